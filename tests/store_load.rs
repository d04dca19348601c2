//! Loads: what they may take, what ends them, and what they never do.

mod support;

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{BLOCK, GatedDisk, blocks_of, bytes_of, chain, config, namespace, seams};
use tiered_kv::io_seams::DiskOp;
use tiered_kv::{
    BlockKey, BlockSource, Delete, GetOptions, Leases, LogKind, LookupMode, MissReason, Op,
    PutOptions, PutStatus, Residency, Store, StoreConfig, Tier,
};

fn put(store: &Store, keys: &[BlockKey]) -> Vec<PutStatus> {
    let ns = namespace(store);
    let put = store.put(&ns, keys, blocks_of(keys), &PutOptions::default());
    put.expect("open").wait().statuses
}

fn get(store: &Store, keys: &[BlockKey], timeout: Option<Duration>) -> Op<Leases> {
    let options = GetOptions { timeout, ..GetOptions::default() };
    store.get(&namespace(store), keys, &options).expect("open")
}

fn state(store: &Store, key: &BlockKey) -> Residency {
    store.lookup(&namespace(store), &[*key], LookupMode::Each).states[0]
}

fn counter(store: &Store, name: &str) -> u64 {
    let stats = store.stats();
    stats.counters.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no {name}")).1
}

fn whole(leases: &Leases, keys: &[BlockKey]) -> Vec<Result<(), MissReason>> {
    let check = |(item, key): (&Result<tiered_kv::Lease, MissReason>, &BlockKey)| {
        let lease = item.as_ref().map_err(|reason| *reason)?;
        assert_eq!(lease.as_slice(), bytes_of(key), "the bytes that were stored");
        Ok(())
    };
    leases.items.iter().zip(keys).map(check).collect()
}

/// A store on a drive that holds chain 1 of `n` blocks, none of them in memory.
fn on_drive(
    n: u32,
    change: impl Fn(&mut StoreConfig),
) -> (Arc<GatedDisk>, Arc<Store>, Vec<BlockKey>) {
    let disk = GatedDisk::new();
    let mut config = config("/simulated".as_ref(), 4 << 20);
    change(&mut config);
    let open = || Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let store = open();
    let keys = chain(&namespace(&store), 1, n);
    for (at, keys) in keys.chunks(8).enumerate() {
        let parent = (at > 0).then(|| chain(&namespace(&store), 1, n)[at * 8 - 1]);
        let options = PutOptions { parent, ..PutOptions::default() };
        let ns = namespace(&store);
        let put = store.put(&ns, keys, blocks_of(keys), &options).expect("open").wait();
        assert_eq!(put.stored(), keys.len());
        assert!(store.flush(None).expect("open").wait().all_durable());
    }
    store.close();
    drop(store);
    let store = open();
    disk.reads.store(0, Ordering::SeqCst);
    (disk, store, keys)
}

/// Blocks whose last one is not to be had before the gate opens.
struct Slow {
    blocks: Vec<Vec<u8>>,
    asked: Arc<AtomicUsize>,
    gate: Arc<(Mutex<bool>, Condvar)>,
}

impl BlockSource for Slow {
    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn block(&self, index: usize) -> &[u8] {
        // The first round asks for lengths only.
        let copying = self.asked.fetch_add(1, Ordering::SeqCst) >= self.blocks.len();
        if copying && index + 1 == self.blocks.len() {
            let mut open = self.gate.0.lock();
            while !*open {
                self.gate.1.wait(&mut open);
            }
        }
        &self.blocks[index]
    }
}

#[test]
fn a_lookup_tells_absent_writing_resident_and_loading_and_a_put_is_visible_at_once() {
    let (disk, store, old) = on_drive(1, |_| {});
    let ns = namespace(&store);
    let keys = chain(&ns, 2, 8);
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let asked = Arc::new(AtomicUsize::new(0));
    let source = Slow { blocks: blocks_of(&keys), asked: asked.clone(), gate: gate.clone() };
    assert_eq!(state(&store, &keys[0]), Residency::Absent);
    let writing = store.put(&ns, &keys, source, &PutOptions::default()).expect("open");
    // Until the first half of them has been copied, and for a while after that.
    let until = Instant::now() + Duration::from_secs(60);
    let copied = |asked: &AtomicUsize| asked.load(Ordering::SeqCst) >= 8 + 5;
    while !copied(&asked) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(20));
    let during: Vec<Residency> = keys.iter().map(|key| state(&store, key)).collect();
    let served = get(&store, &keys, None).wait().hits();
    *gate.0.lock() = true;
    gate.1.notify_all();
    assert_eq!((during, served), (vec![Residency::Writing; 8], 0), "none before all are complete");
    assert_eq!(writing.wait().stored(), 8);
    for key in &keys {
        assert_eq!(state(&store, key), Residency::In(Tier::Dram));
    }
    assert_eq!(state(&store, &old[0]), Residency::In(Tier::Nvme));
    disk.shut_reads(true);
    let loading = get(&store, &old, None);
    assert_eq!(state(&store, &old[0]), Residency::Loading);
    disk.shut_reads(false);
    assert_eq!(loading.wait().hits(), 1);
}

