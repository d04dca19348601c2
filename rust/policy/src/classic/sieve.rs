//! SIEVE: a queue, a bit, and a hand that stays where it is.

use super::list::{Links, Queue, entry};
use super::{Access, BlockCache};

/// First in, first out, but what was used since the hand passed is passed over once.
#[derive(Debug)]
pub struct Sieve {
    capacity: usize,
    links: Links,
    queue: Queue,
    /// Whether a block is resident, and whether it was used.
    state: Vec<(bool, bool)>,
    hand: Option<u32>,
}

impl Sieve {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let (links, queue) = Default::default();
        Self { capacity, links, queue, state: Vec::new(), hand: None }
    }

    fn evict(&mut self) {
        let mut at = self.hand.or_else(|| self.queue.back());
        while let Some(block) = at {
            let newer = self.queue.newer(&self.links, block);
            let state = &mut self.state[block as usize];
            if state.1 {
                state.1 = false;
                at = newer.or_else(|| self.queue.back());
                continue;
            }
            *state = (false, false);
            self.queue.remove(&mut self.links, block);
            self.hand = newer;
            return;
        }
    }
}

impl BlockCache for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    fn access(&mut self, access: &Access) {
        let state = entry(&mut self.state, access.block);
        if state.0 {
            state.1 = true;
            return;
        }
        if self.queue.len() >= self.capacity {
            self.evict();
        }
        self.state[access.block as usize] = (true, false);
        self.queue.push(&mut self.links, access.block);
    }

    fn contains(&self, block: u32) -> bool {
        self.state.get(block as usize).is_some_and(|state| state.0)
    }

    fn residents(&self) -> usize {
        self.queue.len()
    }
}
