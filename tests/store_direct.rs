//! Direct reads on real directories and both backends, and on a device that stalls.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::{BLOCK, GatedDisk, backends, blocks_of, bytes_of, chain, config, namespace, seams};
use tiered_kv::io_seams::ManualClock;
use tiered_kv::{
    AlignedBuf, BlockKey, ErrorKind, GetOptions, KvLayout, LookupMode, MissReason, Namespace,
    NamespaceSpec, OnStall, PutOptions, PutStatus, Region, RegionSlot, Residency, Seams, Store,
    StoreConfig, Tier,
};

const CANARY: u8 = 0xa5;
const LONG: Duration = Duration::from_secs(30);

fn region(store: &Store, slots: usize) -> Arc<Region> {
    let memory = AlignedBuf::new(slots * BLOCK).expect("memory");
    let region = store.register(memory, BLOCK).expect("valid");
    for slot in 0..slots {
        region.write(slot, |bytes| bytes.fill(CANARY)).expect("free");
    }
    region
}

fn put(store: &Store, ns: &Namespace, keys: &[BlockKey], blocks: Vec<Vec<u8>>) {
    let report = store.put(ns, keys, blocks, &PutOptions::default()).expect("open").wait();
    assert!(report.statuses.iter().all(|s| *s == PutStatus::Stored), "{report:?}");
}

/// A store that was closed and opened again, so that a chain of blocks lies on its drive only.
fn reopened(config: &StoreConfig, n: u32) -> (Arc<Store>, Namespace, Vec<BlockKey>) {
    let store = Store::open(config).expect("opens");
    let keys = chain(&namespace(&store), 1, n);
    put(&store, &namespace(&store), &keys, blocks_of(&keys));
    store.close();
    drop(store);
    let store = Store::open(config).expect("opens again");
    let ns = namespace(&store);
    (store, ns, keys)
}

fn on(on_stall: OnStall, timeout: Duration) -> GetOptions {
    GetOptions { on_stall, timeout: Some(timeout), ..GetOptions::default() }
}

fn counter(store: &Store, name: &str) -> u64 {
    store.stats().counters.iter().find(|(n, _)| *n == name).expect(name).1
}

#[test]
fn a_direct_read_brings_what_was_stored_and_leaves_memory_alone() {
    for backend in backends() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let mut config = config(&dir.path().join("kv"), 4 << 20);
        config.io_backend = backend;
        let (store, ns, keys) = reopened(&config, 6);
        let region = region(&store, 10);
        assert_eq!(store.health().regions, 1);
        let places = [9, 3, 5, 0, 2, 7];
        let slots = region.claim_all(&places).expect("free");
        let report =
            store.get_into(&ns, &keys, slots, &on(OnStall::Wait, LONG)).expect("ok").wait();
        assert_eq!(report.items, [Ok(Tier::Nvme); 6], "{backend:?}");
        for (slot, key) in report.buffers.iter().zip(&keys) {
            assert_eq!(slot.as_slice(), bytes_of(key), "{backend:?}");
        }
        drop(report);
        let found = store.lookup(&ns, &keys, LookupMode::Each);
        let on_drive = Residency::In(Tier::Nvme);
        assert!(found.states.iter().all(|s| *s == on_drive), "not in T1 by that");
        assert_eq!(counter(&store, "direct_reads"), 6);
        assert_eq!(counter(&store, "direct_bytes"), 6 * BLOCK as u64);
        for slot in [1, 4, 6, 8] {
            let alone = |bytes: &[u8]| bytes.iter().all(|b| *b == CANARY);
            assert!(region.read(slot, alone).expect("free"), "slot {slot} was not asked for");
        }
        // From T1 they are copied, and a region's slots are put like any buffer.
        let leases = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
        assert_eq!(leases.hits(), 6);
        let slots = region.claim_all(&places).expect("free");
        let report = store.get_into(&ns, &keys, slots, &GetOptions::default()).expect("ok").wait();
        assert_eq!(report.items, [Ok(Tier::Dram); 6]);
        let others = chain(&ns, 2, 6);
        let stored = store.put(&ns, &others, report.buffers, &PutOptions::default());
        assert_eq!(stored.expect("open").wait().stored(), 6);
        assert_eq!(region.slots_used(), 0, "every slot was given back");
        let stats = store.stats();
        assert_eq!(stats.dram.hits + stats.nvme.hits, stats.requested);
        assert_eq!(store.audit().faults, Vec::<String>::new());
    }
}

