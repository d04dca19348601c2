//! Every policy against its naive twin, and the optimum against a search of everything.

mod naive;

use super::*;
use crate::testing::{Owned, trace, universe};
use naive::{Item, Naive};
use std::collections::{BTreeSet, HashMap};

/// ALI: all residents are looked at; of a category only the one touched longest ago can go.
#[derive(Default)]
struct NaiveAli {
    capacity: usize,
    residents: Vec<(u32, u64)>,
    /// By block: category, depth, time, session, length of the last request that had it.
    blocks: HashMap<u32, (usize, u32, f64, u64, usize)>,
    seen: HashMap<usize, (f64, f64, f64)>,
    turns: HashMap<u64, usize>,
    life: f64,
    stamp: u64,
    request: (usize, u64, usize),
}

impl NaiveAli {
    fn begin(&mut self, owned: &Owned) {
        let known =
            owned.blocks.iter().take_while(|b| self.blocks.contains_key(&(**b as u32))).count();
        let inferred = known.checked_sub(1).filter(|at| *at > 0).and_then(|at| {
            let (.., session, len) = self.blocks[&(owned.blocks[at] as u32)];
            (len <= known + 1).then_some(session)
        });
        let fresh = (1 << 32) + self.turns.len() as u64;
        let session = owned.session.or(inferred).unwrap_or(fresh);
        let turn = self.turns.entry(session).or_default();
        *turn += 1;
        let category = usize::from(owned.kind.index()) * 8 + (*turn).min(8) - 1;
        self.request = (category, session, owned.blocks.len());
    }

    fn chance(&self, block: u32, now: f64) -> f64 {
        let (category, _, last, ..) = self.blocks[&block];
        let (accesses, reuses, time) = self.seen.get(&category).copied().unwrap_or_default();
        let (ever, rate) = ((reuses + 1.0) / (accesses + 2.0), (reuses + 1.0) / (time + 60.0));
        ever * (-rate * (now - last)).exp() * (1.0 - (-rate * self.life).exp())
    }
}

impl Naive for NaiveAli {
    fn access(&mut self, access: &Access) {
        self.stamp += 1;
        let (category, session, len) = self.request;
        if let Some((category, _, last, ..)) = self.blocks.get(&access.block) {
            let seen = self.seen.entry(*category).or_default();
            seen.1 += 1.0;
            seen.2 += access.now - last;
        }
        self.seen.entry(category).or_default().0 += 1.0;
        match self.residents.iter().position(|(block, _)| *block == access.block) {
            Some(at) => drop(self.residents.remove(at)),
            None if self.residents.len() == self.capacity => {
                let first = |at: &usize| {
                    let (block, stamp) = self.residents[*at];
                    let category = self.blocks[&block].0;
                    !self.residents.iter().any(|(b, s)| self.blocks[b].0 == category && *s < stamp)
                };
                let goes = (0..self.residents.len()).filter(first).min_by(|a, b| {
                    let (a, b) = (self.residents[*a].0, self.residents[*b].0);
                    let depth = |block: u32| self.blocks[&block].1;
                    let by_chance =
                        self.chance(a, access.now).total_cmp(&self.chance(b, access.now));
                    let by_depth = depth(b).cmp(&depth(a));
                    let by_category = self.blocks[&a].0.cmp(&self.blocks[&b].0);
                    by_chance.then(by_depth).then(by_category)
                });
                let (block, _) = self.residents.remove(goes.unwrap());
                self.life += 0.01 * ((access.now - self.blocks[&block].2) - self.life);
            }
            None => {}
        }
        self.residents.push((access.block, self.stamp));
        self.blocks.insert(access.block, (category, access.depth, access.now, session, len));
    }

    fn residents(&self) -> Vec<u32> {
        self.residents.iter().map(|(block, _)| *block).collect()
    }
}

