//! Batches leased as a whole: nothing that they show moves, whatever the store does meanwhile.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{BLOCK, blocks_of, bytes_of, chain, memory_only, namespace};
use tiered_kv::{
    BlockKey, Delete, Found, GetOptions, KvLayout, LeaseBatch, Leases, LookupMode, MissReason,
    Namespace, NamespaceSpec, PutOptions, Store,
};

const CAPACITY: u64 = 512 << 10;
const ROOM: u32 = (CAPACITY / BLOCK as u64) as u32;

/// Keys that the ledger has room for.
const LEDGER_KEYS: usize = 8192;

fn open(bytes: u64) -> (Arc<Store>, Namespace) {
    let mut config = memory_only(bytes);
    config.max_leased_fraction = 1.0;
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    (store, ns)
}

fn put(store: &Store, ns: &Namespace, keys: &[BlockKey]) -> usize {
    let put = store.put(ns, keys, blocks_of(keys), &PutOptions::default());
    put.expect("open").wait().stored()
}

fn found(store: &Store, ns: &Namespace, keys: &[BlockKey]) -> Found {
    let now = store.get_now(ns, &keys.into(), &GetOptions::default());
    now.expect("open").expect("nothing to wait for")
}

fn whole(store: &Store, ns: &Namespace, keys: &[BlockKey]) -> LeaseBatch {
    match found(store, ns, keys) {
        Found::Whole(batch) => batch,
        Found::Each(leases) => panic!("leased block by block: {leases:?}"),
    }
}

fn check(leases: &Leases, keys: &[BlockKey]) {
    assert_eq!(leases.hits(), keys.len());
    for (lease, key) in leases.items.iter().zip(keys) {
        let lease = lease.as_ref().expect("a hit");
        assert_eq!(lease.as_slice(), bytes_of(key), "the bytes that were stored");
    }
}

#[test]
fn a_batch_keeps_its_blocks_when_memory_is_wanted() {
    let (store, ns) = open(CAPACITY);
    let keys = chain(&ns, 1, 4);
    assert_eq!(put(&store, &ns, &keys), 4);
    let batch = whole(&store, &ns, &keys);
    assert_eq!(store.stats().leased_bytes, 4 * BLOCK as u64);
    for path in 2..8 {
        put(&store, &ns, &chain(&ns, path, ROOM));
    }
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Each).hits, 4, "leased blocks are not evicted");
    assert!(store.stats().counters.iter().any(|(name, n)| *name == "evicted_dram" && *n > 0));
    check(&batch.into_leases(), &keys);
    assert_eq!(store.stats().leased_bytes, 0);
    for path in 2..8 {
        put(&store, &ns, &chain(&ns, path, ROOM));
    }
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Each).hits, 0, "released ones are");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn a_batch_shows_deleted_blocks_until_it_is_released() {
    let (store, ns) = open(CAPACITY);
    let keys = chain(&ns, 1, 8);
    put(&store, &ns, &keys);
    let mut released = whole(&store, &ns, &keys);
    let batch = whole(&store, &ns, &keys);
    store.delete(&ns, &Delete::All).expect("open").wait();
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Each).hits, 0);
    // What is deleted takes no new lease, and its memory is not free.
    assert_eq!(found_hits(&found(&store, &ns, &keys)), 0);
    put(&store, &ns, &chain(&ns, 2, ROOM));
    assert!(store.audit().dram_used_bytes <= CAPACITY);
    assert_eq!(put(&store, &ns, &keys), 8, "stored anew beside it");
    released.release();
    assert!(released.is_released());
    assert_eq!(released.outcome(7), Ok(0), "what is known of the blocks stays");
    check(&batch.into_leases(), &keys);
    assert_eq!(store.stats().leased_bytes, 0);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

fn found_hits(found: &Found) -> usize {
    match found {
        Found::Whole(batch) => batch.hits(),
        Found::Each(leases) => leases.hits(),
    }
}

#[test]
fn a_batch_outlives_its_store() {
    let (store, ns) = open(CAPACITY);
    let keys = chain(&ns, 1, 8);
    put(&store, &ns, &keys);
    let (batch, other) = (whole(&store, &ns, &keys), whole(&store, &ns, &keys));
    store.close();
    assert_eq!(other.hits(), 8);
    drop(other);
    drop(store);
    check(&batch.into_leases(), &keys);
}

