//! Holds, prefetch, hybrid lookups, and puts that wait for room.

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{BLOCK, GatedDisk, blocks_of, chain, config, memory_only, namespace, seams};
use tiered_kv::{
    BlockKey, EvictionPolicy, GetOptions, GroupRule, LookupMode, PutOptions, PutStatus, Residency,
    Store, StoreConfig, Tier,
};

const LONG: Duration = Duration::from_secs(60);

fn put(store: &Store, keys: &[BlockKey], options: &PutOptions) -> Vec<PutStatus> {
    let ns = namespace(store);
    store.put(&ns, keys, blocks_of(keys), options).expect("open").wait().statuses
}

fn hits(store: &Store, keys: &[BlockKey]) -> usize {
    store.lookup(&namespace(store), keys, LookupMode::Prefix).hits
}

/// A store that evicts in the order of use: what is held is not kept by a prediction instead.
fn by_recency() -> StoreConfig {
    StoreConfig { policy: EvictionPolicy::Lru, ..memory_only(512 << 10) }
}

/// Stores other chains until everything that may be evicted has been.
fn crowd_out(store: &Store) {
    let ns = namespace(store);
    for path in 100..130 {
        put(store, &chain(&ns, path, 4), &PutOptions::default());
    }
}

#[test]
fn held_blocks_stay_until_the_hold_is_dropped() {
    let store = Store::open(&by_recency()).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 4);
    put(&store, &keys, &PutOptions::default());
    let hold = store.hold(&ns, &chain(&ns, 1, 6), LONG).expect("open");
    assert_eq!(hold.held(), [true, true, true, true, false, false], "what is stored");
    crowd_out(&store);
    assert_eq!(hits(&store, &keys), 4);
    drop(hold);
    assert_eq!(store.stats().held_bytes, 0);
    crowd_out(&store);
    assert_eq!(hits(&store, &keys), 0);
}

#[test]
fn a_hold_ends_by_time_and_by_the_get_that_uses_it() {
    let store = Store::open(&by_recency()).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 4);
    put(&store, &keys, &PutOptions::default());
    let brief = store.hold(&ns, &keys, Duration::from_millis(5)).expect("open");
    std::thread::sleep(Duration::from_millis(20));
    crowd_out(&store);
    assert_eq!(hits(&store, &keys), 0, "an expired hold is a miss, not an error");
    drop(brief);
    put(&store, &keys, &PutOptions::default());
    let hold = store.hold(&ns, &keys, LONG).expect("open");
    let options = GetOptions { hold: Some(hold.id()), ..GetOptions::default() };
    drop(store.get(&ns, &keys, &options).expect("open").wait());
    assert_eq!(store.stats().holds, 0, "used");
}

#[test]
fn a_million_lookups_and_a_thousand_holds_leave_nothing_pinned() {
    let store = Store::open(&by_recency()).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 10);
    put(&store, &keys, &PutOptions::default());
    for _ in 0..100_000 {
        store.lookup(&ns, &keys, LookupMode::Each);
    }
    for _ in 0..1000 {
        drop(store.hold(&ns, &keys, LONG).expect("open"));
    }
    let stats = store.stats();
    assert_eq!((stats.holds, stats.held_bytes, stats.leased_bytes), (0, 0, 0), "case 16");
    crowd_out(&store);
    assert_eq!(hits(&store, &keys), 0, "nothing keeps them");
}

#[test]
fn bytes_held_at_once_are_capped() {
    let store = Store::open(&by_recency()).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 20);
    put(&store, &keys, &PutOptions::default());
    let hold = store.hold(&ns, &keys, LONG).expect("open");
    assert_eq!(hold.hits(), 16, "half of 512 KiB");
}

#[test]
fn prefetched_blocks_are_in_memory_when_they_are_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(&dir.path().join("kv"), 4 << 20);
    let store = Store::open(&config).expect("opens");
    let keys = chain(&namespace(&store), 1, 6);
    put(&store, &keys, &PutOptions::default());
    drop(store);
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    store.prefetch(&ns, &keys[..4]).expect("open");
    let in_memory = |key: &BlockKey| {
        let found = store.lookup(&ns, &[*key], LookupMode::Each);
        found.states[0] == Residency::In(Tier::Dram)
    };
    let until = std::time::Instant::now() + LONG;
    while !keys[..4].iter().all(in_memory) {
        assert!(std::time::Instant::now() < until, "the loads never end");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!in_memory(&keys[4]));
    let leases = store.get(&ns, &keys[..4], &GetOptions::default()).expect("open").wait();
    assert!(leases.sources.iter().all(|s| *s == Tier::Dram));
}

