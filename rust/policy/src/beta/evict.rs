//! Which leaves go: the least of a draw, and its ancestors while they are worth no more.

use super::Beta;
use super::chain::{NONE, Node};
use super::hazard::Cell;
use super::sentinel::{Books, Sentinels};

/// Most blocks that one draw lets go.
const BATCH: usize = 64;

/// A candidate and what it is worth.
#[derive(Clone, Copy)]
struct Valued {
    key: f32,
    last: f64,
    slot: u32,
}

impl Valued {
    #[inline]
    fn goes_before(self, other: Self, nodes: &[Node]) -> bool {
        if self.key != other.key {
            return self.key < other.key;
        }
        if self.last != other.last {
            return self.last < other.last;
        }
        nodes[self.slot as usize].depth > nodes[other.slot as usize].depth
    }
}

/// The key of a block at an age where the oldest leaves first.
fn recency(age: f64) -> f32 {
    -age as f32
}

impl Beta {
    /// Lets blocks go until no more are resident than may be.
    pub(super) fn evict(&mut self, now: f64) {
        while self.chain.residents() > self.capacity {
            let (victim, second) = self.draw(now);
            self.evict_chain(victim, second, now);
        }
    }

    /// The candidate to go, and the key of the next one, infinite if there is none.
    fn draw(&mut self, now: f64) -> (u32, f32) {
        let by_recency = self.guard.follows();
        let (candidates, nodes) = self.chain.drawing();
        let (count, draw) = (candidates.len(), self.options.draw);
        debug_assert!(count > 0, "a chain of residents ends in a leaf");
        let mut best = Valued { key: f32::INFINITY, last: f64::INFINITY, slot: NONE };
        let mut second = f32::INFINITY;
        for place in 0..count.min(draw) {
            let place = if count > draw { self.rng.below(count) } else { place };
            let candidate = &mut candidates[place];
            let (last, slot) = (candidate.last, candidate.slot);
            if slot == best.slot {
                continue;
            }
            let key = if by_recency {
                recency(now - last)
            } else {
                if now - last >= f64::from(candidate.until) {
                    let valued = self.table.value_until(candidate.cell, now - last);
                    (candidate.worth, candidate.until) = valued;
                }
                candidate.worth
            };
            let valued = Valued { key, last, slot };
            if best.slot == NONE || valued.goes_before(best, nodes) {
                second = best.key;
                best = valued;
            } else if key < second {
                second = key;
            }
        }
        (best.slot, second)
    }

    /// By what blocks of a cell leave at an age in seconds, the least first.
    #[inline]
    fn key(&self, cell: Cell, age: f64) -> f32 {
        if self.guard.follows() { recency(age) } else { self.table.value(cell, age) }
    }

    /// Evicts `victim`, then its parents while each is a leaf and worth no more than `limit`.
    fn evict_chain(&mut self, victim: u32, limit: f32, now: f64) {
        let mut slot = victim;
        let mut valued = (f64::NAN, Cell::default());
        for left in (0..BATCH).rev() {
            let (leaf, forgotten) = self.chain.evict(slot);
            if let Some(forgotten) = forgotten {
                self.forget(forgotten, now);
            }
            let Some(parent) = leaf else { return };
            let node = &self.chain.nodes[parent as usize];
            // Blocks of a chain mostly share cell and age, and so the value that was low enough.
            let worth_more =
                valued != (node.last, node.cell) && self.key(node.cell, now - node.last) > limit;
            valued = (node.last, node.cell);
            if left == 0 || self.chain.residents() <= self.capacity || worth_more {
                self.chain.list(parent);
                return;
            }
            slot = parent;
        }
    }

    /// Forgets a block that left long ago: what its sentinel saw is counted first.
    pub(super) fn forget(&mut self, slot: u32, now: f64) {
        let node = self.chain.nodes[slot as usize];
        if node.sentinel != Sentinels::NONE {
            let mut books = Books { table: &mut self.table, scores: &mut self.scores };
            let moved = self.sentinels.end(node.sentinel, &mut books, now);
            if let Some(moved) = moved {
                self.chain.node(moved).sentinel = node.sentinel;
            }
        }
        if self.options.guard {
            self.guard.forgotten(&mut self.chain, slot);
        }
        self.chain.forget(slot);
    }
}
