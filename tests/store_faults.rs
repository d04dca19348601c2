//! Faults are misses: corruption, failing and stalling devices, deadlines, cancellation, full
//! tiers.

mod support;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::{
    BLOCK, GatedDisk, blocks_of, bytes_of, chain, config, memory_only, namespace, seams,
};
use tiered_kv::io_seams::{DiskOp, MemDisk};
use tiered_kv::{
    BlockKey, ErrorKind, GetOptions, LookupMode, MissReason, OnFormatMismatch, PutOptions,
    PutStatus, Store, StoreConfig,
};

fn put(store: &Store, keys: &[BlockKey]) -> Vec<PutStatus> {
    let ns = namespace(store);
    let put = store.put(&ns, keys, blocks_of(keys), &PutOptions::default());
    put.expect("open").wait().statuses
}

fn fetch(store: &Store, keys: &[BlockKey], timeout: Duration) -> Vec<Result<(), MissReason>> {
    let ns = namespace(store);
    let options = GetOptions { timeout: Some(timeout), ..GetOptions::default() };
    let leases = store.get(&ns, keys, &options).expect("open").wait();
    let check = |(key, item): (&BlockKey, &Result<tiered_kv::Lease, MissReason>)| {
        item.as_ref().map_err(|reason| *reason).map(|lease| {
            assert_eq!(lease.as_slice(), bytes_of(key), "the bytes that were stored");
        })
    };
    keys.iter().zip(&leases.items).map(check).collect()
}

const LONG: Duration = Duration::from_secs(30);

fn stats_of(store: &Store, name: &str) -> u64 {
    let stats = store.stats();
    let counter = stats.counters.iter().chain(&stats.misses).find(|(n, _)| *n == name);
    counter.unwrap_or_else(|| panic!("no counter {name}")).1
}

/// Stores a chain in a fresh directory, closes, and lets `damage` at the segment files.
fn damaged(damage: impl Fn(&mut Vec<u8>)) -> (tempfile::TempDir, Arc<Store>, Vec<BlockKey>) {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(&dir.path().join("kv"), 4 << 20);
    let store = Store::open(&config).expect("opens");
    let keys = chain(&namespace(&store), 1, 6);
    put(&store, &keys);
    store.close();
    drop(store);
    for entry in std::fs::read_dir(dir.path().join("kv")).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("segment-")) {
            let mut bytes = std::fs::read(&path).expect("a segment");
            damage(&mut bytes);
            std::fs::write(&path, bytes).expect("a segment");
        }
    }
    // Without the checkpoint of the clean close, recovery believes the header tables alone.
    std::fs::remove_file(dir.path().join("kv/checkpoint.tkv")).expect("it was written");
    let store = Store::open(&config).expect("opens on damage");
    (dir, store, keys)
}

