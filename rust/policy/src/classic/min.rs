//! Belady's optimum: the block whose next use is farthest goes first, deeper ones before.
//!
//! Keys stand for prefixes, so the blocks that the request `r` needs next lie behind one another,
//! and deeper ones need not be reused sooner than their ancestors. What is resident of them is
//! therefore one stretch of the chain, and to evict means to shorten it from its end.

use crate::{Cache, Request};
use std::collections::BTreeMap;

/// The request that is the next to need a block; `NEVER` if none is.
type Next = u32;
const NEVER: Next = Next::MAX;

/// For each request in turn, the next uses of its blocks, as runs of equal ones from the head.
#[derive(Clone, Debug, Default)]
pub struct NextUses {
    runs: Vec<(u32, Next)>,
    /// Where the runs of each request start; one more than there are requests.
    starts: Vec<usize>,
}

/// The next uses of all blocks of `count` requests. `blocks` gives a request's keys, dense numbers,
/// and how many of them are the prompt's: only those are uses.
pub fn next_uses(count: usize, mut blocks: impl FnMut(usize, &mut Vec<u64>) -> usize) -> NextUses {
    let mut next: Vec<Next> = Vec::new();
    let mut keys = Vec::new();
    let mut reversed: Vec<(u32, Next)> = Vec::new();
    let mut lengths = vec![0usize; count];
    for request in (0..count).rev() {
        keys.clear();
        let prompt = blocks(request, &mut keys);
        let before = reversed.len();
        for (depth, key) in keys.iter().enumerate().rev() {
            let at = *key as usize;
            if next.len() <= at {
                next.resize((at + 1).next_power_of_two(), NEVER);
            }
            match reversed[before..].last_mut() {
                Some((len, value)) if *value == next[at] => *len += 1,
                _ => reversed.push((1, next[at])),
            }
            if depth < prompt {
                next[at] = request as Next;
            }
        }
        lengths[request] = reversed.len() - before;
    }
    reversed.reverse();
    let mut starts = Vec::with_capacity(count + 1);
    let mut start = 0;
    for length in lengths {
        starts.push(start);
        start += length;
    }
    starts.push(start);
    NextUses { runs: reversed, starts }
}

/// The optimum over a known future. What is never used again is not kept at all.
#[derive(Debug)]
pub struct Min<'a> {
    capacity: usize,
    future: &'a NextUses,
    /// Requests so far.
    requests: usize,
    /// By next use, the depths of the resident blocks: from, to.
    stretches: BTreeMap<Next, (usize, usize)>,
    residents: usize,
}

impl<'a> Min<'a> {
    /// An empty cache of `capacity` blocks that will see exactly the requests of `future`.
    pub fn new(capacity: usize, future: &'a NextUses) -> Self {
        Self { capacity, future, requests: 0, stretches: BTreeMap::new(), residents: 0 }
    }
}

impl Cache for Min<'_> {
    fn name(&self) -> &'static str {
        "min"
    }

    fn request(&mut self, _request: &Request<'_>) -> usize {
        let now = self.requests;
        self.requests += 1;
        let (from, to) = self.stretches.remove(&(now as Next)).unwrap_or_default();
        self.residents -= to - from;
        let mut depth = 0;
        for (len, next) in &self.future.runs[self.future.starts[now]..self.future.starts[now + 1]] {
            let len = *len as usize;
            if *next != NEVER {
                let stretch = self.stretches.entry(*next).or_insert((depth, depth));
                self.residents -= stretch.1 - stretch.0;
                *stretch = (stretch.0.min(depth), stretch.1.max(depth + len));
                self.residents += stretch.1 - stretch.0;
            }
            depth += len;
        }
        while self.residents > self.capacity
            && let Some(mut last) = self.stretches.last_entry()
        {
            let stretch = last.get_mut();
            let gone = (self.residents - self.capacity).min(stretch.1 - stretch.0);
            stretch.1 -= gone;
            self.residents -= gone;
            if stretch.0 == stretch.1 {
                last.remove();
            }
        }
        to
    }

    fn residents(&self) -> usize {
        self.residents
    }
}
