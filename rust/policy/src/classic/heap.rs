//! A heap of blocks that knows where each block is.

use super::list::entry;

/// What orders blocks: a value, then a stamp, older first.
pub(super) type Rank = (f64, u64);

fn before(one: Rank, other: Rank) -> bool {
    one.0 < other.0 || (one.0 == other.0 && one.1 < other.1)
}

/// The least block is on top.
#[derive(Clone, Debug, Default)]
pub(super) struct Heap {
    items: Vec<(Rank, u32)>,
    /// Place of each block, counted from one; zero where it is not in.
    places: Vec<u32>,
}

impl Heap {
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.places.get(block as usize).is_some_and(|place| *place != 0)
    }

    /// Inserts a block, or gives it another rank.
    pub(super) fn set(&mut self, block: u32, rank: Rank) {
        let place = entry(&mut self.places, block);
        let at = if *place == 0 {
            self.items.push((rank, block));
            self.items.len() - 1
        } else {
            let at = *place as usize - 1;
            self.items[at].0 = rank;
            at
        };
        let at = self.up(at);
        self.down(at);
    }

    pub(super) fn pop(&mut self) -> Option<(Rank, u32)> {
        let top = *self.items.first()?;
        self.places[top.1 as usize] = 0;
        let last = self.items.pop()?;
        if !self.items.is_empty() {
            self.items[0] = last;
            self.down(0);
        }
        Some(top)
    }

    fn settle(&mut self, at: usize) {
        self.places[self.items[at].1 as usize] = at as u32 + 1;
    }

    fn up(&mut self, mut at: usize) -> usize {
        while at > 0 {
            let parent = (at - 1) / 2;
            if !before(self.items[at].0, self.items[parent].0) {
                break;
            }
            self.items.swap(at, parent);
            self.settle(at);
            at = parent;
        }
        self.settle(at);
        at
    }

    fn down(&mut self, mut at: usize) {
        loop {
            let mut least = at;
            for child in [2 * at + 1, 2 * at + 2] {
                if child < self.items.len() && before(self.items[child].0, self.items[least].0) {
                    least = child;
                }
            }
            if least == at {
                break;
            }
            self.items.swap(at, least);
            self.settle(at);
            at = least;
        }
        self.settle(at);
    }
}
