//! A policy by category: reuse times of each are taken to be exponential, as in "KVCache cache in
//! the wild" (ATC'25), and the block least likely to be reused within a life in the cache goes.

use super::list::{Links, Queue, entry};
use super::{Access, BlockCache};
use crate::Request;
use std::collections::HashMap;

/// Categories: kinds of requests by turns of their session.
const KINDS: usize = 16;
const TURNS: usize = 8;
/// Weight of a new lifetime in the average.
const LIFE_WEIGHT: f64 = 0.01;
/// How much longer a session's last request may be than what a request continues.
const SLACK: u32 = 1;

/// What was seen of a category.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Accesses to its blocks, those that were reuses, and the time to these in seconds.
    accesses: f64,
    reuses: f64,
    time: f64,
}

impl Seen {
    /// The chance of a reuse at ages from `age` to `age + life`.
    fn chance(&self, age: f64, life: f64) -> f64 {
        let ever = (self.reuses + 1.0) / (self.accesses + 2.0);
        let rate = (self.reuses + 1.0) / (self.time + 60.0);
        ever * (-rate * age).exp() * (1.0 - (-rate * life).exp())
    }
}

#[derive(Clone, Copy, Debug)]
struct Block {
    resident: bool,
    category: u16,
    depth: u32,
    last: f64,
    /// What a session is inferred from: who touched it last, and how long that request was.
    session: u32,
    rend: u32,
}

impl Default for Block {
    fn default() -> Self {
        let (category, depth, session, rend) = (0, 0, u32::MAX, 0);
        Self { resident: false, category, depth, last: -1.0, session, rend }
    }
}

/// Least likely to be reused, by category.
#[derive(Debug)]
pub struct Ali {
    capacity: usize,
    links: Links,
    queues: Vec<Queue>,
    seen: Vec<Seen>,
    blocks: Vec<Block>,
    /// Average age at which blocks go, in seconds.
    life: f64,
    residents: usize,
    turns: Vec<u32>,
    labels: HashMap<u64, u32>,
    /// The running request's session, category and length.
    session: u32,
    category: u16,
    len: u32,
}

impl Ali {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            links: Links::default(),
            queues: vec![Queue::default(); KINDS * TURNS],
            seen: vec![Seen::default(); KINDS * TURNS],
            blocks: Vec::new(),
            life: 60.0,
            residents: 0,
            turns: Vec::new(),
            labels: HashMap::new(),
            session: 0,
            category: 0,
            len: 0,
        }
    }

    fn session_of(&mut self, request: &Request<'_>) -> u32 {
        let new = self.turns.len() as u32;
        if let Some(label) = request.session {
            return *self.labels.entry(label).or_insert(new);
        }
        let known = |block: &&u64| self.blocks.get(**block as usize).is_some_and(|b| b.last >= 0.0);
        let known = request.blocks.iter().take_while(known).count();
        if known < 2 {
            return new;
        }
        let deepest = self.blocks[request.blocks[known - 1] as usize];
        if deepest.rend <= known as u32 + SLACK { deepest.session } else { new }
    }

    fn evict(&mut self, now: f64) {
        let mut victim: Option<(f64, u32, usize)> = None;
        for (category, queue) in self.queues.iter().enumerate() {
            let Some(back) = queue.back() else { continue };
            let Block { depth, last, .. } = self.blocks[back as usize];
            let chance = self.seen[category].chance(now - last, self.life);
            let goes = |(least, deepest, _): (f64, u32, usize)| {
                chance < least || (chance == least && depth > deepest)
            };
            if victim.is_none_or(goes) {
                victim = Some((chance, depth, category));
            }
        }
        let Some((_, _, category)) = victim else { return };
        if let Some(block) = self.queues[category].pop(&mut self.links) {
            let block = &mut self.blocks[block as usize];
            block.resident = false;
            self.life += LIFE_WEIGHT * ((now - block.last) - self.life);
            self.residents -= 1;
        }
    }
}

impl BlockCache for Ali {
    fn name(&self) -> &'static str {
        "ali"
    }

    fn begin(&mut self, request: &Request<'_>) {
        self.session = self.session_of(request);
        if self.session as usize == self.turns.len() {
            self.turns.push(0);
        }
        let turn = &mut self.turns[self.session as usize];
        *turn += 1;
        let turn = (*turn as usize).min(TURNS) - 1;
        self.category = (usize::from(request.kind.index()) * TURNS + turn) as u16;
        self.len = request.blocks.len() as u32;
    }

    fn access(&mut self, access: &Access) {
        let block = *entry(&mut self.blocks, access.block);
        if block.last >= 0.0 {
            let seen = &mut self.seen[usize::from(block.category)];
            seen.reuses += 1.0;
            seen.time += access.now - block.last;
        }
        self.seen[usize::from(self.category)].accesses += 1.0;
        if block.resident {
            self.queues[usize::from(block.category)].remove(&mut self.links, access.block);
        } else {
            if self.residents >= self.capacity {
                self.evict(access.now);
            }
            self.residents += 1;
        }
        self.queues[usize::from(self.category)].push(&mut self.links, access.block);
        self.blocks[access.block as usize] = Block {
            resident: true,
            category: self.category,
            depth: access.depth,
            last: access.now,
            session: self.session,
            rend: self.len,
        };
    }

    fn contains(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|block| block.resident)
    }

    fn residents(&self) -> usize {
        self.residents
    }
}
