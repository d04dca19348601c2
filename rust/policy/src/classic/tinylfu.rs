//! W-TinyLFU: a small window in front, and a main part that admits by estimated frequency.

use super::list::{Links, Queue, entry};
use super::{Access, BlockCache};

/// Rows of the sketch.
const ROWS: usize = 4;
/// Counters saturate here.
const MAX_COUNT: u8 = 15;
/// Accesses, as a multiple of the capacity, after which counts are halved.
const SAMPLE: u64 = 10;

/// Counts that may be too high, never too low.
#[derive(Clone, Debug)]
pub(super) struct Sketch {
    rows: [Vec<u8>; ROWS],
    added: u64,
    sample: u64,
}

impl Sketch {
    pub(super) fn new(capacity: usize) -> Self {
        let width = (4 * capacity).next_power_of_two().max(64);
        let rows = std::array::from_fn(|_| vec![0; width]);
        Self { rows, added: 0, sample: (SAMPLE * capacity as u64).max(64) }
    }

    fn place(&self, row: usize, block: u32) -> usize {
        let mixed = (u64::from(block) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ (row as u64) << 17);
        let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed >> 32) as usize & (self.rows[row].len() - 1)
    }

    pub(super) fn add(&mut self, block: u32) {
        let places: [usize; ROWS] = std::array::from_fn(|row| self.place(row, block));
        for (row, place) in self.rows.iter_mut().zip(places) {
            row[place] = (row[place] + 1).min(MAX_COUNT);
        }
        self.added += 1;
        if self.added >= self.sample {
            self.added /= 2;
            self.rows.iter_mut().flatten().for_each(|count| *count /= 2);
        }
    }

    pub(super) fn count(&self, block: u32) -> u8 {
        let counts = (0..ROWS).map(|row| self.rows[row][self.place(row, block)]);
        counts.min().unwrap_or(0)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Place {
    #[default]
    Absent,
    Window,
    Probation,
    Protected,
}

/// The window has one percent; of the main part four fifths are protected.
#[derive(Debug)]
pub struct TinyLfu {
    window_size: usize,
    main_size: usize,
    protected_size: usize,
    sketch: Sketch,
    links: Links,
    window: Queue,
    probation: Queue,
    protected: Queue,
    places: Vec<Place>,
}

impl TinyLfu {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let window_size = (capacity / 100).max(1);
        let main_size = capacity.saturating_sub(window_size);
        let (links, places) = Default::default();
        let (window, probation, protected) = Default::default();
        Self {
            window_size,
            main_size,
            protected_size: main_size * 4 / 5,
            sketch: Sketch::new(capacity),
            links,
            window,
            probation,
            protected,
            places,
        }
    }

    /// What the window has too many competes with what main would lose.
    fn shrink_window(&mut self) {
        while self.window.len() > self.window_size {
            let Some(candidate) = self.window.pop(&mut self.links) else { return };
            if self.probation.len() + self.protected.len() < self.main_size {
                self.admit(candidate);
                continue;
            }
            let victim = self.probation.back().or_else(|| self.protected.back());
            match victim {
                Some(victim) if self.sketch.count(candidate) > self.sketch.count(victim) => {
                    match self.places[victim as usize] {
                        Place::Protected => self.protected.remove(&mut self.links, victim),
                        _ => self.probation.remove(&mut self.links, victim),
                    }
                    self.places[victim as usize] = Place::Absent;
                    self.admit(candidate);
                }
                _ => self.places[candidate as usize] = Place::Absent,
            }
        }
    }

    fn admit(&mut self, block: u32) {
        self.probation.push(&mut self.links, block);
        self.places[block as usize] = Place::Probation;
    }

    fn protect(&mut self, block: u32) {
        self.probation.remove(&mut self.links, block);
        self.protected.push(&mut self.links, block);
        self.places[block as usize] = Place::Protected;
        if self.protected.len() > self.protected_size
            && let Some(old) = self.protected.pop(&mut self.links)
        {
            self.admit(old);
        }
    }
}

impl BlockCache for TinyLfu {
    fn name(&self) -> &'static str {
        "w-tinylfu"
    }

    fn access(&mut self, access: &Access) {
        let block = access.block;
        self.sketch.add(block);
        match *entry(&mut self.places, block) {
            Place::Window => self.window.move_to_front(&mut self.links, block),
            Place::Probation => self.protect(block),
            Place::Protected => self.protected.move_to_front(&mut self.links, block),
            Place::Absent => {
                self.window.push(&mut self.links, block);
                self.places[block as usize] = Place::Window;
                self.shrink_window();
            }
        }
    }

    fn contains(&self, block: u32) -> bool {
        self.places.get(block as usize).is_some_and(|place| *place != Place::Absent)
    }

    fn residents(&self) -> usize {
        self.window.len() + self.probation.len() + self.protected.len()
    }
}
