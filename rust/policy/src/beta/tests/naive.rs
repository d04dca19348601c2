//! The predictor again, from its rules, with maps that are scanned.
//!
//! It shares no table with the policy: lives are kept as intervals and counted from these at each
//! rebuild, every index is the best of all stopping ages, and every candidate is looked at.

use crate::beta::age::{BUCKETS, start};
use crate::rng::Rng;
use crate::testing::Owned;
use std::collections::BTreeMap;

/// One stretch of a sentinel's life in one cell, as it was credited.
#[derive(Clone, Debug)]
struct Life {
    cell: [usize; 3],
    features: [usize; 6],
    scored: bool,
    /// Ages between which it was seen to survive, and whether it was reused at the latter.
    from: f64,
    to: f64,
    reused: bool,
    /// The rebuild before which it was credited.
    epoch: usize,
}

/// Trials and reuses by bucket.
pub(super) type Counts = Vec<(f64, f64)>;

#[derive(Clone, Debug)]
struct Watch {
    cell: [usize; 3],
    features: [usize; 6],
    scored: bool,
    since: f64,
    /// Age up to which it was credited.
    credited: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) key: u64,
    parent: Option<u64>,
    depth: usize,
    pub(super) resident: bool,
    session: u64,
    shared: bool,
    partial: bool,
    own_type: usize,
    pub(super) cell: [usize; 3],
    pub(super) last: f64,
    gap: Option<f32>,
    count: usize,
    rend: usize,
    watch: Option<Watch>,
    /// How many had been evicted when it was.
    evicted: usize,
}

#[derive(Clone, Debug, Default)]
struct Session {
    last: f64,
    gap: f32,
    turn: usize,
    end: Option<u64>,
    tokens: u32,
}

pub(super) struct Naive {
    pub(super) capacity: usize,
    pub(super) ghosts: usize,
    rng: Rng,
    pub(super) blocks: BTreeMap<u64, Block>,
    sessions: BTreeMap<u64, Session>,
    lives: Vec<Life>,
    /// Keys of watched blocks, in the order in which the sweep goes.
    watched: Vec<u64>,
    sweep: usize,
    evicted: usize,
    requests: usize,
    /// Requests at which the table was computed anew.
    pub(super) rebuilds: Vec<usize>,
    /// Global hazards and feature ratios as of each rebuild, the first being the start.
    global: Vec<[f64; BUCKETS]>,
    ratios: Vec<[[f64; 16]; 6]>,
    pub(super) index: BTreeMap<[usize; 3], [f32; BUCKETS]>,
}

fn widths() -> [f64; BUCKETS] {
    std::array::from_fn(|bucket| start(bucket + 1) - start(bucket))
}

fn bucket_of(age: f64) -> usize {
    (0..BUCKETS).rev().find(|bucket| age >= start(*bucket)).unwrap_or(0)
}

fn level(gap: f32) -> usize {
    ((gap + 2.0) / 2.0).floor().clamp(0.0, 6.0) as usize
}

fn log_gap(gap: f64) -> f32 {
    gap.max(0.01).log2() as f32
}

fn averaged(before: Option<f32>, gap: f32) -> f32 {
    before.map_or(gap, |before| before + 0.3 * (gap - before))
}

impl Naive {
    pub(super) fn new(capacity: usize, ghosts: usize, seed: u64) -> Self {
        let mut naive = Self {
            capacity,
            ghosts,
            rng: Rng::new(seed),
            blocks: BTreeMap::new(),
            sessions: BTreeMap::new(),
            lives: Vec::new(),
            watched: Vec::new(),
            sweep: 0,
            evicted: 0,
            requests: 0,
            rebuilds: vec![0],
            global: Vec::new(),
            ratios: vec![[[1.0; 16]; 6]],
            index: BTreeMap::new(),
        };
        naive.compute();
        naive
    }