/// LHD: densities as sums over all later ages, straight from their definition.
struct NaiveLhd {
    capacity: usize,
    time: u64,
    blocks: Vec<(u32, u64, [u64; 2])>,
    hits: Vec<Vec<f64>>,
    ends: Vec<Vec<f64>>,
    density: Vec<Vec<f64>>,
}

impl NaiveLhd {
    fn new(capacity: usize) -> Self {
        let zero = vec![vec![0.0; 1024]; 16];
        let start: Vec<f64> = (1..=1024).map(|age| 1.0 / f64::from(age)).collect();
        let (hits, ends) = (zero.clone(), zero);
        Self { capacity, time: 0, blocks: Vec::new(), hits, ends, density: vec![start; 16] }
    }

    fn class_and_age(&self, (_, last, ages): &(u32, u64, [u64; 2])) -> (usize, usize) {
        let step = (self.capacity as u64 / 64).max(1);
        let age = ((self.time - last) / step).min(1023) as usize;
        let sum = (ages[0] + ages[1]).min(1024);
        let class = (0..15).find(|class| sum << class >= 1024).unwrap_or(15);
        let class = if sum == 0 { 15 } else { class };
        (class, age)
    }
}

impl Naive for NaiveLhd {
    fn access(&mut self, access: &Access) {
        self.time += 1;
        if self.time.is_multiple_of((self.capacity as u64).max(4096)) {
            for class in 0..16 {
                for age in 0..1024 {
                    let hits: f64 = self.hits[class][age..].iter().sum();
                    let lived = |a: usize| self.hits[class][a] + self.ends[class][a];
                    let time: f64 = (age..1024).map(|a| lived(a) * (a - age + 1) as f64).sum();
                    let events: f64 = (age..1024).map(lived).sum();
                    self.density[class][age] = if events > 1e-5 { hits / time } else { 0.0 };
                }
                self.hits[class].iter_mut().for_each(|count| *count *= 0.9);
                self.ends[class].iter_mut().for_each(|count| *count *= 0.9);
            }
        }
        if let Some(at) = self.blocks.iter().position(|(block, ..)| *block == access.block) {
            let (class, age) = self.class_and_age(&self.blocks[at]);
            self.hits[class][age] += 1.0;
            let (_, last, ages) = &mut self.blocks[at];
            (*last, *ages) = (self.time, [age as u64, ages[0]]);
            return;
        }
        if self.blocks.len() == self.capacity {
            let value = |block: &(u32, u64, [u64; 2])| {
                let (class, age) = self.class_and_age(block);
                // Sums in another order differ in their last digits.
                (self.density[class][age] * 1e9).round()
            };
            let goes = (0..self.blocks.len()).min_by(|a, b| {
                let (a, b) = (&self.blocks[*a], &self.blocks[*b]);
                value(a).total_cmp(&value(b)).then(a.1.cmp(&b.1))
            });
            let block = self.blocks.remove(goes.unwrap());
            let (class, age) = self.class_and_age(&block);
            self.ends[class][age] += 1.0;
        }
        self.blocks.push((access.block, self.time, [0, 1024]));
    }

    fn residents(&self) -> Vec<u32> {
        self.blocks.iter().map(|(block, ..)| *block).collect()
    }
}

/// Runs both over `requests` and compares hits, residents and bounds after each of them.
fn audit<N: Naive>(
    seed: u64,
    requests: &[Owned],
    capacity: usize,
    policy: impl BlockCache,
    naive: &mut N,
    mut begin: impl FnMut(&mut N, &Owned),
) {
    let mut cache = Classic(policy);
    let all = universe(requests) as u32;
    for (number, owned) in requests.iter().enumerate() {
        let before: BTreeSet<u32> = naive.residents().into_iter().collect();
        let prompt = owned.blocks[..owned.prompt].iter();
        let expected = prompt.take_while(|block| before.contains(&(**block as u32))).count();
        let context = format!("{}, seed {seed}, request {number}", cache.name());
        assert_eq!(cache.request(&owned.request()), expected, "{context}: hits");
        begin(naive, owned);
        for (depth, block) in owned.blocks.iter().enumerate().rev() {
            naive.access(&Access {
                block: *block as u32,
                depth: depth as u32,
                now: owned.now as f64 * 1e-9,
                kind: owned.kind.index(),
                block_tokens: 16,
            });
        }
        let residents: BTreeSet<u32> = (0..all).filter(|b| cache.0.contains(*b)).collect();
        assert_eq!(residents, naive.residents().into_iter().collect(), "{context}: residents");
        assert_eq!(cache.residents(), residents.len(), "{context}: how many are resident");
        assert!(residents.len() <= capacity, "{context}: more than may be");
    }
}