#[test]
fn tails_that_fill_no_page_and_slots_off_the_page_grid_are_read_through_a_buffer() {
    let layouts = [
        KvLayout::uniform(4, 3 * 4096 + 100).expect("valid"),
        KvLayout::uniform(4, 700).expect("valid"),
        KvLayout::grid(4, 2, 1, vec![8192 + 512, 4096]).expect("valid"),
    ];
    for backend in backends() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let mut config = config(&dir.path().join("kv"), 8 << 20);
        config.io_backend = backend;
        for (number, layout) in layouts.iter().enumerate() {
            let len = layout.block_bytes() as usize;
            let spec = NamespaceSpec::new("m", format!("w{number}"), "float32", layout.clone());
            let block = |key: &BlockKey| -> Vec<u8> {
                (0..len).map(|i| key.0[i % 32] ^ (i / 7) as u8).collect()
            };
            let open = || Store::open(&config).expect("opens");
            let store = open();
            let ns = store.namespace(&spec).expect("valid");
            let keys = chain(&ns, 1, 5);
            put(&store, &ns, &keys, keys.iter().map(block).collect());
            store.close();
            drop(store);
            let store = open();
            let ns = store.namespace(&spec).expect("valid");
            // Slots on the grid of pages, and slots one behind the other.
            for stride in [len.next_multiple_of(4096), len] {
                let memory = vec![CANARY; 6 * stride + 3 * 4096];
                let region = store.register_strided(memory, len, stride).expect("valid");
                let slots = region.claim_all(&[0, 1, 3, 4, 2]).expect("free");
                let got = store.get_into(&ns, &keys, slots, &GetOptions::default());
                let report = got.expect("ok").wait();
                assert_eq!(report.items, [Ok(Tier::Nvme); 5], "{backend:?} {number} {stride}");
                for (slot, key) in report.buffers.iter().zip(&keys) {
                    assert!(slot.as_slice() == block(key), "{backend:?} {number} {stride}");
                }
                let next = region.read(5, |bytes| bytes.iter().all(|b| *b == CANARY));
                assert!(next.expect("free"), "nothing behind the last slot was touched");
            }
            assert_eq!(counter(&store, "direct_reads"), 10);
        }
    }
}

#[test]
fn a_corrupt_payload_is_a_miss_whose_slot_is_not_filled_and_heals() {
    for backend in backends() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let path = dir.path().join("kv");
        let mut config = config(&path, 4 << 20);
        config.io_backend = backend;
        let (store, _, keys) = reopened(&config, 4);
        store.close();
        drop(store);
        for entry in std::fs::read_dir(&path).expect("a directory") {
            let path = entry.expect("an entry").path();
            let mut bytes = std::fs::read(&path).expect("a file");
            let wanted = bytes_of(&keys[2]);
            let found = bytes.windows(64).position(|window| window == &wanted[..64]);
            if let Some(at) = found.filter(|_| path.to_string_lossy().contains("segment-")) {
                bytes[at + BLOCK - 1] ^= 4;
                std::fs::write(&path, bytes).expect("damaged");
            }
        }
        let store = Store::open(&config).expect("opens");
        let ns = namespace(&store);
        let region = region(&store, 4);
        let get = || {
            let slots = region.claim_all(&[0, 1, 2, 3]).expect("free");
            store.get_into(&ns, &keys, slots, &GetOptions::default()).expect("ok").wait().items
        };
        let nvme = Ok(Tier::Nvme);
        assert_eq!(get(), [nvme, nvme, Err(MissReason::Corrupt), nvme], "{backend:?}");
        assert_eq!(counter(&store, "quarantined"), 1);
        assert!(store.events(0).iter().any(|e| e.key == keys[2]), "it is in the log");
        assert_eq!(get()[2], Err(MissReason::Absent));
        let again = [bytes_of(&keys[2])].to_vec();
        let heal = PutOptions { parent: Some(keys[1]), ..PutOptions::default() };
        store.put(&ns, &keys[2..3], again, &heal).expect("open").wait();
        assert!(get().iter().all(Result::is_ok));
        assert_eq!(store.audit().faults, Vec::<String>::new());
    }
}

#[test]
fn a_slot_that_another_call_uses_is_refused_by_its_number_until_that_call_has_ended() {
    let (disk, store, ns, keys) = gated();
    let region = region(&store, 4);
    disk.shut_reads(true);
    let slots = region.claim_all(&[1, 2]).expect("free");
    let call = store.get_into(&ns, &keys[..2], slots, &on(OnStall::Wait, LONG)).expect("ok");
    let err = region.claim_all(&[0, 2]).expect_err("in use");
    assert_eq!(err.kind(), ErrorKind::InvalidArgument);
    assert!(err.context().contains("slot 2 is in use"), "{err}");
    assert!(region.read(1, |_| ()).is_err(), "reading claims the slot likewise");
    region.close();
    let weak = Arc::downgrade(&region);
    drop(region);
    disk.shut_reads(false);
    let report = call.wait();
    assert_eq!(report.hits(), 2, "a closed region keeps its memory for the call");
    for (slot, key) in report.buffers.iter().zip(&keys) {
        assert_eq!(slot.as_slice(), bytes_of(key));
    }
    drop(report);
    assert!(weak.upgrade().is_none(), "the last slot frees it");
    assert_eq!(store.health().regions, 0);
}

