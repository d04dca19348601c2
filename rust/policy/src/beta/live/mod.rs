//! The predictor as the policy of a store, which decides itself what is resident and may leave.
//!
//! Of every block that the store has there is a node, as in a replay, but in no chain before a
//! request names it: what is put before its request has ended would else count as reused by it. A
//! block that leaves the store's last tier is remembered, like in a replay, and so is one that a
//! request names and the store has not got. Where a block is gone and one behind it is not, its
//! node stays until that one is gone too.

mod draw;
mod lists;
mod request;
#[cfg(test)]
mod tests;

use super::chain::{Chain, NONE, Node, RESIDENT, UNCLAIMED};
use super::hazard::Cell;
use super::pace;
use super::sentinel::Sentinels;
use super::session::Sessions;
use super::{Beta, BetaOptions, FIRST, MIN_GHOSTS, NO_GAP, PairPosterior, seconds};
use crate::{Accesses, BlockId, Facts, Nanos, Policy, Standing};
use draw::Run;
use lists::Lists;
use tiered_kv_types::config::MIN_METADATA_BYTES;
use tiered_kv_types::{BlockType, Tier};

/// Most bytes that a block's node, its place in the maps and, if it is resident, in the lists of
/// two tiers take up, where all of these have just grown.
const NODE_BYTES: usize = 200;
/// Bytes of a session and of a sentinel where their tables have just grown.
const SESSION_BYTES: usize = 192;
const SENTINEL_BYTES: usize = 96;

/// Nodes that a request looks at, at most, for those that nobody has named.
const MIN_SEARCH: usize = 4096;
const SEARCH_EACH: usize = 64;

/// The score level of what no request has named.
const NO_SCORE: usize = 4;

/// Evicts what it is worth least to keep, by predicted reuse.
///
/// Pure and deterministic: time comes with what happens, and the seed with [`Predictor::new`].
#[derive(Debug)]
pub struct Predictor {
    beta: Beta,
    /// By the tier's number.
    tiers: [Lists; 6],
    /// Each block's node, `NONE` where the store has it not or memory was short.
    slots: Vec<u32>,
    /// Blocks that the store has.
    residents: usize,
    /// Nodes that are `UNCLAIMED`, and where the next search for one begins.
    unclaimed: usize,
    search: u32,
    now: f64,
    /// The time of the last request, until the next one: what it made old is not counted yet.
    learned: Option<f64>,
    /// Where the draws go on, so that a chain leaves as a whole.
    run: Option<Run>,
    /// Of the request at hand.
    keys: Vec<u64>,
    types: Vec<BlockType>,
}

/// The predictor's type of a block, where a caller told it.
fn type_of(told: BlockType) -> usize {
    match told {
        BlockType::System => 0,
        BlockType::Tool => 1,
        BlockType::User | BlockType::Unknown => 2,
        BlockType::Reasoning => 3,
    }
}

impl Predictor {
    /// A predictor that has learned nothing yet and keeps at most `metadata_bytes`, of which
    /// 4 MiB are the least. What is remembered of blocks that left goes first; a
    /// store of very many blocks needs some 40 bytes for each beyond it.
    pub fn new(options: BetaOptions, metadata_bytes: u64, seed: u64) -> Self {
        let most = usize::try_from(metadata_bytes.max(MIN_METADATA_BYTES)).unwrap_or(usize::MAX);
        let mut beta = Beta::with_ghosts(usize::MAX, options, seed, 0);
        let nodes = (most / 16 * 13).saturating_sub(beta.table.bytes()) / NODE_BYTES;
        beta.chain = Chain::of_store(nodes.min(NONE as usize / 2));
        beta.sentinels = Sentinels::new(most / 8 / SENTINEL_BYTES);
        beta.sessions = Sessions::new((most / 16 / SESSION_BYTES).min(1 << 24) as u32);
        Self {
            beta,
            tiers: Default::default(),
            slots: Vec::new(),
            residents: 0,
            unclaimed: 0,
            search: 0,
            now: 0.0,
            learned: None,
            run: None,
            keys: Vec::new(),
            types: Vec::new(),
        }
    }

    /// Bytes of what is kept of one block: its chain, its last accesses, its cell.
    pub const fn block_bytes() -> usize {
        size_of::<Node>()
    }

    /// What the posteriors of the 16 pairs are computed from.
    pub fn evidence(&self) -> super::Evidence {
        self.beta.evidence()
    }

    /// The posteriors of the 16 pairs.
    pub fn posterior(&self) -> [PairPosterior; super::PAIRS] {
        self.beta.posterior()
    }

    /// How what was predicted compares with what came, in this process.
    pub fn calibrations(&self) -> super::Calibrations {
        self.beta.calibrations()
    }

    /// Requests that it has learned from, those of an earlier process included.
    pub fn requests(&self) -> u64 {
        self.beta.requests
    }