#[test]
fn a_load_that_finds_no_room_is_cut_to_the_prefix_that_it_could_take() {
    let (_disk, store, keys) = on_drive(40, |config| config.max_leased_fraction = 1.0);
    let pinned = get(&store, &keys[..28], None).wait();
    assert_eq!(pinned.hits(), 28, "of 32 slots");
    let cut = get(&store, &keys[28..], None).wait();
    let found = whole(&cut, &keys[28..]);
    assert_eq!(found[..4], [Ok(()); 4]);
    assert_eq!(found[4..], [Err(MissReason::NoSpace); 8]);
}

/// How often a block was missed, by what is counted; what was hit and missed is what was asked for.
fn missed(store: &Store, after: &str) -> Vec<&'static str> {
    let stats = store.stats();
    let missed: u64 = stats.misses.iter().map(|(_, n)| n).sum();
    let hits = stats.dram.hits + stats.nvme.hits;
    assert_eq!(hits + missed, stats.requested, "{after}: {:?}", stats.misses);
    stats.misses.iter().filter(|(_, n)| *n > 0).map(|(name, _)| *name).collect()
}

#[test]
fn case_27_hits_and_misses_add_up_whatever_a_block_was_missed_for() {
    let (disk, store, keys) = on_drive(8, |config| config.max_load_bytes = 3 * BLOCK as u64);
    let ns = namespace(&store);
    let [first, second] = [&keys[..4], &keys[4..]];
    let absent = chain(&ns, 2, 2);
    disk.shut_reads(true);
    get(&store, second, Some(Duration::from_millis(1))).wait();
    assert_eq!(missed(&store, "a deadline"), ["deadline", "load_cap"]);
    disk.shut_reads(false);
    until("the read has ended", || store.stats().loading_bytes == 0);
    for _ in 0..2 {
        get(&store, &[first, &absent].concat(), None).wait();
        missed(&store, "some of it stored");
    }
    let buffers = vec![vec![0; BLOCK]; 6];
    let options = GetOptions::default();
    store.get_into(&ns, &[first, &absent].concat(), buffers, &options).expect("open").wait();
    missed(&store, "into buffers");
    disk.inner.set_fault(Some(Box::new(|op| {
        let read = matches!(op, DiskOp::ReadAt { .. });
        read.then(|| std::io::Error::other("planted"))
    })));
    get(&store, &keys[6..], None).wait();
    let reasons = ["absent", "io_error", "deadline", "load_cap"];
    assert_eq!(missed(&store, "a drive that fails"), reasons);
}

#[test]
fn loads_beyond_the_bytes_that_may_be_in_flight_are_misses() {
    let (disk, store, keys) = on_drive(4, |config| config.max_load_bytes = 2 * BLOCK as u64);
    disk.shut_reads(true);
    let first = get(&store, &keys, None);
    assert_eq!(store.stats().loading_bytes, 2 * BLOCK as u64);
    let second = whole(&get(&store, &keys[2..], None).wait(), &keys[2..]);
    disk.shut_reads(false);
    // What comes behind a load that could not begin is not begun either.
    let beyond = [Err(MissReason::LoadCap), Err(MissReason::NoSpace)];
    assert_eq!(second, beyond);
    assert_eq!(whole(&first.wait(), &keys), [Ok(()), Ok(()), beyond[0], beyond[1]]);
}

#[test]
fn a_failed_load_reaches_all_waiters_is_logged_once_and_hides_the_key_until_it_is_stored_again() {
    let (disk, store, keys) = on_drive(1, |_| {});
    disk.shut_reads(true);
    let waiters: Vec<Op<Leases>> = (0..3).map(|_| get(&store, &keys, None)).collect();
    disk.inner.set_fault(Some(Box::new(|op| {
        let read = matches!(op, DiskOp::ReadAt { .. });
        read.then(|| std::io::Error::other("planted"))
    })));
    disk.shut_reads(false);
    for waiter in waiters {
        assert!(matches!(waiter.wait().items[0], Err(MissReason::IoError)));
    }
    let faults = store.events(0).into_iter().filter(|e| matches!(e.kind, LogKind::Fault(_)));
    assert_eq!((faults.count(), counter(&store, "load_faults")), (1, 1));
    disk.inner.set_fault(None);
    assert_eq!(state(&store, &keys[0]), Residency::Absent, "hidden, though the drive has it");
    assert!(matches!(get(&store, &keys, None).wait().items[0], Err(MissReason::Absent)));
    assert_eq!(put(&store, &keys), [PutStatus::Stored]);
    assert_eq!(whole(&get(&store, &keys, None).wait(), &keys), [Ok(())]);
}