/// A store on a disk whose reads can be stopped, with a chain that only the drive has.
fn gated() -> (Arc<GatedDisk>, Arc<Store>, Namespace, Vec<BlockKey>) {
    let disk = GatedDisk::new();
    let config = config("/simulated".as_ref(), 4 << 20);
    let open = || Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let store = open();
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 4);
    put(&store, &ns, &keys, blocks_of(&keys));
    store.close();
    drop(store);
    let store = open();
    let ns = namespace(&store);
    // Not in the order in which they lie on the drive, so that no two of their reads are one call.
    (disk, store, ns, keys.into_iter().rev().collect())
}

/// Waits until `n` reads stand still in the device.
fn reads_stalled(disk: &GatedDisk, n: usize) {
    while disk.reads.load(Ordering::SeqCst) < n {
        std::thread::yield_now();
    }
}

fn untouched(slots: &[RegionSlot]) -> bool {
    slots.iter().all(|slot| slot.as_slice().iter().all(|byte| *byte == CANARY))
}

#[test]
fn with_bounce_a_deadline_is_kept_on_a_stalled_device_and_the_memory_stays_as_it_was() {
    let (disk, store, ns, keys) = gated();
    let region = region(&store, 4);
    disk.shut_reads(true);
    let slots = region.claim_all(&[0, 1, 2, 3]).expect("free");
    let soon = on(OnStall::Bounce, Duration::from_millis(30));
    let report = store.get_into(&ns, &keys, slots, &soon).expect("ok").wait();
    assert_eq!(report.items, [Err(MissReason::Deadline); 4], "it ended while the device stalls");
    disk.shut_reads(false);
    let leases = store.get(&ns, &keys, &on(OnStall::Wait, LONG)).expect("open").wait();
    assert_eq!(leases.hits(), 4, "the device is back");
    assert!(untouched(&report.buffers), "nobody wrote after the call had ended");
}

#[test]
fn with_wait_a_call_ends_only_when_the_device_no_longer_writes() {
    let (disk, store, ns, keys) = gated();
    let region = region(&store, 4);
    disk.shut_reads(true);
    disk.reads.store(0, Ordering::SeqCst);
    let slots = region.claim_all(&[0, 1, 2, 3]).expect("free");
    let (sent, ended) = std::sync::mpsc::channel();
    let wait = on(OnStall::Wait, LONG);
    let op = store.get_into_with(&ns, &keys, slots, &wait, move |r| sent.send(r).expect("held"));
    // Two threads load, so that two of the four reads wait for their turn.
    reads_stalled(&disk, 2);
    store.cancel(op.expect("in progress"));
    assert!(
        ended.recv_timeout(Duration::from_millis(200)).is_err(),
        "a cancellation does not end it while the device has the memory"
    );
    assert_eq!(region.slots_used(), 4);
    disk.shut_reads(false);
    let report = ended.recv().expect("it ends once the device is back");
    for ((item, slot), key) in report.items.iter().zip(&report.buffers).zip(&keys) {
        match item {
            Ok(_) => assert_eq!(slot.as_slice(), bytes_of(key)),
            Err(reason) => assert_eq!(*reason, MissReason::Cancelled),
        }
    }
    assert_eq!(counter(&store, "loads_cancelled"), 2, "what the device did not have was dropped");
    assert_eq!(store.audit().faults, Vec::<String>::new());
    assert_eq!(store.stats().loading_bytes, 0);
}

#[test]
fn with_wait_a_deadline_waits_for_the_device_too() {
    let disk = GatedDisk::new();
    let clock = Arc::new(ManualClock::new(1 << 60));
    let open = || {
        let seams = Seams { clock: clock.clone(), ..seams(disk.clone()) };
        Store::open_with(&config("/simulated".as_ref(), 4 << 20), &seams).expect("opens")
    };
    let store = open();
    let keys = chain(&namespace(&store), 1, 1);
    put(&store, &namespace(&store), &keys, blocks_of(&keys));
    store.close();
    drop(store);
    let store = open();
    let ns = namespace(&store);
    let region = region(&store, 4);
    disk.shut_reads(true);
    disk.reads.store(0, Ordering::SeqCst);
    let slots = region.claim_all(&[3]).expect("free");
    let soon = on(OnStall::Wait, Duration::from_secs(1));
    let call = store.get_into(&ns, &keys, slots, &soon).expect("ok");
    reads_stalled(&disk, 1);
    clock.advance(30_000_000_000);
    // A step, in which the deadline is seen.
    store.prefetch(&ns, &[]).expect("open");
    assert_eq!(region.slots_used(), 1, "the device has the memory");
    let slow: Vec<BlockKey> = store.events(0).iter().map(|event| event.key).collect();
    assert_eq!(slow, keys, "the log says that it was slow");
    let call = call.wait_for(Duration::from_millis(20)).expect_err("the device has the memory");
    disk.shut_reads(false);
    let report = call.wait();
    assert_eq!(report.items, [Ok(Tier::Nvme)], "what was filled and is sound counts, late or not");
    assert_eq!(report.buffers[0].as_slice(), bytes_of(&keys[0]));
}

