//! Scrubs find what is bad before anybody asks for it.

mod support;

use std::io;
use std::sync::Arc;
use std::time::Duration;
use support::{blocks_of, bytes_of, chain, config, namespace, seams};
use tiered_kv::io_seams::{Disk, DiskOp, MemDisk};
use tiered_kv::{
    BlockKey, GetOptions, LookupMode, MissReason, PutOptions, ScrubReport, Store, StoreConfig,
};

fn put(store: &Store, keys: &[BlockKey]) {
    let ns = namespace(store);
    let put = store.put(&ns, keys, blocks_of(keys), &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), keys.len());
    assert!(store.flush(None).expect("open").wait().all_durable());
}

fn counter(store: &Store, name: &str) -> u64 {
    store.stats().counters.iter().find(|(n, _)| *n == name).expect(name).1
}

fn open(disk: &Arc<MemDisk>, config: &StoreConfig) -> Arc<Store> {
    Store::open_with(config, &seams(disk.clone())).expect("opens")
}

fn small() -> StoreConfig {
    config("/simulated".as_ref(), 4 << 20)
}

/// Flips a bit of a block on the disk.
fn damage(disk: &MemDisk, key: &BlockKey) {
    let head = &bytes_of(key)[..64];
    for (name, _) in disk.list().expect("lists") {
        let Some(bytes) = disk.read_file(&name, 64 << 20).expect("reads") else { continue };
        let at = (0..bytes.len() / 512).map(|n| n * 512).find(|at| bytes[*at..].starts_with(head));
        if let Some(at) = at {
            return disk.flip(&name, at as u64 + 5000, 4);
        }
    }
    panic!("the block is on the disk");
}

#[test]
fn case_6_a_scrub_finds_what_nobody_asked_for_and_rewrites_what_memory_has() {
    let disk = Arc::new(MemDisk::new());
    let store = open(&disk, &small());
    let keys = chain(&namespace(&store), 1, 8);
    put(&store, &keys);
    let whole = store.scrub(None).expect("open").wait();
    let bytes = 8 * support::BLOCK as u64;
    assert_eq!(whole, ScrubReport { blocks: 8, bytes, complete: true, ..ScrubReport::default() });
    // In memory still: the copy on the drive is replaced.
    damage(&disk, &keys[3]);
    let found = store.scrub(None).expect("open").wait();
    assert_eq!((found.blocks, found.corrupt, found.complete), (7, 1, true));
    assert_eq!(counter(&store, "scrub_faults"), 1);
    assert_eq!(counter(&store, "quarantined"), 1);
    assert!(store.flush(None).expect("open").wait().all_durable(), "written anew");
    assert_eq!(store.scrub(None).expect("open").wait().blocks, 8);
    store.close();
    drop(store);
    // On the drive only: it is gone before anybody is promised it.
    let store = open(&disk, &small());
    damage(&disk, &keys[5]);
    let found = store.scrub(None).expect("open").wait();
    assert_eq!((found.blocks, found.corrupt), (7, 1));
    let ns = namespace(&store);
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Prefix).hits, 5);
    let got = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
    assert!(matches!(got.items[5], Err(MissReason::Absent)));
    drop(got);
    put(&store, &keys[5..6]);
    assert_eq!(store.scrub(None).expect("open").wait().blocks, 8, "the next store heals");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn a_scrub_of_a_drive_that_fails_says_so_and_stops_asking_it() {
    let disk = Arc::new(MemDisk::new());
    let store = open(&disk, &StoreConfig { drive_retry_s: 600.0, ..small() });
    let keys = chain(&namespace(&store), 1, 16);
    put(&store, &keys);
    store.close();
    drop(store);
    let store = open(&disk, &StoreConfig { drive_retry_s: 600.0, ..small() });
    disk.set_fault(Some(Box::new(|op| {
        matches!(op, DiskOp::ReadAt { .. }).then(|| io::Error::other("planted"))
    })));
    let found = store.scrub(None).expect("open").wait();
    assert!((3..=6).contains(&found.unreadable), "{found:?}");
    assert_eq!(found.unreadable + found.skipped, 16, "the rest was left alone: {found:?}");
    assert!(found.complete);
}

#[test]
fn the_background_reads_everything_back_while_nothing_else_is_to_be_done() {
    let disk = Arc::new(MemDisk::new());
    let store = open(&disk, &StoreConfig { scrub_bytes_per_s: 1 << 30, ..small() });
    let keys = chain(&namespace(&store), 1, 8);
    put(&store, &keys);
    for _ in 0..6000 {
        if counter(&store, "scrub_rounds") > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(counter(&store, "scrub_rounds"), 1);
    assert!(counter(&store, "scrubbed") >= 1);
    assert_eq!(counter(&store, "scrub_faults"), 0);
    drop(store);
    let store = open(&disk, &small());
    put(&store, &chain(&namespace(&store), 2, 8));
    assert_eq!(counter(&store, "scrubbed"), 0, "off by default");
}

#[test]
fn a_scrub_ends_at_its_deadline_and_with_the_store() {
    let disk = support::GatedDisk::new();
    let open = || Store::open_with(&small(), &seams(disk.clone())).expect("opens");
    let store = open();
    put(&store, &chain(&namespace(&store), 1, 8));
    disk.shut_reads(true);
    let ended = store.scrub(Some(Duration::from_millis(50))).expect("open").wait();
    assert_eq!((ended.complete, ended.blocks), (false, 0));
    let another = store.scrub(None).expect("open");
    disk.shut_reads(false);
    assert!(another.wait().complete);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}