fn heals(store: &Store, keys: &[BlockKey]) {
    put(store, keys);
    store.flush(None).expect("open").wait();
    assert!(fetch(store, keys, LONG).iter().all(Result::is_ok), "the next store heals the key");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn case_6_a_flipped_payload_bit_is_a_miss_is_counted_and_healed() {
    let (_dir, store, keys) = damaged(|bytes| {
        let at = find(bytes, &bytes_of(&chain_key(2)));
        bytes[at + 777] ^= 1;
    });
    let got = fetch(&store, &keys, LONG);
    assert_eq!(got[2], Err(MissReason::Corrupt));
    assert_eq!(got.iter().filter(|r| r.is_ok()).count(), 5, "the others are whole");
    assert_eq!(stats_of(&store, "quarantined"), 1);
    let ns = namespace(&store);
    let found = store.lookup(&ns, &keys, LookupMode::Prefix);
    assert_eq!(found.hits, 2, "case 33: after the failed load a lookup no longer says present");
    assert_eq!(store.stats().orphans, 3, "the blocks behind it are orphans");
    heals(&store, &keys);
    assert_eq!(store.stats().orphans, 0, "adopted again");
}

fn chain_key(index: usize) -> BlockKey {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    chain(&namespace(&store), 1, 6)[index]
}

fn find(haystack: &[u8], needle: &[u8]) -> usize {
    (0..haystack.len() / 512)
        .map(|sector| sector * 512)
        .find(|at| haystack[*at..].starts_with(&needle[..64]))
        .expect("the block is in the file")
}

#[test]
fn case_6_any_damage_to_a_segment_file_is_never_served() {
    let zero_half = |bytes: &mut Vec<u8>| {
        let half = bytes.len() / 2;
        bytes[..half].fill(0);
    };
    let swap_blocks = |bytes: &mut Vec<u8>| {
        let a = find(bytes, &bytes_of(&chain_key(1)));
        let b = find(bytes, &bytes_of(&chain_key(3)));
        for i in 0..BLOCK {
            bytes.swap(a + i, b + i);
        }
    };
    let swap_headers = |bytes: &mut Vec<u8>| {
        for i in 0..512 {
            bytes.swap(4096 + i, 4096 + 512 + i);
        }
    };
    type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);
    let cases: [(&str, Damage<'_>); 7] = [
        ("zeroed", &|bytes| bytes.fill(0)),
        ("half zeroed", &zero_half),
        ("ones", &|bytes| bytes.fill(0xff)),
        ("truncated", &|bytes| bytes.truncate(bytes.len() / 2)),
        ("lengthened", &|bytes| bytes.extend([7; 4096])),
        ("blocks swapped", &swap_blocks),
        ("headers swapped", &swap_headers),
    ];
    for (name, damage) in cases {
        let (_dir, store, keys) = damaged(damage);
        let got = fetch(&store, &keys, LONG);
        assert!(got.iter().any(Result::is_err), "{name}: the damage shows");
        heals(&store, &keys);
    }
}

#[test]
fn case_14_files_deleted_under_load_are_no_crash() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let store = Store::open(&config(&path, 4 << 20)).expect("opens");
    let ns = namespace(&store);
    put(&store, &chain(&ns, 1, 8));
    store.flush(None).expect("open").wait();
    std::fs::remove_dir_all(&path).expect("removed");
    for path in 2..30 {
        put(&store, &chain(&ns, path, 8));
        fetch(&store, &chain(&ns, 1, 8), LONG);
    }
    let report = store.flush(Some(LONG)).expect("open").wait();
    assert_eq!(report.pending, 0, "what cannot be written is said to have failed: {report:?}");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn case_7_a_block_whose_write_fails_is_never_called_durable() {
    for fails in ["write", "payload", "sync", "create"] {
        let disk = Arc::new(MemDisk::new());
        let store = memory_store(&disk);
        disk.set_fault(Some(Box::new(move |op| {
            let hit = match op {
                DiskOp::WriteAt { len: BLOCK, .. } => matches!(fails, "write" | "payload"),
                DiskOp::WriteAt { .. } => fails == "write",
                DiskOp::Sync { .. } => fails == "sync",
                DiskOp::Create { .. } => fails == "create",
                _ => false,
            };
            hit.then(|| io::Error::from(io::ErrorKind::StorageFull))
        })));
        let ns = namespace(&store);
        let keys = chain(&ns, 1, 4);
        put(&store, &keys);
        let report = store.flush(None).expect("open").wait();
        assert_eq!(report.failed, 4, "{fails}: {report:?}");
        assert!(!report.all_durable());
        assert!(fetch(&store, &keys, LONG).iter().all(Result::is_ok), "memory still has them");
        store.close();
        drop(store);
        disk.set_fault(None);
        let store = memory_store(&disk.crash(|_| false).into());
        let found = store.lookup(&namespace(&store), &keys, LookupMode::Each);
        assert!(found.states.iter().all(|s| !s.is_hit()), "{fails}: never a hit after a crash");
    }
}

fn memory_store(disk: &Arc<MemDisk>) -> Arc<Store> {
    let config = config("/simulated".as_ref(), 4 << 20);
    Store::open_with(&config, &seams(disk.clone())).expect("opens")
}

#[test]
fn case_13_a_full_device_pauses_writing_and_resumes_nothing_wedges() {
    let disk = Arc::new(MemDisk::new());
    let store = memory_store(&disk);
    disk.set_fault(Some(Box::new(|op| {
        let create = matches!(op, DiskOp::Create { .. });
        create.then(|| io::Error::from(io::ErrorKind::StorageFull))
    })));
    let ns = namespace(&store);
    for path in 0..40 {
        let statuses = put(&store, &chain(&ns, path, 4));
        assert!(
            statuses.iter().all(|s| matches!(s, PutStatus::Stored | PutStatus::Throttled)),
            "{statuses:?}"
        );
        store.flush(None).expect("open").wait();
    }
    assert!(store.health().drive_paused);
    assert!(fetch(&store, &chain(&ns, 39, 4), LONG).iter().all(Result::is_ok));
    assert_eq!(store.stats().nvme.used_bytes, 0);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

fn gated() -> (Arc<GatedDisk>, Arc<Store>, Vec<BlockKey>) {
    let disk = GatedDisk::new();
    let config: StoreConfig = config("/simulated".as_ref(), 4 << 20);
    let open = || Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let store = open();
    let keys = chain(&namespace(&store), 1, 4);
    put(&store, &keys);
    store.close();
    drop(store);
    let store = open();
    disk.reads.store(0, Ordering::SeqCst);
    (disk, store, keys)
}

#[test]
fn case_15_a_load_on_a_stalled_device_misses_at_its_deadline_and_works_again_later() {
    let (disk, store, keys) = gated();
    disk.shut_reads(true);
    let got = fetch(&store, &keys, Duration::from_millis(50));
    assert!(got.iter().all(|r| *r == Err(MissReason::Deadline)), "{got:?}");
    disk.shut_reads(false);
    assert!(fetch(&store, &keys, LONG).iter().all(Result::is_ok));
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn case_15_a_get_into_that_missed_its_deadline_never_writes_into_the_buffer_later() {
    let (disk, store, keys) = gated();
    disk.shut_reads(true);
    let ns = namespace(&store);
    let options = GetOptions { timeout: Some(Duration::from_millis(30)), ..GetOptions::default() };
    let canary = vec![vec![0xa5u8; BLOCK]; 4];
    let report = store.get_into(&ns, &keys, canary.clone(), &options).expect("ok").wait();
    assert_eq!(report.hits(), 0);
    disk.shut_reads(false);
    assert!(fetch(&store, &keys, LONG).iter().all(Result::is_ok), "the loads have ended");
    assert_eq!(report.buffers, canary, "the buffers were given back untouched");
}

#[test]
fn loads_of_one_block_are_one_read_with_a_deadline_for_each_waiter() {
    let (disk, store, keys) = gated();
    disk.shut_reads(true);
    let ns = namespace(&store);
    let get = |timeout: Duration| {
        let options = GetOptions { timeout: Some(timeout), ..GetOptions::default() };
        store.get(&ns, &keys[..1], &options).expect("open")
    };
    let waiters: Vec<_> = (0..8).map(|_| get(LONG)).collect();
    let hasty = get(Duration::from_millis(20)).wait();
    assert!(matches!(hasty.items[0], Err(MissReason::Deadline)));
    disk.shut_reads(false);
    for waiter in waiters {
        assert_eq!(waiter.wait().hits(), 1);
    }
    assert_eq!(disk.reads.load(Ordering::SeqCst), 1, "single flight");
}

#[test]
fn a_cancelled_get_ends_at_once_and_leaks_nothing() {
    let (disk, store, keys) = gated();
    disk.shut_reads(true);
    let ns = namespace(&store);
    let (sent, ended) = std::sync::mpsc::channel();
    let options = GetOptions::default();
    let op = store.get_with(&ns, &keys, &options, move |l| sent.send(l).expect("held"));
    store.cancel(op.expect("open").expect("in progress"));
    let leases = ended.recv().expect("it ended while the device stalls");
    assert!(leases.items.iter().all(|i| matches!(i, Err(MissReason::Cancelled))));
    disk.shut_reads(false);
    assert!(fetch(&store, &keys, LONG).iter().all(Result::is_ok));
    assert_eq!(store.stats().leased_bytes, 0);
}

#[test]
fn case_18_more_dirty_bytes_than_the_mark_are_throttled_and_closing_counts_what_it_drops() {
    let disk = GatedDisk::new();
    let mut config = config("/simulated".as_ref(), 4 << 20);
    config.dirty_high_fraction = 0.5;
    config.close_timeout_s = 0.05;
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    disk.shut_writes(true);
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 20);
    let statuses = put(&store, &keys);
    let stored = statuses.iter().filter(|s| **s == PutStatus::Stored).count();
    assert_eq!(stored, 16, "half of 512 KiB");
    assert!(statuses[16..].iter().all(|s| *s == PutStatus::Throttled));
    let events = store.events(0);
    assert!(keys[16..].iter().all(|key| events.iter().any(|e| e.key == *key)));
    let writes = disk.clone();
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        writes.shut_writes(false);
    });
    assert_eq!(store.close().dropped, 16);
    opener.join().expect("opened");
}