    /// Blocks that are remembered after they left.
    pub fn ghosts(&self) -> usize {
        self.beta.chain.places()
    }

    /// What was learned, in at most `most` bytes; empty where they hold nothing of it.
    pub fn save(&self, most: usize) -> Vec<u8> {
        self.beta.save(most)
    }

    /// Whether bytes are what a predictor with other options saved.
    pub fn is_of_another(&self, bytes: &[u8]) -> bool {
        self.beta.is_of_another(bytes)
    }

    /// Takes in what [`Predictor::save`] gave; false, and nothing is changed, where it is anything
    /// else.
    pub fn load(&mut self, bytes: &[u8]) -> bool {
        self.beta.load(bytes)
    }

    fn advance(&mut self, now: Nanos) {
        self.now = self.now.max(seconds(now));
    }

    fn lists(&mut self, tier: Tier) -> &mut Lists {
        &mut self.tiers[tier as usize]
    }

    fn slot(&self, block: BlockId) -> Option<u32> {
        self.slots.get(block as usize).copied().filter(|slot| *slot != NONE)
    }

    fn is_unclaimed(&self, slot: u32) -> bool {
        self.beta.chain.nodes[slot as usize].has(UNCLAIMED)
    }

    /// What a draw sees of a block; where memory was short for a node, what it saw when the block
    /// was listed, as if that had been an access.
    fn seen(&self, block: BlockId) -> (f64, Cell) {
        if let Some(slot) = self.slot(block) {
            let node = &self.beta.chain.nodes[slot as usize];
            return (node.last, node.cell);
        }
        let listed = self.tiers.iter().find_map(|lists| lists.seen(block));
        listed.unwrap_or_else(|| (self.now, self.first_cell(BlockType::Unknown)))
    }

    /// The cell of what no request has named.
    fn first_cell(&self, block_type: BlockType) -> Cell {
        let options = &self.beta.options;
        let score = if options.score { NO_SCORE } else { 0 };
        let gap = match (options.pace, options.gap) {
            (true, _) => pace::level(0.0),
            (false, true) => NO_GAP,
            (false, false) => 0,
        };
        Cell::new(type_of(block_type) * 4 + FIRST, score, gap)
    }

    fn depth(&self, block: BlockId) -> u32 {
        self.slot(block).map_or(0, |slot| self.beta.chain.nodes[slot as usize].depth)
    }

    /// Makes room for nodes where it can, by forgetting what left longest ago; whether it did.
    fn make_room(&mut self, wanted: usize) -> bool {
        let chain = &mut self.beta.chain;
        let all = chain.room() + chain.places();
        let limit = MIN_GHOSTS.max(4 * self.residents).min(all.saturating_sub(wanted));
        chain.limit_ghosts(limit);
        let mut forgot = false;
        loop {
            let chain = &mut self.beta.chain;
            let short = chain.room() < wanted;
            let Some(slot) = chain.surplus(if short { 0 } else { limit }) else { return forgot };
            self.beta.forget(slot, self.now);
            forgot = true;
        }
    }

    /// A block that came into the store: its node is the one that is remembered, or a new one.
    fn arrive(&mut self, block: BlockId, facts: &Facts) {
        if self.slots.len() <= block as usize {
            self.slots.resize(block as usize + 1, NONE);
        }
        self.residents += 1;
        let behind = match facts.parent {
            None => Some(NONE),
            Some(parent) => self.slot(parent).filter(|slot| !self.is_unclaimed(*slot)),
        };
        let known = behind.and_then(|parent| self.beta.chain.child(parent, facts.key));
        let free = |slot: &u32| self.beta.chain.nodes[*slot as usize].block == NONE;
        if let Some(slot) = known.filter(free) {
            self.readmit(slot);
            return self.link(block, slot);
        }
        self.make_room(1);
        if self.beta.chain.room() == 0 {
            return;
        }
        let mut node = Node::new(facts.key, NONE, facts.depth);
        node.flags = UNCLAIMED;
        node.last = self.now - seconds(facts.age);
        node.cell = self.first_cell(facts.block_type);
        let slot = self.beta.chain.hold(node);
        self.unclaimed += 1;
        self.link(block, slot);
    }

    fn link(&mut self, block: BlockId, slot: u32) {
        self.beta.chain.node(slot).block = block;
        self.slots[block as usize] = slot;
    }

    /// Takes the node of a block that no request has named: its lists keep what they see of it.
    fn release(&mut self, slot: u32) {
        let block = self.beta.chain.nodes[slot as usize].block;
        self.slots[block as usize] = NONE;
        self.unlink(slot);
    }