    /// How much a life credited in `epoch` weighs at the last rebuild.
    fn weight(&self, epoch: usize) -> f64 {
        let at = self.rebuilds[self.rebuilds.len() - 1];
        // What was credited between two rebuilds fades by the time between them at once.
        0.5f64.powf((at - self.rebuilds[epoch]) as f64 / 8000.0)
    }

    /// Trials and reuses by cell and bucket.
    pub(super) fn recount(&self) -> BTreeMap<[usize; 3], Counts> {
        let mut cells: BTreeMap<[usize; 3], Counts> = BTreeMap::new();
        for life in &self.lives {
            let counts = cells.entry(life.cell).or_insert_with(|| vec![(0.0, 0.0); BUCKETS]);
            for (bucket, trials, reuses) in life.credits() {
                let weight = self.weight(life.epoch);
                counts[bucket].0 += weight * trials;
                counts[bucket].1 += weight * reuses;
            }
        }
        cells
    }

    fn compute(&mut self) {
        let cells = self.recount();
        let sum = |of: &dyn Fn([usize; 3]) -> bool| {
            let mut counts = vec![(0.0, 0.0); BUCKETS];
            for (_, own) in cells.iter().filter(|(cell, _)| of(**cell)) {
                counts.iter_mut().zip(own).for_each(|(a, b)| *a = (a.0 + b.0, a.1 + b.1));
            }
            counts
        };
        let total = sum(&|_| true);
        let mut hazard = [0.0; BUCKETS];
        for b in 0..BUCKETS {
            let mean = if b <= 1 { 0.1 } else { 0.7 * hazard[b - 1] };
            hazard[b] = (total[b].1 + 30.0 * mean) / (total[b].0 + 30.0);
        }
        self.global.push(hazard);
        self.index.clear();
        for pair in 0..16 {
            let of_type = shrink(&sum(&|c| c[0] / 4 == pair / 4), &hazard);
            let of_pair = shrink(&sum(&|c| c[0] == pair), &of_type);
            let pair_index = best_stop(&of_pair);
            for score in 0..8 {
                let mut index = pair_index;
                let mut of_score = of_pair;
                if cells.keys().any(|cell| cell[..2] == [pair, score]) {
                    of_score = shrink(&sum(&|c| c[..2] == [pair, score]), &of_pair);
                    index = best_stop(&of_score);
                }
                for gap in 0..8 {
                    let own = cells.get(&[pair, score, gap]);
                    let own = own.map_or(index, |own| best_stop(&shrink(own, &of_score)));
                    self.index.insert([pair, score, gap], own);
                }
            }
        }
    }

    fn rebuild(&mut self) {
        self.rebuilds.push(self.requests);
        let mut ratios = [[1.0; 16]; 6];
        for (feature, values) in ratios.iter_mut().enumerate() {
            for (value, ratio) in values.iter_mut().enumerate() {
                let (mut reuses, mut expected) = (0.0, 0.0);
                let carries = |life: &&Life| life.scored && life.features[feature] == value;
                for life in self.lives.iter().filter(carries) {
                    let weight = self.weight(life.epoch);
                    let others: f64 = (0..6)
                        .filter(|other| *other != feature)
                        .map(|other| self.ratios[life.epoch][other][life.features[other]])
                        .product();
                    for (bucket, trials, reused) in life.credits() {
                        reuses += weight * reused;
                        expected += weight * trials * self.global[life.epoch][bucket] * others;
                    }
                }
                *ratio = (reuses + 30.0) / (expected + 30.0);
            }
        }
        self.ratios.push(ratios);
        self.compute();
    }

    fn credit(&mut self, key: u64, now: f64, reused: bool) {
        let epoch = self.rebuilds.len() - 1;
        let block = self.blocks.get_mut(&key).unwrap();
        let watch = block.watch.as_mut().unwrap();
        let to = now - watch.since;
        let Watch { cell, features, scored, credited: from, .. } = watch.clone();
        watch.credited = to;
        self.lives.push(Life { cell, features, scored, from, to, reused, epoch });
    }

