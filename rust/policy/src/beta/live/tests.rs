//! A small store on the predictor: its structure, its bounds, and its hits beside a replay's.

use super::*;
use crate::testing::{Owned, trace};
use crate::{Cache, Lru, Request, RequestKind, Rng};
use std::collections::{BTreeMap, BTreeSet};

const SHAPE: u32 = 3;

/// A store of one tier that puts what a request missed before the request ends.
struct Toy<P> {
    policy: P,
    capacity: usize,
    /// Number, parent and resident children of every resident by its key.
    residents: BTreeMap<u64, (BlockId, Option<u64>, usize)>,
    /// The key of every number that was given, and those that are free.
    keys: Vec<u64>,
    free: Vec<BlockId>,
    /// Puts tell of the block before.
    chained: bool,
}

impl<P: Policy> Toy<P> {
    fn new(policy: P, capacity: usize) -> Self {
        let (residents, keys, free) = Default::default();
        Self { policy, capacity, residents, keys, free, chained: true }
    }

    fn standing(&mut self, key: u64) {
        let Some((block, _, children)) = self.residents.get(&key).copied() else { return };
        let standing = if children == 0 { Standing::Candidate } else { Standing::Kept };
        self.policy.set_standing(Tier::Dram, block, standing);
    }

    fn remove(&mut self, key: u64) {
        let (block, parent, _) = self.residents.remove(&key).expect("resident");
        self.policy.removed(Tier::Dram, block);
        self.free.push(block);
        if let Some(parent) = parent
            && let Some((_, _, children)) = self.residents.get_mut(&parent)
        {
            *children -= 1;
            self.standing(parent);
        }
    }

    fn make_room(&mut self, now: Nanos, pinned: &BTreeSet<u64>) -> bool {
        while self.residents.len() >= self.capacity {
            let keys = &self.keys;
            let mut busy = |block: BlockId| pinned.contains(&keys[block as usize]);
            let Some(block) = self.policy.victim(Tier::Dram, SHAPE, now, &mut busy) else {
                return false;
            };
            let key = self.keys[block as usize];
            assert_eq!((self.residents[&key].0, self.residents[&key].2), (block, 0), "a leaf");
            self.remove(key);
        }
        true
    }

    fn put(&mut self, owned: &Owned, at: usize, pinned: &BTreeSet<u64>) -> bool {
        let key = owned.blocks[at];
        if self.residents.contains_key(&key) {
            return true;
        }
        if !self.make_room(owned.now, pinned) {
            return false;
        }
        let before = at.checked_sub(1).map(|at| owned.blocks[at]).filter(|_| self.chained);
        let parent = before.and_then(|key| self.residents.get(&key)).map(|(block, ..)| *block);
        let block = self.free.pop().unwrap_or(self.keys.len() as BlockId);
        self.keys.resize(self.keys.len().max(block as usize + 1), key);
        self.keys[block as usize] = key;
        let block_type = BlockType::Unknown;
        let facts = Facts { shape: SHAPE, depth: at as u32, block_type, key, parent, age: 0 };
        let before = before.filter(|key| self.residents.contains_key(key));
        self.residents.insert(key, (block, before, 0));
        if let Some(before) = before {
            self.residents.get_mut(&before).expect("resident").2 += 1;
            self.standing(before);
        }
        self.policy.inserted(Tier::Dram, block, &facts, owned.now);
        self.standing(key);
        true
    }

    /// Plays a request: its hits.
    fn play(&mut self, owned: &Owned) -> usize {
        let prompt = &owned.blocks[..owned.prompt];
        let hits = prompt.iter().take_while(|key| self.residents.contains_key(key)).count();
        let pinned: BTreeSet<u64> = owned.blocks.iter().copied().collect();
        for at in 0..owned.blocks.len() {
            if !self.put(owned, at, &pinned) {
                break;
            }
        }
        self.finish(owned, false);
        hits
    }

    fn finish(&mut self, owned: &Owned, bare: bool) {
        let id = |key: &u64| self.residents.get(key).map(|(block, ..)| *block);
        let ids: Vec<Option<BlockId>> = owned.blocks.iter().map(id).collect();
        let accesses = Accesses { request: owned.request(), ids: &ids, turn: 0, bare };
        self.policy.requested(&accesses);
    }
}

