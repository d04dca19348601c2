//! Deletes and several drives: what is deleted never comes back, what a drive loses is misses.

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::{blocks_of, chain, config, memory_only, namespace, seams, spec};
use tiered_kv::io_seams::{DiskOp, MemDisk};
use tiered_kv::{
    BlockKey, Delete, DriveState, GetOptions, LookupMode, PutOptions, Store, StoreConfig,
};

fn put(store: &Store, keys: &[BlockKey]) -> usize {
    let ns = namespace(store);
    store.put(&ns, keys, blocks_of(keys), &PutOptions::default()).expect("open").wait().stored()
}

fn flush(store: &Store) {
    assert!(store.flush(None).expect("open").wait().all_durable());
}

fn present(store: &Store, keys: &[BlockKey]) -> Vec<bool> {
    let found = store.lookup(&namespace(store), keys, LookupMode::Each);
    found.states.iter().map(|s| s.is_hit()).collect()
}

fn simulated(disk: &Arc<MemDisk>) -> Arc<Store> {
    let config = config("/simulated".as_ref(), 4 << 20);
    Store::open_with(&config, &seams(disk.clone())).expect("opens")
}

#[test]
fn deleted_keys_are_gone_from_both_tiers_and_after_a_crash_at_any_point() {
    let disk = Arc::new(MemDisk::new());
    let store = simulated(&disk);
    let keys = chain(&namespace(&store), 1, 6);
    put(&store, &keys);
    flush(&store);
    let what = Delete::Keys(keys[3..].to_vec());
    let report = store.delete(&namespace(&store), &what).expect("open").wait();
    assert_eq!((report.removed, report.durable), (3, true));
    assert_eq!(present(&store, &keys), [true, true, true, false, false, false]);
    // Whatever part of the unsynced writes a power cut loses, the delete stays.
    for kept in 0..4u32 {
        let crashed = Arc::new(disk.crash(|i| kept >> (i % 2) & 1 == 1));
        let store = simulated(&crashed);
        assert_eq!(present(&store, &keys), [true, true, true, false, false, false], "{kept}");
        assert_eq!(put(&store, &keys), 3, "a deleted key can be stored again");
        flush(&store);
        store.close();
        let store = simulated(&crashed);
        assert_eq!(present(&store, &keys), [true; 6], "the tombstone covers older records only");
    }
}

#[test]
fn a_tombstone_that_a_drive_failed_to_write_is_reported() {
    let disk = Arc::new(MemDisk::new());
    let store = simulated(&disk);
    let keys = chain(&namespace(&store), 1, 2);
    put(&store, &keys);
    flush(&store);
    disk.set_fault(Some(Box::new(|op| {
        let write = matches!(op, DiskOp::WriteAt { .. });
        write.then(|| std::io::Error::other("planted"))
    })));
    let what = Delete::Keys(keys.clone());
    let report = store.delete(&namespace(&store), &what).expect("open").wait();
    assert!(!report.durable, "{report:?}");
    assert_eq!(present(&store, &keys), [false; 2], "gone for callers all the same");
}

#[test]
fn a_new_epoch_takes_a_namespace_and_leaves_others_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(&dir.path().join("kv"), 4 << 20);
    let mut other = spec();
    other.salt = "other".into();
    let (mine, theirs) = {
        let store = Store::open(&config).expect("opens");
        let (ns, other) = (namespace(&store), store.namespace(&other).expect("valid"));
        let (mine, theirs) = (chain(&ns, 1, 4), chain(&other, 1, 4));
        put(&store, &mine);
        let options = PutOptions::default();
        store.put(&other, &theirs, blocks_of(&theirs), &options).expect("open").wait();
        flush(&store);
        let report = store.new_epoch(&ns).expect("open").wait();
        assert_eq!((report.removed, report.durable), (4, true));
        (mine, theirs)
    };
    let store = Store::open(&config).expect("opens");
    assert_eq!(present(&store, &mine), [false; 4]);
    let other = store.namespace(&other).expect("valid");
    assert_eq!(store.lookup(&other, &theirs, LookupMode::Prefix).hits, 4);
}

