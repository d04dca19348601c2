//! The measure: capacities, hits, the report, and the figures on public traces where they are.

#![allow(clippy::unwrap_used, reason = "helpers of tests: what is unexpected ends the test")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::BufReader;
use std::path::PathBuf;
use tiered_kv_replay::{
    ALL, Job, Options, Outcome, Progress, Report, Trace, capacity_blocks, jobs, known, read, table,
};

/// Two conversations in turn: each request has the blocks of the last one and two more.
fn conversations(turns: u64) -> Trace {
    let mut text = String::new();
    for turn in 0..turns {
        for chat in 0..2 {
            let (at, first, len) = (turn * 10 + chat, chat * 1000, 2 * (turn + 1));
            let _ = writeln!(
                text,
                r#"{{"timestamp":{at},"session_id":"{chat}","input_length":{},"block_size":16,
                "output_length":0,"type":"chat","hash_runs":[[{first},{len}]]}}"#,
                len * 16
            );
        }
    }
    let text = text.replace(",\n", ",");
    read(BufReader::new(text.as_bytes()), "conversations").unwrap()
}

fn run(trace: &Trace, options: Options, jobs: &[Job], threads: usize) -> Vec<Outcome> {
    let progress = Progress::default();
    let found = tiered_kv_replay::run(trace, options, jobs, threads, &progress, |_| ());
    assert_eq!(progress.requests(), (jobs.len() * trace.entries().len()) as u64);
    found.unwrap()
}

fn hits(trace: &Trace, options: Options, policy: &str, pct: f64, seeds: u64) -> f64 {
    let jobs = jobs(&[pct], &[known(policy).unwrap()], seeds);
    let outcomes = run(trace, options, &jobs, 1);
    outcomes.iter().map(|outcome| outcome.hit_pct).sum::<f64>() / outcomes.len() as f64
}

#[test]
fn a_cache_that_holds_all_reaches_the_ceiling() {
    let trace = conversations(8);
    assert_eq!((trace.unique_blocks, trace.block_accesses), (32, 144));
    // All but the two new blocks of each request.
    assert!((trace.ceiling_pct(false) - 100.0 * 112.0 / 144.0).abs() < 1e-9);
    for policy in ALL {
        // Some keep a part of the cache for newcomers only: they get twice the room.
        let ceiling = trace.ceiling_pct(false);
        let found = hits(&trace, Options::default(), policy, 100.0, 1);
        let exempt = ["2q", "s3-fifo", "w-tinylfu"].contains(policy);
        assert!(exempt || found == ceiling, "{policy}: {found}, ceiling {ceiling}");
        assert!(found <= ceiling, "{policy}");
    }
}

#[test]
fn capacities_are_rounded_down_and_not_to_nothing() {
    let trace = conversations(100);
    assert_eq!(trace.unique_blocks, 400);
    let blocks = |pct| capacity_blocks(&trace, pct);
    assert_eq!((blocks(0.5), blocks(0.7), blocks(0.01), blocks(29.0)), (2, 2, 1, 116));
}

#[test]
fn results_come_in_the_order_of_jobs_whatever_the_threads() {
    let trace = conversations(30);
    let policies: Vec<&'static str> = ["lru", "beta-spec", "min"].map(|p| known(p).unwrap()).into();
    let jobs = jobs(&[5.0, 20.0], &policies, 3);
    assert_eq!(jobs.len(), 2 + 6 + 2, "seeds only where draws decide");
    let result = |threads| {
        let outcomes = run(&trace, Options::default(), &jobs, threads);
        let key = |o: &tiered_kv_replay::Outcome| (o.policy, o.seed, o.capacity_blocks);
        outcomes.iter().map(|o| (key(o), o.hit_pct.to_bits())).collect::<Vec<_>>()
    };
    assert_eq!(result(1), result(4));
}

#[test]
fn the_report_has_the_fields_that_readers_rely_on() {
    let trace = conversations(10);
    let options = Options::default();
    let jobs = jobs(&[10.0], &[known("lru").unwrap()], 1);
    let report = Report::new(&trace, options, run(&trace, options, &jobs, 1));
    let json: serde_json::Value =
        serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    let fields = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    let mut expected = [
        "trace",
        "block_size",
        "requests",
        "block_accesses",
        "unique_blocks",
        "ceiling_pct",
        "results",
    ];
    expected.sort_unstable();
    assert_eq!(fields(&json), expected);
    let mut expected = [
        "capacity_pct",
        "capacity_blocks",
        "policy",
        "seed",
        "hit_pct",
        "cost_saved_pct",
        "ns_per_block",
    ];
    expected.sort_unstable();
    assert_eq!(fields(&json["results"][0]), expected);
    assert!(table(&report).contains("| lru |"));
}