/// What must hold after any step.
fn check(toy: &Toy<Predictor>, context: &str) {
    let predictor = &toy.policy;
    let chain = &predictor.beta.chain;
    let numbers: BTreeMap<BlockId, u64> =
        toy.residents.iter().map(|(key, (block, ..))| (*block, *key)).collect();
    assert_eq!(predictor.residents, numbers.len(), "{context}: residents");
    let mut children = vec![0; chain.nodes.len()];
    let mut used = 0;
    for (slot, node) in chain.nodes.iter().enumerate() {
        used += usize::from(node.count > 0 || node.has(UNCLAIMED));
        if node.block != NONE {
            assert_eq!(predictor.slots[node.block as usize], slot as u32, "{context}: its slot");
            assert_eq!(numbers.get(&node.block), Some(&node.key), "{context}: its block");
            assert!(node.has(RESIDENT) != node.has(UNCLAIMED), "{context}: {node:?}");
        }
        if node.count > 0 && node.has(RESIDENT) && node.parent != NONE {
            assert!(chain.nodes[node.parent as usize].has(RESIDENT), "{context}: its parent");
            children[node.parent as usize] += 1;
        }
    }
    assert_eq!(chain.used(), used, "{context}: nodes in use");
    for (slot, node) in chain.nodes.iter().enumerate().filter(|(_, node)| node.has(RESIDENT)) {
        assert_eq!(node.children, children[slot], "{context}: children");
        assert!(node.block != NONE || node.children > 0, "{context}: nothing keeps {node:?}");
    }
    let lists = &predictor.tiers[Tier::Dram as usize];
    let mut listed = 0;
    for candidate in lists.lists.iter().flatten().flatten() {
        listed += 1;
        let seen = predictor.seen(candidate.block);
        assert_eq!(seen, (candidate.last, candidate.cell), "{context}: what a draw sees");
        assert_eq!(toy.residents[&numbers[&candidate.block]].2, 0, "{context}: a leaf");
    }
    let leaves = toy.residents.values().filter(|(.., children)| *children == 0).count();
    assert_eq!((listed, lists.count), (leaves, leaves), "{context}: candidates");
}

fn predictor(seed: u64) -> Predictor {
    Predictor::new(BetaOptions::SPEC, 16 << 20, seed)
}

#[test]
fn its_structure_holds_whatever_comes() {
    for seed in 0..60 {
        let mut toy = Toy::new(predictor(seed), 5 + seed as usize % 40);
        toy.chained = seed % 3 != 0;
        let mut rng = Rng::new(seed);
        let mut all = trace(seed, 150);
        for (number, owned) in all.iter_mut().enumerate() {
            let context = format!("seed {seed}, request {number}");
            match rng.below(10) {
                // Deleted or lost, with what hangs on it or without.
                0 => {
                    if let Some(key) = toy.residents.keys().nth(rng.below(20)).copied() {
                        let orphans = toy.residents.iter_mut().filter(|(_, b)| b.1 == Some(key));
                        orphans.for_each(|(_, block)| block.1 = None);
                        toy.remove(key);
                    }
                }
                // The end of a chain alone, accessed without a request.
                1 => {
                    let from = rng.below(owned.blocks.len() + 1);
                    owned.blocks.drain(..from);
                    owned.prompt = owned.blocks.len();
                    toy.finish(owned, true);
                }
                // Blocks in no order, and twice.
                2 => {
                    owned.blocks.iter_mut().for_each(|block| *block = rng.below(30) as u64);
                    toy.finish(owned, rng.below(2) == 0);
                }
                _ => _ = toy.play(owned),
            }
            check(&toy, &context);
        }
    }
}

/// The hits of a replay, in percent of the accesses, and those of the small store.
fn both(all: &[Owned], capacity: usize, options: BetaOptions, chained: bool) -> (f64, f64) {
    let mut replay = Beta::new(capacity, options, 1);
    let mut toy = Toy::new(Predictor::new(options, 64 << 20, 1), capacity);
    toy.chained = chained;
    let (mut expected, mut hits, mut accesses) = (0, 0, 0);
    for owned in all {
        expected += replay.request(&owned.request());
        hits += toy.play(owned);
        accesses += owned.prompt;
    }
    let percent = |hits: usize| 100.0 * hits as f64 / accesses as f64;
    (percent(expected), percent(hits))
}

#[test]
fn a_store_hits_what_a_replay_hits() {
    for seed in [3, 4, 7] {
        for chained in [true, false] {
            let all = trace(seed, 4000);
            let capacity = 150;
            let (expected, hits) = both(&all, capacity, BetaOptions::SPEC, chained);
            let close = hits > expected - 1.5;
            assert!(close, "seed {seed} {chained}: {hits} %, a replay has {expected} %");
        }
    }
}