    /// Makes room for what a request names, at the cost of what none has named.
    fn claim_room(&mut self, wanted: usize) {
        // Round all nodes, a part of them for each request.
        for _ in 0..MIN_SEARCH.max(wanted.saturating_mul(SEARCH_EACH)) {
            if self.beta.chain.room() >= wanted || self.unclaimed == 0 {
                return;
            }
            self.search = (self.search + 1) % self.beta.chain.nodes.len() as u32;
            if self.is_unclaimed(self.search) {
                self.release(self.search);
            }
        }
    }

    /// Makes a node that is remembered resident, and all before it.
    fn readmit(&mut self, slot: u32) {
        let mut path = vec![];
        let mut at = slot;
        while at != NONE && !self.beta.chain.nodes[at as usize].has(RESIDENT) {
            path.push(at);
            at = self.beta.chain.nodes[at as usize].parent;
        }
        for slot in path.into_iter().rev() {
            let parent = self.beta.chain.nodes[slot as usize].parent;
            self.beta.chain.readmit(slot, parent);
        }
    }

    /// A block that left the store: its node is remembered once nothing behind it is resident.
    fn depart(&mut self, block: BlockId) {
        self.residents -= 1;
        let Some(slot) = self.slot(block) else { return };
        self.slots[block as usize] = NONE;
        self.unlink(slot);
    }

    fn unlink(&mut self, slot: u32) {
        let node = self.beta.chain.node(slot);
        node.block = NONE;
        if node.has(UNCLAIMED) {
            self.unclaimed -= 1;
            self.beta.chain.let_go(slot);
        } else {
            self.settle(slot);
        }
    }

    /// Remembers a node that the store has not got, and those before it that only it kept.
    fn settle(&mut self, slot: u32) {
        let mut next = Some(slot);
        while let Some(slot) = next {
            let node = &self.beta.chain.nodes[slot as usize];
            if !node.has(RESIDENT) || node.children > 0 || node.block != NONE {
                return;
            }
            let (leaf, forgotten) = self.beta.chain.evict(slot);
            if let Some(forgotten) = forgotten {
                self.beta.forget(forgotten, self.now);
            }
            next = leaf;
        }
    }
}

impl Policy for Predictor {
    fn name(&self) -> &'static str {
        self.beta.options.name
    }

    fn inserted(&mut self, tier: Tier, block: BlockId, facts: &Facts, now: Nanos) {
        self.advance(now);
        let there = self.tiers.iter().any(|lists| lists.entry(block).is_some());
        self.lists(tier).enter(block, facts.shape);
        if !there {
            self.arrive(block, facts);
        }
    }

    fn restored(
        &mut self,
        tier: Tier,
        blocks: &mut dyn Iterator<Item = (BlockId, Facts, Standing)>,
        now: Nanos,
    ) {
        // A million of them, mostly: tables that grow by and by would be copied many times.
        let (found, _) = blocks.size_hint();
        self.slots.reserve(found);
        self.lists(tier).reserve(found);
        self.beta.chain.reserve(found);
        for (block, facts, standing) in blocks {
            self.inserted(tier, block, &facts, now);
            self.set_standing(tier, block, standing);
        }
    }

    fn requested(&mut self, accesses: &Accesses<'_>) {
        self.begun(accesses);
    }

    fn removed(&mut self, tier: Tier, block: BlockId) {
        if !self.lists(tier).leave(block) {
            return;
        }
        self.follow(tier, block);
        if self.tiers.iter().all(|lists| lists.entry(block).is_none()) {
            self.depart(block);
        }
    }

    fn reshaped(&mut self, tier: Tier, block: BlockId, shape: u32) {
        let seen = self.seen(block);
        self.lists(tier).reshape(block, shape, seen);
    }

    fn set_standing(&mut self, tier: Tier, block: BlockId, standing: Standing) {
        let seen = self.seen(block);
        self.lists(tier).set(block, standing, seen);
    }

    fn victim(
        &mut self,
        tier: Tier,
        shape: u32,
        now: Nanos,
        skip: &mut dyn FnMut(BlockId) -> bool,
    ) -> Option<BlockId> {
        self.advance(now);
        self.choose(tier, shape, skip)
    }

    fn worth(&self, tier: Tier, block: BlockId) -> f64 {
        match self.tiers[tier as usize].entry(block) {
            Some(entry) if entry.standing() != Standing::Orphan => self.value_of(block),
            _ => 0.0,
        }
    }

    fn candidates(&self, tier: Tier) -> usize {
        self.tiers[tier as usize].count
    }

    fn metadata_bytes(&self) -> usize {
        let beta = &self.beta;
        beta.table.bytes()
            + beta.chain.bytes()
            + beta.sessions.bytes()
            + beta.sentinels.bytes()
            + self.tiers.iter().map(Lists::bytes).sum::<usize>()
            + self.slots.capacity() * size_of::<u32>()
            + (self.keys.capacity() + beta.path.capacity()) * size_of::<u64>()
            + self.types.capacity()
    }

    fn predictor(&mut self) -> Option<&mut Predictor> {
        Some(self)
    }
}
