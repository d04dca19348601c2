//! The classical policies again, from their definitions, with lists that are scanned.

use crate::classic::Access;
use std::collections::HashMap;

/// What a naive cache does with one access; residents are whatever it says.
pub(super) trait Naive {
    fn access(&mut self, access: &Access);
    fn residents(&self) -> Vec<u32>;
}

fn least<T>(items: &[T], key: impl Fn(&T) -> (f64, f64)) -> usize {
    let mut best = 0;
    for at in 1..items.len() {
        if key(&items[at]) < key(&items[best]) {
            best = at;
        }
    }
    best
}

/// FIFO, LRU, LFU-DA and GDSF: the resident with the least value goes, older ones first.
pub(super) struct Valued {
    pub(super) capacity: usize,
    pub(super) value: fn(&mut Item, f64, &Access),
    pub(super) items: Vec<Item>,
    pub(super) age: f64,
    pub(super) time: f64,
}

#[derive(Clone, Default)]
pub(super) struct Item {
    block: u32,
    pub(super) uses: f64,
    pub(super) value: f64,
    pub(super) stamp: f64,
}

impl Naive for Valued {
    fn access(&mut self, access: &Access) {
        self.time += 1.0;
        let found = self.items.iter().position(|item| item.block == access.block);
        let at = found.unwrap_or_else(|| {
            if self.items.len() == self.capacity {
                let at = least(&self.items, |item| (item.value, item.stamp));
                self.age = self.items.remove(at).value;
            }
            self.items.push(Item { block: access.block, stamp: self.time, ..Item::default() });
            self.items.len() - 1
        });
        self.items[at].uses += 1.0;
        let (time, age) = (self.time, self.age);
        let item = &mut self.items[at];
        (self.value)(item, age, access);
        if found.is_none() || item.value != 0.0 {
            item.stamp = time;
        }
    }

    fn residents(&self) -> Vec<u32> {
        self.items.iter().map(|item| item.block).collect()
    }
}

/// Removes a block from a list; whether it was in.
fn take(list: &mut Vec<u32>, block: u32) -> bool {
    let at = list.iter().position(|other| *other == block);
    at.map(|at| list.remove(at)).is_some()
}

/// 2Q. Lists begin with the oldest.
#[derive(Default)]
pub(super) struct TwoQ {
    pub(super) capacity: usize,
    pub(super) input: Vec<u32>,
    pub(super) out: Vec<u32>,
    pub(super) main: Vec<u32>,
}

impl Naive for TwoQ {
    fn access(&mut self, access: &Access) {
        let block = access.block;
        if self.input.contains(&block) {
            return;
        }
        if take(&mut self.main, block) {
            self.main.push(block);
            return;
        }
        let seen = take(&mut self.out, block);
        if self.input.len() + self.main.len() == self.capacity {
            let quarter = (self.capacity / 4).max(1);
            if self.input.len() > quarter || self.main.is_empty() {
                let gone = self.input.remove(0);
                self.out.push(gone);
                if self.out.len() > (self.capacity / 2).max(1) {
                    self.out.remove(0);
                }
            } else {
                self.main.remove(0);
            }
        }
        if seen { self.main.push(block) } else { self.input.push(block) }
    }

    fn residents(&self) -> Vec<u32> {
        [&self.input[..], &self.main[..]].concat()
    }
}

/// ARC, as in figure 4 of its paper. Lists begin with the oldest.
#[derive(Default)]
pub(super) struct Arc {
    pub(super) c: usize,
    pub(super) p: usize,
    pub(super) t1: Vec<u32>,
    pub(super) b1: Vec<u32>,
    pub(super) t2: Vec<u32>,
    pub(super) b2: Vec<u32>,
}

impl Arc {
    fn replace(&mut self, in_b2: bool) {
        let from_t1 =
            !self.t1.is_empty() && (self.t1.len() > self.p || (in_b2 && self.t1.len() == self.p));
        if from_t1 || self.t2.is_empty() {
            if !self.t1.is_empty() {
                self.b1.push(self.t1.remove(0));
            }
        } else {
            self.b2.push(self.t2.remove(0));
        }
    }
}

impl Naive for Arc {
    fn access(&mut self, access: &Access) {
        let x = access.block;
        let (l1, l2) = (self.t1.len() + self.b1.len(), self.t2.len() + self.b2.len());
        if take(&mut self.t1, x) || take(&mut self.t2, x) {
            self.t2.push(x);
        } else if self.b1.contains(&x) {
            self.p = self.c.min(self.p + (self.b2.len() / self.b1.len()).max(1));
            take(&mut self.b1, x);
            self.replace(false);
            self.t2.push(x);
        } else if self.b2.contains(&x) {
            self.p -= self.p.min((self.b1.len() / self.b2.len()).max(1));
            take(&mut self.b2, x);
            self.replace(true);
            self.t2.push(x);
        } else {
            if l1 >= self.c {
                if self.t1.len() < self.c {
                    self.b1.remove(0);
                    self.replace(false);
                } else {
                    self.t1.remove(0);
                }
            } else if l1 + l2 >= self.c {
                if l1 + l2 >= 2 * self.c {
                    self.b2.remove(0);
                }
                self.replace(false);
            }
            self.t1.push(x);
        }
    }

    fn residents(&self) -> Vec<u32> {
        [&self.t1[..], &self.t2[..]].concat()
    }
}

