//! The regret guard: what a cache by recency would have hit, and whether to do as it does.
//!
//! That cache is exact and costs a flag a block and a place in a queue a request. The blocks that a
//! request touched last are the end of its chain, since whoever touches a block touches all before
//! it; so the queue of requests, each with the end that is left of it, is the order of recency.

use super::chain::{Chain, NONE, RECENT};
use std::collections::VecDeque;

/// Part of the accesses by which it may be behind before it does as recency does.
const BEHIND: f64 = 0.001;
/// Standard deviations of the sum that chance may account for.
const CHANCE: f64 = 1.5;
/// How far a lead counts against what may come, in accesses.
const AHEAD: f64 = 0.05;

/// Stretches beyond two a block that may be in the queue before it is tidied.
const SLACK: usize = 64;

/// What is left of a request in the order of recency: from this block up, all that it touched last.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    end: u32,
    request: u32,
}

/// The cache by recency, and how it compares.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    stretches: VecDeque<Stretch>,
    residents: usize,
    /// Hits that recency had and this cache had not, the sum of the squares of that over the
    /// requests, and accesses: all fade.
    behind: f64,
    squares: f64,
    accesses: f64,
    follows: bool,
}

impl Guard {
    /// Whether blocks leave by recency for now.
    pub(crate) fn follows(&self) -> bool {
        self.follows
    }

    /// Takes what a request hit here and there; `fade` is what a request lets the sums fade by.
    pub(crate) fn compare(&mut self, hits: usize, recency: usize, accesses: usize, fade: f64) {
        self.accesses = self.accesses * fade + accesses as f64;
        let apart = recency as f64 - hits as f64;
        self.behind = (self.behind * fade + apart).max(-AHEAD * self.accesses);
        self.squares = self.squares * fade + apart * apart;
        let bound = (BEHIND * self.accesses).max(CHANCE * self.squares.sqrt());
        let bound = if self.follows { bound / 2.0 } else { bound };
        self.follows = self.behind > bound;
    }

    #[cfg(test)]
    pub(crate) fn stretches(&self) -> usize {
        self.stretches.len()
    }

    /// A block was touched that was not in it.
    pub(crate) fn admitted(&mut self) {
        self.residents += 1;
    }

    /// The request that was stamped so has touched all blocks up to `end`: what has no room goes.
    pub(crate) fn ended(&mut self, chain: &mut Chain, end: u32, request: u32, capacity: usize) {
        if end != NONE {
            self.stretches.push_back(Stretch { end, request });
        }
        if self.stretches.len() > 2 * self.residents + SLACK {
            // Of those that others touched again nothing is left; each of the others has a block.
            self.stretches.retain(|stretch| {
                let node = &chain.nodes[stretch.end as usize];
                node.request == stretch.request && node.has(RECENT)
            });
        }
        while self.residents > capacity
            && let Some(mut oldest) = self.stretches.pop_front()
        {
            let room = self.residents - capacity;
            self.drop_up(chain, &mut oldest, room);
            if oldest.end != NONE {
                self.stretches.push_front(oldest);
            }
        }
    }

    /// A block is forgotten: it and all that the same request touched leave, if they have not yet.
    pub(crate) fn forgotten(&mut self, chain: &mut Chain, slot: u32) {
        let request = chain.nodes[slot as usize].request;
        self.drop_up(chain, &mut Stretch { end: slot, request }, usize::MAX);
    }

    /// Drops at most so many blocks of a stretch; its end is `NONE` where nothing is left of it.
    fn drop_up(&mut self, chain: &mut Chain, stretch: &mut Stretch, most: usize) {
        for _ in 0..most {
            if stretch.end == NONE {
                return;
            }
            let node = chain.node(stretch.end);
            if node.request != stretch.request || !node.has(RECENT) {
                stretch.end = NONE;
                return;
            }
            node.flags &= !RECENT;
            self.residents -= 1;
            stretch.end = node.parent;
        }
    }
}
