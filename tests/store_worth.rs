//! Loads that take longer than computing what they would bring, and a cache that is of no use.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{BLOCK, GatedDisk, blocks_of, bytes_of, chain, config, namespace, open_at, seams};
use tiered_kv::io_seams::{DiskOp, ManualClock};
use tiered_kv::{
    BlockKey, Cause, GetOptions, Latency, LookupMode, MissReason, Namespace, PutOptions, Store,
    StoreConfig,
};

const MS: u64 = 1_000_000;
const LONG: Duration = Duration::from_secs(600);

/// A store on a drive whose reads each take a time of the test's own, on a clock of its own.
struct Bench {
    disk: Arc<GatedDisk>,
    clock: Arc<ManualClock>,
    read_ns: Arc<AtomicU64>,
    store: Arc<Store>,
    ns: Namespace,
    keys: Vec<BlockKey>,
}

impl Bench {
    /// Eight blocks on the drive, none in memory, and nothing known of the drive.
    fn new(change: impl FnOnce(&mut StoreConfig)) -> Self {
        let (disk, clock) = (GatedDisk::new(), Arc::new(ManualClock::new(1 << 60)));
        let mut config = StoreConfig { load_threads: 1, ..config("/simulated".as_ref(), 4 << 20) };
        change(&mut config);
        let store = open_at(&config, &disk, &clock);
        let ns = namespace(&store);
        let keys = chain(&ns, 1, 8);
        let put = store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default());
        assert_eq!(put.expect("open").wait().stored(), keys.len());
        store.close();
        drop((ns, store));
        let read_ns = Arc::new(AtomicU64::new(10 * MS));
        let (takes, passes) = (read_ns.clone(), clock.clone());
        disk.inner.set_fault(Some(Box::new(move |op| {
            if matches!(op, DiskOp::ReadAt { len, .. } if len >= BLOCK) {
                passes.advance(takes.load(Ordering::SeqCst));
            }
            None
        })));
        let store = open_at(&config, &disk, &clock);
        let ns = namespace(&store);
        Self { disk, clock, read_ns, store, ns, keys }
    }

    /// What a get of some blocks brings, for a caller that computes one in so long.
    fn get(&self, keys: &[BlockKey], recompute: Option<Duration>) -> Vec<Result<(), MissReason>> {
        let options = GetOptions { timeout: Some(LONG), recompute, ..GetOptions::default() };
        let got = self.store.get(&self.ns, keys, &options).expect("open").wait();
        let check = |(item, key): (&Result<tiered_kv::Lease, MissReason>, &BlockKey)| {
            item.as_ref().map_err(|reason| *reason).map(|lease| {
                assert_eq!(lease.as_slice(), bytes_of(key), "the bytes that were stored");
            })
        };
        got.items.iter().zip(keys).map(check).collect()
    }

    fn reads(&self) -> usize {
        self.disk.reads.load(Ordering::SeqCst)
    }
}

fn ms(n: u64) -> Option<Duration> {
    Some(Duration::from_millis(n))
}

const RECOMPUTE: Result<(), MissReason> = Err(MissReason::Recompute);

#[test]
fn case_21_what_is_computed_sooner_is_not_loaded() {
    let bench = Bench::new(|_| {});
    let keys = &bench.keys;
    assert_eq!(bench.get(&keys[..2], ms(1)), [Ok(()); 2], "nothing is known of the drive yet");
    let drive = &bench.store.health().drives[0];
    assert_eq!(drive.load_bytes_per_s, Some(BLOCK as u64 * 100), "10 ms a block");
    let reads = bench.reads();
    assert_eq!(bench.get(&keys[..4], ms(9)), [Ok(()), Ok(()), RECOMPUTE, RECOMPUTE]);
    assert_eq!(bench.reads(), reads, "the drive was not asked");
    let told = bench.store.operator().explain(bench.ns.id(), &keys[1..3]).expect("open").keys;
    assert_eq!((told[0].cause, told[1].cause), (Cause::Resident, Cause::Recompute));
    assert_eq!(bench.get(&keys[2..4], ms(11)), [Ok(()); 2], "it is the faster way");
    assert_eq!(bench.get(&keys[4..5], None), [Ok(())], "nobody said what computing costs");
    let stats = bench.store.stats();
    let missed = stats.misses.iter().find(|(why, _)| *why == "recompute");
    assert_eq!(missed.map(|(_, n)| *n), Some(2));
}

#[test]
fn loads_count_by_how_long_they_took() {
    let bench = Bench::new(|_| {});
    let load = || bench.store.stats().latencies.load;
    assert_eq!(load(), Latency::default());
    assert_eq!(bench.get(&bench.keys[..1], None), [Ok(())]);
    assert_eq!(bench.get(&bench.keys[..1], None), [Ok(())], "from memory: it is no load");
    bench.read_ns.store(3000 * MS, Ordering::SeqCst);
    assert_eq!(bench.get(&bench.keys[1..2], None), [Ok(())]);
    let counts = load().counts;
    assert_eq!((counts.iter().sum::<u64>(), counts[4], counts[12]), (2, 1, 1), "{counts:?}");
    assert_eq!(load().sum_ns, 3010 * MS);
}

