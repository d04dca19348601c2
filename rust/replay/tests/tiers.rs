//! Replays over the tiers of a node: against a naive twin, and what must hold of any.

#![allow(clippy::unwrap_used, reason = "helpers of tests: what is unexpected ends the test")]

mod twin;

use tiered_kv_policy::{RequestKind, Rng};
use tiered_kv_replay::{Builder, Entry, Filled, Job, NodeOutcome, NodeSpec, Options, Progress};
use tiered_kv_replay::{Service, TierSpec, Trace, generate, known, node, nodes};
use tiered_kv_types::Tier;
use twin::Twin;

/// A node of these tiers, whose loads take a tenth of the time to compute where not said otherwise.
fn spec(policy: &str, tiers: &[(Tier, u64, Filled)]) -> NodeSpec {
    let tier = |(tier, blocks, filled): &(Tier, u64, Filled)| TierSpec {
        tier: *tier,
        blocks: *blocks,
        filled: *filled,
    };
    let count = tiers.len();
    NodeSpec {
        policy: policy.to_owned(),
        seed: 0,
        block_bytes: 1000,
        waste_budget: 0.05,
        tiers: tiers.iter().map(tier).collect(),
        services: vec![Service {
            read_s: (0..count).map(|level| level as f64 * 1e-4).collect(),
            latency_s: (0..count).map(|level| level as f64 * 1e-4).collect(),
            token_s: 1e-3,
            pair_s: 1e-6,
            instances: 1,
        }],
    }
}

fn run(trace: &Trace, options: Options, spec: &NodeSpec) -> NodeOutcome {
    node(trace, options, spec, &Progress::default()).unwrap().unwrap()
}

/// A small trace: prefixes shared, left and extended; outputs, partial tails, and ties in time.
fn small(seed: u64) -> Trace {
    let mut rng = Rng::new(seed);
    let mut builder = Builder::new(16);
    let mut parents: Vec<Option<u64>> = Vec::new();
    let mut chains: Vec<Vec<u64>> = Vec::new();
    let (mut now, sessions) = (0, 1 + rng.below(6));
    for _ in 0..20 + rng.below(60) {
        now += [0, 50_000_000, 2_000_000_000, 60_000_000_000][rng.below(4)];
        let mut chain = match chains.len() {
            0 => Vec::new(),
            len if rng.below(5) > 0 => chains[len - 1 - rng.below(len.min(sessions))].clone(),
            _ => Vec::new(),
        };
        chain.truncate(chain.len() - rng.below(chain.len().min(3) + 1));
        for _ in 0..1 + rng.below(5) {
            let parent = chain.last().copied();
            let known: Vec<u64> =
                (0..parents.len() as u64).filter(|b| parents[*b as usize] == parent).collect();
            chain.push(if known.is_empty() || rng.below(3) > 0 {
                parents.push(parent);
                parents.len() as u64 - 1
            } else {
                known[rng.below(known.len())]
            });
        }
        let output = rng.below(2).min(chain.len() - 1);
        let prompt = chain.len() - output;
        let tokens = (prompt as u32 * 16 - rng.below(2) as u32 * 5, output as u32 * 16);
        let session = (sessions % 2 == 0).then(|| rng.below(sessions) as u32);
        let ranges: Vec<(u64, u32)> = chain.iter().map(|block| (*block, 1)).collect();
        let entry = Entry::new(now, session, RequestKind::Chat, tokens);
        builder.add(entry, &ranges[..prompt], &ranges[prompt..]).unwrap();
        chains.push(chain);
    }
    builder.finish("small")
}

/// A small node: any tiers, some slower than to compute.
fn any_node(seed: u64) -> NodeSpec {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let all = [Tier::Hbm, Tier::Dram, Tier::Cxl, Tier::Nvme, Tier::Fabric, Tier::Pfs];
    let mut tiers = Vec::new();
    for tier in all {
        if rng.below(3) > 0 {
            let filled = if rng.below(2) == 0 { Filled::Puts } else { Filled::Victims };
            tiers.push((tier, 1 + rng.below(12) as u64, filled));
        }
    }
    if tiers.is_empty() {
        tiers.push((Tier::Dram, 5, Filled::Puts));
    }
    let mut spec = spec(["lru", "beta", "beta-spec"][rng.below(3)], &tiers);
    spec.waste_budget = [0.0, 0.05, 0.9][rng.below(3)];
    let service = |rng: &mut Rng| Service {
        read_s: tiers.iter().map(|_| rng.unit() * rng.unit() * 0.03).collect(),
        latency_s: tiers.iter().map(|_| rng.unit() * rng.unit() * 0.03).collect(),
        token_s: 1e-3,
        pair_s: rng.unit() * 1e-5,
        instances: 1 + rng.below(2),
    };
    spec.services = (0..1 + rng.below(3)).map(|_| service(&mut rng)).collect();
    spec
}

