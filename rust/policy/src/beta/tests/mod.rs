//! The predictor against its naive twin, and what must hold of its tables at any time.

mod naive;

use super::age::{BUCKETS, start};
use super::chain::{NONE, RESIDENT};
use super::hazard::Cell;
use super::sentinel::Sentinels;
use super::{Beta, BetaOptions};
use crate::Cache;
use crate::classic::{Classic, LeastRecent};
use crate::testing::{Owned, trace};
use naive::Naive;
use std::collections::BTreeMap;

/// A trace in which no two requests come at the same time: no two leaves tie in all that decides.
fn distinct(seed: u64, requests: usize) -> Vec<Owned> {
    let mut all = trace(seed, requests);
    for (number, owned) in all.iter_mut().enumerate() {
        owned.now += number as u64 * 1000;
    }
    all
}

fn known(beta: &Beta) -> BTreeMap<u64, &super::chain::Node> {
    let nodes = beta.chain.nodes.iter();
    nodes.filter(|node| node.count > 0).map(|node| (node.key, node)).collect()
}

/// What must hold between two requests, whatever came.
fn check_structure(beta: &Beta, context: &str) {
    let nodes = &beta.chain.nodes;
    let mut children = vec![0; nodes.len()];
    let (mut residents, mut watched) = (0, 0);
    for node in nodes.iter().filter(|node| node.count > 0) {
        if node.parent != NONE {
            let parent = &nodes[node.parent as usize];
            assert!(parent.count > 0, "{context}: a known block has a known parent");
            assert_eq!(parent.depth + 1, node.depth, "{context}: depth");
            if node.has(RESIDENT) {
                assert!(parent.has(RESIDENT), "{context}: a resident has a resident parent");
                children[node.parent as usize] += 1;
            }
        }
        residents += usize::from(node.has(RESIDENT));
        if node.sentinel != Sentinels::NONE {
            watched += 1;
            let slot = beta.sentinels.slot(node.sentinel);
            assert_eq!(nodes[slot as usize].key, node.key, "{context}: its sentinel");
        }
    }
    assert_eq!(residents, beta.residents(), "{context}: residents");
    assert!(residents <= beta.capacity, "{context}: more resident than may be");
    assert_eq!(watched, beta.sentinels.len(), "{context}: sentinels");
    let mut leaves = 0;
    for (slot, node) in nodes.iter().enumerate().filter(|(_, node)| node.has(RESIDENT)) {
        assert_eq!(node.children, children[slot], "{context}: children of {}", node.key);
        leaves += usize::from(node.children == 0);
    }
    let candidates = beta.chain.candidates();
    assert_eq!(candidates.len(), leaves, "{context}: candidates");
    for candidate in candidates {
        let node = &nodes[candidate.slot as usize];
        let same = (node.last, node.cell) == (candidate.last, candidate.cell);
        assert!(node.has(RESIDENT) && node.children == 0 && same, "{context}: a candidate");
    }
}

fn compare_counts(beta: &Beta, naive: &Naive, context: &str) {
    let mut lives = 0.0;
    let cells = naive.recount();
    for pair in 0..16 {
        for level in 0..64 {
            let (score, gap) = (level / 8, level % 8);
            let counts = cells.get(&[pair, score, gap]);
            for bucket in 0..BUCKETS {
                let (trials, reuses) = counts.map_or((0.0, 0.0), |counts| counts[bucket]);
                let count = beta.table.count(Cell::new(pair, score, gap), bucket);
                let close = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-3 + 1e-4 * b;
                assert!(
                    close(count.trials, trials) && close(count.reuses, reuses),
                    "{context}: {count:?}, recounted {trials} {reuses}, {pair} {level} {bucket}"
                );
                lives += reuses;
            }
        }
    }
    assert!(lives > 5.0, "{context}: too little was counted to compare");
}