    pub(super) fn key_of(&self, block: &Block, now: f64) -> f32 {
        self.index[&block.cell][bucket_of(now - block.last)]
    }

    fn forget_old(&mut self, now: f64) {
        let old = |block: &Block| !block.resident && self.evicted - block.evicted > self.ghosts;
        let keys: Vec<u64> = self.blocks.values().filter(|b| old(b)).map(|b| b.key).collect();
        for key in keys {
            if self.blocks[&key].watch.is_some() {
                self.credit(key, now, false);
                let at = self.watched.iter().position(|watched| *watched == key).unwrap();
                self.watched.swap_remove(at);
            }
            self.blocks.remove(&key);
        }
    }

    fn evict(&mut self, now: f64) {
        let residents = |naive: &Self| naive.blocks.values().filter(|b| b.resident).count();
        while residents(self) > self.capacity {
            let leaf = |naive: &Self, key: u64| {
                let mut all = naive.blocks.values();
                !all.any(|block| block.resident && block.parent == Some(key))
            };
            let mut leaves: Vec<(f32, f64, isize, u64)> = Vec::new();
            for block in self.blocks.values().filter(|b| b.resident && leaf(self, b.key)) {
                let key = self.key_of(block, now);
                leaves.push((key, block.last, -(block.depth as isize), block.key));
            }
            assert!(leaves.len() <= 64, "audits are of draws that look at all");
            leaves.sort_by(|a, b| a.partial_cmp(b).unwrap());
            let limit = leaves.get(1).map_or(f32::INFINITY, |leaf| leaf.0);
            let mut next = Some(leaves[0].3);
            for _ in 0..64 {
                let Some(key) = next else { break };
                let block = self.blocks.get_mut(&key).unwrap();
                block.resident = false;
                block.evicted = self.evicted;
                let parent = block.parent;
                self.evicted += 1;
                self.forget_old(now);
                next = parent.filter(|parent| {
                    residents(self) > self.capacity
                        && leaf(self, *parent)
                        && self.key_of(&self.blocks[parent], now) <= limit
                });
            }
        }
    }

    /// One request; how many leading blocks of the prompt were resident.
    pub(super) fn request(&mut self, owned: &Owned) -> usize {
        self.requests += 1;
        let now = owned.now as f64 * 1e-9;
        let resident = |block: &&u64| self.blocks.get(*block).is_some_and(|b| b.resident);
        let hits = owned.blocks[..owned.prompt].iter().take_while(resident).count();
        let known = owned.blocks.iter().take_while(|b| self.blocks.contains_key(b)).count();
        let deepest = (known >= 2).then(|| &self.blocks[&owned.blocks[known - 1]]);
        let inferred = deepest.filter(|block| block.rend as isize - known as isize <= 1);
        let fresh = (1 << 32) + self.sessions.len() as u64;
        let serial = owned.session.or(inferred.map(|b| b.session)).unwrap_or(fresh);
        let (features, turn, end) = self.visit(owned, serial, now);
        let sum: f64 = (0..6).map(|f| self.ratios.last().unwrap()[f][features[f]].log2()).sum();
        let score = (sum / 0.5 + 4.0).floor().clamp(0.0, 7.0) as usize;
        self.leave_behind(owned, serial, end, now);
        self.touch(owned, serial, now, (features, turn, score));
        self.evict(now);
        let count = 32.max(self.watched.len() / 512).min(self.watched.len());
        for _ in 0..count {
            self.sweep = if self.sweep >= self.watched.len() { 0 } else { self.sweep };
            self.credit(self.watched[self.sweep], now, false);
            self.sweep += 1;
        }
        let last = self.rebuilds[self.rebuilds.len() - 1];
        let wait = if last == 0 { 16 } else { (last / 4).clamp(16, 256) };
        if self.requests >= last + wait {
            self.rebuild();
        }
        hits
    }

