//! A twin that keeps lists of what each tier has and looks through them.

mod served;

use served::{Served, seconds, times_line};
use std::collections::BTreeMap;
use tiered_kv_policy::{Accesses, Batch, BetaOptions, BlockId, Facts, Lru, Policy, Predictor};
use tiered_kv_policy::{Request, Standing, Window};
use tiered_kv_replay::{Filled, NodeOutcome, NodeSpec, Options, Trace, Why};
use tiered_kv_types::{BlockType, Tier};

/// What both tell: a line each.
pub(crate) type Shown = Vec<String>;

fn tier_line(tier: &str, residents: usize, hits: u64, recomputed: u64) -> String {
    format!("{tier}: {residents} resident, {hits} hits, {recomputed} recomputed")
}

fn moves(moved: &BTreeMap<(String, String, String), u64>) -> impl Iterator<Item = String> + '_ {
    moved.iter().map(|((from, to, why), blocks)| format!("{from} -> {to}, {why}: {blocks}"))
}

/// What a replay found.
pub(crate) fn shown(found: &NodeOutcome) -> Shown {
    let mut lines: Shown = found
        .tiers
        .iter()
        .map(|tier| tier_line(tier.tier, tier.resident_blocks, tier.hits, tier.recomputed))
        .collect();
    let key = |from: &str, to: &str, why: Why| (from.into(), to.into(), format!("{why:?}"));
    let moved = found.moved.iter().map(|one| (key(one.from, one.to, one.why), one.blocks));
    lines.extend(moves(&moved.collect()));
    let ahead = &found.ahead;
    lines.push(format!("{ahead:?}"));
    for served in &found.services {
        let (alone, queued) = (served.ttft_s, served.queued_ttft_s);
        lines.push(times_line([
            alone.mean,
            alone.p50,
            alone.p90,
            alone.p99,
            queued.mean,
            queued.p50,
            queued.p90,
            queued.p99,
        ]));
        let read: Vec<String> = served.read_s.iter().copied().map(seconds).collect();
        lines.push(format!(
            "{} {} {} {:?} {read:?} {}",
            seconds(served.compute_s),
            seconds(served.load_s),
            served.computed_tokens,
            served.read_blocks,
            served.recomputed_blocks
        ));
    }
    lines.push(format!("{} misses", found.misses));
    lines
}

/// The twin.
pub(crate) struct Twin<'a> {
    spec: &'a NodeSpec,
    /// What each tier has.
    has: Vec<Vec<u64>>,
    /// What each tier got with the request at hand.
    fresh: Vec<Vec<u64>>,
    engine: Lru,
    store: Box<dyn Policy>,
    parents: BTreeMap<u64, Option<u64>>,
    moved: BTreeMap<(String, String, String), u64>,
    next: BTreeMap<u64, u64>,
    window: Window,
    unread: Vec<u64>,
    /// Demanded, covered, guessed, read later, left unread.
    ahead: [u64; 5],
    served: Vec<Served>,
    batches: Vec<Batch>,
    hits: Vec<u64>,
    recomputed: Vec<u64>,
    misses: u64,
    now: u64,
}

impl<'a> Twin<'a> {
    /// What the twin says of a whole trace.
    pub(crate) fn run(trace: &Trace, options: Options, spec: &'a NodeSpec) -> Shown {
        let store: Box<dyn Policy> = match BetaOptions::named(&spec.policy) {
            Some(options) => Box::new(Predictor::new(options, 64 << 20, spec.seed)),
            None => Box::new(Lru::new()),
        };
        let count = spec.tiers.len();
        let adapts = spec.waste_budget > 0.0;
        let mut twin = Self {
            spec,
            has: vec![Vec::new(); count],
            fresh: vec![Vec::new(); count],
            engine: Lru::new(),
            store,
            parents: BTreeMap::new(),
            moved: BTreeMap::new(),
            next: BTreeMap::new(),
            window: if adapts { Window::within(spec.waste_budget) } else { Window::fixed(0) },
            unread: Vec::new(),
            ahead: [0; 5],
            served: spec.services.iter().map(Served::new).collect(),
            batches: vec![Batch::default(); count],
            hits: vec![0; count],
            recomputed: vec![0; count],
            misses: 0,
            now: 0,
        };
        let mut blocks = Vec::new();
        for entry in trace.entries() {
            trace.blocks(entry, options.outputs, &mut blocks);
            twin.request(&Request {
                now: entry.now,
                session: entry.session.map(u64::from),
                kind: entry.kind,
                blocks: &blocks,
                prompt: entry.prompt as usize,
                types: &[],
                input_tokens: entry.input_tokens,
                output_tokens: entry.output_tokens,
                block_tokens: trace.block_tokens,
            });
        }
        twin.lines()
    }