#[test]
fn what_was_begun_before_a_new_epoch_is_not_published_after_it() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 2);
    let reservation = store.reserve(&ns, &keys, &PutOptions::default()).expect("open");
    store.new_epoch(&ns).expect("open").wait();
    let report = store.publish(reservation).expect("in time");
    assert_eq!(report.stored(), 0, "{report:?}: bytes of the weights before");
    assert_eq!(present(&store, &keys), [false; 2]);
    assert_eq!(put(&store, &keys), 2, "what is begun after it is stored");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn what_is_older_goes_and_what_is_newer_stays() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let (old, new) = (chain(&ns, 1, 2), chain(&ns, 2, 2));
    put(&store, &old);
    std::thread::sleep(Duration::from_millis(300));
    put(&store, &new);
    let what = Delete::OlderThan(Duration::from_millis(150));
    assert_eq!(store.delete(&ns, &what).expect("open").wait().removed, 2);
    assert_eq!(present(&store, &old), [false; 2]);
    assert_eq!(present(&store, &new), [true; 2]);
}

#[test]
fn leases_of_deleted_blocks_stay_valid() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 2);
    put(&store, &keys);
    let leases = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
    store.delete(&ns, &Delete::All).expect("open").wait();
    assert_eq!(leases.items[0].as_ref().expect("a hit").as_slice(), support::bytes_of(&keys[0]));
    drop(leases);
    let audit = store.audit();
    assert_eq!((audit.dram_used_bytes, audit.faults), (0, Vec::new()));
}

#[test]
fn thousands_of_deletes_retire_their_tombstones_and_the_journal_never_fills() {
    let disk = Arc::new(MemDisk::new());
    let store = simulated(&disk);
    let ns = namespace(&store);
    for round in 0..60 {
        let keys = chain(&ns, round, 8);
        put(&store, &keys);
        flush(&store);
        for key in keys {
            let report = store.delete(&ns, &Delete::Keys(vec![key])).expect("open").wait();
            assert_eq!((report.removed, report.durable), (1, true), "round {round}");
        }
    }
    let counters = store.stats().counters;
    let retired = counters.iter().find(|(n, _)| *n == "tombstones_retired");
    assert!(retired.expect("a counter").1 > 100, "480 pages went through a journal of few");
    drop(store);
    let store = simulated(&disk);
    assert_eq!(store.stats().blocks, 0);
}

fn two_drives(dir: &tempfile::TempDir) -> (StoreConfig, [PathBuf; 2]) {
    let paths = [dir.path().join("a").join("kv"), dir.path().join("b").join("kv")];
    for path in &paths {
        std::fs::create_dir_all(path.parent().expect("has one")).expect("made");
    }
    let mut config = config(&paths[0], 4 << 20);
    config.nvme_paths.push(paths[1].clone());
    (config, paths)
}

#[test]
fn blocks_spread_over_drives_and_a_lost_drive_is_misses_until_it_is_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, paths) = two_drives(&dir);
    let store = Store::open(&config).expect("opens");
    let keys = chain(&namespace(&store), 1, 16);
    put(&store, &keys);
    flush(&store);
    drop(store);
    let away = dir.path().join("away");
    std::fs::rename(paths[1].parent().expect("has one"), &away).expect("unplugged");

    let store = Store::open(&config).expect("opens without it");
    let health = store.health();
    assert_eq!(health.drives[1].state, DriveState::Lost);
    let left = present(&store, &keys);
    let there = left.iter().filter(|p| **p).count();
    assert!(there > 0 && there < 16, "half of it: {left:?}");
    let ns = namespace(&store);
    store.delete(&ns, &Delete::Keys(keys[..4].to_vec())).expect("open").wait();
    assert!(put(&store, &keys[8..]) > 0, "what the lost drive had is stored again");
    flush(&store);
    drop(store);

    std::fs::rename(&away, paths[1].parent().expect("has one")).expect("plugged in");
    let store = Store::open(&config).expect("opens with both");
    assert!(store.health().drives.iter().all(|d| d.state == DriveState::Working));
    let back = present(&store, &keys);
    assert_eq!(back[..4], [false; 4], "deleted while the drive was away: it does not come back");
    assert_eq!(back[4..], [true; 12]);
    let buffers = vec![vec![0u8; support::BLOCK]; 12];
    let loaded = store.get_into(&ns_of(&store), &keys[4..], buffers, &GetOptions::default());
    assert_eq!(loaded.expect("open").wait().buffers, blocks_of(&keys[4..]));
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

