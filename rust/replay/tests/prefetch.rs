//! Prefetching between two tiers: what was moved ahead, and what was moved for nothing.

#![allow(clippy::unwrap_used, reason = "helpers of tests: what is unexpected ends the test")]

use std::path::PathBuf;
use tiered_kv_policy::{RequestKind, Window};
use tiered_kv_replay::{Builder, Entry, Options, Prefetched, Progress, Trace};
use tiered_kv_replay::{generate, prefetch, read_path};

/// A trace of requests at one a second; each names the ranges of its blocks.
fn trace(requests: &[&[(u64, u32)]]) -> Trace {
    let mut builder = Builder::new(16);
    for (number, ranges) in requests.iter().enumerate() {
        let blocks: u32 = ranges.iter().map(|range| range.1).sum();
        let tokens = (blocks * 16, 0);
        let entry = Entry::new(number as u64 * 1_000_000_000, None, RequestKind::Chat, tokens);
        builder.add(entry, ranges, &[]).unwrap();
    }
    builder.finish("made")
}

fn run(trace: &Trace, tiers: (f64, f64), window: Window) -> Prefetched {
    prefetch(trace, Options::default(), tiers, window, None, &Progress::default()).unwrap()
}

#[test]
fn what_follows_in_the_stored_chain_is_moved_before_it_is_asked_for() {
    // The fast tier holds one block of the twenty, the slow one all.
    let trace = trace(&[&[(0, 20)], &[(0, 20)]]);
    let without = run(&trace, (5.0, 100.0), Window::fixed(0));
    assert_eq!((without.covered_pct, without.moved_blocks), (0.0, 19));
    let with = run(&trace, (5.0, 100.0), Window::fixed(4));
    // Of 19 hits only the first was not moved ahead; nothing is stored behind the last.
    assert!((with.covered_pct - 100.0 * 18.0 / 19.0).abs() < 1e-9, "{with:?}");
    assert_eq!((with.moved_blocks, with.waste_pct), (19, 0.0));
    assert!((with.slow_hit_pct - 100.0 * 19.0 / 40.0).abs() < 1e-9, "{with:?}");
}

#[test]
fn where_the_request_turns_off_the_chain_the_window_is_wasted() {
    // Two branches behind ten blocks: the last one read is followed, and it is the wrong one.
    let first: &[(u64, u32)] = &[(0, 10), (100, 10)];
    let second: &[(u64, u32)] = &[(0, 10), (200, 10)];
    let trace = trace(&[first, second, first]);
    let found = run(&trace, (3.4, 100.0), Window::fixed(4));
    // Second: hits 1 to 9 and four of the first branch; third: the same, and from 100 on ten.
    assert_eq!(found.moved_blocks, (9 + 4) + (9 + 4) + 10, "{found:?}");
    assert!((found.waste_pct - 100.0 * 8.0 / 36.0).abs() < 1e-9, "{found:?}");
}

#[test]
fn case_22_promoted_blocks_are_read() {
    // "Promotion thrash: promoted bytes evicted unread": what is promoted on demand is read by its
    // request, so that all that can be promoted in vain is what the window moved.
    for (kind, tiers) in [("chat", (1.0, 5.0)), ("agents", (0.5, 5.0)), ("flip", (1.0, 10.0))] {
        let trace = generate(kind, 6000, 3).unwrap();
        let found = run(&trace, tiers, Window::within(0.05));
        assert!(found.waste_pct < 5.0 && found.covered_pct > 80.0, "{kind}: {found:?}");
    }
}

/// The figures on public traces, where `TIERED_KV_TRACES` says that they are.
#[test]
fn figures_of_prefetching_on_public_traces() {
    let Some(root) = std::env::var_os("TIERED_KV_TRACES") else { return };
    for (name, tiers, wasted) in [
        ("mooncake_conversation_512", (1.0, 10.0), [3.4, 10.9, 16.4]),
        ("mtbench101_qwen16", (2.0, 20.0), [5.3, 11.1, 11.5]),
        ("sharegpt_dev_qwen16", (1.0, 5.0), [0.4, 1.4, 4.1]),
        ("lmcache_miniswe_qwen16", (3.0, 20.0), [0.0, 0.0, 0.0]),
    ] {
        let path = PathBuf::from(&root).join(format!("{name}.rle.jsonl.gz"));
        let Ok(trace) = read_path(&path) else { continue };
        for (width, wasted) in [4, 16, 64].into_iter().zip(wasted) {
            let found = run(&trace, tiers, Window::fixed(width));
            assert!(found.waste_pct <= wasted + 2.0, "{name}, {wasted}: {found:?}");
            assert!(found.covered_pct >= 83.0, "{name}: {found:?}");
        }
        let found = run(&trace, tiers, Window::within(0.05));
        assert!(found.waste_pct < 5.0, "case 22, {name}: {found:?}");
    }
}