#[test]
fn equals_its_naive_twin() {
    for seed in 0..240 {
        let requests = distinct(seed, 40 + seed as usize % 60);
        let (capacity, ghosts) = (1 + (seed as usize * 5) % 37, [1, 7, 30, 400][seed as usize % 4]);
        let mut beta = Beta::with_ghosts(capacity, BetaOptions::SPEC, seed, ghosts);
        let mut naive = Naive::new(capacity, ghosts, seed);
        for (number, owned) in requests.iter().enumerate() {
            let context = format!("seed {seed}, request {number}");
            let hits = naive.request(owned);
            assert_eq!(beta.request(&owned.request()), hits, "{context}: hits");
            check_structure(&beta, &context);
            let nodes = known(&beta);
            assert_eq!(nodes.len(), naive.blocks.len(), "{context}: known blocks");
            for (key, block) in &naive.blocks {
                let node = nodes[key];
                let [pair, score, gap] = block.cell;
                assert_eq!(node.has(RESIDENT), block.resident, "{context}: block {key}");
                assert_eq!(node.cell, Cell::new(pair, score, gap), "{context}: cell of {key}");
                assert_eq!(node.last, block.last, "{context}: time of {key}");
            }
        }
        compare_counts(&beta, &naive, &format!("seed {seed}"));
        for (cell, index) in &naive.index {
            for (bucket, value) in index.iter().enumerate() {
                let [pair, score, gap] = *cell;
                let own = beta.table.value(Cell::new(pair, score, gap), start(bucket));
                assert!((own - value).abs() <= 1e-3 * value, "seed {seed}: {cell:?} {bucket}");
            }
        }
    }
}

#[test]
fn structure_holds_under_churn() {
    for seed in 0..12 {
        let capacity = 5 + seed as usize * 31;
        let mut beta = Beta::with_ghosts(capacity, BetaOptions::SPEC, seed, 3 * capacity);
        for (number, owned) in trace(seed, 3000).iter().enumerate() {
            beta.request(&owned.request());
            if number % 10 == 0 {
                check_structure(&beta, &format!("seed {seed}, request {number}"));
            }
        }
    }
}

/// Keys that do not stand for prefixes must not break the tables: they are other blocks then.
#[test]
fn broken_chains_are_survived() {
    for seed in 0..20 {
        let mut rng = crate::rng::Rng::new(seed);
        let mut beta = Beta::with_ghosts(9, BetaOptions::SPEC, seed, 20);
        let mut all = trace(seed, 400);
        for (number, owned) in all.iter_mut().enumerate() {
            owned.blocks.iter_mut().for_each(|block| *block = rng.below(12) as u64);
            let hits = beta.request(&owned.request());
            assert!(hits <= owned.prompt);
            check_structure(&beta, &format!("seed {seed}, request {number}"));
        }
    }
}

#[test]
fn every_ablation_keeps_within_its_capacity() {
    for options in BetaOptions::ablation() {
        for seed in 0..10 {
            let mut beta = Beta::new(11, options, seed);
            for owned in trace(seed, 300) {
                beta.request(&owned.request());
                assert!(beta.residents() <= 11, "{}, seed {seed}", options.name);
            }
        }
    }
}

/// Equal inputs give equal runs; another seed may give another one.
#[test]
fn a_run_is_a_function_of_trace_and_seed() {
    let run = |seed| {
        let mut beta = Beta::new(150, BetaOptions::SPEC, seed);
        trace(3, 3000).iter().map(|owned| beta.request(&owned.request())).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2), "no draw decided: the trace is too small");
}

#[test]
fn the_guard_s_cache_by_recency_is_exact() {
    let mut followed = 0;
    for seed in 0..120 {
        let capacity = 3 + seed as usize % 40;
        let options = BetaOptions { half_life: 60.0, ..BetaOptions::GUARDED };
        let mut beta = Beta::new(capacity, options, seed);
        let mut recency = Classic(LeastRecent::new(capacity));
        for (number, owned) in distinct(seed, 300).iter().enumerate() {
            let request = owned.request();
            let [_, recent, _] = beta.look_up(&request);
            beta.request(&request);
            assert_eq!(recent, recency.request(&request), "seed {seed}, request {number}");
            followed += usize::from(beta.guard.follows());
            assert!(beta.guard.stretches() <= 2 * capacity + 200, "what is left of none goes");
        }
        check_structure(&beta, "guarded");
    }
    assert!(followed > 0, "it has to be followed somewhere for the test to say something");
}