/// S3-FIFO. Lists begin with the oldest.
#[derive(Default)]
pub(super) struct S3Fifo {
    pub(super) capacity: usize,
    pub(super) small: Vec<(u32, u8)>,
    pub(super) main: Vec<(u32, u8)>,
    pub(super) ghosts: Vec<u32>,
}

impl S3Fifo {
    fn small_size(&self) -> usize {
        (self.capacity / 10).max(1)
    }

    fn evict_main(&mut self) {
        while !self.main.is_empty() {
            let (block, uses) = self.main.remove(0);
            if uses == 0 {
                return;
            }
            self.main.push((block, uses - 1));
        }
    }

    fn evict_small(&mut self) {
        let main_size = self.capacity - self.small_size().min(self.capacity);
        while !self.small.is_empty() {
            let (block, uses) = self.small.remove(0);
            if uses < 2 || main_size == 0 {
                self.ghosts.push(block);
                if self.ghosts.len() > main_size {
                    self.ghosts.remove(0);
                }
                return;
            }
            self.main.push((block, 0));
            if self.main.len() > main_size {
                return self.evict_main();
            }
        }
    }
}

impl Naive for S3Fifo {
    fn access(&mut self, access: &Access) {
        let block = access.block;
        let mut both = self.small.iter_mut().chain(&mut self.main);
        if let Some((_, uses)) = both.find(|(other, _)| *other == block) {
            *uses = (*uses + 1).min(3);
            return;
        }
        let ghost = take(&mut self.ghosts, block);
        while self.small.len() + self.main.len() >= self.capacity {
            if self.small.len() >= self.small_size() || self.main.is_empty() {
                self.evict_small();
            } else {
                self.evict_main();
            }
        }
        if ghost && self.capacity > self.small_size() {
            self.main.push((block, 0));
        } else {
            self.small.push((block, 0));
        }
    }

    fn residents(&self) -> Vec<u32> {
        self.small.iter().chain(&self.main).map(|(block, _)| *block).collect()
    }
}

/// SIEVE. The list begins with the oldest; the hand is the block that it looks at next.
#[derive(Default)]
pub(super) struct Sieve {
    pub(super) capacity: usize,
    pub(super) list: Vec<(u32, bool)>,
    pub(super) hand: Option<u32>,
}

impl Naive for Sieve {
    fn access(&mut self, access: &Access) {
        if let Some(found) = self.list.iter_mut().find(|(block, _)| *block == access.block) {
            found.1 = true;
            return;
        }
        if self.list.len() == self.capacity {
            let hand = self.hand;
            let mut at = self.list.iter().position(|(b, _)| Some(*b) == hand).unwrap_or(0);
            while self.list[at].1 {
                self.list[at].1 = false;
                at = (at + 1) % self.list.len();
            }
            self.list.remove(at);
            self.hand = self.list.get(at).map(|(block, _)| *block);
        }
        self.list.push((access.block, false));
    }

    fn residents(&self) -> Vec<u32> {
        self.list.iter().map(|(block, _)| *block).collect()
    }
}

/// W-TinyLFU. Lists begin with the oldest.
#[derive(Default)]
pub(super) struct TinyLfu {
    pub(super) capacity: usize,
    pub(super) counts: HashMap<(usize, usize), u8>,
    pub(super) added: u64,
    pub(super) window: Vec<u32>,
    pub(super) probation: Vec<u32>,
    pub(super) protected: Vec<u32>,
}

impl TinyLfu {
    /// The counters of a block, where those of the policy under audit collide.
    fn places(&self, block: u32) -> [(usize, usize); 4] {
        let width = (4 * self.capacity).next_power_of_two().max(64);
        std::array::from_fn(|row| {
            let factor = 0x9e37_79b9_7f4a_7c15u64 ^ ((row as u64) << 17);
            let once = (u64::from(block) + 1).wrapping_mul(factor);
            let twice = (once ^ (once >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (row, (twice >> 32) as usize % width)
        })
    }

    fn count(&self, block: u32) -> u8 {
        let counts = self.places(block).map(|p| self.counts.get(&p).copied().unwrap_or(0));
        counts.into_iter().min().unwrap()
    }
}

impl Naive for TinyLfu {
    fn access(&mut self, access: &Access) {
        let block = access.block;
        for place in self.places(block) {
            let count = self.counts.entry(place).or_default();
            *count = (*count + 1).min(15);
        }
        self.added += 1;
        if self.added >= (10 * self.capacity as u64).max(64) {
            self.added /= 2;
            self.counts.values_mut().for_each(|count| *count /= 2);
        }
        let window = (self.capacity / 100).max(1);
        let main = self.capacity - window.min(self.capacity);
        if take(&mut self.window, block) {
            self.window.push(block);
        } else if take(&mut self.protected, block) {
            self.protected.push(block);
        } else if take(&mut self.probation, block) {
            self.protected.push(block);
            if self.protected.len() > main * 4 / 5 {
                self.probation.push(self.protected.remove(0));
            }
        } else {
            self.window.push(block);
            while self.window.len() > window {
                let candidate = self.window.remove(0);
                if self.probation.len() + self.protected.len() >= main {
                    let lists = [&self.probation[..], &self.protected[..]].concat();
                    match lists.first() {
                        Some(victim) if self.count(candidate) > self.count(*victim) => {
                            take(&mut self.probation, *victim);
                            take(&mut self.protected, *victim);
                        }
                        _ => continue,
                    }
                }
                self.probation.push(candidate);
            }
        }
    }

    fn residents(&self) -> Vec<u32> {
        [&self.window[..], &self.probation[..], &self.protected[..]].concat()
    }
}
