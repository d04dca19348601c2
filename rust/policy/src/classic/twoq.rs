//! 2Q: a queue for newcomers, a memory of those that left it, and a queue of the proven.

use super::list::{Links, Queue, entry};
use super::{Access, BlockCache};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Place {
    #[default]
    Absent,
    In,
    Out,
    Main,
}

/// The full version: newcomers may have a quarter, the memory holds half as many as the cache.
#[derive(Debug)]
pub struct TwoQ {
    capacity: usize,
    in_size: usize,
    out_size: usize,
    links: Links,
    newcomers: Queue,
    left: Queue,
    main: Queue,
    places: Vec<Place>,
}

impl TwoQ {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let (in_size, out_size) = ((capacity / 4).max(1), (capacity / 2).max(1));
        let (newcomers, left, main) = Default::default();
        let (links, places) = (Links::default(), Vec::new());
        Self { capacity, in_size, out_size, links, newcomers, left, main, places }
    }

    fn make_room(&mut self) {
        if self.residents() < self.capacity {
            return;
        }
        if self.newcomers.len() <= self.in_size
            && let Some(block) = self.main.pop(&mut self.links)
        {
            self.places[block as usize] = Place::Absent;
        } else if let Some(block) = self.newcomers.pop(&mut self.links) {
            self.places[block as usize] = Place::Out;
            self.left.push(&mut self.links, block);
            if self.left.len() > self.out_size
                && let Some(old) = self.left.pop(&mut self.links)
            {
                self.places[old as usize] = Place::Absent;
            }
        }
    }
}

impl BlockCache for TwoQ {
    fn name(&self) -> &'static str {
        "2q"
    }

    fn access(&mut self, access: &Access) {
        let block = access.block;
        match *entry(&mut self.places, block) {
            Place::Main => self.main.move_to_front(&mut self.links, block),
            Place::In => {}
            Place::Out => {
                self.left.remove(&mut self.links, block);
                self.places[block as usize] = Place::Absent;
                self.make_room();
                self.main.push(&mut self.links, block);
                self.places[block as usize] = Place::Main;
            }
            Place::Absent => {
                self.make_room();
                self.newcomers.push(&mut self.links, block);
                self.places[block as usize] = Place::In;
            }
        }
    }

    fn contains(&self, block: u32) -> bool {
        let place = self.places.get(block as usize);
        place.is_some_and(|place| matches!(place, Place::In | Place::Main))
    }

    fn residents(&self) -> usize {
        self.newcomers.len() + self.main.len()
    }
}
