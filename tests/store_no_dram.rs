//! A store without T1: blocks pass through a small memory, and lie on the drive only.

mod support;

use std::io;
use std::sync::Arc;
use std::time::Duration;
use support::{BLOCK, GatedDisk, backends, blocks_of, bytes_of, chain, namespace, seams, spec};
use tiered_kv::io_seams::{DiskOp, MemDisk};
use tiered_kv::{
    AlignedBuf, BlockKey, ErrorKind, GetOptions, KvLayout, LookupMode, MissReason, NamespaceSpec,
    OnStall, PutOptions, PutStatus, Residency, Store, StoreConfig, Tier,
};

const LONG: Duration = Duration::from_secs(30);

fn config(dir: &std::path::Path) -> StoreConfig {
    StoreConfig {
        dram_capacity: Some(0),
        staging_capacity: 512 << 10,
        ..support::config(dir, 8 << 20)
    }
}

fn put(store: &Store, keys: &[BlockKey], options: &PutOptions) -> Vec<PutStatus> {
    let ns = namespace(store);
    store.put(&ns, keys, blocks_of(keys), options).expect("open").wait().statuses
}

/// Loads into buffers of the heap and checks what came.
fn fetch(store: &Store, keys: &[BlockKey], timeout: Duration) -> Vec<Result<Tier, MissReason>> {
    let ns = namespace(store);
    let options = GetOptions { timeout: Some(timeout), ..GetOptions::default() };
    let buffers = vec![vec![0xa5u8; BLOCK]; keys.len()];
    let report = store.get_into(&ns, keys, buffers, &options).expect("ok").wait();
    for ((item, buffer), key) in report.items.iter().zip(&report.buffers).zip(keys) {
        assert!(item.is_err() || *buffer == bytes_of(key), "the bytes that were stored");
    }
    report.items
}

fn counter(store: &Store, name: &str) -> u64 {
    store.stats().counters.iter().find(|(n, _)| *n == name).expect(name).1
}

fn at_rest(store: &Store) {
    let audit = store.audit();
    assert_eq!(audit.faults, Vec::<String>::new());
    assert_eq!(audit.dram_used_bytes, 0, "nothing stays in memory");
    let stats = store.stats();
    assert_eq!((stats.staging_used_bytes, stats.loading_bytes, stats.dirty_bytes), (0, 0, 0));
    assert_eq!((stats.dram.capacity_bytes, stats.dram.blocks), (0, 0));
}

#[test]
fn a_put_is_durable_when_it_ends_and_comes_back_after_a_restart_by_either_way() {
    for backend in backends() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let config = StoreConfig { io_backend: backend, ..config(&dir.path().join("kv")) };
        let store = Store::open(&config).expect("opens");
        let ns = namespace(&store);
        let keys = chain(&ns, 1, 16);
        assert_eq!(put(&store, &keys, &PutOptions::default()), [PutStatus::Stored; 16]);
        let found = store.lookup(&ns, &keys, LookupMode::Prefix);
        assert!(found.states.iter().all(|s| *s == Residency::In(Tier::Nvme)), "{backend:?}");
        assert!(store.flush(None).expect("open").wait().all_durable());
        assert_eq!(put(&store, &keys, &PutOptions::default()), [PutStatus::Exists; 16]);
        at_rest(&store);
        store.close();
        drop(store);

        let store = Store::open(&config).expect("opens again");
        let ns = namespace(&store);
        assert_eq!(fetch(&store, &keys, LONG), [Ok(Tier::Nvme); 16], "{backend:?}");
        let region = store.register(AlignedBuf::new(16 * BLOCK).expect("memory"), BLOCK);
        let region = region.expect("valid");
        let slots = region.claim_all(&(0..16).collect::<Vec<_>>()).expect("free");
        let report = store.get_into(&ns, &keys, slots, &GetOptions::default()).expect("ok").wait();
        assert_eq!(report.items, [Ok(Tier::Nvme); 16]);
        for (slot, key) in report.buffers.iter().zip(&keys) {
            assert_eq!(slot.as_slice(), bytes_of(key));
        }
        let bounced = GetOptions { on_stall: OnStall::Bounce, ..GetOptions::default() };
        let report = store.get_into(&ns, &keys, report.buffers, &bounced).expect("ok").wait();
        assert_eq!(report.hits(), 16);
        assert_eq!(counter(&store, "direct_reads"), 16);
        at_rest(&store);
    }
}

#[test]
fn more_than_the_staging_memory_passes_through_it_where_puts_may_wait() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(&config(&dir.path().join("kv"))).expect("opens");
    let keys = chain(&namespace(&store), 1, 100);
    let waits = PutOptions { wait: Some(LONG), ..PutOptions::default() };
    assert_eq!(put(&store, &keys, &waits), [PutStatus::Stored; 100]);
    for part in keys.chunks(20) {
        assert!(fetch(&store, part, LONG).iter().all(Result::is_ok));
    }
    at_rest(&store);
    store.prefetch(&namespace(&store), &keys[..7]).expect("open");
    assert_eq!(counter(&store, "prefetch_ignored"), 7);
    let ns = namespace(&store);
    let deleted = store.delete(&ns, &tiered_kv::Delete::Keys(keys[..50].to_vec()));
    assert_eq!(deleted.expect("open").wait().removed, 50);
    assert_eq!(fetch(&store, &keys[..1], LONG), [Err(MissReason::Absent)]);
    at_rest(&store);
}