#[test]
fn a_load_publishes_only_while_the_generation_that_it_began_with_is_the_keys() {
    let (disk, store, keys) = on_drive(1, |_| {});
    disk.shut_reads(true);
    let waiter = get(&store, &keys, None);
    let ns = namespace(&store);
    store.delete(&ns, &Delete::Keys(keys.clone())).expect("open").wait();
    let new = vec![vec![9u8; BLOCK]];
    store.put(&ns, &keys, new.clone(), &PutOptions::default()).expect("open").wait();
    disk.shut_reads(false);
    assert!(matches!(waiter.wait().items[0], Err(MissReason::Superseded)));
    store.flush(None).expect("open").wait();
    let lease = get(&store, &keys, None).wait();
    assert_eq!(lease.items[0].as_ref().expect("a hit").as_slice(), new[0]);
    // Closing waits for the load to end: then it has had its chance.
    store.close();
    assert_eq!(counter(&store, "onboarded"), 0);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn a_waiter_that_cancels_leaves_the_others_their_load() {
    let (disk, store, keys) = on_drive(1, |_| {});
    disk.shut_reads(true);
    let patient = get(&store, &keys, None);
    let (sent, ended) = std::sync::mpsc::channel();
    let ns = namespace(&store);
    let done = move |leases: Leases| sent.send(leases).expect("held");
    let hasty = store.get_with(&ns, &keys, &GetOptions::default(), done).expect("open");
    store.cancel(hasty.expect("in progress"));
    let cancelled = ended.recv().expect("it ended while the device stalls");
    assert!(matches!(cancelled.items[0], Err(MissReason::Cancelled)));
    disk.shut_reads(false);
    assert_eq!(whole(&patient.wait(), &keys), [Ok(())]);
    assert_eq!(disk.reads.load(Ordering::SeqCst), 1);
}

#[test]
fn onboarding_keeps_the_copy_on_the_drive_and_evicting_a_clean_block_writes_nothing() {
    let (disk, store, keys) = on_drive(64, |_| {});
    let writes = Arc::new(AtomicUsize::new(0));
    let count = writes.clone();
    disk.inner.set_fault(Some(Box::new(move |op| {
        if matches!(op, DiskOp::WriteAt { .. } | DiskOp::Create { .. }) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        None
    })));
    for keys in keys.chunks(8).chain(keys.chunks(8)) {
        assert_eq!(whole(&get(&store, keys, None).wait(), keys), [Ok(()); 8]);
    }
    let reads = disk.reads.load(Ordering::SeqCst);
    assert_eq!(get(&store, &keys[56..], None).wait().hits(), 8);
    assert_eq!(disk.reads.load(Ordering::SeqCst), reads, "a hit in memory reads no drive");
    assert!(counter(&store, "evicted_dram") >= 64, "twice as many blocks as slots, twice");
    assert_eq!(store.stats().nvme.blocks, 64);
    store.flush(None).expect("open").wait();
    assert_eq!(writes.load(Ordering::SeqCst), 0);
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let last = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < last, "never came: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn case_36_a_load_is_read_while_the_threads_that_write_stall() {
    let (disk, store, keys) = on_drive(4, |config| config.store_threads = 1);
    disk.writes.store(0, Ordering::SeqCst);
    disk.shut_writes(true);
    put(&store, &chain(&namespace(&store), 2, 8));
    until("a write stalls", || disk.writes.load(Ordering::SeqCst) > 0);
    let loaded = get(&store, &keys, Some(Duration::from_secs(20))).wait();
    disk.shut_writes(false);
    assert_eq!(whole(&loaded, &keys), [Ok(()); 4], "they waited for the writes");
}

#[test]
fn a_group_is_synced_before_the_payloads_of_the_next_are_written() {
    let (disk, store, _) = on_drive(1, |config| config.store_threads = 1);
    let steps = Arc::new(Mutex::new(Vec::new()));
    let seen = steps.clone();
    disk.inner.set_fault(Some(Box::new(move |op| {
        match op {
            DiskOp::WriteAt { len: BLOCK, .. } => seen.lock().push("payload"),
            DiskOp::Sync { .. } => seen.lock().push("sync"),
            _ => {}
        }
        None
    })));
    disk.writes.store(0, Ordering::SeqCst);
    disk.shut_writes(true);
    put(&store, &chain(&namespace(&store), 2, 1));
    until("the first group stalls", || disk.writes.load(Ordering::SeqCst) > 0);
    // The next group, all of which is handed out when the first one's payload is written.
    put(&store, &chain(&namespace(&store), 3, 16));
    disk.let_long_writes(BLOCK, 1);
    disk.shut_writes(false);
    // While the payloads of the next group go no further.
    until("the first group is synced", || steps.lock().contains(&"sync"));
    assert_eq!(*steps.lock(), ["payload", "sync"]);
    disk.let_long_writes(BLOCK, 100);
    until("all is written", || steps.lock().iter().filter(|step| **step == "sync").count() > 1);
}
