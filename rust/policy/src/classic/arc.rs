//! ARC: recency and frequency share the cache by what their memories say was dropped too early.

use super::list::{Links, Queue, entry};
use super::{Access, BlockCache};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Place {
    #[default]
    Absent,
    Once,
    OnceGhost,
    Often,
    OftenGhost,
}

/// Adaptive replacement.
#[derive(Debug)]
pub struct Arc {
    capacity: usize,
    /// How much of the cache blocks used once should have.
    target: usize,
    links: Links,
    once: Queue,
    once_ghosts: Queue,
    often: Queue,
    often_ghosts: Queue,
    places: Vec<Place>,
}

impl Arc {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let (once, once_ghosts, often, often_ghosts) = Default::default();
        let (links, places) = (Links::default(), Vec::new());
        Self { capacity, target: 0, links, once, once_ghosts, often, often_ghosts, places }
    }

    /// Moves one resident to its memory; `from_often` if a block of that memory is wanted.
    fn replace(&mut self, from_often: bool) {
        let once = self.once.len();
        let first = once > self.target || (from_often && once == self.target);
        if once > 0 && (first || self.often.len() == 0) {
            if let Some(block) = self.once.pop(&mut self.links) {
                self.once_ghosts.push(&mut self.links, block);
                self.places[block as usize] = Place::OnceGhost;
            }
        } else if let Some(block) = self.often.pop(&mut self.links) {
            self.often_ghosts.push(&mut self.links, block);
            self.places[block as usize] = Place::OftenGhost;
        }
    }

    fn promote(&mut self, block: u32) {
        self.often.push(&mut self.links, block);
        self.places[block as usize] = Place::Often;
    }

    fn insert_new(&mut self, block: u32) {
        let recent = self.once.len() + self.once_ghosts.len();
        let all = recent + self.often.len() + self.often_ghosts.len();
        if recent >= self.capacity {
            let gone = if self.once.len() < self.capacity {
                let gone = self.once_ghosts.pop(&mut self.links);
                self.replace(false);
                gone
            } else {
                self.once.pop(&mut self.links)
            };
            if let Some(gone) = gone {
                self.places[gone as usize] = Place::Absent;
            }
        } else if all >= self.capacity {
            if all >= 2 * self.capacity
                && let Some(gone) = self.often_ghosts.pop(&mut self.links)
            {
                self.places[gone as usize] = Place::Absent;
            }
            self.replace(false);
        }
        self.once.push(&mut self.links, block);
        self.places[block as usize] = Place::Once;
    }
}

impl BlockCache for Arc {
    fn name(&self) -> &'static str {
        "arc"
    }

    fn access(&mut self, access: &Access) {
        let block = access.block;
        match *entry(&mut self.places, block) {
            Place::Often => self.often.move_to_front(&mut self.links, block),
            Place::Once => {
                self.once.remove(&mut self.links, block);
                self.promote(block);
            }
            Place::OnceGhost => {
                let step = (self.often_ghosts.len() / self.once_ghosts.len()).max(1);
                self.target = (self.target + step).min(self.capacity);
                self.once_ghosts.remove(&mut self.links, block);
                self.replace(false);
                self.promote(block);
            }
            Place::OftenGhost => {
                let step = (self.once_ghosts.len() / self.often_ghosts.len()).max(1);
                self.target = self.target.saturating_sub(step);
                self.often_ghosts.remove(&mut self.links, block);
                self.replace(true);
                self.promote(block);
            }
            Place::Absent => self.insert_new(block),
        }
    }

    fn contains(&self, block: u32) -> bool {
        let place = self.places.get(block as usize);
        place.is_some_and(|place| matches!(place, Place::Once | Place::Often))
    }

    fn residents(&self) -> usize {
        self.once.len() + self.often.len()
    }
}