fn scan(number: u64) -> Owned {
    let blocks: Vec<u64> = (0..8).map(|at| 1_000_000 + number * 8 + at).collect();
    Owned {
        now: number * 100_000_000,
        session: Some(1_000_000 + number),
        kind: RequestKind::Chat,
        prompt: blocks.len(),
        input_tokens: 128,
        output_tokens: 0,
        blocks,
    }
}

/// Sessions that come back, between a scan that never does.
fn mixed(requests: u64) -> Vec<Owned> {
    let mut rng = Rng::new(11);
    let session = |number: u64, rng: &mut Rng| {
        let own = rng.below(12) as u64;
        let blocks: Vec<u64> = (0..8).map(|at| own * 8 + at).collect();
        Owned { session: Some(own), blocks, ..scan(number) }
    };
    let each = |n| if n % 3 == 0 { session(n, &mut rng) } else { scan(n) };
    (0..requests).map(each).collect()
}

#[test]
fn what_comes_back_outlives_a_scan() {
    let all = mixed(6000);
    let hits = |policy: Box<dyn Policy>| {
        let mut toy = Toy::new(Boxed(policy), 120);
        all.iter().map(|owned| toy.play(owned)).sum::<usize>()
    };
    let ours = hits(Box::new(predictor(1)));
    let lru = hits(Box::new(Lru::new()));
    assert!(ours > 2 * lru, "{ours} hits, least recently used {lru}");
}

struct Boxed(Box<dyn Policy>);

impl Policy for Boxed {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn inserted(&mut self, tier: Tier, block: BlockId, facts: &Facts, now: Nanos) {
        self.0.inserted(tier, block, facts, now);
    }
    fn requested(&mut self, accesses: &Accesses<'_>) {
        self.0.requested(accesses);
    }
    fn removed(&mut self, tier: Tier, block: BlockId) {
        self.0.removed(tier, block);
    }
    fn reshaped(&mut self, tier: Tier, block: BlockId, shape: u32) {
        self.0.reshaped(tier, block, shape);
    }
    fn set_standing(&mut self, tier: Tier, block: BlockId, standing: Standing) {
        self.0.set_standing(tier, block, standing);
    }
    fn victim(
        &mut self,
        tier: Tier,
        shape: u32,
        now: Nanos,
        skip: &mut dyn FnMut(BlockId) -> bool,
    ) -> Option<BlockId> {
        self.0.victim(tier, shape, now, skip)
    }
    fn worth(&self, tier: Tier, block: BlockId) -> f64 {
        self.0.worth(tier, block)
    }
    fn candidates(&self, tier: Tier) -> usize {
        self.0.candidates(tier)
    }
    fn metadata_bytes(&self) -> usize {
        self.0.metadata_bytes()
    }
}

#[test]
fn a_block_costs_what_is_promised() {
    // The key is the index's; what is left is the policy's, in a tier that lists it or not.
    let metadata = size_of::<Node>() - size_of::<u64>() + size_of::<lists::Entry>();
    assert!(metadata <= 64, "{metadata} bytes a resident block");
    assert!(size_of::<Node>() <= 64 && size_of::<lists::Candidate>() <= 16);
}

#[test]
fn memory_stays_within_its_bound_and_ghosts_go_first() {
    let bound = MIN_METADATA_BYTES as usize;
    let mut toy = Toy::new(Predictor::new(BetaOptions::SPEC, bound as u64, 1), 2000);
    let mut most_ghosts = 0;
    for number in 0..30_000 {
        toy.play(&scan(number));
        let used = toy.policy.metadata_bytes();
        assert!(used <= bound, "request {number}: {used} bytes");
        most_ghosts = most_ghosts.max(toy.policy.ghosts());
    }
    assert!(most_ghosts > 5000 && most_ghosts < 65_536, "{most_ghosts} ghosts");
    toy.capacity = usize::MAX;
    let before = toy.policy.ghosts();
    (30_000..31_000).for_each(|number| _ = toy.play(&scan(number)));
    assert!(toy.policy.ghosts() < before - 5000, "residents take the place of ghosts");
    check(&toy, "full");
    // More than there is memory for: the rest is evicted all the same.
    (31_000..34_000).for_each(|number| _ = toy.play(&scan(number)));
    assert!(toy.policy.residents > toy.policy.slots.iter().filter(|s| **s != NONE).count());
    toy.capacity = 500;
    assert!(toy.make_room(0, &BTreeSet::new()));
}

