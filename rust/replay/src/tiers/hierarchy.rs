//! Which tier has which block, and how blocks come and go: by the rules of the store's mover.
//!
//! Puts land in the store's first tier and are written behind to those that puts fill; what is
//! loaded comes into the first tier, and the copy below stays. What the engine's memory had is put
//! nowhere. Leaves go first in every tier. What leaves a tier is offered to those below that
//! victims fill, from the fastest on, until one takes it or has it; it is dropped at the first that
//! does not take it while one further below has it.

use super::spec::{Filled, LRU, NodeSpec, Service};
use serde::Serialize;
use tiered_kv_policy::{Accesses, Batch, BetaOptions, BlockId, Costs, Facts, Lru, Nanos, Policy};
use tiered_kv_policy::{Predictor, Request, Standing, belongs};
use tiered_kv_types::{BlockType, Tier};

/// The size class that all blocks are of.
const SHAPE: u32 = 0;
/// No block.
const NONE: u32 = u32::MAX;
/// Memory of the policy as a store has it by default: at least this, and a part of the tiers.
const METADATA_BYTES: u64 = 64 << 20;
const METADATA_PART: u64 = 100;

/// Why a block was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It was computed and stored.
    Put,
    /// It was stored, and is written to a tier below.
    WriteBehind,
    /// It left the tier above.
    Offload,
    /// A request asked for it.
    Demand,
    /// A request was expected to ask for it, and did, or did not.
    Ahead,
}

/// Blocks that were moved from one place to another.
#[derive(Clone, Debug, Serialize)]
pub struct Moved {
    /// The tier, or `gpu` for what was just computed.
    pub from: &'static str,
    /// The tier.
    pub to: &'static str,
    /// Why.
    pub why: Why,
    /// How many.
    pub blocks: u64,
}

/// Where what is put comes from.
const GPU: &str = "gpu";

struct Level {
    tier: Tier,
    capacity: usize,
    filled: Filled,
    /// The number of its policy.
    policy: usize,
    /// Resident blocks behind each block.
    children: Vec<u32>,
    residents: usize,
    batch: Batch,
}

/// What the policies see of a request: a number of each block that they have.
type Ids = Vec<Option<BlockId>>;

pub(super) struct Hierarchy<'a> {
    levels: Vec<Level>,
    /// The serving engine's, and the store's.
    policies: [Box<dyn Policy>; 2],
    /// Whether the store's policy predicts, so that its values can be weighed.
    predicts: bool,
    service: &'a Service,
    block_bytes: f64,
    block_tokens: f64,
    /// Of each block: which levels have it, and which have it since the request at hand.
    has: Vec<u8>,
    fresh: Vec<u8>,
    /// Of each block: the one before it, its depth, and whether it was moved ahead and not read.
    parent: Vec<u32>,
    depth: Vec<u32>,
    pub(super) unread: Vec<bool>,
    pub(super) moved: Vec<Moved>,
    /// Blocks that left the first tier without having been read since they were moved ahead.
    pub(super) evicted_unread: u64,
    ids: Ids,
    pub(super) now: Nanos,
}

const ENGINE: usize = 0;
const STORE: usize = 1;

fn policy_of(spec: &NodeSpec) -> Box<dyn Policy> {
    if spec.policy == LRU {
        return Box::new(Lru::new());
    }
    let options = BetaOptions::named(&spec.policy).unwrap_or(BetaOptions::DEFAULT);
    let blocks: u64 = spec.tiers.iter().map(|tier| tier.blocks).sum();
    let bytes = blocks.saturating_mul(spec.block_bytes);
    Box::new(Predictor::new(options, METADATA_BYTES.max(bytes / METADATA_PART), spec.seed))
}

impl<'a> Hierarchy<'a> {
    /// Empty tiers, of which there is at least one and one service model at least.
    pub(super) fn new(spec: &'a NodeSpec, block_tokens: u32) -> Self {
        let level = |tier: &super::TierSpec| Level {
            tier: tier.tier,
            capacity: usize::try_from(tier.blocks).unwrap_or(usize::MAX),
            filled: tier.filled,
            policy: if tier.tier == Tier::Hbm { ENGINE } else { STORE },
            children: Vec::new(),
            residents: 0,
            batch: Batch::default(),
        };
        Self {
            levels: spec.tiers.iter().map(level).collect(),
            policies: [Box::new(Lru::new()), policy_of(spec)],
            predicts: spec.policy != LRU,
            service: &spec.services[0],
            block_bytes: spec.block_bytes as f64,
            block_tokens: f64::from(block_tokens),
            has: Vec::new(),
            fresh: Vec::new(),
            parent: Vec::new(),
            depth: Vec::new(),
            unread: Vec::new(),
            moved: Vec::new(),
            evicted_unread: 0,
            ids: Vec::new(),
            now: 0,
        }
    }

