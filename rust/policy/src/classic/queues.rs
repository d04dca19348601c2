//! Policies of one queue.

use super::list::{Links, Queue, entry};
use super::{Access, BlockCache};

/// First in, first out.
#[derive(Debug)]
pub struct Fifo {
    capacity: usize,
    links: Links,
    queue: Queue,
    resident: Vec<bool>,
}

impl Fifo {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let (links, queue) = Default::default();
        Self { capacity, links, queue, resident: Vec::new() }
    }

    /// Inserts an absent block in front, and lets the one at the back go if it must.
    fn insert(&mut self, block: u32) {
        if self.queue.len() >= self.capacity
            && let Some(victim) = self.queue.pop(&mut self.links)
        {
            self.resident[victim as usize] = false;
        }
        self.queue.push(&mut self.links, block);
        *entry(&mut self.resident, block) = true;
    }
}

impl BlockCache for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn access(&mut self, access: &Access) {
        if !self.contains(access.block) {
            self.insert(access.block);
        }
    }

    fn contains(&self, block: u32) -> bool {
        self.resident.get(block as usize) == Some(&true)
    }

    fn residents(&self) -> usize {
        self.queue.len()
    }
}

/// Least recently used.
#[derive(Debug)]
pub struct LeastRecent(Fifo);

impl LeastRecent {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self(Fifo::new(capacity))
    }
}

impl BlockCache for LeastRecent {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn access(&mut self, access: &Access) {
        if self.0.contains(access.block) {
            self.0.queue.move_to_front(&mut self.0.links, access.block);
        } else {
            self.0.insert(access.block);
        }
    }

    fn contains(&self, block: u32) -> bool {
        self.0.contains(block)
    }

    fn residents(&self) -> usize {
        self.0.residents()
    }
}