/// Hundreds of pairs of a trace and a capacity.
fn pairs(each: impl Fn(u64, &[Owned], usize)) {
    for seed in 0..300 {
        let requests = trace(seed, 30 + seed as usize % 90);
        each(seed, &requests, 1 + (seed as usize * 7) % 41);
    }
}

fn audit_valued(make: impl Fn(usize) -> Box<dyn BlockCache>, value: fn(&mut Item, f64, &Access)) {
    pairs(|seed, requests, capacity| {
        let items = Vec::new();
        let mut naive = naive::Valued { capacity, value, items, age: 0.0, time: 0.0 };
        audit(seed, requests, capacity, make(capacity), &mut naive, |_, _| ());
    });
}

impl BlockCache for Box<dyn BlockCache> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn begin(&mut self, request: &Request<'_>) {
        (**self).begin(request);
    }

    fn access(&mut self, access: &Access) {
        (**self).access(access);
    }

    fn contains(&self, block: u32) -> bool {
        (**self).contains(block)
    }

    fn residents(&self) -> usize {
        (**self).residents()
    }
}

#[test]
fn policies_of_one_value_equal_a_list_that_is_scanned() {
    audit_valued(|c| Box::new(Fifo::new(c)), |_, _, _| ());
    audit_valued(|c| Box::new(LeastRecent::new(c)), |item, _, _| item.value = 1.0);
    audit_valued(|c| Box::new(Frequency::lfu_da(c)), |item, age, _| item.value = age + item.uses);
    audit_valued(
        |c| Box::new(Frequency::gdsf(c)),
        |item, age, access| {
            let cost = 1.0 + f64::from(access.depth) * 16.0 / 30_518.0;
            item.value = age + item.uses * cost;
        },
    );
}

#[test]
fn policies_of_several_queues_equal_lists() {
    pairs(|seed, requests, capacity| {
        let mut naive = naive::TwoQ { capacity, ..Default::default() };
        audit(seed, requests, capacity, TwoQ::new(capacity), &mut naive, |_, _| ());
        let mut naive = naive::Arc { c: capacity, ..Default::default() };
        audit(seed, requests, capacity, Arc::new(capacity), &mut naive, |_, _| ());
        let mut naive = naive::S3Fifo { capacity, ..Default::default() };
        audit(seed, requests, capacity, S3Fifo::new(capacity), &mut naive, |_, _| ());
        let mut naive = naive::Sieve { capacity, ..Default::default() };
        audit(seed, requests, capacity, Sieve::new(capacity), &mut naive, |_, _| ());
        let mut naive = naive::TinyLfu { capacity, ..Default::default() };
        audit(seed, requests, capacity, TinyLfu::new(capacity), &mut naive, |_, _| ());
    });
}

#[test]
fn policies_that_learn_equal_a_scan_of_all_residents() {
    pairs(|seed, requests, capacity| {
        let mut naive = NaiveAli { capacity, life: 60.0, ..Default::default() };
        audit(seed, requests, capacity, Ali::new(capacity), &mut naive, NaiveAli::begin);
        let mut naive = NaiveLhd::new(capacity);
        audit(seed, requests, capacity, Lhd::new(capacity, seed), &mut naive, |_, _| ());
    });
    // Long enough for densities to be learned.
    for seed in 0..6 {
        let requests = trace(seed, 2500);
        let mut naive = NaiveLhd::new(20);
        audit(seed, &requests, 20, Lhd::new(20, seed), &mut naive, |_, _| ());
    }
}

