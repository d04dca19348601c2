//! One owner: a second open in a process is one more handle on the same core.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::Barrier;
use std::time::Duration;
use support::{BLOCK, blocks_of, chain, config, memory_only, namespace, seams};
use tiered_kv::{
    CpuList, ErrorKind, GetOptions, LookupMode, MissReason, PutOptions, Store, StoreConfig,
};

const LONG: Duration = Duration::from_secs(60);

fn put(store: &Store, path: u32, n: u32) {
    let ns = namespace(store);
    let keys = chain(&ns, path, n);
    let report = store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default());
    assert_eq!(report.expect("open").wait().stored(), keys.len());
}

fn hits(store: &Store, path: u32, n: u32) -> usize {
    let ns = namespace(store);
    store.lookup(&ns, &chain(&ns, path, n), LookupMode::Prefix).hits
}

#[test]
fn a_second_open_is_the_same_core_however_the_directory_is_spelled() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let first = Store::open(&config(&path, 4 << 20)).expect("opens");
    put(&first, 1, 4);
    std::os::unix::fs::symlink(&path, dir.path().join("link")).expect("linked");
    std::fs::create_dir(dir.path().join("sub")).expect("made");
    let spellings = ["link".into(), "./kv".into(), format!("sub/{}/kv", "..")];
    for spelling in spellings {
        let second = Store::open(&config(&dir.path().join(&spelling), 4 << 20)).expect("shares");
        assert_eq!(second.core_number(), first.core_number(), "{spelling}");
        assert_eq!(hits(&second, 1, 4), 4);
        let ns = namespace(&first);
        let leases = second.get(&ns, &chain(&ns, 1, 4), &GetOptions::default());
        assert_eq!(leases.expect("a namespace of either is good").wait().hits(), 4);
        second.close();
        let refused = second.flush(None).expect_err("this handle is closed");
        assert_eq!(refused.kind(), ErrorKind::Closed);
        assert_eq!(hits(&first, 1, 4), 4, "the other one goes on");
    }
    let third = Store::open(&config(&path, 4 << 20)).expect("shares");
    first.close();
    put(&third, 2, 4);
    drop(third);
    let again = Store::open(&config(&path, 4 << 20)).expect("opens anew");
    assert_ne!(again.core_number(), first.core_number());
    assert_eq!((hits(&again, 1, 4), hits(&again, 2, 4)), (4, 4), "the last close wrote it all");
}

#[test]
fn stores_without_a_directory_are_each_their_own() {
    let (one, two) = (Store::open(&memory_only(1 << 20)), Store::open(&memory_only(1 << 20)));
    let (one, two) = (one.expect("opens"), two.expect("opens"));
    assert_ne!(one.core_number(), two.core_number());
    put(&one, 1, 2);
    assert_eq!(hits(&two, 1, 2), 0);
    let (ns, keys) = (namespace(&one), chain(&namespace(&one), 1, 2));
    let wrong = two.put(&ns, &keys, blocks_of(&keys), &PutOptions::default());
    let wrong = wrong.map(drop).expect_err("refused");
    assert_eq!(wrong.kind(), ErrorKind::InvalidArgument);
    assert_eq!(two.lookup(&ns, &keys, LookupMode::Prefix).hits, 0);
    assert!(!two.contains(&ns, &keys[0]) && one.contains(&ns, &keys[0]));
}

#[test]
fn a_configuration_that_contradicts_the_open_one_is_refused_with_both_values() {
    let dir = tempfile::tempdir().expect("a directory");
    let (path, other) = (dir.path().join("kv"), dir.path().join("other"));
    let good = config(&path, 4 << 20);
    let open = Store::open(&good).expect("opens");
    let with = |change: &dyn Fn(&mut StoreConfig)| {
        let mut changed = good.clone();
        change(&mut changed);
        changed
    };
    let cases = [
        ("dram_capacity", "1048576", "524288", with(&|c| c.dram_capacity = Some(1 << 20))),
        ("nvme_capacity", "8388608", "4194304", with(&|c| c.nvme_capacity = 8 << 20)),
        ("segment_bytes", "65536", "524288", with(&|c| c.segment_bytes = Some(64 << 10))),
        ("max_leased_fraction", "0.25", "0.5", with(&|c| c.max_leased_fraction = 0.25)),
        ("copy_threads", "3", "2", with(&|c| c.copy_threads = 3)),
        ("cpus", "[0]", "absent", with(&|c| c.cpus = CpuList::new([0]).ok())),
        ("nvme_paths", "other", "kv", with(&|c| c.nvme_paths.push(other.clone()))),
    ];
    for (field, asked, has, config) in cases {
        let refused = Store::open(&config).expect_err(field);
        let text = refused.to_string();
        assert_eq!(refused.kind(), ErrorKind::Config, "{text}");
        for part in [field, asked, has, "close that store first"] {
            assert!(text.contains(part), "{field}: {text} lacks {part}");
        }
    }
    assert!(!other.exists(), "a refused open makes nothing");
    let patient = with(&|c| {
        (c.dram_capacity, c.load_timeout_s, c.close_timeout_s) = (None, 1.0, 5.0);
    });
    let second = Store::open(&patient).expect("its own deadlines, no wish for a capacity");
    assert_eq!(second.core_number(), open.core_number());
    let backend = if open.health().backend == "io_uring" { "blocking" } else { "io_uring" };
    let backend = StoreConfig::from_toml(&format!("io_backend = {backend:?}"), []);
    let backend = with(&|c| c.io_backend = backend.as_ref().expect("valid").io_backend);
    let refused = Store::open(&backend).expect_err("another backend").to_string();
    assert!(refused.contains("io_backend") && refused.contains(&open.health().backend));
}