    fn visit(&mut self, owned: &Owned, serial: u64, now: f64) -> ([usize; 6], usize, Option<u64>) {
        let session = self.sessions.entry(serial).or_default();
        let since = now - session.last;
        session.turn += 1;
        let (turn, input) = (session.turn, owned.input_tokens);
        if turn > 1 {
            let before = (turn > 2).then_some(session.gap);
            session.gap = averaged(before, log_gap(since));
        }
        let new = if turn == 1 { input } else { input.saturating_sub(session.tokens) };
        let log = |tokens: u32| f64::from(tokens.max(1)).log2().floor();
        let lasts = [1, 2, 3, 4, 5, 7, 10, 15, 25];
        let values = [
            lasts.iter().position(|last| turn <= *last).unwrap_or(9) as f64,
            log(new),
            log(input) - 2.0,
            log(owned.output_tokens),
            if turn == 1 { 0.0 } else { (1.0 + (1.0 + since).log2()).floor() },
            f64::from(owned.kind.index()),
        ];
        session.tokens = input + owned.output_tokens;
        session.last = now;
        (values.map(|value| value.clamp(0.0, 15.0) as usize), turn, session.end)
    }

    fn leave_behind(&mut self, owned: &Owned, serial: u64, end: Option<u64>, now: f64) {
        let mut at = end;
        while let Some(block) = at.and_then(|key| self.blocks.get_mut(&key)) {
            let key = block.key;
            let stays = owned.blocks.contains(&key) || block.shared || block.session != serial;
            if stays || block.cell[0] % 4 == 3 {
                return;
            }
            block.cell[0] = block.own_type * 4 + 3;
            at = block.parent;
            let cell = block.cell;
            if block.watch.is_some() {
                self.credit(key, now, false);
                let watch = self.blocks.get_mut(&key).unwrap().watch.as_mut().unwrap();
                (watch.cell, watch.scored) = (cell, false);
            }
        }
    }

    fn touch(
        &mut self,
        owned: &Owned,
        serial: u64,
        now: f64,
        (features, turn, score): ([usize; 6], usize, usize),
    ) {
        let session_gap = if turn == 1 { 7 } else { level(self.sessions[&serial].gap) };
        let transition = if turn == 1 { 1 } else { 2 };
        let mut runs: Vec<Vec<u64>> = Vec::new();
        let mut last_new: Option<[usize; 3]> = None;
        for (at, key) in owned.blocks.iter().enumerate() {
            if self.blocks.contains_key(key) {
                last_new = None;
                let watch = self.known(*key, serial, now, [transition, score, session_gap]);
                let block = self.blocks.get_mut(key).unwrap();
                block.rend = owned.blocks.len();
                if block.watch.is_some() {
                    self.credit(*key, now, true);
                    let watch = Watch { features, ..watch };
                    self.blocks.get_mut(key).unwrap().watch = Some(watch);
                }
                continue;
            }
            let mut block = self.inserted(owned, at, turn);
            (block.session, block.last) = (serial, now);
            let pair = block.own_type * 4 + if block.partial { 0 } else { transition };
            block.cell = [pair, score, session_gap];
            if last_new != Some(block.cell) {
                runs.push(Vec::new());
            }
            last_new = Some(block.cell);
            self.blocks.insert(*key, block);
            runs.last_mut().unwrap().push(*key);
        }
        for run in runs {
            for _ in 0..1 + run.len() / 64 {
                let block = self.blocks.get_mut(&run[self.rng.below(run.len())]).unwrap();
                if block.watch.is_none() {
                    let (cell, scored) = (block.cell, !block.partial);
                    self.watched.push(block.key);
                    block.watch = Some(Watch { cell, features, scored, since: now, credited: 0.0 });
                }
            }
        }
        self.sessions.get_mut(&serial).unwrap().end = owned.blocks.last().copied();
    }

