//! Tests of what needs no lock of the machine's: lookups, hits in memory, and counting accesses.

use crate::open::default_dram;
use crate::{GetOptions, LookupMode, Namespace, PutOptions, Store, StoreConfig};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use tiered_kv_types::{BlockKey, KvLayout, NamespaceSpec};

fn store_of_one_block() -> (Arc<Store>, Namespace, Vec<BlockKey>) {
    let config =
        StoreConfig { dram_capacity: Some(1 << 20), huge_pages: false, ..StoreConfig::default() };
    let store = Store::open(&config).expect("opens");
    let layout = KvLayout::uniform(4, 4096).expect("valid");
    let ns = store.namespace(&NamespaceSpec::new("m", "w", "float32", layout)).expect("valid");
    let keys = ns.keys_from_tokens(&[1, 2, 3, 4], None);
    let put = store.put(&ns, &keys, vec![vec![7u8; 4096]], &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), 1);
    (store, ns, keys)
}

/// Runs `body` on another thread while this one holds the machine's lock; says what it returned,
/// or `None` where it waits for the lock.
fn while_locked<R: Send + 'static>(
    store: &Arc<Store>,
    body: impl FnOnce() -> R + Send + 'static,
) -> Option<R> {
    let (sent, ended) = channel();
    store.core.with_machine(|_| {
        std::thread::spawn(move || sent.send(body()));
        ended.recv_timeout(Duration::from_secs(20)).ok()
    })
}

#[test]
fn lookups_and_hits_in_memory_wait_for_no_lock() {
    let (store, ns, keys) = store_of_one_block();
    let other = store.clone();
    let found = while_locked(&store, move || {
        let absent = BlockKey([9; 32]);
        let both = [keys[0], absent];
        let lookup = other.lookup(&ns, &both, LookupMode::Each).hits;
        let contains = both.map(|key| other.contains(&ns, &key));
        let leases = other.get(&ns, &both, &GetOptions::default()).expect("open").wait();
        (lookup, contains, leases.hits())
    });
    assert_eq!(found, Some((1, [true, false], 1)));
}

#[test]
fn accesses_that_the_queue_cannot_hold_are_dropped_and_counted() {
    let (store, ns, keys) = store_of_one_block();
    let other = store.clone();
    let gets = 5000;
    let hits = while_locked(&store, move || {
        let get = || other.get(&ns, &keys, &GetOptions::default()).expect("open").wait().hits();
        (0..gets).map(|_| get()).sum::<usize>()
    });
    assert_eq!(hits, Some(gets), "counting never waits");
    let stats = store.stats();
    let dropped = stats.counters.iter().find(|(n, _)| *n == "accesses_dropped").expect("there").1;
    assert_eq!(
        dropped,
        gets as u64 - crate::driver::ACCESS_QUEUE as u64,
        "what the bounded queue could not take"
    );
}

#[test]
fn memory_is_a_quarter_of_the_limit_up_to_4_gib_by_default() {
    assert_eq!(default_dram(None), 4 << 30);
    assert_eq!(default_dram(Some(2 << 30)), 512 << 20);
    assert_eq!(default_dram(Some(64 << 30)), 4 << 30);
}
