//! Policies that count uses: the least of a heap goes.

use super::heap::Heap;
use super::list::entry;
use super::{Access, BlockCache};

/// Tokens of prefix that double what it costs to compute a block anew.
const ATTENTION_TOKENS: f64 = 30_518.0;

/// Least frequently used with dynamic aging, or greedy dual size frequency: what goes raises the
/// value that newcomers start from. Blocks are of one size.
#[derive(Debug)]
pub struct Frequency {
    capacity: usize,
    /// Whether a use counts by what it saves: deeper blocks have more attention to redo.
    by_cost: bool,
    heap: Heap,
    uses: Vec<u32>,
    /// The value of the last block that went.
    age: f64,
    stamp: u64,
}

impl Frequency {
    /// An empty cache of `capacity` blocks where each use counts one.
    pub fn lfu_da(capacity: usize) -> Self {
        let (heap, uses) = Default::default();
        Self { capacity, by_cost: false, heap, uses, age: 0.0, stamp: 0 }
    }

    /// An empty cache of `capacity` blocks where a use counts what it saves.
    pub fn gdsf(capacity: usize) -> Self {
        Self { by_cost: true, ..Self::lfu_da(capacity) }
    }
}

impl BlockCache for Frequency {
    fn name(&self) -> &'static str {
        if self.by_cost { "gdsf" } else { "lfu-da" }
    }

    fn access(&mut self, access: &Access) {
        let block = access.block;
        let uses = entry(&mut self.uses, block);
        if self.heap.contains(block) {
            *uses += 1;
        } else {
            *uses = 1;
            if self.heap.len() >= self.capacity
                && let Some(((value, _), _)) = self.heap.pop()
            {
                self.age = value;
            }
        }
        let cost = if self.by_cost {
            let tokens = f64::from(access.depth) * f64::from(access.block_tokens);
            1.0 + tokens / ATTENTION_TOKENS
        } else {
            1.0
        };
        self.stamp += 1;
        self.heap.set(block, (self.age + f64::from(self.uses[block as usize]) * cost, self.stamp));
    }

    fn contains(&self, block: u32) -> bool {
        self.heap.contains(block)
    }

    fn residents(&self) -> usize {
        self.heap.len()
    }
}