#[test]
fn runs_end_when_they_are_told_to() {
    let trace = conversations(2000);
    let jobs = jobs(&[5.0, 20.0], &[known("beta").unwrap()], 2);
    let (options, progress) = (Options::default(), Progress::default());
    let stop = |_: &Outcome| progress.stop();
    assert!(tiered_kv_replay::run(&trace, options, &jobs, 1, &progress, stop).is_none());
    assert_eq!(progress.requests(), 4000, "no run was begun after the first");
}

/// The figures that the Python module is held to as well.
#[test]
fn figures_of_a_trace_that_is_made_up() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/replay_figures.json");
    let wanted: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let trace = tiered_kv_replay::generate("chat", 2000, 7).unwrap();
    let found = run(&trace, Options::default(), &jobs(&[2.0, 10.0], ALL, 2), 2);
    let wanted = wanted["results"].as_array().unwrap();
    assert_eq!(found.len(), wanted.len());
    for (one, other) in found.iter().zip(wanted) {
        assert_eq!(
            (Some(one.policy), Some(one.seed)),
            (other["policy"].as_str(), other["seed"].as_u64())
        );
        assert_eq!(Some(one.capacity_pct), other["capacity_pct"].as_f64());
        let hits = other["hit_pct"].as_f64().unwrap();
        assert!((one.hit_pct - hits).abs() < 1e-9, "{one:?}, not {hits}");
    }
}

#[test]
fn sessions_are_found_again_without_labels() {
    let trace = conversations(60);
    let told = Options::default();
    let untold = Options { no_labels: true, ..told };
    let (with, without) =
        (hits(&trace, told, "beta-spec", 30.0, 3), hits(&trace, untold, "beta-spec", 30.0, 3));
    assert!((with - without).abs() < 1.0, "{with} with labels, {without} without");
}

/// A public trace, where `TIERED_KV_TRACES` says that they are: they take a while.
fn public(name: &str) -> Option<Trace> {
    let root = PathBuf::from(std::env::var_os("TIERED_KV_TRACES")?);
    let path = root.join(format!("{name}.rle.jsonl.gz"));
    path.exists().then(|| tiered_kv_replay::read_path(&path).unwrap())
}

/// Hits in percent at 0.5 to 20 percent: the policy as specified may be 0.4 points below, the
/// optimum and least recently used must be as they are.
#[test]
fn figures_on_public_traces() {
    let capacities = [0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0];
    let expected: BTreeMap<&str, [[f64; 7]; 2]> = BTreeMap::from([
        (
            "mooncake_conversation_512",
            [[8.0, 10.6, 14.8, 17.6, 22.1, 29.6, 34.5], [18.3, 24.6, 31.4, 34.8, 36.6, 36.6, 36.6]],
        ),
        (
            "mtbench101_qwen16",
            [
                [13.2, 17.7, 23.5, 28.0, 34.7, 42.6, 47.3],
                [24.0, 32.0, 40.6, 45.1, 48.0, 48.0, 48.0],
            ],
        ),
        (
            "lmcache_miniswe_qwen16",
            [
                [12.3, 24.2, 43.2, 55.1, 65.0, 78.2, 91.8],
                [12.3, 24.2, 43.2, 55.1, 65.0, 78.2, 91.8],
            ],
        ),
    ]);
    for (name, [beta, min]) in expected {
        let Some(trace) = public(name) else { continue };
        for (at, pct) in capacities.into_iter().enumerate() {
            let found = hits(&trace, Options::default(), "beta-spec", pct, 5);
            assert!(found >= beta[at] - 0.4, "{name} {pct} %: {found}, not {}", beta[at]);
            let found = hits(&trace, Options::default(), "min", pct, 1);
            assert!((found - min[at]).abs() <= 0.051, "{name} {pct} %: {found}, not {}", min[at]);
        }
    }
}