fn ns_of(store: &Store) -> tiered_kv::Namespace {
    namespace(store)
}

#[test]
fn no_drive_left_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(&dir.path().join("none/kv"), 4 << 20);
    assert!(Store::open(&config).is_err());
}

#[test]
fn each_drive_has_the_tombstones_of_all() {
    for away in 0..2 {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut config, paths) = two_drives(&dir);
        let store = Store::open(&config).expect("opens");
        let keys = chain(&namespace(&store), 1, 16);
        put(&store, &keys);
        flush(&store);
        // What a tombstone alone keeps away: the headers are put back behind the store's back.
        let left = paths[1 - away].clone();
        let segments = || {
            let files = std::fs::read_dir(&left).expect("a directory");
            let paths = files.map(|file| file.expect("an entry").path());
            paths.filter(|p| p.display().to_string().contains("segment-")).collect::<Vec<_>>()
        };
        let before: Vec<_> =
            segments().into_iter().map(|p| (p.clone(), std::fs::read(p).expect("read"))).collect();
        store.delete(&namespace(&store), &Delete::Keys(keys.clone())).expect("open").wait();
        drop(store);
        for (path, bytes) in before {
            std::fs::write(path, bytes).expect("put back");
        }
        std::fs::remove_file(left.join("checkpoint.tkv")).expect("it was written");
        config.nvme_paths = vec![left];
        let store = Store::open(&config).expect("opens with one of them");
        assert_eq!(present(&store, &keys), [false; 16], "without drive {away}");
        let buried = store.stats().counters.into_iter().find(|(n, _)| *n == "buried");
        assert!(buried.expect("a counter").1 > 0);
    }
}

#[test]
fn tombstones_stay_as_long_as_a_drive_is_away_that_has_none_of_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, paths) = two_drives(&dir);
    let open = || Store::open(&config).expect("opens");
    let store = open();
    let keys = chain(&namespace(&store), 1, 16);
    put(&store, &keys);
    flush(&store);
    drop(store);
    let away = dir.path().join("away");
    std::fs::rename(paths[1].parent().expect("has one"), &away).expect("unplugged");
    let store = open();
    let deleted = store.delete(&namespace(&store), &Delete::Keys(keys.clone()));
    assert!(deleted.expect("open").wait().durable);
    drop(store);
    // As after a crash: every table is read, and no header that a tombstone covers is left here.
    std::fs::remove_file(paths[0].join("checkpoint.tkv")).expect("it was written");
    let store = open();
    put(&store, &chain(&namespace(&store), 2, 16));
    flush(&store);
    drop(store);
    std::fs::rename(&away, paths[1].parent().expect("has one")).expect("plugged in");
    assert_eq!(present(&open(), &keys), [false; 16], "the returned drive still had them");
}

#[test]
fn a_delete_is_newer_than_all_that_a_drive_holds_which_is_away() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, paths) = two_drives(&dir);
    let open = || Store::open(&config).expect("opens");
    let store = open();
    let ns = namespace(&store);
    // The drive follows from the key. What is stored last is on the one that will be away.
    let keys = chain(&ns, 1, 32);
    let (there, away): (Vec<BlockKey>, Vec<BlockKey>) =
        keys.into_iter().partition(|key| key.0[8].is_multiple_of(2));
    let options = PutOptions { chain: false, ..PutOptions::default() };
    for keys in [&there, &away] {
        let put = store.put(&ns, keys, blocks_of(keys), &options).expect("open").wait();
        assert!(put.stored() > 4, "{put:?}");
        flush(&store);
    }
    drop((ns, store));
    let (mount, gone) = (paths[1].parent().expect("has one"), dir.path().join("away"));
    std::fs::rename(mount, &gone).expect("unplugged");
    let store = open();
    assert_eq!(present(&store, &away), vec![false; away.len()], "they are on the other drive");
    assert_eq!(present(&store, &there), vec![true; there.len()]);
    let what = Delete::Keys(away.clone());
    assert!(store.delete(&namespace(&store), &what).expect("open").wait().durable);
    drop(store);
    std::fs::rename(&gone, mount).expect("plugged in");
    assert_eq!(present(&open(), &away), vec![false; away.len()], "they came back");
}