#[test]
fn it_does_what_a_naive_twin_does() {
    let (mut moved, mut recomputed, mut guessed) = (0, 0, 0);
    for seed in 0..600 {
        let (trace, spec) = (small(seed), any_node(seed));
        let options = Options { outputs: seed % 2 == 0, no_labels: false };
        let found = run(&trace, options, &spec);
        let wanted = Twin::run(&trace, options, &spec);
        assert_eq!(twin::shown(&found), wanted, "seed {seed}: {spec:?}");
        moved += found.moved.iter().filter(|one| one.from != "gpu").count();
        recomputed += found.tiers.iter().map(|tier| tier.recomputed).sum::<u64>();
        guessed += found.ahead.guessed;
    }
    // What is compared must have happened.
    assert!(moved > 500 && recomputed > 500 && guessed > 500, "{moved} {recomputed} {guessed}");
}

/// Hits in percent of a replay of one cache of so many percent of the trace's blocks.
fn single(trace: &Trace, policy: &str, pct: f64) -> (f64, usize) {
    let job = Job { capacity_pct: pct, policy: known(policy).unwrap(), seed: 0 };
    let progress = Progress::default();
    let found =
        tiered_kv_replay::run(trace, Options::default(), &[job], 1, &progress, |_| ()).unwrap();
    (found[0].hit_pct, found[0].capacity_blocks)
}

#[test]
fn one_tier_hits_what_a_replay_of_one_cache_hits() {
    for (kind, seed) in [("chat", 7), ("agents", 3), ("zipf", 1), ("flip", 2)] {
        let trace = generate(kind, 2000, seed).unwrap();
        for pct in [0.5, 2.0, 10.0] {
            for policy in ["lru", "beta", "beta-spec"] {
                let (wanted, blocks) = single(&trace, policy, pct);
                let spec = spec(policy, &[(Tier::Dram, blocks as u64, Filled::Puts)]);
                let found = run(&trace, Options::default(), &spec).hit_pct;
                assert_eq!(found, wanted, "{kind} at {pct} %: {policy}");
            }
        }
    }
}

#[test]
fn hits_of_all_tiers_and_misses_are_the_accesses() {
    let trace = generate("chat", 2000, 5).unwrap();
    let tiers = [
        (Tier::Hbm, 50, Filled::Puts),
        (Tier::Dram, 300, Filled::Puts),
        (Tier::Cxl, 200, Filled::Victims),
        (Tier::Nvme, 1500, Filled::Puts),
        (Tier::Pfs, 400, Filled::Victims),
    ];
    let specs: Vec<NodeSpec> = ["lru", "beta"].iter().map(|policy| spec(policy, &tiers)).collect();
    let found = nodes(&trace, Options::default(), &specs, 2, &Progress::default());
    for outcome in found.unwrap().unwrap() {
        let hits: u64 = outcome.tiers.iter().map(|tier| tier.hits).sum();
        assert_eq!(hits + outcome.misses, trace.block_accesses, "{}", outcome.policy);
        for tier in &outcome.tiers {
            assert!(tier.resident_blocks as u64 <= tier.capacity_blocks, "{tier:?}");
            assert!(tier.hits > 0, "{}: {tier:?}", outcome.policy);
        }
    }
}

#[test]
fn case_21_nothing_is_loaded_that_is_computed_faster() {
    let trace = generate("chat", 2000, 5).unwrap();
    let tiers = [(Tier::Dram, 300, Filled::Puts), (Tier::Nvme, 3000, Filled::Puts)];
    let fast = spec("beta", &tiers);
    let mut slow = fast.clone();
    // A block takes 16 ms to compute.
    slow.services[0].read_s = vec![1e-4, 0.1];
    let (fast, slow) =
        (run(&trace, Options::default(), &fast), run(&trace, Options::default(), &slow));
    let written = |found: &NodeOutcome| found.moved.iter().any(|one| one.to == "nvme");
    assert!(written(&fast) && fast.services[0].read_blocks[1] > 0);
    assert!(!written(&slow), "what saves nothing is not written: {:?}", slow.moved);
    // A tier that turned slow: what it has is computed again.
    let mut lru = spec("lru", &tiers);
    lru.services[0].read_s = vec![1e-4, 0.1];
    let lru = run(&trace, Options::default(), &lru);
    assert!(lru.tiers[1].hits > 0 && lru.tiers[1].recomputed == lru.tiers[1].hits, "{lru:?}");
    assert_eq!(lru.services[0].read_blocks[1], 0);
    assert!(lru.moved.iter().all(|one| one.from != "nvme"), "{:?}", lru.moved);
}