#[test]
fn a_prefix_is_leased_as_a_whole_and_anything_else_block_by_block() {
    let (store, ns) = open(CAPACITY);
    let keys = chain(&ns, 1, 8);
    put(&store, &ns, &keys[..6]);
    let batch = whole(&store, &ns, &keys);
    assert_eq!((batch.len(), batch.hits()), (8, 6));
    assert_eq!(batch.outcome(6), Err(MissReason::Absent));
    let leases = batch.into_leases();
    assert!(matches!(leases.items[7], Err(MissReason::Absent)));
    check(&Leases { items: leases.items.into_iter().take(6).collect(), ..leases }, &keys[..6]);
    let Found::Each(gapped) = found(&store, &ns, &[keys[0], keys[7], keys[1]]) else {
        panic!("a block behind a miss has a lease of its own");
    };
    let hits: Vec<bool> = gapped.items.iter().map(Result::is_ok).collect();
    assert_eq!(hits, [true, false, true]);
    drop(gapped);
    let stats = store.stats();
    assert_eq!((stats.requested, stats.dram.hits, stats.leased_bytes), (11, 8, 0));
    assert_eq!(stats.misses.iter().map(|(_, n)| n).sum::<u64>(), 3);
}

#[test]
fn batches_that_the_ledger_has_no_room_for_are_leased_block_by_block() {
    let mut config = memory_only(40 << 20);
    config.max_leased_fraction = 1.0;
    let store = Store::open(&config).expect("opens");
    let layout = KvLayout::uniform(1, 4096).expect("valid");
    let ns = store.namespace(&NamespaceSpec::new("m", "w", "d", layout)).expect("valid");
    let keys = ns.keys_from_tokens(&(0..512).collect::<Vec<u32>>(), None);
    let blocks = vec![vec![7; 4096]; keys.len()];
    store.put(&ns, &keys, blocks, &PutOptions::default()).expect("open").wait();
    let mut batches: Vec<LeaseBatch> =
        (0..LEDGER_KEYS / keys.len()).map(|_| whole(&store, &ns, &keys)).collect();
    let Found::Each(leases) = found(&store, &ns, &keys) else { panic!("the ledger is full") };
    assert_eq!(leases.hits(), 512);
    assert_eq!(store.stats().leased_bytes, 17 * 512 * 4096);
    batches.pop();
    drop(whole(&store, &ns, &keys));
    drop((batches, leases));
    assert_eq!(store.stats().leased_bytes, 0);
}

#[test]
fn batches_show_their_blocks_while_others_evict_delete_and_lease() {
    const CHAINS: u32 = 12;
    const CHECKS: usize = 150;
    let (store, ns) = open(CAPACITY);
    let chains: Vec<_> = (0..CHAINS).map(|path| chain(&ns, path, 8)).collect();
    let (checked, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let lease = &|mut at: usize| {
        let (mut kept, mut turn) = (Vec::new(), 0usize);
        while !done.load(Ordering::Relaxed) {
            at = (at * 5 + 1) % chains.len();
            if let Found::Whole(batch) = found(&store, &ns, &chains[at])
                && batch.hits() > 0
            {
                kept.push((at, batch));
            } else {
                // What all of them keep may have reached the cap, and nobody would get any more.
                kept.pop();
                std::thread::sleep(Duration::from_micros(200));
            }
            if kept.len() < 3 {
                continue;
            }
            let (at, mut batch) = kept.remove(0);
            turn += 1;
            if turn.is_multiple_of(3) {
                batch.release();
                continue;
            }
            let mut leases = batch.into_leases();
            leases.items.retain(Result::is_ok);
            check(&leases, &chains[at][..leases.items.len()]);
            checked.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        (0..3).for_each(|at| {
            scope.spawn(move || lease(at));
        });
        let until = Instant::now() + Duration::from_secs(100);
        let mut round = 0;
        while (round < 300 || checked.load(Ordering::Relaxed) < CHECKS) && Instant::now() < until {
            let keys = &chains[round % chains.len()];
            put(&store, &ns, keys);
            if round % 7 == 0 {
                let what = Delete::Keys(keys[4..].to_vec());
                store.delete(&ns, &what).expect("open").wait();
            }
            round += 1;
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(checked.into_inner() >= CHECKS, "batches were leased and looked at");
    assert!(store.stats().counters.iter().any(|(name, n)| *name == "evicted_dram" && *n > 0));
    assert_eq!(store.stats().leased_bytes, 0);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}