#[test]
fn a_block_whose_write_failed_is_reported_and_not_stored() {
    for fails in ["write", "sync", "create"] {
        let disk = Arc::new(MemDisk::new());
        let store = Store::open_with(&config("/simulated".as_ref()), &seams(disk.clone()));
        let store = store.expect("opens");
        disk.set_fault(Some(Box::new(move |op| {
            let hit = match op {
                DiskOp::WriteAt { .. } => fails == "write",
                DiskOp::Sync { .. } => fails == "sync",
                DiskOp::Create { .. } => fails == "create",
                _ => false,
            };
            hit.then(|| io::Error::from(io::ErrorKind::StorageFull))
        })));
        let ns = namespace(&store);
        let keys = chain(&ns, 1, 4);
        let statuses = put(&store, &keys, &PutOptions::default());
        assert_eq!(statuses, [PutStatus::Failed; 4], "{fails}");
        let found = store.lookup(&ns, &keys, LookupMode::Each);
        assert!(found.states.iter().all(|s| *s == Residency::Absent), "{fails}");
        assert_eq!(fetch(&store, &keys, LONG), [Err(MissReason::Absent); 4], "{fails}");
        at_rest(&store);
    }
}

#[test]
fn a_put_is_not_there_before_it_is_written_and_another_put_of_the_key_waits_with_it() {
    let disk = GatedDisk::new();
    let store = Store::open_with(&config("/simulated".as_ref()), &seams(disk.clone()));
    let store = store.expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 4);
    disk.shut_writes(true);
    let begin = |timeout| {
        let options = PutOptions { timeout: Some(timeout), ..PutOptions::default() };
        store.put(&ns, &keys, blocks_of(&keys), &options).expect("open")
    };
    let (first, second) = (begin(LONG), begin(LONG));
    let hasty = begin(Duration::from_millis(30)).wait();
    assert_eq!(hasty.statuses, [PutStatus::Ended; 4], "its deadline is its own");
    let found = store.lookup(&ns, &keys, LookupMode::Each);
    assert!(found.states.iter().all(|s| *s == Residency::Writing), "{found:?}");
    let first = first.wait_for(Duration::from_millis(20)).expect_err("it is not durable");
    disk.shut_writes(false);
    assert_eq!(first.wait().statuses, [PutStatus::Stored; 4]);
    assert_eq!(second.wait().statuses, [PutStatus::Exists; 4]);
    at_rest(&store);
}

#[test]
fn a_plain_buffer_keeps_its_deadline_on_a_stalled_device_and_is_not_written_later() {
    let disk = GatedDisk::new();
    let store = Store::open_with(&config("/simulated".as_ref()), &seams(disk.clone()));
    let store = store.expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 4);
    put(&store, &keys, &PutOptions::default());
    disk.shut_reads(true);
    let soon = GetOptions { timeout: Some(Duration::from_millis(30)), ..GetOptions::default() };
    let canary = vec![vec![0xa5u8; BLOCK]; 4];
    let report = store.get_into(&ns, &keys, canary.clone(), &soon).expect("ok").wait();
    assert_eq!(report.items, [Err(MissReason::Deadline); 4]);
    disk.shut_reads(false);
    assert_eq!(fetch(&store, &keys, LONG), [Ok(Tier::Nvme); 4]);
    assert_eq!(report.buffers, canary);
    store.close();
    at_rest(&store);
}

#[test]
fn what_needs_a_tier_in_memory_says_so_and_what_fits_nowhere_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(&dir.path().join("kv"));
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 1);
    let get = store.get(&ns, &keys, &GetOptions::default()).expect_err("no leases");
    let reserve = store.reserve(&ns, &keys, &PutOptions::default()).expect_err("no slots");
    for err in [get, reserve] {
        assert_eq!(err.kind(), ErrorKind::Unsupported);
        assert!(err.context().contains("`dram_capacity` is 0"), "{err}");
    }
    let layout = KvLayout::grid(16, 40, 1, vec![16 << 10; 40]).expect("valid");
    let large = NamespaceSpec::new("large", "w", "float32", layout);
    let err = store.namespace(&large).expect_err("640 KiB do not fit in 512 KiB");
    assert!(err.context().contains("`staging_capacity` to 5242880 bytes"), "{err}");
    drop(store);
    let wider = StoreConfig { staging_capacity: 5 << 20, ..config };
    let store = Store::open(&wider).expect("opens");
    store.namespace(&large).expect("now it fits");
    store.namespace(&spec()).expect("as before");
}

#[test]
fn closing_waits_for_the_puts_under_way() {
    let disk = GatedDisk::new();
    let store = Store::open_with(&config("/simulated".as_ref()), &seams(disk.clone()));
    let store = store.expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 4);
    disk.shut_writes(true);
    let call = store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default()).expect("open");
    let call = call.wait_for(Duration::from_millis(50)).expect_err("the device stalls");
    let closer = {
        let store = store.clone();
        std::thread::spawn(move || store.close())
    };
    while !store.is_closed() {
        std::thread::yield_now();
    }
    disk.shut_writes(false);
    assert_eq!(call.wait().statuses, [PutStatus::Stored; 4]);
    assert_eq!(closer.join().expect("closed").dropped, 0);
}
