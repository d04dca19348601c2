//! What is moved up before anybody asks: the window behind what a get reads from a drive, and what
//! was read past memory and belongs there.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use support::{BLOCK, GatedDisk, blocks_of, bytes_of, chain, config, namespace, open_at};
use tiered_kv::io_seams::{DiskOp, ManualClock};
use tiered_kv::{
    AlignedBuf, BlockKey, EvictionPolicy, GetOptions, LookupMode, Namespace, PutOptions, Residency,
    Store, StoreConfig, Tier,
};

const LONG: Duration = Duration::from_secs(600);
const SECOND: u64 = 1_000_000_000;
/// Blocks of the window as it begins, which is what may be kept of this memory, too.
const WINDOW: usize = 16;

struct Bench {
    disk: Arc<GatedDisk>,
    clock: Arc<ManualClock>,
    store: Arc<Store>,
    ns: Namespace,
    /// A chain on the drive, and another one.
    keys: Vec<BlockKey>,
    other: Vec<BlockKey>,
}

impl Bench {
    /// Two chains of 40 blocks on the drive, and memory for 128 blocks that has none of them.
    fn new(change: impl FnOnce(&mut StoreConfig)) -> Self {
        let (disk, clock) = (GatedDisk::new(), Arc::new(ManualClock::new(1 << 60)));
        let mut config = StoreConfig {
            load_threads: 1,
            dram_capacity: Some((8 * WINDOW * BLOCK) as u64),
            ahead_waste: 0.05,
            max_leased_fraction: 1.0,
            policy: EvictionPolicy::Lru,
            ..config("/simulated".as_ref(), 16 << 20)
        };
        change(&mut config);
        let store = open_at(&config, &disk, &clock);
        let ns = namespace(&store);
        let (keys, other) = (chain(&ns, 1, 40), chain(&ns, 2, 40));
        // By turns, so that no two of a chain lie side by side and are read by one call.
        for at in 0..keys.len() {
            for keys in [&keys, &other] {
                let parent = at.checked_sub(1).map(|before| keys[before]);
                let options = PutOptions { parent, ..PutOptions::default() };
                let put = store.put(&ns, &keys[at..=at], blocks_of(&keys[at..=at]), &options);
                assert_eq!(put.expect("open").wait().stored(), 1);
            }
        }
        store.close();
        drop((ns, store));
        let store = open_at(&config, &disk, &clock);
        let ns = namespace(&store);
        disk.reads.store(0, Ordering::SeqCst);
        Self { disk, clock, store, ns, keys, other }
    }

    fn get(&self, keys: &[BlockKey]) {
        let options = GetOptions { timeout: Some(LONG), ..GetOptions::default() };
        let got = self.store.get(&self.ns, keys, &options).expect("open").wait();
        for (item, key) in got.items.iter().zip(keys) {
            assert_eq!(item.as_ref().expect("a hit").as_slice(), bytes_of(key));
        }
    }

    fn counter(&self, name: &str) -> u64 {
        self.store.stats().counters.iter().find(|(n, _)| *n == name).expect(name).1
    }

