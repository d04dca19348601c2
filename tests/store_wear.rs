//! A budget of what is written to the drives, so that they last.

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{BLOCK, GatedDisk, blocks_of, chain, config, namespace, seams};
use tiered_kv::io_seams::{ManualClock, MemDisk};
use tiered_kv::{
    BlockKey, EvictionPolicy, GetOptions, LookupMode, Namespace, PutOptions, Seams, Store,
    StoreConfig,
};

const HOUR: u64 = 3_600_000_000_000;
const LONG: Duration = Duration::from_secs(600);

fn counter(store: &Store, name: &str) -> u64 {
    store.stats().counters.iter().find(|(n, _)| *n == name).expect(name).1
}

/// Puts blocks and waits for what is written of them; how many could not be.
fn put(store: &Store, ns: &Namespace, keys: &[BlockKey]) -> u64 {
    let put = store.put(ns, keys, blocks_of(keys), &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), keys.len());
    let flushed = store.flush(Some(LONG)).expect("open").wait();
    assert_eq!(flushed.pending, 0);
    flushed.failed
}

/// So many blocks an hour may be written, and as many at once.
fn budget(blocks: u64) -> StoreConfig {
    let nvme_write_bytes_per_s = (blocks * BLOCK as u64).div_ceil(3600);
    StoreConfig { nvme_write_bytes_per_s, ..config("/simulated".as_ref(), 8 << 20) }
}

#[test]
fn case_23_a_drive_gets_what_its_budget_allows_and_no_less() {
    let clock = Arc::new(ManualClock::new(1 << 60));
    let seams = Seams { clock: clock.clone(), ..seams(Arc::new(MemDisk::new())) };
    let store = Store::open_with(&budget(8), &seams).expect("opens");
    let ns = namespace(&store);
    assert_eq!(put(&store, &ns, &chain(&ns, 0, 4)), 0, "an empty drive is written to");
    let mut failed = 0;
    for hour in 1..=20 {
        for one in 0..16 {
            failed += put(&store, &ns, &chain(&ns, hour * 100 + one, 1));
            clock.advance(HOUR / 16);
        }
    }
    let written = counter(&store, "offloaded");
    assert!(written <= 8 + 20 * 8, "{written} blocks in 20 hours");
    assert!(written >= 20 * 8, "{written}: a drive that may be written to is not");
    assert_eq!(counter(&store, "not_admitted"), failed);
    assert_eq!(counter(&store, "undurable"), failed, "they are in memory, or gone from it");
    assert_eq!(written + failed, 4 + 20 * 16);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn a_drive_of_bounded_writes_takes_nothing_for_what_is_worth_more() {
    let disk = GatedDisk::new();
    let bounded = StoreConfig {
        nvme_write_bytes_per_s: 1 << 40,
        policy: EvictionPolicy::Lru,
        ..config("/simulated".as_ref(), 4 << 20)
    };
    let store = Store::open_with(&bounded, &seams(disk.clone())).expect("opens");
    let ns = namespace(&store);
    let mut stored = Vec::new();
    while counter(&store, "evicted_nvme") == 0 {
        let keys = chain(&ns, 100 + stored.len() as u32, 4);
        assert_eq!(put(&store, &ns, &keys), 0, "what is new is worth more");
        stored.extend(keys);
    }
    assert_eq!(counter(&store, "not_admitted"), 0);
    // Two groups are being written, and others wait behind them.
    disk.shut_writes(true);
    let waiting: Vec<_> = (1..=3).map(|path| chain(&ns, path, 4)).collect();
    for keys in &waiting {
        let put = store.put(&ns, keys, blocks_of(keys), &PutOptions::default());
        assert_eq!(put.expect("open").wait().stored(), 4);
    }
    // Meanwhile all that the drive has is used.
    for keys in stored.chunks(4) {
        let got = store.get(&ns, keys, &GetOptions::default()).expect("open").wait();
        drop(got);
        store.learn();
    }
    let evicted = counter(&store, "evicted_nvme");
    disk.shut_writes(false);
    let flushed = store.flush(Some(LONG)).expect("open").wait();
    assert_eq!((flushed.pending, flushed.failed), (0, 4));
    assert_eq!(counter(&store, "not_admitted"), 4);
    assert_eq!(counter(&store, "evicted_nvme"), evicted, "nothing has left for them");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn what_a_budget_leaves_of_a_chain_is_reachable_from_its_root() {
    let disk = Arc::new(MemDisk::new());
    let seams = Seams { clock: Arc::new(ManualClock::new(1 << 60)), ..seams(disk) };
    let open = || Store::open_with(&budget(8), &seams).expect("opens");
    let store = open();
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 16);
    let failed = put(&store, &ns, &keys);
    assert!((8..16).contains(&failed), "{failed}");
    store.close();
    drop((ns, store));
    let store = open();
    let found = store.lookup(&namespace(&store), &keys, LookupMode::Each);
    let durable = 16 - usize::try_from(failed).expect("few");
    assert_eq!(found.hits, durable);
    assert!(found.states[..durable].iter().all(|state| state.is_hit()), "its first blocks");
}

#[test]
fn without_a_budget_everything_is_written() {
    let seams = seams(Arc::new(MemDisk::new()));
    let store = Store::open_with(&budget(0), &seams).expect("opens");
    let ns = namespace(&store);
    for path in 0..64 {
        assert_eq!(put(&store, &ns, &chain(&ns, path, 4)), 0);
    }
    assert_eq!((counter(&store, "offloaded"), counter(&store, "not_admitted")), (256, 0));
}