#[test]
fn a_closed_store_says_so() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 1);
    store.close();
    let kinds = [
        store.get(&ns, &keys, &GetOptions::default()).expect_err("closed").kind(),
        store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default()).expect_err("closed").kind(),
        store.flush(None).expect_err("closed").kind(),
        store.reserve(&ns, &keys, &PutOptions::default()).expect_err("closed").kind(),
    ];
    assert_eq!(kinds, [ErrorKind::Closed; 4]);
    assert_eq!(store.close().dropped, 0, "a second close does nothing");
}

#[test]
fn a_directory_that_cannot_be_used_is_refused_with_the_field_and_the_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let good = config(&path, 4 << 20);
    let open = |config: &StoreConfig| Store::open(config).expect_err("must be refused");
    drop(Store::open(&good).expect("opens"));

    std::fs::write(dir.path().join("file"), b"x").expect("written");
    let strange = open(&config(dir.path(), 4 << 20));
    assert_eq!(strange.kind(), ErrorKind::FormatMismatch);
    assert!(strange.to_string().contains("holds other files"), "{strange}");

    let missing = open(&config(&dir.path().join("a/b/c"), 4 << 20));
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().contains("nvme_paths"), "{missing}");

    let superblock = path.join("superblock.tkv");
    let mut bytes = std::fs::read(&superblock).expect("a superblock");
    bytes[8] = 99;
    std::fs::write(&superblock, bytes).expect("written");
    let version = open(&good);
    assert_eq!(version.kind(), ErrorKind::FormatMismatch);
    assert!(version.to_string().contains("version 99"), "{version}");
    assert!(version.to_string().contains("on_format_mismatch"), "{version}");
    let reset = StoreConfig { on_format_mismatch: OnFormatMismatch::Reset, ..good.clone() };
    drop(Store::open(&reset).expect("a reset opens"));
    drop(Store::open(&good).expect("and is of this version from then on"));
}