#[test]
fn a_put_alone_is_an_access_once_somebody_gets_it() {
    let mut toy = Toy::new(predictor(1), 1000);
    let requests = |toy: &Toy<Predictor>| toy.policy.requests();
    let mut owned = scan(0);
    (0..8).for_each(|at| assert!(toy.put(&owned, at, &BTreeSet::new())));
    assert_eq!(requests(&toy), 0, "a put is no request");
    owned.now = 60_000_000_000;
    owned.session = None;
    toy.finish(&owned, true);
    assert_eq!(requests(&toy), 2, "the put, and the get");
    let reused: f64 = toy.policy.posterior().iter().map(|pair| pair.reuses).sum();
    assert!((reused - 1.0).abs() < 1e-3, "its one sentinel was reused: {reused}");
    check(&toy, "after");
}

#[test]
fn a_turn_that_is_told_counts() {
    let mut toy = Toy::new(predictor(1), 100);
    let owned = scan(1);
    let accesses = |toy: &mut Toy<Predictor>, turn| {
        let request: Request<'_> = owned.request();
        let ids = vec![None; owned.blocks.len()];
        toy.policy.requested(&Accesses { request, ids: &ids, turn, bare: false });
        let serial = toy.policy.beta.sessions.by_label(owned.session.expect("told"));
        toy.policy.beta.sessions.get(serial.expect("kept")).expect("kept").turn
    };
    assert_eq!(accesses(&mut toy, 7), 7, "of a session that began before the store");
    assert_eq!(accesses(&mut toy, 0), 8);
    assert_eq!(accesses(&mut toy, 2), 9, "it never goes back");
}

/// A store of `count` blocks of which none was named yet, with the least memory that there may be.
fn restored(count: u32) -> Predictor {
    let mut predictor = Predictor::new(BetaOptions::SPEC, MIN_METADATA_BYTES, 1);
    let block_type = BlockType::User;
    let facts = |key| Facts { shape: SHAPE, depth: 0, block_type, key, parent: None, age: 0 };
    let each = |block: u32| (block, facts(u64::from(block)), Standing::Candidate);
    predictor.restored(Tier::Dram, &mut (0..count).map(each), 1_000_000_000);
    predictor
}

#[test]
fn a_request_is_learned_though_what_was_restored_has_taken_all_memory() {
    let count = 60_000;
    let mut predictor = restored(count);
    assert_eq!(predictor.beta.chain.room(), 0, "more blocks than nodes");
    // One that has nodes of its own, and one that memory was short for.
    for blocks in [0..8u32, count - 8..count] {
        let keys: Vec<u64> = blocks.clone().map(u64::from).collect();
        let ids: Vec<Option<BlockId>> = blocks.clone().map(Some).collect();
        for turn in 1..4 {
            let now = u64::from(turn) * 60_000_000_000;
            let owned = Owned { now, session: Some(1), blocks: keys.clone(), ..scan(0) };
            let request = owned.request();
            predictor.requested(&Accesses { request, ids: &ids, turn, bare: false });
        }
        for block in blocks {
            let slot = predictor.slot(block).expect("it has a node");
            assert!(
                !predictor.is_unclaimed(slot)
                    && predictor.beta.chain.nodes[slot as usize].count == 3
            );
        }
    }
    assert!(predictor.metadata_bytes() <= MIN_METADATA_BYTES as usize + 40 * count as usize);
    let unclaimed = predictor.beta.chain.nodes.iter().filter(|n| n.has(UNCLAIMED)).count();
    assert_eq!(unclaimed, predictor.unclaimed);
}

#[test]
fn what_comes_when_memory_is_short_is_not_the_oldest() {
    let count = 60_000;
    let mut predictor = restored(count);
    let (key, block_type) = (u64::from(count), BlockType::User);
    let facts = Facts { shape: SHAPE, depth: 0, block_type, key, parent: None, age: 0 };
    predictor.inserted(Tier::Dram, count, &facts, 100_000_000_000);
    predictor.set_standing(Tier::Dram, count, Standing::Candidate);
    assert!(predictor.slot(count).is_none());
    let worth = |block| predictor.worth(Tier::Dram, block);
    assert!(worth(count) > worth(0) && worth(count) > worth(count - 1), "the newest");
    let (last, cell) = predictor.tiers[Tier::Dram as usize].seen(count).expect("listed");
    assert_eq!((last, cell), (100.0, predictor.first_cell(BlockType::Unknown)));
}