/// The next uses of a trace's blocks.
fn future(requests: &[Owned]) -> NextUses {
    next_uses(requests.len(), |number, blocks| {
        blocks.extend(&requests[number].blocks);
        requests[number].prompt
    })
}

fn hits_of_min(requests: &[Owned], capacity: usize) -> usize {
    let future = future(requests);
    let mut min = Min::new(capacity, &future);
    requests.iter().map(|owned| min.request(&owned.request())).sum()
}

/// The most hits that any choice of what to keep can have: all choices are tried.
fn exhaustive(requests: &[Owned], capacity: usize) -> usize {
    let mut best: HashMap<u32, usize> = HashMap::from([(0, 0)]);
    for owned in requests {
        let mask = owned.blocks.iter().fold(0u32, |mask, block| mask | 1 << block);
        let mut next: HashMap<u32, usize> = HashMap::new();
        for (resident, hits) in best {
            let prompt = owned.blocks[..owned.prompt].iter();
            let hits = hits + prompt.take_while(|block| resident >> **block & 1 == 1).count();
            let offered = resident | mask;
            let mut kept = offered;
            loop {
                if kept.count_ones() as usize <= capacity {
                    let known = next.entry(kept).or_default();
                    *known = hits.max(*known);
                }
                if kept == 0 {
                    break;
                }
                kept = (kept - 1) & offered;
            }
        }
        best = next;
    }
    best.into_values().max().unwrap()
}

#[test]
fn min_is_the_optimum() {
    let mut compared = 0;
    for seed in 0..2000 {
        let requests = trace(seed, 4 + seed as usize % 4);
        if universe(&requests) > 12 {
            continue;
        }
        for capacity in 1..5 {
            let best = exhaustive(&requests, capacity);
            assert_eq!(hits_of_min(&requests, capacity), best, "seed {seed}, {capacity} blocks");
            compared += 1;
        }
    }
    assert!(compared > 400, "{compared} traces were small enough");
}

/// The rule itself, block by block: farthest next use first, then the deeper one.
#[test]
fn min_evicts_the_farthest_and_deepest() {
    pairs(|seed, requests, capacity| {
        let future = future(requests);
        let mut min = Min::new(capacity, &future);
        let mut residents: BTreeSet<(u64, usize)> = BTreeSet::new();
        for (number, owned) in requests.iter().enumerate() {
            let prompt = owned.blocks[..owned.prompt].iter().enumerate();
            let expected = prompt.take_while(|(d, b)| residents.contains(&(**b, *d))).count();
            assert_eq!(min.request(&owned.request()), expected, "seed {seed}, request {number}");
            residents.extend(owned.blocks.iter().enumerate().map(|(depth, b)| (*b, depth)));
            let next = |block: u64| {
                let later = requests[number + 1..].iter();
                let mut later = later.map(|r| r.blocks[..r.prompt].contains(&block));
                later.position(|uses| uses).unwrap_or(usize::MAX)
            };
            residents.retain(|(block, _)| next(*block) != usize::MAX);
            while residents.len() > capacity {
                let farthest = residents.iter().copied().max_by_key(|(b, d)| (next(*b), *d));
                residents.remove(&farthest.unwrap());
            }
            assert_eq!(min.residents(), residents.len(), "seed {seed}, request {number}");
        }
    });
}

#[test]
fn a_sketch_counts_no_block_too_low() {
    let mut sketch = super::tinylfu::Sketch::new(100);
    for block in 0..60 {
        for _ in 0..block % 7 {
            sketch.add(block);
        }
    }
    assert!((0..60).all(|block| u32::from(sketch.count(block)) >= block % 7));
}