#[test]
fn a_block_deleted_while_it_is_read_is_a_miss_and_its_place_on_the_drive_waits() {
    let (disk, store, ns, keys) = gated();
    let region = region(&store, 4);
    disk.shut_reads(true);
    let slots = region.claim_all(&[0]).expect("free");
    let call = store.get_into(&ns, &keys[3..], slots, &on(OnStall::Wait, LONG)).expect("ok");
    store.delete(&ns, &tiered_kv::Delete::Keys(keys[3..].to_vec())).expect("open").wait();
    let used = store.stats().nvme.used_bytes;
    assert_eq!(used, 4 * BLOCK as u64, "its slot is not free while it is read");
    disk.shut_reads(false);
    assert_eq!(call.wait().items, [Err(MissReason::Superseded)]);
    assert_eq!(store.stats().nvme.used_bytes, 3 * BLOCK as u64);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn a_direct_read_joins_a_load_under_way_and_stays_below_the_cap_of_loads() {
    let (disk, store, ns, keys) = gated();
    let region = region(&store, 4);
    disk.shut_reads(true);
    disk.reads.store(0, Ordering::SeqCst);
    let lease = store.get(&ns, &keys[..1], &on(OnStall::Wait, LONG)).expect("open");
    let slots = region.claim_all(&[0]).expect("free");
    let call = store.get_into(&ns, &keys[..1], slots, &on(OnStall::Wait, LONG)).expect("ok");
    disk.shut_reads(false);
    assert_eq!((lease.wait().hits(), call.wait().hits()), (1, 1));
    assert_eq!(disk.reads.load(Ordering::SeqCst), 1, "one read for both");
    store.close();
    drop(store);

    let mut config = config("/simulated".as_ref(), 4 << 20);
    config.max_load_bytes = 2 * BLOCK as u64;
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let slots = region.claim_all(&[0, 1, 2, 3]).expect("free");
    let report = store.get_into(&namespace(&store), &keys, slots, &GetOptions::default());
    let items = report.expect("ok").wait().items;
    let full = |reason: &MissReason| matches!(reason, MissReason::LoadCap | MissReason::NoSpace);
    assert!(
        items[..2].iter().all(Result::is_ok)
            && items[2..].iter().all(|i| i.is_err_and(|r| full(&r)))
    );
}

#[test]
fn a_load_that_nobody_waits_for_any_more_is_dropped_before_the_device_has_it() {
    let (disk, store, ns, keys) = gated();
    disk.shut_reads(true);
    disk.reads.store(0, Ordering::SeqCst);
    // Two threads load, so that two of the four reads wait for their turn.
    let (sent, ended) = std::sync::mpsc::channel();
    let op = store.get_with(&ns, &keys, &on(OnStall::Wait, LONG), move |l| _ = sent.send(l));
    reads_stalled(&disk, 2);
    store.cancel(op.expect("open").expect("in progress"));
    assert_eq!(ended.recv().expect("ended").hits(), 0);
    disk.shut_reads(false);
    let leases = store.get(&ns, &keys[..1], &on(OnStall::Wait, LONG)).expect("open").wait();
    assert_eq!(leases.hits(), 1);
    drop(leases);
    store.close();
    assert_eq!(counter(&store, "loads_cancelled"), 2);
    assert!(disk.reads.load(Ordering::SeqCst) < 4);
    assert_eq!(counter(&store, "load_faults"), 0, "and is no fault");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn a_region_off_every_drive_is_memory_all_the_same() {
    let store = Store::open(&support::memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 2);
    put(&store, &ns, &keys, blocks_of(&keys));
    let region = region(&store, 2);
    let slots = region.claim_all(&[1, 0]).expect("free");
    let report = store.get_into(&ns, &keys, slots, &GetOptions::default()).expect("ok").wait();
    assert_eq!(report.buffers[0].as_slice(), bytes_of(&keys[0]));
}