    /// Waits until nothing is being read, and nothing that waits may begin.
    fn settle(&self) {
        let until = std::time::Instant::now() + Duration::from_secs(60);
        let mut before = (usize::MAX, 0);
        loop {
            self.store.learn();
            let now = (self.disk.reads.load(Ordering::SeqCst), self.store.stats().loading_bytes);
            if now == before && now.1 == 0 {
                return;
            }
            before = now;
            assert!(std::time::Instant::now() < until, "it ends");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn in_memory(&self, keys: &[BlockKey]) -> usize {
        let found = self.store.lookup(&self.ns, keys, LookupMode::Each).states;
        found.iter().filter(|state| **state == Residency::In(Tier::Dram)).count()
    }

    fn fill(&self, path: u32, blocks: u32) -> Vec<BlockKey> {
        let keys = chain(&self.ns, path, blocks);
        let options = PutOptions { wait: Some(LONG), ..PutOptions::default() };
        let put = self.store.put(&self.ns, &keys, blocks_of(&keys), &options);
        assert_eq!(put.expect("open").wait().stored(), keys.len());
        keys
    }

    /// Fills memory with what may leave it again.
    fn fill_durably(&self, path: u32, blocks: u32) -> Vec<BlockKey> {
        let keys = self.fill(path, blocks);
        assert!(self.store.flush(Some(LONG)).expect("open").wait().all_durable());
        keys
    }
}

#[test]
fn what_is_stored_behind_a_block_that_was_read_is_there_before_it_is_asked_for() {
    let bench = Bench::new(|_| {});
    bench.get(&bench.keys[..2]);
    bench.settle();
    assert_eq!(bench.counter("ahead_loaded"), WINDOW as u64);
    assert_eq!(bench.in_memory(&bench.keys), 2 + WINDOW, "the next of the chain, in its order");
    assert_eq!(bench.in_memory(&bench.keys[..2 + WINDOW]), 2 + WINDOW);
    let reads = bench.disk.reads.load(Ordering::SeqCst);
    bench.get(&bench.keys[2..2 + WINDOW]);
    bench.settle();
    assert_eq!(bench.disk.reads.load(Ordering::SeqCst), reads, "hits in memory");
    assert_eq!((bench.counter("ahead_used"), bench.counter("ahead_wasted")), (WINDOW as u64, 0));
    bench.get(&bench.keys[2 + WINDOW..4 + WINDOW]);
    bench.settle();
    assert!(bench.counter("ahead_loaded") > WINDOW as u64, "it goes along with the position");
    assert_eq!(bench.in_memory(&bench.other), 0);
}

#[test]
fn where_a_chain_forks_what_was_read_last_is_followed() {
    let bench = Bench::new(|_| {});
    // The same first blocks, then another way; it is stored later than the one of `keys`.
    let tokens: Vec<u32> = (0..8 * 4).map(|at| if at < 8 { 100_000 + at } else { 7 }).collect();
    let fork = bench.ns.keys_from_tokens(&tokens, None);
    assert_eq!(fork[..2], bench.keys[..2], "they share two blocks");
    let put = bench.store.put(&bench.ns, &fork, blocks_of(&fork), &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), 6);
    assert!(bench.store.flush(Some(LONG)).expect("open").wait().all_durable());
    bench.get(&bench.keys[..3]);
    bench.settle();
    let way = |store: &Bench| store.in_memory(&store.keys[3..]);
    assert_eq!(way(&bench), WINDOW, "behind the third block there is one way");
    assert_eq!(bench.in_memory(&bench.other), 0);
    // Read to there, the first blocks lead on to `keys` again.
    bench.clock.advance(3 * SECOND);
    bench.fill(8, 110);
    bench.fill(9, 110);
    bench.settle();
    assert_eq!(bench.in_memory(&bench.keys[..3]), 0, "they have made way for others");
    bench.get(&bench.keys[..2]);
    bench.settle();
    assert!(bench.in_memory(&bench.keys[2..4]) == 2, "the way that was read, not the newest");
}

#[test]
fn nothing_is_read_ahead_while_somebody_waits_for_the_drive() {
    let bench = Bench::new(|_| {});
    bench.disk.shut_reads(true);
    let options = GetOptions { timeout: Some(LONG), ..GetOptions::default() };
    let get = bench.store.get(&bench.ns, &bench.keys[..2], &options).expect("open");
    bench.store.learn();
    let loading = bench.store.stats().loading_bytes;
    bench.disk.shut_reads(false);
    assert_eq!(loading, 2 * BLOCK as u64, "what was asked for alone");
    assert_eq!(get.wait().hits(), 2);
    bench.settle();
    assert_eq!(bench.counter("ahead_loaded"), WINDOW as u64);
}

#[test]
fn a_get_drops_what_is_read_ahead_and_has_not_begun() {
    let bench = Bench::new(|_| {});
    let (seen, disk) = (Arc::new(AtomicUsize::new(0)), bench.disk.clone());
    let (reads, held) = (seen.clone(), disk.clone());
    bench.disk.inner.set_fault(Some(Box::new(move |op| {
        if matches!(op, DiskOp::ReadAt { len, .. } if len >= BLOCK)
            && reads.fetch_add(1, Ordering::SeqCst) == 0
        {
            // Behind the one that is asked for, the drive stands still.
            held.shut_reads(true);
        }
        None
    })));
    bench.get(&bench.keys[..1]);
    let until = std::time::Instant::now() + Duration::from_secs(60);
    let eight = || bench.store.stats().loading_bytes == 8 * BLOCK as u64;
    while !eight() || disk.reads.load(Ordering::SeqCst) < 2 {
        assert!(std::time::Instant::now() < until, "the drive has the first of eight");
        std::thread::yield_now();
    }
    let options = GetOptions { timeout: Some(LONG), ..GetOptions::default() };
    let get = bench.store.get(&bench.ns, &bench.other[..1], &options).expect("open");
    disk.shut_reads(false);
    assert_eq!(get.wait().hits(), 1);
    bench.settle();
    let dropped = bench.counter("loads_cancelled");
    assert_eq!(dropped, 7, "all but the one that the drive had");
    assert_eq!(bench.in_memory(&bench.other), 1 + WINDOW, "then what is behind that one");
}

#[test]
fn what_was_moved_up_stays_a_while_and_is_counted_as_wasted_if_nobody_reads_it() {
    let bench = Bench::new(|_| {});
    bench.get(&bench.keys[..1]);
    bench.settle();
    assert_eq!(bench.counter("ahead_loaded"), WINDOW as u64);
    bench.fill_durably(3, 110);
    bench.fill_durably(4, 60);
    assert_eq!(bench.in_memory(&bench.keys[1..=WINDOW]), WINDOW, "others made room");
    bench.clock.advance(3 * SECOND);
    bench.fill_durably(5, 110);
    bench.settle();
    assert_eq!(bench.in_memory(&bench.keys), 0, "it is like any other then");
    assert_eq!((bench.counter("ahead_used"), bench.counter("ahead_wasted")), (0, WINDOW as u64));
}

#[test]
fn without_a_budget_nothing_is_moved_up_unasked() {
    let bench = Bench::new(|config| config.ahead_waste = 0.0);
    bench.get(&bench.keys[..2]);
    bench.settle();
    assert_eq!(bench.in_memory(&bench.keys), 2);
    assert_eq!(bench.counter("ahead_loaded"), 0);
    for waste in [-0.1, 1.1, f64::NAN] {
        let config = StoreConfig { ahead_waste: waste, ..StoreConfig::default() };
        let refused = config.check().expect_err("no part").to_string();
        assert!(refused.contains("`ahead_waste`"), "{refused}");
    }
}

/// Reads the first blocks of a chain into memory of the caller's own.
fn read_past_memory(bench: &Bench, keys: &[BlockKey]) {
    let memory = AlignedBuf::new(keys.len() * BLOCK).expect("memory");
    let region = bench.store.register(memory, BLOCK).expect("valid");
    let places: Vec<usize> = (0..keys.len()).collect();
    let slots = region.claim_all(&places).expect("free");
    let options = GetOptions { timeout: Some(LONG), ..GetOptions::default() };
    let report = bench.store.get_into(&bench.ns, keys, slots, &options).expect("ok").wait();
    assert!(report.items.iter().all(|item| *item == Ok(Tier::Nvme)));
}

#[test]
fn what_was_read_past_memory_is_moved_up_where_it_is_worth_more_than_what_is_there() {
    let bench = Bench::new(|_| {});
    read_past_memory(&bench, &bench.keys[38..]);
    bench.settle();
    assert_eq!((bench.counter("promoted"), bench.in_memory(&bench.keys)), (2, 2), "there is room");
    // What is used leaves for nobody.
    let held = bench.fill(3, 126);
    let options = GetOptions::default();
    let leases = bench.store.get(&bench.ns, &held, &options).expect("open").wait();
    let kept = bench.store.get(&bench.ns, &bench.keys[38..], &options).expect("open").wait();
    assert_eq!((leases.hits(), kept.hits()), (126, 2));
    read_past_memory(&bench, &bench.other[38..]);
    bench.settle();
    assert_eq!((bench.counter("promoted"), bench.in_memory(&bench.other)), (2, 0));
}

#[test]
fn what_was_moved_up_makes_way_for_what_is_asked_for() {
    let bench = Bench::new(|_| {});
    let chains: Vec<Vec<BlockKey>> =
        (10..10 + WINDOW as u32).map(|n| bench.fill_durably(n, 8)).collect();
    // As many blocks as memory has: the chains are on the drive only.
    bench.fill_durably(3, 8 * WINDOW as u32);
    assert_eq!(chains.iter().map(|keys| bench.in_memory(keys)).sum::<usize>(), 0);
    for keys in &chains {
        bench.get(&keys[..7]);
        bench.settle();
    }
    let there = chains.iter().map(|keys| bench.in_memory(keys)).sum::<usize>();
    assert_eq!(there, 8 * WINDOW, "every block in memory is kept, or before one that is");
    bench.get(&bench.keys[..4]);
    let new = chain(&bench.ns, 4, 2);
    let put = bench.store.put(&bench.ns, &new, blocks_of(&new), &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), 2);
    assert_eq!(bench.store.audit().faults, Vec::<String>::new());
}