#[test]
fn threads_that_open_and_close_at_once_share_one_core_at_a_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let barrier = Barrier::new(4);
    std::thread::scope(|scope| {
        for worker in 0..4u32 {
            let (path, barrier) = (&path, &barrier);
            scope.spawn(move || {
                for round in 0..8 {
                    barrier.wait();
                    let store = Store::open(&config(path, 4 << 20)).expect("opens or shares");
                    put(&store, 10 + worker * 8 + round, 1);
                    // Some close and some drop, some while others open.
                    if (worker + round) % 2 == 0 {
                        store.close();
                    }
                }
            });
        }
    });
    let store = Store::open(&config(&path, 4 << 20)).expect("opens");
    assert_eq!(store.audit().faults, Vec::<String>::new());
    for path in 10..42 {
        assert_eq!(hits(&store, path, 1), 1, "stored by a handle that has closed");
    }
}

/// A disk whose reads stall, in the place of a drive's files.
fn stalled(dir: &Path) -> (Arc<support::GatedDisk>, tiered_kv::Seams, StoreConfig) {
    let disk = support::GatedDisk::new();
    let mut seams = seams(disk.clone());
    seams.lock_directory = true;
    std::fs::create_dir_all(dir).expect("made");
    (disk, seams, config(dir, 4 << 20))
}

#[test]
fn an_open_waits_for_the_last_close_or_says_that_it_is_under_way() {
    let dir = tempfile::tempdir().expect("a directory");
    let (disk, seams, good) = stalled(&dir.path().join("kv"));
    let first = Store::open_with(&good, &seams).expect("opens");
    disk.shut_writes(true);
    put(&first, 1, 4);
    let closing = {
        let first = first.clone();
        std::thread::spawn(move || first.close())
    };
    while !first.is_closed() {
        std::thread::yield_now();
    }
    let hasty = StoreConfig { close_timeout_s: 0.05, ..good.clone() };
    let refused = Store::open_with(&hasty, &seams).expect_err("it cannot close yet");
    assert_eq!(refused.kind(), ErrorKind::InUse, "{refused}");
    assert!(refused.to_string().contains("close_timeout_s"), "{refused}");
    let waiting = std::thread::spawn(move || Store::open_with(&good, &seams));
    disk.shut_writes(false);
    assert_eq!(closing.join().expect("ends").dropped, 0);
    let second = waiting.join().expect("ends").expect("opens after the close");
    assert_ne!(second.core_number(), first.core_number());
}

#[test]
fn closing_a_handle_ends_its_own_calls_and_no_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let (disk, seams, good) = stalled(&dir.path().join("kv"));
    let filler = Store::open_with(&good, &seams).expect("opens");
    put(&filler, 1, 2);
    put(&filler, 2, 2);
    drop(filler);
    let first = Store::open_with(&good, &seams).expect("opens");
    let second = Store::open_with(&good, &seams).expect("shares");
    disk.shut_reads(true);
    let ns = namespace(&first);
    let get = |store: &Store, path| {
        store.get(&ns, &chain(&ns, path, 2), &GetOptions::default()).expect("open")
    };
    let (ended, goes_on) = (get(&first, 1), get(&second, 2));
    first.close();
    let ended = ended.wait_for(LONG).expect("a closed handle's call ends");
    assert!(ended.items.iter().all(|item| item.as_ref().err() == Some(&MissReason::Cancelled)));
    disk.shut_reads(false);
    assert_eq!(goes_on.wait().hits(), 2);
}

#[test]
fn a_close_from_a_function_that_the_core_calls_waits_for_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let good = config(&path, 4 << 20);
    for (path, last_drop) in [(1, false), (2, true)] {
        let store = Store::open(&good).expect("opens");
        put(&store, path, 6);
        let (told, ended) = std::sync::mpsc::channel();
        let closer = store.clone();
        // Over 64 KiB, so that it is copied, and told, on a thread of the core.
        let ns = namespace(&store);
        let keys = chain(&ns, path, 6);
        let (ready, go) = std::sync::mpsc::channel::<()>();
        let buffers = vec![vec![0u8; BLOCK]; 6];
        store
            .get_into_with(&ns, &keys, buffers, &GetOptions::default(), move |_| {
                go.recv_timeout(LONG).expect("the other handle is gone, or kept on purpose");
                if last_drop {
                    drop(closer);
                } else {
                    closer.close();
                    closer.close();
                }
                told.send(std::thread::current().name().map(str::to_owned)).expect("awaited");
            })
            .expect("open");
        let kept = (!last_drop).then_some(store);
        ready.send(()).expect("it waits");
        let thread = ended.recv_timeout(LONG).expect("it does not wait for itself");
        assert!(thread.is_some_and(|name| name.starts_with("tkv-")), "told by a core's thread");
        drop(kept);
        let again = Store::open(&good).expect("opens once that close has ended");
        assert_eq!(hits(&again, path, 6), 6);
    }
}

#[test]
fn closes_of_one_handle_at_once_all_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(&config(&dir.path().join("kv"), 4 << 20)).expect("opens");
    put(&store, 1, 4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                store.close();
                assert!(store.is_closed());
            });
        }
    });
    assert_eq!(hits_closed(&store), 0, "a closed store has nothing");
}

fn hits_closed(store: &Store) -> usize {
    assert!(store.namespace(&support::spec()).is_err());
    let other = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&other);
    store.lookup(&ns, &chain(&ns, 1, 4), LookupMode::Each).hits
}