    /// A known block is touched; how it would be watched from now on.
    fn known(&mut self, key: u64, serial: u64, now: f64, private: [usize; 3]) -> Watch {
        let block = self.blocks.get_mut(&key).unwrap();
        let foreign = block.session != serial;
        block.shared |= foreign;
        block.gap = Some(averaged(block.gap, log_gap(now - block.last)));
        let lone = block.partial && !block.shared;
        let own_type = if block.shared { 0 } else { block.own_type };
        let pair = own_type * 4 + if foreign || lone { 0 } else { private[0] };
        let uses = [3, 6, 12].iter().filter(|bound| block.count >= **bound).count();
        let [score, gap] = if block.shared {
            [uses, block.gap.map_or(7, level)]
        } else {
            [private[1], private[2]]
        };
        block.cell = [pair, score, gap];
        block.session = serial;
        block.count += 1;
        block.last = now;
        block.resident = true;
        let scored = !block.shared && !lone;
        Watch { cell: block.cell, features: [0; 6], scored, since: now, credited: 0.0 }
    }

    /// A new block, but for what its session says of it.
    fn inserted(&self, owned: &Owned, at: usize, turn: usize) -> Block {
        let full = owned.prompt as u32 * 16;
        let partial = full > owned.input_tokens && at + 1 == owned.prompt;
        let own_type = match (partial || at >= owned.prompt, owned.kind.is_agent() && turn > 1) {
            (true, _) => 3,
            (false, true) => 1,
            (false, false) => 2,
        };
        Block {
            key: owned.blocks[at],
            parent: at.checked_sub(1).map(|before| owned.blocks[before]),
            depth: at,
            resident: true,
            session: 0,
            shared: false,
            partial,
            own_type,
            cell: [0; 3],
            last: 0.0,
            gap: None,
            count: 1,
            rend: owned.blocks.len(),
            watch: None,
            evicted: 0,
        }
    }
}

impl Life {
    /// Bucket, trials and reuses: full buckets, the parts at both ends, and all of the last one
    /// where the life ended in a reuse.
    fn credits(&self) -> Vec<(usize, f64, f64)> {
        let part = |age: f64, bucket: usize| {
            let width = start(bucket + 1) - start(bucket);
            ((age - start(bucket)) / width).clamp(0.0, 1.0)
        };
        let (first, last) = (bucket_of(self.from), bucket_of(self.to));
        let credit = |bucket: usize| {
            let to = if bucket == last && !self.reused { part(self.to, bucket) } else { 1.0 };
            let from = if bucket == first { part(self.from, bucket) } else { 0.0 };
            (bucket, to - from, f64::from(u8::from(self.reused && bucket == last)))
        };
        (first..=last).map(credit).collect()
    }
}

fn shrink(counts: &[(f64, f64)], parent: &[f64; BUCKETS]) -> [f64; BUCKETS] {
    std::array::from_fn(|bucket| {
        // The fading sums, written out.
        let faded = |value: &dyn Fn(usize) -> f64| {
            (0..bucket).map(|b| 0.8f64.powi((bucket - 1 - b) as i32) * value(b)).sum::<f64>()
        };
        let observed = faded(&|b| counts[b].1);
        let expected = faded(&|b| counts[b].0 * parent[b]);
        let prior = ((observed + 2.0) / (expected + 2.0) * parent[bucket]).min(0.95);
        (counts[bucket].1 + 40.0 * prior) / (counts[bucket].0 + 40.0)
    })
}

fn best_stop(hazard: &[f64; BUCKETS]) -> [f32; BUCKETS] {
    let widths = widths();
    std::array::from_fn(|from| {
        let (mut best, mut reach, mut hits, mut seconds) = (0f64, 1.0, 0.0, 0.0);
        for e in from..BUCKETS {
            hits += reach * hazard[e];
            seconds += reach * widths[e] * (1.0 - hazard[e] / 2.0);
            reach *= 1.0 - hazard[e];
            best = best.max(hits / seconds);
        }
        best as f32
    })
}