#[test]
fn a_hybrid_hit_means_every_part_that_the_position_needs() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let (full, window, state) = (chain(&ns, 1, 8), chain(&ns, 2, 8), chain(&ns, 3, 8));
    let alone = PutOptions { chain: false, ..PutOptions::default() };
    put(&store, &full[..7], &PutOptions::default());
    put(&store, &window[2..6], &alone);
    put(&store, &[state[2], state[4]], &alone);
    let position = |rules: [GroupRule; 3]| {
        let groups = [(&full[..], rules[0]), (&window[..], rules[1]), (&state[..], rules[2])];
        store.lookup_hybrid(&ns, &groups).expect("equal lengths")
    };
    let (all, two, last) = (GroupRule::All, GroupRule::Window(2), GroupRule::Last);
    assert_eq!(position([all, two, last]), 5, "state ends at 5, the window reaches to 6");
    assert_eq!(position([all, GroupRule::Window(4), last]), 0, "no window of four ends at 5");
    assert_eq!(position([all, GroupRule::Window(3), last]), 5);
    assert_eq!(position([all, all, last]), 0, "case 34: the window's first blocks are not there");
    let uneven = [(&full[..], all), (&window[..3], two)];
    assert!(store.lookup_hybrid(&ns, &uneven).is_err());
}

#[test]
fn a_put_that_may_wait_is_stored_when_there_is_room_again() {
    let disk = GatedDisk::new();
    let mut config = config("/simulated".as_ref(), 4 << 20);
    config.dirty_high_fraction = 0.5;
    config.dirty_low_fraction = 0.25;
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    disk.shut_writes(true);
    let ns = namespace(&store);
    put(&store, &chain(&ns, 1, 16), &PutOptions::default());
    let keys = chain(&ns, 2, 20);
    let brief = PutOptions { wait: Some(Duration::from_millis(20)), ..PutOptions::default() };
    assert_eq!(put(&store, &keys[..2], &brief), [PutStatus::Throttled; 2], "it waited in vain");
    let patient = PutOptions { wait: Some(LONG), ..PutOptions::default() };
    let waiting = store.put(&ns, &keys, blocks_of(&keys), &patient).expect("open");
    disk.shut_writes(false);
    assert_eq!(waiting.wait().statuses, [PutStatus::Stored; 20]);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn above_the_high_mark_puts_are_throttled_until_below_the_low_one() {
    let disk = GatedDisk::new();
    let mut config = config("/simulated".as_ref(), 4 << 20);
    config.dirty_high_fraction = 0.5;
    config.dirty_low_fraction = 0.25;
    let store: Arc<Store> = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    disk.shut_writes(true);
    let ns = namespace(&store);
    let statuses = put(&store, &chain(&ns, 1, 17), &PutOptions::default());
    assert_eq!(statuses[15..], [PutStatus::Stored, PutStatus::Throttled]);
    assert_eq!(store.stats().dirty_bytes, 16 * BLOCK as u64);
    assert_eq!(put(&store, &chain(&ns, 2, 1), &PutOptions::default()), [PutStatus::Throttled]);
    disk.shut_writes(false);
    store.flush(None).expect("open").wait();
    assert_eq!(put(&store, &chain(&ns, 2, 1), &PutOptions::default()), [PutStatus::Stored]);
}

#[test]
fn slots_given_back_without_a_word_are_noticed_by_a_put_that_waits() {
    let store = Store::open(&by_recency()).expect("opens");
    let ns = namespace(&store);
    let reservation = store.reserve(&ns, &chain(&ns, 1, 32), &PutOptions::default());
    let reservation = reservation.expect("open");
    let keys = chain(&ns, 2, 1);
    let patient = PutOptions { wait: Some(LONG), ..PutOptions::default() };
    let waiting = store.put(&ns, &keys, blocks_of(&keys), &patient).expect("open");
    drop(reservation);
    assert_eq!(waiting.wait().statuses, [PutStatus::Stored]);
}

#[test]
fn reserved_bytes_count_as_dirty_until_they_are_published_or_given_back() {
    let mut config = config("/simulated".as_ref(), 4 << 20);
    config.dirty_high_fraction = 0.5;
    let disk = GatedDisk::new();
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    disk.shut_writes(true);
    let ns = namespace(&store);
    let reserve = |path: u32, n: u32| {
        store.reserve(&ns, &chain(&ns, path, n), &PutOptions::default()).expect("open")
    };
    let reservation = reserve(1, 17);
    let refused: Vec<Option<PutStatus>> = (0..17).map(|at| reservation.refused(at)).collect();
    assert_eq!(refused[15..], [None, Some(PutStatus::Throttled)], "half of 512 KiB");
    let one = chain(&ns, 2, 1);
    assert_eq!(put(&store, &one, &PutOptions::default()), [PutStatus::Throttled]);
    drop(reservation);
    assert_eq!(put(&store, &one, &PutOptions::default()), [PutStatus::Stored], "given back");
    let published = reserve(3, 15);
    assert_eq!(store.publish(published).expect("in time").stored(), 15);
    assert_eq!(store.stats().dirty_bytes, 16 * BLOCK as u64);
    assert_eq!(reserve(4, 1).refused(0), Some(PutStatus::Throttled), "counted once, as dirty");
    disk.shut_writes(false);
    store.flush(None).expect("open").wait();
    assert_eq!(reserve(4, 1).refused(0), None, "and no longer as reserved");
}

#[test]
fn a_hold_keeps_a_block_on_its_drive() {
    let mut config = config("/simulated".as_ref(), 1 << 20);
    config.dram_capacity = Some(128 << 10);
    let disk = Arc::new(tiered_kv::io_seams::MemDisk::new());
    let store = Store::open_with(&config, &seams(disk)).expect("opens");
    let ns = namespace(&store);
    let crowd = |from: u32| {
        for path in from..from + 60 {
            put(&store, &chain(&ns, path, 1), &PutOptions::default());
            store.flush(None).expect("open").wait();
        }
    };
    let keys = chain(&ns, 1, 2);
    put(&store, &keys, &PutOptions::default());
    store.flush(None).expect("open").wait();
    let on_drive = |key: &BlockKey| {
        store.lookup(&ns, &[*key], LookupMode::Each).states[0] == Residency::In(Tier::Nvme)
    };
    for path in 500..510 {
        put(&store, &chain(&ns, path, 1), &PutOptions::default());
        store.flush(None).expect("open").wait();
    }
    assert!(keys.iter().all(on_drive), "no longer in memory");
    let hold = store.hold(&ns, &keys, LONG).expect("open");
    assert_eq!(hold.hits(), 2);
    crowd(100);
    assert_eq!(hits(&store, &keys), 2, "held on the drive");
    drop(hold);
    crowd(200);
    assert_eq!(hits(&store, &keys), 0);
}

/// The blocks left in memory of those given.
fn left(store: &Store, keys: &[BlockKey]) -> Vec<bool> {
    let found = store.lookup(&namespace(store), keys, LookupMode::Each);
    found.states.iter().map(|s| s.is_hit()).collect()
}

#[test]
fn memory_evicts_the_leaves_of_a_chain_before_its_roots() {
    let store = Store::open(&by_recency()).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 8);
    put(&store, &keys, &PutOptions::default());
    put(&store, &chain(&ns, 2, 24), &PutOptions::default());
    for gone in 1..=8 {
        put(&store, &chain(&ns, 2 + gone, 1), &PutOptions::default());
        let stays = 8 - gone as usize;
        let expected: Vec<bool> = (0..8).map(|at| at < stays).collect();
        assert_eq!(left(&store, &keys), expected);
    }
}