    fn lines(self) -> Shown {
        let mut lines = Vec::new();
        for (level, tier) in self.spec.tiers.iter().enumerate() {
            let (residents, hits) = (self.has[level].len(), self.hits[level]);
            lines.push(tier_line(tier.tier.name(), residents, hits, self.recomputed[level]));
        }
        lines.extend(moves(&self.moved));
        let [demanded, covered, guessed, guessed_read, evicted_unread] = self.ahead;
        let all = demanded + covered + guessed;
        let ahead = tiered_kv_replay::AheadOutcome {
            window: self.window.width(),
            demanded,
            covered,
            guessed,
            guessed_read,
            evicted_unread,
            left_unread: self.unread.len() as u64,
            waste_pct: if all == 0 {
                0.0
            } else {
                100.0 * (guessed - guessed_read) as f64 / all as f64
            },
        };
        lines.push(format!("{ahead:?}"));
        lines.extend(self.served.into_iter().flat_map(Served::lines));
        lines.push(format!("{} misses", self.misses));
        lines
    }

    fn tier(&self, level: usize) -> Tier {
        self.spec.tiers[level].tier
    }

    fn is_engine(&self, level: usize) -> bool {
        self.tier(level) == Tier::Hbm
    }

    fn top(&self) -> Option<usize> {
        (0..self.has.len()).find(|level| !self.is_engine(*level))
    }

    fn predicts(&self) -> bool {
        self.spec.policy != "lru"
    }

    fn policy(&mut self, level: usize) -> &mut dyn Policy {
        if self.is_engine(level) { &mut self.engine } else { self.store.as_mut() }
    }

    fn fastest(&self, block: u64) -> Option<usize> {
        self.has.iter().position(|has| has.contains(&block))
    }

    fn is_below(&self, top: usize, block: u64) -> bool {
        self.fastest(block).is_some_and(|level| level > top)
    }

    fn depth(&self, block: u64) -> u32 {
        match self.parents[&block] {
            None => 0,
            Some(parent) => 1 + self.depth(parent),
        }
    }

    fn has_children(&self, level: usize, block: u64) -> bool {
        self.has[level].iter().any(|other| self.parents[other] == Some(block))
    }

    fn book(&mut self, from: Option<usize>, to: usize, why: Why) {
        let name = |level: usize| self.tier(level).name().to_owned();
        let key = (from.map_or("gpu".to_owned(), name), name(to), format!("{why:?}"));
        *self.moved.entry(key).or_default() += 1;
    }

    /// Tells the policy of every block of a level whether it may leave.
    fn refresh(&mut self, level: usize) {
        for block in self.has[level].clone() {
            let leaf = !self.has_children(level, block);
            let standing = if leaf { Standing::Candidate } else { Standing::Kept };
            let tier = self.tier(level);
            self.policy(level).set_standing(tier, block as BlockId, standing);
        }
    }

    fn enter(&mut self, level: usize, block: u64) {
        assert!(!self.has[level].contains(&block));
        let engine = self.is_engine(level);
        let parent = self.parents[&block].filter(|parent| {
            let mut levels = (0..self.has.len()).filter(|level| self.is_engine(*level) == engine);
            levels.any(|level| self.has[level].contains(parent))
        });
        self.has[level].push(block);
        let facts = Facts {
            shape: 0,
            depth: self.depth(block),
            block_type: BlockType::Unknown,
            key: block,
            parent: parent.map(|parent| parent as BlockId),
            age: 0,
        };
        let (tier, now) = (self.tier(level), self.now);
        self.policy(level).inserted(tier, block as BlockId, &facts, now);
        self.refresh(level);
    }

    fn evict(&mut self, level: usize, block: u64) {
        if !self.is_engine(level) {
            self.offer(level, block);
        }
        let tier = self.tier(level);
        self.policy(level).removed(tier, block as BlockId);
        self.has[level].retain(|other| *other != block);
        self.refresh(level);
        if Some(level) == self.top() && self.unread.contains(&block) {
            self.unread.retain(|other| *other != block);
            self.ahead[4] += 1;
        }
    }

    fn offer(&mut self, from: usize, block: u64) {
        let hits = self.store.worth(self.tier(from), block as BlockId);
        for below in from + 1..self.has.len() {
            let further = self.has[below + 1..].iter().any(|has| has.contains(&block));
            if self.has[below].contains(&block) {
                return;
            }
            if self.spec.tiers[below].filled == Filled::Puts {
                continue;
            }
            if self.takes(below, block, hits) {
                let fresh = Some(from) != self.top() && self.fresh[from].contains(&block);
                let source = if fresh { self.top() } else { Some(from) };
                self.book(source, below, Why::Offload);
                self.enter(below, block);
                return;
            }
            if further {
                return;
            }
        }
    }

    /// Seconds that a hit of a block in a level saves.
    fn saved(&self, level: usize, block: u64) -> f64 {
        let service = &self.spec.services[0];
        let from = f64::from(self.depth(block)) * 16.0;
        let compute = 16.0 * service.token_s + service.pair_s * 16.0 * (from + 8.0);
        compute - self.batches[level].load_s(service.latency_s[level], service.read_s[level])
    }