    /// The level at which puts land: the first that is not the engine's.
    pub(super) fn top(&self) -> Option<usize> {
        self.levels.iter().position(|level| level.policy == STORE)
    }

    pub(super) fn levels(&self) -> usize {
        self.levels.len()
    }

    pub(super) fn name(&self, level: usize) -> &'static str {
        self.levels[level].tier.name()
    }

    pub(super) fn residents(&self, level: usize) -> usize {
        self.levels[level].residents
    }

    /// The fastest level that has a block.
    pub(super) fn fastest(&self, block: u64) -> Option<usize> {
        let has = self.has.get(block as usize).copied().unwrap_or(0);
        (has != 0).then(|| has.trailing_zeros() as usize)
    }

    fn has(&self, level: usize, block: u32) -> bool {
        self.has[block as usize] & 1 << level != 0
    }

    /// Takes note of a request's blocks.
    pub(super) fn know(&mut self, blocks: &[u64]) {
        let Some(last) = blocks.iter().max() else { return };
        if self.has.len() <= *last as usize {
            let len = (*last as usize + 1).next_power_of_two();
            self.has.resize(len, 0);
            self.fresh.resize(len, 0);
            self.parent.resize(len, NONE);
            self.depth.resize(len, NONE);
            self.unread.resize(len, false);
            self.levels.iter_mut().for_each(|level| level.children.resize(len, 0));
        }
        let mut parent = NONE;
        for (at, block) in blocks.iter().enumerate() {
            let depth = &mut self.depth[*block as usize];
            if *depth == NONE {
                *depth = at as u32;
                self.parent[*block as usize] = parent;
            }
            parent = *block as u32;
        }
    }

    /// Books a move.
    pub(super) fn book(&mut self, from: Option<usize>, to: usize, why: Why) {
        let name = |level: usize| self.levels[level].tier.name();
        let (from, to) = (from.map_or(GPU, name), name(to));
        let same = |one: &&mut Moved| one.from == from && one.to == to && one.why == why;
        match self.moved.iter_mut().find(same) {
            Some(one) => one.blocks += 1,
            None => self.moved.push(Moved { from, to, why, blocks: 1 }),
        }
    }

    /// A load of so many blocks from a level.
    pub(super) fn loaded(&mut self, level: usize, blocks: usize) {
        self.levels[level].batch.loaded(blocks);
    }

    /// Tells the policy whether a block may leave a level.
    fn refresh(&mut self, level: usize, block: u32) {
        if block == NONE || !self.has(level, block) {
            return;
        }
        let Level { tier, policy, ref children, .. } = self.levels[level];
        let leaf = children[block as usize] == 0;
        let standing = if leaf { Standing::Candidate } else { Standing::Kept };
        self.policies[policy].set_standing(tier, block, standing);
    }

    fn enter(&mut self, level: usize, block: u32) {
        debug_assert!(!self.has(level, block), "it comes once");
        self.has[block as usize] |= 1 << level;
        let parent = self.parent[block as usize];
        let store = self.levels[level].policy;
        let there = |block: &u32| *block != NONE && self.is_known_to(store, *block);
        let facts = Facts {
            shape: SHAPE,
            depth: self.depth[block as usize],
            block_type: BlockType::Unknown,
            key: u64::from(block),
            parent: Some(parent).filter(there),
            age: 0,
        };
        let at = &mut self.levels[level];
        at.residents += 1;
        if parent != NONE {
            at.children[parent as usize] += 1;
        }
        self.policies[store].inserted(at.tier, block, &facts, self.now);
        self.refresh(level, parent);
        self.refresh(level, block);
    }

    fn leave(&mut self, level: usize, block: u32) {
        self.has[block as usize] &= !(1 << level);
        let parent = self.parent[block as usize];
        let at = &mut self.levels[level];
        at.residents -= 1;
        if parent != NONE {
            at.children[parent as usize] -= 1;
        }
        self.policies[at.policy].removed(at.tier, block);
        self.refresh(level, parent);
        if Some(level) == self.top() && std::mem::take(&mut self.unread[block as usize]) {
            self.evicted_unread += 1;
        }
    }

    fn is_known_to(&self, policy: usize, block: u32) -> bool {
        let has = self.has[block as usize];
        (0..self.levels.len()).any(|l| has & 1 << l != 0 && self.levels[l].policy == policy)
    }

    /// What it takes to have a block again, from a level or by computing it.
    fn costs(&self, level: usize, block: u32) -> Costs {
        let from = f64::from(self.depth[block as usize]) * self.block_tokens;
        let (latency, read) = (self.service.latency_s[level], self.service.read_s[level]);
        Costs {
            recompute_s: self.service.compute_s(from, from + self.block_tokens),
            load_s: self.levels[level].batch.load_s(latency, read),
            bytes: self.block_bytes,
        }
    }

    /// Brings a block into the store's first tier ahead of its demand.
    pub(super) fn enter_ahead(&mut self, top: usize, block: u32) {
        self.enter(top, block);
        self.unread[block as usize] = true;
    }

    /// Stores a request's blocks: in the engine's memory, in the store's first tier, and behind it
    /// in those that puts fill; then lets the policies learn, and makes room. Of the prompt's first
    /// `loaded` blocks, `found` says which level they came from.
    pub(super) fn apply(&mut self, request: &Request<'_>, found: &[u8], loaded: usize) {
        let top = self.top();
        for level in 0..self.levels.len() {
            let behind = Some(level) > top;
            if behind && self.levels[level].filled == Filled::Victims {
                continue;
            }
            for (at, block) in request.blocks.iter().enumerate() {
                let block = *block as u32;
                let came_from = (at < loaded).then(|| usize::from(found[at]));
                let wanted = if behind {
                    came_from.is_none() && (!self.predicts || self.costs(level, block).saves())
                } else {
                    top != Some(level) || came_from.is_none_or(|from| from >= level)
                };
                if wanted && !self.has(level, block) {
                    self.fresh[block as usize] |= 1 << level;
                    self.enter(level, block);
                }
            }
        }
        self.learn(request);
        (0..self.levels.len()).for_each(|level| self.settle(level));
        for block in request.blocks {
            let fresh = std::mem::take(&mut self.fresh[*block as usize]);
            self.count_written(top, *block as u32, fresh);
        }
    }

    /// Counts what was written behind: what came and stayed.
    fn count_written(&mut self, top: Option<usize>, block: u32, fresh: u8) {
        let Some(top) = top else { return };
        for level in top + 1..self.levels.len() {
            if fresh & 1 << level != 0 && self.has(level, block) {
                self.book(Some(top), level, Why::WriteBehind);
            }
        }
    }

    /// Whether a level has a block.
    pub(super) fn is_in(&self, level: usize, block: u64) -> bool {
        self.has(level, block as u32)
    }

    fn learn(&mut self, request: &Request<'_>) {
        let mut ids = std::mem::take(&mut self.ids);
        for policy in [ENGINE, STORE] {
            if self.levels.iter().all(|level| level.policy != policy) {
                continue;
            }
            ids.clear();
            let id = |block: &u64| {
                let block = *block as u32;
                self.is_known_to(policy, block).then_some(block)
            };
            ids.extend(request.blocks.iter().map(id));
            let accesses = Accesses { request: *request, ids: &ids, turn: 0, bare: false };
            self.policies[policy].requested(&accesses);
        }
        self.ids = ids;
    }

    fn victim(&mut self, level: usize) -> Option<u32> {
        let Level { tier, policy, .. } = self.levels[level];
        self.policies[policy].victim(tier, SHAPE, self.now, &mut |_| false)
    }

    /// Lets blocks leave a level until it holds no more than it can.
    fn settle(&mut self, level: usize) {
        while self.levels[level].residents > self.levels[level].capacity {
            let victim = self.victim(level).expect("a chain of residents ends in a leaf");
            self.evict(level, victim);
        }
    }

    /// Lets a block leave a level, to one below where it belongs in one.
    fn evict(&mut self, level: usize, block: u32) {
        if self.levels[level].policy == STORE {
            self.offer(level, block);
        }
        self.leave(level, block);
    }

    fn offer(&mut self, from: usize, block: u32) {
        let hits = self.policies[STORE].worth(self.levels[from].tier, block);
        for below in from + 1..self.levels.len() {
            if self.has(below, block) {
                return;
            }
            if self.levels[below].filled == Filled::Puts {
                continue;
            }
            if self.makes_room(below, block, hits) {
                // What came with this request and did not stay was never written here.
                let came = self.fresh[block as usize] & 1 << from != 0 && Some(from) > self.top();
                let source = if came { self.top() } else { Some(from) };
                self.book(source, below, Why::Offload);
                self.enter(below, block);
                return;
            }
            if self.has[block as usize] >> (below + 1) != 0 {
                return;
            }
        }
    }

    /// Whether a block belongs in a level, in which there is room for it then.
    fn makes_room(&mut self, level: usize, block: u32, hits: f64) -> bool {
        let costs = self.costs(level, block);
        if self.predicts && !costs.saves() {
            return false;
        }
        let value = costs.value(hits);
        while self.levels[level].residents >= self.levels[level].capacity {
            let Some(victim) = self.victim(level) else { return false };
            // What has residents behind it stays with them, whatever it is worth.
            if self.predicts && self.levels[level].children[block as usize] == 0 {
                let worth = self.policies[STORE].worth(self.levels[level].tier, victim);
                if !belongs(value, Some(self.costs(level, victim).value(worth))) {
                    return false;
                }
            }
            self.evict(level, victim);
        }
        true
    }
}