#[test]
fn orphans_are_reclaimed_before_anything_older_and_adopted_when_their_parent_is_back() {
    let store = Store::open(&by_recency()).expect("opens");
    let ns = namespace(&store);
    let (old, broken) = (chain(&ns, 1, 8), chain(&ns, 2, 8));
    put(&store, &old, &PutOptions::default());
    put(&store, &broken, &PutOptions::default());
    put(&store, &chain(&ns, 3, 16), &PutOptions::default());
    let delete = |keys: &[BlockKey]| {
        let what = tiered_kv::Delete::Keys(keys.to_vec());
        store.delete(&ns, &what).expect("open").wait();
    };
    delete(&broken[..1]);
    assert_eq!(store.stats().orphans, 7, "never wrong, but nothing leads to them");
    put(&store, &chain(&ns, 4, 5), &PutOptions::default());
    assert_eq!(left(&store, &old), [true; 8], "older, yet they stay");
    assert_eq!(store.stats().orphans, 3, "the slot of the root, and four of them");
    put(&store, &broken[..1], &PutOptions::default());
    assert_eq!(store.stats().orphans, 0, "adopted");
    let served = store.get(&ns, &broken[1..2], &GetOptions::default()).expect("open").wait();
    let lease = served.items[0].as_ref().expect("it has stayed");
    assert_eq!(lease.as_slice(), support::bytes_of(&broken[1]));
}

#[test]
fn a_request_is_counted_leaf_first_and_a_get_outside_of_one_as_a_request_of_its_own() {
    let policy = EvictionPolicy::Lru;
    let config = StoreConfig { policy, ..by_recency() };
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    // Without parents only the order of the accesses decides.
    let alone = PutOptions { chain: false, ..PutOptions::default() };
    let (first, second) = (chain(&ns, 1, 4), chain(&ns, 2, 4));
    put(&store, &second, &alone);
    put(&store, &first, &alone);
    let request = store.begin_request(Default::default());
    request.observe(&ns, &first, 0);
    request.finish(0, 0);
    drop(store.get(&ns, &second, &GetOptions::default()).expect("open").wait());
    store.learn();
    put(&store, &chain(&ns, 3, 24), &PutOptions::default());
    let mut order = Vec::new();
    for path in 0..8 {
        put(&store, &chain(&ns, 10 + path, 1), &PutOptions::default());
        let keys = [&first[..], &second[..]].concat();
        order.push(left(&store, &keys).iter().filter(|l| **l).count());
        if path < 4 {
            assert_eq!(left(&store, &first).iter().filter(|l| **l).count(), 3 - path as usize);
            assert_eq!(left(&store, &first)[..3 - path as usize], vec![true; 3 - path as usize]);
        }
    }
    assert_eq!(order, [7, 6, 5, 4, 3, 2, 1, 0], "the get was the later use, and root last");
}