#[test]
fn case_5_sessions_under_spill_never_see_anothers_bytes() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut config = config(&dir.path().join("kv"), 8 << 20);
    config.load_timeout_s = 30.0;
    let store = Store::open(&config).expect("opens");
    std::thread::scope(|scope| {
        for worker in 0..8u32 {
            let store = &store;
            scope.spawn(move || {
                let ns = namespace(store);
                for round in 0..36 {
                    // 96 sessions, twelve to a worker, over a tier of 32 blocks.
                    let keys = chain(&ns, worker * 12 + round % 12, 3);
                    put(store, &keys);
                    for miss in fetch(store, &keys, LONG).into_iter().filter_map(Result::err) {
                        let room = [MissReason::Absent, MissReason::NoSpace, MissReason::LeaseCap];
                        assert!(room.contains(&miss), "{miss:?}");
                    }
                }
            });
        }
    });
    store.flush(None).expect("open").wait();
    let audit = store.audit();
    assert_eq!(audit.faults, Vec::<String>::new());
    assert_eq!(audit.dram_used_bytes, audit.dram_block_bytes);
    let stats = store.stats();
    let missed: u64 = stats.misses.iter().map(|(_, n)| n).sum();
    assert_eq!(stats.dram.hits + stats.nvme.hits + missed, stats.requested, "case 27");
}

/// A caller's buffer that changes while the core has it.
struct Fickle {
    asked: std::sync::atomic::AtomicUsize,
    panics: bool,
    block: Vec<u8>,
}

impl tiered_kv::BlockSource for Fickle {
    fn blocks(&self) -> usize {
        1
    }

    fn block(&self, _index: usize) -> &[u8] {
        if self.asked.fetch_add(1, Ordering::SeqCst) == 0 {
            return &self.block;
        }
        assert!(!self.panics, "planted");
        &self.block[1..]
    }
}

#[test]
fn a_source_that_panics_or_shrinks_ends_its_call_and_stores_nothing() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 1);
    for panics in [true, false] {
        let source = Fickle { asked: 0.into(), panics, block: vec![7; BLOCK] };
        let report = store.put(&ns, &keys, source, &PutOptions::default()).expect("open").wait();
        assert_eq!(report.statuses, [PutStatus::Ended], "panics: {panics}");
    }
    assert_eq!(fetch(&store, &keys, LONG), [Err(MissReason::Absent)]);
    let audit = store.audit();
    assert_eq!((audit.dram_used_bytes, audit.faults), (0, Vec::new()));
}

#[test]
fn a_directory_in_a_segments_place_costs_that_segment_only() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let config = config(&path, 4 << 20);
    drop(Store::open(&config).expect("opens"));
    std::fs::create_dir(path.join("segment-000000.tkv")).expect("planted");
    let store = Store::open(&config).expect("opens");
    let keys = chain(&namespace(&store), 1, 4);
    put(&store, &keys);
    assert!(store.flush(None).expect("open").wait().all_durable(), "the next segment is taken");
}

#[test]
fn an_overlong_superblock_can_be_reset() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let good = config(&path, 4 << 20);
    drop(Store::open(&good).expect("opens"));
    std::fs::write(path.join("superblock.tkv"), vec![1; 10_000]).expect("written");
    let refused = Store::open(&good).expect_err("not a superblock");
    assert!(refused.to_string().contains("on_format_mismatch"), "{refused}");
    let reset = StoreConfig { on_format_mismatch: OnFormatMismatch::Reset, ..good };
    drop(Store::open(&reset).expect("reset"));
}