#[test]
fn case_22_what_is_moved_up_is_read() {
    let cases = [("chat", 2500, 200, 2000), ("agents", 1500, 200, 2000), ("flip", 6000, 100, 1000)];
    for (kind, requests, fast, slow) in cases {
        let trace = generate(kind, requests, 3).unwrap();
        let tiers = [(Tier::Dram, fast, Filled::Puts), (Tier::Nvme, slow, Filled::Puts)];
        let found = run(&trace, Options::default(), &spec("beta", &tiers));
        assert!(found.ahead.covered > found.ahead.demanded, "{kind}: {:?}", found.ahead);
        assert!(found.ahead.waste_pct < 5.0, "{kind}: {:?}", found.ahead);
        let mut without = spec("beta", &tiers);
        without.waste_budget = 0.0;
        let without = run(&trace, Options::default(), &without).ahead;
        assert_eq!((without.covered, without.guessed), (0, 0), "{kind}");
    }
}

#[test]
fn requests_wait_for_each_other_only_with_queues() {
    let mut builder = Builder::new(16);
    for number in 0..3 {
        let entry = Entry::new(1_000_000_000, None, RequestKind::Chat, (16, 0));
        builder.add(entry, &[(number, 1)], &[]).unwrap();
    }
    let trace = builder.finish("three at once");
    let mut spec = spec("lru", &[(Tier::Dram, 10, Filled::Puts)]);
    spec.services[0].pair_s = 0.0;
    let mut twice = spec.services[0].clone();
    twice.instances = 2;
    spec.services.push(twice);
    let found = run(&trace, Options::default(), &spec).services;
    let seconds = 0.016;
    assert!((found[0].ttft_s.p99 - seconds).abs() < 1e-12, "{found:?}");
    assert!((found[0].queued_ttft_s.p99 - 3.0 * seconds).abs() < 1e-9, "{found:?}");
    assert!((found[1].queued_ttft_s.p99 - 2.0 * seconds).abs() < 1e-9, "{found:?}");
    assert!((found[0].queued_ttft_s.mean - 2.0 * seconds).abs() < 1e-9, "{found:?}");
}

#[test]
fn of_what_takes_equally_long_the_most_is_loaded() {
    let trace = generate("chat", 300, 5).unwrap();
    let mut spec = spec("lru", &[(Tier::Dram, 5000, Filled::Puts)]);
    let service = &mut spec.services[0];
    (service.token_s, service.pair_s) = (0.0, 0.0);
    let found = run(&trace, Options::default(), &spec);
    assert!(found.tiers[0].hits > 0);
    assert_eq!(found.services[0].recomputed_blocks, 0);
    assert_eq!(found.services[0].read_blocks[0], found.tiers[0].hits);
}

#[test]
fn a_fault_of_the_description_names_field_and_remedy() {
    let good = spec("lru", &[(Tier::Dram, 10, Filled::Puts), (Tier::Nvme, 10, Filled::Puts)]);
    good.check().unwrap();
    let bad = |change: fn(&mut NodeSpec)| {
        let mut spec = good.clone();
        change(&mut spec);
        spec.check().unwrap_err()
    };
    for (fault, field) in [
        (bad(|s| "belady".clone_into(&mut s.policy)), "`policy` is \"belady\": give"),
        (bad(|s| s.tiers[1].blocks = 0), "`tiers.nvme.blocks` is 0: give"),
        (bad(|s| s.tiers.swap(0, 1)), "`tiers` has dram out of order: give"),
        (bad(|s| s.tiers.clear()), "`tiers` is empty: give"),
        (bad(|s| s.services[0].token_s = -1.0), "a time of `services` is -1: give"),
        (bad(|s| s.services[0].pair_s = f64::NAN), "a time of `services` is NaN: give"),
        (bad(|s| s.services[0].read_s.truncate(1)), "`read_s` has 1 times: give"),
        (bad(|s| s.services[0].instances = 0), "`instances` is 0: give"),
        (bad(|s| s.services.clear()), "`services` has 0: give"),
        (bad(|s| s.waste_budget = 1.5), "`waste_budget` is 1.5: give"),
        (bad(|s| s.block_bytes = 0), "`block_bytes` is 0: give"),
    ] {
        assert!(fault.starts_with(field), "{fault}");
    }
    let unknown = r#"{"policy":"lru","seed":0,"block_bytes":1,"waste_budget":0,"tiers":[],
        "services":[],"colour":"red"}"#;
    let fault = serde_json::from_str::<NodeSpec>(unknown).unwrap_err().to_string();
    assert!(fault.contains("unknown field `colour`"), "{fault}");
}