#[test]
fn a_request_that_begins_in_the_midst_of_a_chain_is_as_long_as_the_chain() {
    let mut toy = Toy::new(predictor(1), 100);
    toy.play(&scan(1));
    let mut owned = scan(1);
    owned.now += 1_000_000_000;
    owned.blocks.drain(..4);
    owned.blocks.push(77);
    (owned.prompt, owned.input_tokens) = (5, 80);
    toy.finish(&owned, false);
    let chain = &toy.policy.beta.chain;
    let new = chain.nodes.iter().find(|node| node.key == 77 && node.count > 0).expect("learned");
    assert_eq!(new.depth, 8);
    assert!(!new.has(crate::beta::chain::PARTIAL), "it is full");
    let serial = toy.policy.beta.sessions.by_label(1_000_001).expect("kept");
    assert_eq!(toy.policy.beta.sessions.get(serial).expect("kept").tokens, 9 * 16);
}

#[test]
fn the_rest_of_a_request_does_not_count_again() {
    let mut toy = Toy::new(predictor(1), 100);
    let minute: Nanos = 60_000_000_000;
    for (turn, prompt, all) in [(1, 4, 6), (2, 8, 10)] {
        let tokens = |blocks: usize| blocks as u32 * 16;
        let whole = Owned {
            now: turn * minute,
            blocks: (1..=all as u64).collect(),
            prompt,
            input_tokens: tokens(prompt),
            output_tokens: tokens(all - prompt),
            ..scan(1)
        };
        let asked = Owned { blocks: whole.blocks[..prompt].to_vec(), output_tokens: 0, ..whole };
        let ids = |toy: &Toy<Predictor>, owned: &Owned| -> Vec<Option<BlockId>> {
            let id = |key: &u64| toy.residents.get(key).map(|(block, ..)| *block);
            owned.blocks.iter().map(id).collect()
        };
        let told = |request, ids| Accesses { request, ids, turn: 0, bare: false };
        let before = ids(&toy, &asked);
        let counted = toy.policy.begun(&told(asked.request(), &before));
        for at in 0..all {
            assert!(toy.put(&whole, at, &BTreeSet::new()));
        }
        let after = ids(&toy, &whole);
        let later = Owned { now: turn * minute + minute / 4, ..whole };
        toy.policy.ended(&told(later.request(), &after), counted);
        check(&toy, "a turn");
    }
    assert_eq!(toy.policy.requests(), 2);
    let chain = &toy.policy.beta.chain;
    let used = |key: u64| chain.nodes.iter().find(|node| node.key == key && node.count > 0);
    let counts: Vec<_> = (1..=10).map(|key| used(key).expect("known").count).collect();
    assert_eq!(counts, [2, 2, 2, 2, 2, 2, 1, 1, 1, 1]);
    assert!((1..=10).all(|key| used(key).expect("known").rend == 10), "as long as it became");
    let serial = toy.policy.beta.sessions.by_label(1_000_001).expect("kept");
    let session = toy.policy.beta.sessions.get(serial).expect("kept");
    assert_eq!((session.turn, session.tokens, session.output), (2, 160, 32));
    assert!((session.gap - 60f32.log2()).abs() < 0.01, "the time between its prompts");
}

#[test]
fn the_rest_of_a_request_leaves_a_later_one_of_its_session_alone() {
    let mut toy = Toy::new(predictor(1), 100);
    let asked = |number: u64, blocks: u64| Owned {
        now: number * 1_000_000_000,
        blocks: (number * 100..number * 100 + blocks).collect(),
        prompt: 4,
        input_tokens: 64,
        output_tokens: (blocks as u32 - 4) * 16,
        ..scan(1)
    };
    let told = |toy: &mut Toy<Predictor>, owned: &Owned, rest_of: Option<crate::Turn>| {
        let (request, ids) = (owned.request(), vec![None; owned.blocks.len()]);
        let accesses = Accesses { request, ids: &ids, turn: 0, bare: false };
        let Some(turn) = rest_of else { return toy.policy.begun(&accesses) };
        toy.policy.ended(&accesses, turn);
        turn
    };
    let first = told(&mut toy, &asked(1, 4), None);
    let second = told(&mut toy, &asked(2, 4), None);
    told(&mut toy, &asked(2, 7), Some(second));
    told(&mut toy, &asked(1, 5), Some(first));
    let serial = toy.policy.beta.sessions.by_label(1_000_001).expect("kept");
    let session = *toy.policy.beta.sessions.get(serial).expect("kept");
    assert_eq!((session.turn, session.tokens, session.output), (2, 64 + 48, 48));
    let end = &toy.policy.beta.chain.nodes[session.end as usize];
    assert_eq!(end.key, 206, "where the later one ended");
}
