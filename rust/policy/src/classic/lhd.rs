//! LHD: the block of a draw with the fewest expected hits for the space and time that it takes.

use super::list::entry;
use super::{Access, BlockCache};
use crate::rng::Rng;

/// Ages are counted in steps, up to this many.
const AGES: usize = 1024;
/// Classes by how old blocks were when they were hit the last two times.
const CLASSES: usize = 16;
/// Blocks looked at in one draw.
const DRAW: usize = 64;
/// Weight of what was seen before the last update.
const KEEP: f64 = 0.9;

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// Place among the residents, from one; zero where it is not resident.
    place: u32,
    last: u64,
    hit_ages: [u32; 2],
}

#[derive(Clone, Copy, Debug)]
struct Class {
    hits: [f64; AGES],
    evictions: [f64; AGES],
    density: [f64; AGES],
}

/// Least hit density.
#[derive(Debug)]
pub struct Lhd {
    capacity: usize,
    /// Accesses in a step of age.
    step: u64,
    /// Accesses between two updates of the densities.
    period: u64,
    accesses: u64,
    blocks: Vec<Block>,
    residents: Vec<u32>,
    classes: Vec<Class>,
    rng: Rng,
}

impl Lhd {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize, seed: u64) -> Self {
        let density = std::array::from_fn(|age| 1.0 / (age as f64 + 1.0));
        let class = Class { hits: [0.0; AGES], evictions: [0.0; AGES], density };
        Self {
            capacity,
            step: (capacity as u64 / 64).max(1),
            period: (capacity as u64).max(4096),
            accesses: 0,
            blocks: Vec::new(),
            residents: Vec::new(),
            classes: vec![class; CLASSES],
            rng: Rng::new(seed),
        }
    }

    fn place_of(&self, block: &Block) -> (usize, usize) {
        let age = ((self.accesses - block.last) / self.step).min(AGES as u64 - 1) as usize;
        let sum = block.hit_ages[0].saturating_add(block.hit_ages[1]).min(AGES as u32);
        let class = match sum {
            0 => CLASSES - 1,
            sum => ((AGES as u32).ilog2() - sum.ilog2()).min(CLASSES as u32 - 1) as usize,
        };
        (class, age)
    }

    fn evict(&mut self) {
        let count = self.residents.len();
        let mut victim: Option<(f64, u64, u32)> = None;
        for place in 0..count.min(DRAW) {
            let place = if count > DRAW { self.rng.below(count) } else { place };
            let number = self.residents[place];
            let block = &self.blocks[number as usize];
            let (class, age) = self.place_of(block);
            let density = self.classes[class].density[age];
            if victim.is_none_or(|(least, last, _)| (density, block.last) < (least, last)) {
                victim = Some((density, block.last, number));
            }
        }
        let Some((_, _, number)) = victim else { return };
        let block = self.blocks[number as usize];
        let (class, age) = self.place_of(&block);
        self.classes[class].evictions[age] += 1.0;
        self.blocks[number as usize] = Block::default();
        let place = block.place as usize - 1;
        self.residents.swap_remove(place);
        if let Some(moved) = self.residents.get(place) {
            self.blocks[*moved as usize].place = block.place;
        }
    }

    fn update(&mut self) {
        for class in &mut self.classes {
            let (mut events, mut hits, mut lifetime) = (0.0, 0.0, 0.0);
            for age in (0..AGES).rev() {
                hits += class.hits[age];
                events += class.hits[age] + class.evictions[age];
                lifetime += events;
                class.density[age] = if events > 1e-5 { hits / lifetime } else { 0.0 };
                class.hits[age] *= KEEP;
                class.evictions[age] *= KEEP;
            }
        }
    }
}

impl BlockCache for Lhd {
    fn name(&self) -> &'static str {
        "lhd"
    }

    fn access(&mut self, access: &Access) {
        self.accesses += 1;
        if self.accesses.is_multiple_of(self.period) {
            self.update();
        }
        let number = access.block;
        let block = *entry(&mut self.blocks, number);
        if block.place != 0 {
            let (class, age) = self.place_of(&block);
            self.classes[class].hits[age] += 1.0;
            let block = &mut self.blocks[number as usize];
            block.hit_ages = [age as u32, block.hit_ages[0]];
            block.last = self.accesses;
            return;
        }
        if self.residents.len() >= self.capacity {
            self.evict();
        }
        self.residents.push(number);
        let place = self.residents.len() as u32;
        let hit_ages = [0, AGES as u32];
        self.blocks[number as usize] = Block { place, last: self.accesses, hit_ages };
    }

    fn contains(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|block| block.place != 0)
    }

    fn residents(&self) -> usize {
        self.residents.len()
    }
}