#[test]
fn a_drive_that_was_slow_is_asked_again_after_some_time() {
    let bench = Bench::new(|config| config.drive_retry_s = 3.0);
    let keys = &bench.keys;
    assert_eq!(bench.get(&keys[..1], None), [Ok(())]);
    bench.read_ns.store(MS / 100, Ordering::SeqCst);
    bench.clock.advance(2000 * MS);
    assert_eq!(bench.get(&keys[1..2], ms(5)), [RECOMPUTE]);
    bench.clock.advance(1000 * MS);
    assert_eq!(bench.get(&keys[1..2], ms(5)), [Ok(())], "what was known is old");
    assert_eq!(bench.get(&keys[2..8], ms(6)), [Ok(()); 6], "it has become fast");
}

#[test]
fn a_load_waits_behind_those_of_others_and_of_its_own_call() {
    let bench = Bench::new(|_| {});
    let keys = &bench.keys;
    assert_eq!(bench.get(&keys[..1], None), [Ok(())]);
    bench.disk.shut_reads(true);
    let options = GetOptions { timeout: Some(LONG), ..GetOptions::default() };
    let before = bench.store.get(&bench.ns, &keys[1..5], &options).expect("open");
    assert_eq!(bench.get(&keys[5..6], ms(45)), [RECOMPUTE], "50 ms behind the four");
    assert_eq!(bench.get(&keys[4..5], ms(35)), [RECOMPUTE], "40 ms, though others load it");
    // The first is late by what waits before it; with two more the drive is the faster way.
    let three = bench.store.get(
        &bench.ns,
        &keys[5..8],
        &GetOptions { recompute: ms(25), ..options.clone() },
    );
    bench.disk.shut_reads(false);
    assert!(three.expect("open").wait().items.iter().all(Result::is_ok));
    assert!(before.wait().items.iter().all(Result::is_ok));
}

#[test]
fn the_configuration_says_what_computing_costs_where_a_call_does_not() {
    // Four tokens a block.
    let bench = Bench::new(|config| config.recompute_tokens_per_s = Some(500.0));
    let keys = &bench.keys;
    assert_eq!(bench.get(&keys[..1], None), [Ok(())]);
    assert_eq!(bench.get(&keys[1..2], None), [RECOMPUTE], "8 ms to 10");
    assert_eq!(bench.get(&keys[1..2], ms(12)), [Ok(())], "the call knows better");
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let config = StoreConfig { recompute_tokens_per_s: Some(rate), ..StoreConfig::default() };
        let refused = config.check().expect_err("no rate").to_string();
        assert!(refused.contains("`recompute_tokens_per_s`"), "{refused}");
    }
}

#[test]
fn case_24_a_workload_without_reuse_waits_for_no_drive_and_writes_each_block_once() {
    let disk = GatedDisk::new();
    let config = config("/simulated".as_ref(), 4 << 20);
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let ns = namespace(&store);
    disk.reads.store(0, Ordering::SeqCst);
    // Whoever asked a drive for something would wait.
    disk.shut_reads(true);
    let (requests, blocks) = (200, 4);
    for request in 0..requests {
        let keys: Arc<[BlockKey]> = chain(&ns, request, blocks).into();
        assert_eq!(store.lookup(&ns, &keys, LookupMode::Prefix).hits, 0);
        let found = store.get_now(&ns, &keys, &GetOptions::default()).expect("open");
        assert!(found.is_some(), "that nothing is there is known at once");
        let options = PutOptions { wait: Some(LONG), ..PutOptions::default() };
        let put = store.put(&ns, &keys, blocks_of(&keys), &options).expect("open").wait();
        assert_eq!(put.stored(), keys.len(), "no put is refused while drives keep up");
    }
    assert!(store.flush(Some(LONG)).expect("open").wait().all_durable());
    assert_eq!(disk.reads.load(Ordering::SeqCst), 0, "eviction reads nothing, nor does a miss");
    let stats = store.stats();
    let counter = |name: &str| stats.counters.iter().find(|(n, _)| *n == name).expect(name).1;
    let stored = u64::from(requests * blocks);
    assert_eq!((counter("put_stored"), counter("offloaded")), (stored, stored));
    assert_eq!(counter("offloaded_bytes"), stored * BLOCK as u64, "each block is written once");
    assert_eq!(counter("onboarded") + counter("direct_reads") + counter("probes"), 0);
    assert!(counter("evicted_dram") > 0 && counter("evicted_nvme") > 0, "both tiers are full");
    disk.shut_reads(false);
}