    fn takes(&mut self, level: usize, block: u64, hits: f64) -> bool {
        if self.predicts() && self.saved(level, block) <= 0.0 {
            return false;
        }
        let capacity = self.spec.tiers[level].blocks as usize;
        while self.has[level].len() >= capacity {
            let (tier, now) = (self.tier(level), self.now);
            let Some(victim) = self.policy(level).victim(tier, 0, now, &mut |_| false) else {
                return false;
            };
            if self.predicts() && !self.has_children(level, block) {
                let least = self.store.worth(tier, victim) * self.saved(level, u64::from(victim));
                if hits * self.saved(level, block) <= least {
                    return false;
                }
            }
            self.evict(level, u64::from(victim));
        }
        true
    }

    fn request(&mut self, request: &Request<'_>) {
        self.now = request.now;
        let mut parent = None;
        for block in request.blocks {
            self.parents.entry(*block).or_insert(parent);
            parent = Some(*block);
        }
        let prompt = &request.blocks[..request.prompt];
        let found: Vec<usize> = prompt.iter().map_while(|block| self.fastest(*block)).collect();
        let mut loads = self.served.iter_mut().map(|served| served.request(&found, request));
        let loaded = loads.next().unwrap();
        loads.for_each(drop);
        for (at, level) in found.iter().enumerate() {
            self.hits[*level] += 1;
            self.recomputed[*level] += u64::from(at >= loaded);
        }
        self.misses += (request.prompt - found.len()) as u64;
        for level in 0..self.has.len() {
            let blocks = found[..loaded].iter().filter(|one| **one == level).count();
            if blocks > 0 {
                self.batches[level].loaded(blocks);
            }
        }
        if let Some(top) = self.top() {
            self.move_up(top, request.blocks, loaded);
            for block in &request.blocks[loaded..] {
                if !self.has[top].contains(block) {
                    self.book(None, top, Why::Put);
                }
            }
        }
        self.store_all(request, &found, loaded);
    }

    fn move_up(&mut self, top: usize, blocks: &[u64], loaded: usize) {
        let before = self.unread.len();
        self.unread.retain(|block| !blocks.contains(block));
        self.ahead[3] += (before - self.unread.len()) as u64;
        let mut at = 0;
        while at < loaded {
            if !self.is_below(top, blocks[at]) {
                at += 1;
                continue;
            }
            let width = self.window.width();
            // All that is stored behind it, as it was last read.
            let mut behind = Vec::new();
            let mut last = blocks[at];
            while width > 0
                && let Some(next) = self.next.get(&last).filter(|next| self.is_below(top, **next))
            {
                last = *next;
                behind.push(last);
            }
            let own = behind.iter().zip(&blocks[at + 1..loaded]);
            let covered = own.take_while(|(one, other)| one == other).count();
            behind.truncate(covered + width);
            self.window.told(1 + behind.len(), behind.len() - covered);
            self.book(self.fastest(blocks[at]), top, Why::Demand);
            for (number, block) in behind.iter().enumerate() {
                self.book(self.fastest(*block), top, Why::Ahead);
                if number >= covered {
                    self.enter(top, *block);
                    self.unread.push(*block);
                    self.ahead[2] += 1;
                }
            }
            self.ahead[0] += 1;
            self.ahead[1] += covered as u64;
            at += 1 + covered;
        }
        for pair in blocks.windows(2) {
            self.next.insert(pair[0], pair[1]);
        }
    }

    fn store_all(&mut self, request: &Request<'_>, found: &[usize], loaded: usize) {
        let top = self.top();
        for level in 0..self.has.len() {
            for (at, block) in request.blocks.iter().enumerate() {
                let from = found.get(at).filter(|_| at < loaded);
                let wanted = if self.is_engine(level) {
                    true
                } else if top == Some(level) {
                    from.is_none_or(|from| !self.is_engine(*from))
                } else {
                    let saves = !self.predicts() || self.saved(level, *block) > 0.0;
                    self.spec.tiers[level].filled == Filled::Puts && from.is_none() && saves
                };
                if wanted && !self.has[level].contains(block) {
                    self.enter(level, *block);
                    self.fresh[level].push(*block);
                }
            }
        }
        for engine in [true, false] {
            let levels: Vec<usize> =
                (0..self.has.len()).filter(|level| self.is_engine(*level) == engine).collect();
            let id = |block: &u64| {
                let there = levels.iter().any(|level| self.has[*level].contains(block));
                there.then_some(*block as BlockId)
            };
            let ids: Vec<Option<BlockId>> = request.blocks.iter().map(id).collect();
            let accesses = Accesses { request: *request, ids: &ids, turn: 0, bare: false };
            if let Some(level) = levels.first() {
                self.policy(*level).requested(&accesses);
            }
        }
        for level in 0..self.has.len() {
            while self.has[level].len() > self.spec.tiers[level].blocks as usize {
                let (tier, now) = (self.tier(level), self.now);
                let victim = self.policy(level).victim(tier, 0, now, &mut |_| false).unwrap();
                assert!(!self.has_children(level, u64::from(victim)), "leaves go first");
                self.evict(level, u64::from(victim));
            }
        }
        for level in top.map_or(0..0, |top| top + 1..self.has.len()) {
            for block in std::mem::take(&mut self.fresh[level]) {
                if self.has[level].contains(&block) {
                    self.book(top, level, Why::WriteBehind);
                }
            }
        }
        self.fresh.iter_mut().for_each(Vec::clear);
    }
}
