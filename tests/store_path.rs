//! The request path on a real directory: put, look up, get, flush, restart.

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{BLOCK, blocks_of, bytes_of, chain, config, memory_only, namespace, spec};
use tiered_kv::io_seams::ManualClock;
use tiered_kv::{
    BlockKey, ComputedBy, Delete, EvictionPolicy, GetOptions, KvLayout, LookupMode, MissReason,
    NamespaceSpec, PutOptions, PutStatus, Residency, Seams, Store, StoreConfig, Tier,
};

fn hits(store: &Store, keys: &[BlockKey]) -> Vec<bool> {
    let ns = namespace(store);
    let leases = store.get(&ns, keys, &GetOptions::default()).expect("open").wait();
    for (key, item) in keys.iter().zip(&leases.items) {
        if let Ok(lease) = item {
            assert_eq!(lease.as_slice(), bytes_of(key), "the bytes that were stored");
        }
    }
    leases.items.iter().map(Result::is_ok).collect()
}

fn put(store: &Store, keys: &[BlockKey]) -> Vec<PutStatus> {
    let ns = namespace(store);
    let put = store.put(&ns, keys, blocks_of(keys), &PutOptions::default());
    put.expect("open").wait().statuses
}

fn flush(store: &Store) {
    let report = store.flush(None).expect("open").wait();
    assert!(report.all_durable(), "{report:?}");
}

#[test]
fn what_is_stored_comes_back_from_memory_and_after_a_restart_from_the_drive() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(&dir.path().join("kv"), 4 << 20);
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 8);
    assert_eq!(put(&store, &keys), [PutStatus::Stored; 8]);
    assert_eq!(put(&store, &keys), [PutStatus::Exists; 8], "a second put is a no-op");
    assert_eq!(hits(&store, &keys), [true; 8]);
    flush(&store);
    store.close();
    drop(store);

    let store = Store::open(&config).expect("opens again");
    let ns = namespace(&store);
    let found = store.lookup(&ns, &keys, LookupMode::Prefix);
    assert_eq!(found.hits, 8);
    assert!(found.states.iter().all(|s| *s == Residency::In(Tier::Nvme)));
    assert_eq!(found.infos[3].depth, 3, "a record keeps the depth");
    let leases = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
    assert_eq!(leases.hits(), 8);
    assert!(leases.sources.iter().all(|s| *s == Tier::Nvme));
    drop(leases);
    assert_eq!(hits(&store, &keys), [true; 8]);
    let stats = store.stats();
    assert_eq!(stats.nvme.hits + stats.dram.hits, stats.requested);
    let audit = store.audit();
    assert_eq!(audit.faults, Vec::<String>::new());
    assert_eq!(audit.nvme_used_bytes, 8 * BLOCK as u64, "usage is counted again after a restart");
}

#[test]
fn a_longer_prompt_hits_its_stored_prefix_only() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 10);
    put(&store, &keys[..6]);
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Prefix).hits, 6);
    let each = store.lookup(&ns, &[keys[9], keys[2]], LookupMode::Each);
    assert_eq!(each.states, [Residency::Absent, Residency::In(Tier::Dram)]);
    assert_eq!(each.hits, 0);
    let tail = ns.keys_with_tail(&[1, 2, 3], None);
    let full = ns.keys_from_tokens(&[1, 2, 3, 0], None);
    assert_ne!(tail, full, "case 3: the key covers the exact token extent");
}

#[test]
fn other_namespaces_never_share_bytes() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 3);
    put(&store, &keys);
    let mut salted = spec();
    salted.salt = "tenant".into();
    let other = store.namespace(&salted).expect("valid");
    assert_ne!(chain(&other, 1, 3), keys);
    // Even the very same key is another block in another namespace: case 4, keys compared whole.
    let leases = store.get(&other, &keys, &GetOptions::default()).expect("open").wait();
    assert!(leases.items.iter().all(|item| matches!(item, Err(MissReason::Absent))));
}

#[test]
fn memory_overflows_to_the_drive_and_both_keep_their_capacity() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(&config(&dir.path().join("kv"), 4 << 20)).expect("opens");
    let ns = namespace(&store);
    let mut all = Vec::new();
    for path in 0..40 {
        let keys = chain(&ns, path, 4);
        assert!(put(&store, &keys).iter().all(|s| *s == PutStatus::Stored));
        flush(&store);
        all.extend(keys);
    }
    let stats = store.stats();
    assert!(stats.dram.used_bytes <= 512 << 10);
    assert!(stats.nvme.used_bytes <= 4 << 20);
    let found = all.chunks(4).flat_map(|keys| hits(&store, keys)).all(|hit| hit);
    assert!(found, "all 160 blocks fit on the drive");
    let on_disk: u64 = std::fs::read_dir(dir.path().join("kv"))
        .expect("a directory")
        .map(|e| {
            std::os::unix::fs::MetadataExt::blocks(&e.expect("entry").metadata().expect("meta"))
        })
        .sum();
    assert!(on_disk * 512 <= 4 << 20, "case 13: the capacity bounds what is allocated on disk");
}

#[test]
fn a_full_drive_evicts_leaves_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(&config(&dir.path().join("kv"), 1 << 20)).expect("opens");
    let ns = namespace(&store);
    for path in 0..30 {
        let keys = chain(&ns, path, 5);
        put(&store, &keys);
        flush(&store);
        for path in 0..=path {
            let keys = chain(&ns, path, 5);
            let found = store.lookup(&ns, &keys, LookupMode::Each);
            let present: Vec<bool> = found.states.iter().map(|s| s.is_hit()).collect();
            let prefix = present.iter().take_while(|p| **p).count();
            let kept = present.iter().filter(|p| **p).count();
            assert_eq!(prefix, kept, "case 26: tails die before heads: {present:?}");
        }
    }
    assert!(store.stats().counters.iter().any(|(n, v)| *n == "evicted_nvme" && *v > 0));
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn leases_survive_eviction_and_the_store() {
    let store = Store::open(&memory_only(512 << 10)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 4);
    put(&store, &keys);
    let leases = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
    for path in 2..20 {
        put(&store, &chain(&ns, path, 4));
    }
    assert_eq!(hits(&store, &keys), [true; 4], "leased blocks are not evicted");
    store.close();
    drop(store);
    for (key, lease) in keys.iter().zip(&leases.items) {
        assert_eq!(lease.as_ref().expect("a hit").as_slice(), bytes_of(key));
    }
}

#[test]
fn leased_bytes_are_capped_and_come_back() {
    let mut config = memory_only(512 << 10);
    config.max_leased_fraction = 0.25;
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 16);
    put(&store, &keys);
    let leases = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
    assert_eq!(leases.hits(), 8, "a quarter of 512 KiB is 8 blocks");
    assert!(matches!(leases.items[8], Err(MissReason::LeaseCap)));
    drop(leases);
    assert_eq!(store.stats().leased_bytes, 0, "case 16: pinned bytes return to 0");
    let again = store.get(&ns, &keys[8..], &GetOptions::default()).expect("open").wait();
    assert_eq!(again.hits(), 8);
}

#[test]
fn get_into_fills_buffers_and_says_which() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 6);
    put(&store, &keys[..4]);
    let buffers = vec![vec![0u8; BLOCK]; 6];
    let report = store.get_into(&ns, &keys, buffers, &GetOptions::default()).expect("valid").wait();
    assert_eq!(report.hits(), 4);
    assert_eq!(report.buffers[..4], blocks_of(&keys[..4]));
    assert_eq!(report.items[5], Err(MissReason::Absent));
    let wrong = store.get_into(&ns, &keys[..1], vec![vec![0u8; 5]], &GetOptions::default());
    assert!(wrong.expect_err("too small").to_string().contains("buffer 0 holds 5 bytes"));
}

#[test]
fn a_reservation_is_filled_in_place_and_visible_when_published() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 2);
    let mut reservation = store.reserve(&ns, &keys, &PutOptions::default()).expect("open");
    for (index, key) in keys.iter().enumerate() {
        reservation.slab_mut(index, 0).expect("reserved").copy_from_slice(&bytes_of(key));
    }
    assert_eq!(hits(&store, &keys), [false; 2], "not visible before it is published");
    assert_eq!(store.publish(reservation).expect("in time").stored(), 2);
    assert_eq!(hits(&store, &keys), [true; 2]);
    let again = store.reserve(&ns, &keys, &PutOptions::default()).expect("open");
    assert_eq!(again.refused(0), Some(PutStatus::Exists));
    let other = chain(&ns, 2, 2);
    drop(store.reserve(&ns, &other, &PutOptions::default()).expect("open"));
    let audit = store.audit();
    assert_eq!(audit.dram_used_bytes, audit.dram_block_bytes, "an abandoned one gives back");
}

#[test]
fn an_expired_reservation_is_refused() {
    let mut config = memory_only(1 << 20);
    config.reservation_ttl_s = 0.001;
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 1);
    let reservation = store.reserve(&ns, &keys, &PutOptions::default()).expect("open");
    std::thread::sleep(Duration::from_millis(5));
    let refused = store.publish(reservation).expect_err("too late").to_string();
    assert!(refused.contains("reservation_ttl_s"), "{refused}");
    assert_eq!(hits(&store, &keys), [false]);
}

#[test]
fn prefill_supersedes_decode_and_not_the_other_way() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 1);
    let decode = PutOptions { computed: ComputedBy::Decode, ..PutOptions::default() };
    let first = vec![vec![1u8; BLOCK]];
    store.put(&ns, &keys, first, &decode).expect("open").wait();
    assert_eq!(put(&store, &keys), [PutStatus::Stored]);
    assert_eq!(hits(&store, &keys), [true]);
    let again = store.put(&ns, &keys, vec![vec![1u8; BLOCK]], &decode).expect("open").wait();
    assert_eq!(again.statuses, [PutStatus::Exists]);
    let info = store.lookup(&ns, &keys, LookupMode::Each).infos[0];
    assert_eq!(info.computed, ComputedBy::Prefill);
}

#[test]
fn blocks_of_several_slabs_come_back_whole_from_every_tier() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(&dir.path().join("kv"), 4 << 20);
    let layout = KvLayout::grid(4, 2, 2, vec![1000, 5000, 4096, 1]).expect("valid");
    let bytes: Vec<u8> = (0..10_097u32).map(|i| (i % 251) as u8).collect();
    let spec = NamespaceSpec::new("grid", "w", "int8", layout);
    let keys = {
        let store = Store::open(&config).expect("opens");
        let ns = store.namespace(&spec).expect("valid");
        let keys = ns.keys_from_tokens(&[1, 2, 3, 4], None);
        store.put(&ns, &keys, vec![bytes.clone()], &PutOptions::default()).expect("ok").wait();
        let leases = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
        let lease = leases.items[0].as_ref().expect("a hit");
        assert_eq!(lease.slab(1), &bytes[1000..6000]);
        flush(&store);
        keys
    };
    let store = Store::open(&config).expect("opens");
    let ns = store.namespace(&spec).expect("valid");
    let buffers = vec![vec![0u8; bytes.len()]];
    let back = store.get_into(&ns, &keys, buffers, &GetOptions::default()).expect("ok").wait();
    assert_eq!(back.buffers[0], bytes);
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn a_request_counts_one_access_a_block_and_lookups_none() {
    // A second passes and no more: what is expected of a block changes with its age, too.
    let clock = Arc::new(ManualClock::new(1 << 60));
    let seams = Seams { clock: clock.clone(), ..Seams::default() };
    let later = || clock.advance(1_000_000_000);
    let store = Store::open_with(&memory_only(512 << 10), &seams).expect("opens");
    let ns = namespace(&store);
    // 32 slots: two chains of 8, then others push out whichever was used longest ago.
    let (old, kept) = (chain(&ns, 1, 8), chain(&ns, 2, 8));
    put(&store, &kept);
    put(&store, &old);
    later();
    for _ in 0..100 {
        store.lookup(&ns, &old, LookupMode::Prefix);
    }
    let request = store.begin_request(Default::default());
    request.observe(&ns, &kept, 0);
    request.finish(0, 0);
    let learned = store.predictor().expect("open").expect("the default predicts");
    assert_eq!((learned.policy, learned.requests), ("beta", 1));
    later();
    put(&store, &chain(&ns, 3, 24));
    assert_eq!(store.lookup(&ns, &kept, LookupMode::Prefix).hits, 8, "used by a request");
    assert_eq!(store.lookup(&ns, &old, LookupMode::Prefix).hits, 0, "only looked up");
}

#[test]
fn a_clean_close_leaves_a_checkpoint_that_the_next_open_uses_up() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let config = config(&path, 4 << 20);
    let store = Store::open(&config).expect("opens");
    let keys = chain(&namespace(&store), 1, 8);
    put(&store, &keys);
    store.close();
    drop(store);
    let checkpoint = path.join("checkpoint.tkv");
    // The tables are wiped: only the checkpoint knows what is there.
    for entry in std::fs::read_dir(&path).expect("a directory") {
        let file = entry.expect("an entry").path();
        if file.file_name().is_some_and(|n| n.to_string_lossy().starts_with("segment-")) {
            let mut bytes = std::fs::read(&file).expect("a segment");
            bytes[4096..8192].fill(0);
            std::fs::write(&file, bytes).expect("written");
        }
    }
    let store = Store::open(&config).expect("opens");
    assert!(!checkpoint.exists(), "out of date as soon as the store is open");
    assert_eq!(hits(&store, &keys), [true; 8]);
    assert_eq!(store.audit().faults, Vec::<String>::new());
    store.close();
    drop(store);
    assert!(checkpoint.exists());
    let mut bytes = std::fs::read(&checkpoint).expect("a checkpoint");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&checkpoint, bytes).expect("written");
    let store = Store::open(&config).expect("a damaged checkpoint is not believed");
    assert_eq!(hits(&store, &keys), [false; 8], "and the tables were wiped");
}

/// A source that looks into the store when it is dropped.
struct Curious {
    store: std::sync::Weak<Store>,
    dropped: std::sync::mpsc::Sender<()>,
    block: Vec<u8>,
}

impl tiered_kv::BlockSource for Curious {
    fn blocks(&self) -> usize {
        1
    }

    fn block(&self, _index: usize) -> &[u8] {
        &self.block
    }
}

impl Drop for Curious {
    fn drop(&mut self) {
        if let Some(store) = self.store.upgrade() {
            store.stats();
        }
        let _ = self.dropped.send(());
    }
}

#[test]
fn a_source_is_dropped_without_the_lock_held() {
    let store = Store::open(&memory_only(512 << 10)).expect("opens");
    let keys = chain(&namespace(&store), 1, 1);
    let (dropped, told) = std::sync::mpsc::channel();
    let source =
        Curious { store: std::sync::Arc::downgrade(&store), dropped, block: bytes_of(&keys[0]) };
    std::thread::spawn({
        let store = store.clone();
        move || drop(store.put(&namespace(&store), &keys, source, &PutOptions::default()))
    });
    if told.recv_timeout(Duration::from_secs(10)).is_err() {
        // Neither dropping nor closing the store would come back.
        std::mem::forget(store);
        panic!("the source's drop waits for the lock");
    }
}

/// Blocks of two models in one store: the second one's are larger.
fn two_models(store: &Store) -> [(tiered_kv::Namespace, usize); 2] {
    [BLOCK, 3 * BLOCK].map(|bytes| {
        let layout = KvLayout::uniform(4, bytes as u64).expect("valid");
        let spec = NamespaceSpec::new("model", "weights", "float32", layout);
        (store.namespace(&spec).expect("a valid namespace"), bytes)
    })
}

#[test]
fn two_models_that_alternate_hand_the_segments_of_a_full_store_over() {
    let dir = tempfile::tempdir().expect("a directory");
    // By recency, so that it is the segments that decide what is found.
    let config =
        StoreConfig { policy: EvictionPolicy::Lru, ..config(&dir.path().join("kv"), 8 << 20) };
    let store = Store::open(&config).expect("opens");
    let models = two_models(&store);
    for round in 0..4u32 {
        let (ns, bytes) = &models[round as usize % 2];
        // As much as the drive holds, in chains of eight.
        let paths = (8 << 20) / (8 * *bytes as u32);
        let chains: Vec<_> = (0..paths).map(|path| chain(ns, round * 1000 + path, 8)).collect();
        for keys in &chains {
            let blocks: Vec<Vec<u8>> = keys.iter().map(|key| vec![key.0[0]; *bytes]).collect();
            let options =
                PutOptions { wait: Some(Duration::from_secs(5)), ..PutOptions::default() };
            let report = store.put(ns, keys, blocks, &options).expect("open").wait();
            assert_eq!(report.stored(), 8);
            flush(&store);
        }
        let found: usize =
            chains.iter().map(|keys| store.lookup(ns, keys, LookupMode::Prefix).hits).sum();
        let stats = store.stats();
        let share = (found * bytes) as f64 / stats.nvme.capacity_bytes as f64;
        assert!(share > 0.75, "round {round}: the model that runs has {share:.2} of the drive");
        assert_eq!(store.audit().faults, Vec::<String>::new());
    }
}

#[test]
fn a_class_whose_slots_are_all_leased_gets_a_segment_of_another() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(&config(&dir.path().join("kv"), 8 << 20)).expect("opens");
    let models = two_models(&store);
    let [(small, _), (large, bytes)] = &models;
    let one = chain(large, 1, 1);
    let blocks = |keys: &[BlockKey]| vec![vec![1u8; *bytes]; keys.len()];
    store.put(large, &one, blocks(&one), &PutOptions::default()).expect("open").wait();
    flush(&store);
    // One segment of memory, with room for one block of this size; all others go to the small ones.
    let lease = store.get(large, &one, &GetOptions::default()).expect("open").wait();
    assert_eq!(lease.hits(), 1);
    for path in 0..8 {
        let keys = chain(small, path, 8);
        store.put(small, &keys, blocks_of(&keys), &PutOptions::default()).expect("open").wait();
        flush(&store);
    }
    let two = chain(large, 2, 1);
    let report = store.put(large, &two, blocks(&two), &PutOptions::default()).expect("open").wait();
    assert_eq!(report.statuses, [PutStatus::Stored], "the small blocks are idle");
}

#[test]
fn a_class_whose_slots_are_all_leased_gets_a_segment_though_none_was_worth_less_than_its_block() {
    let dir = tempfile::tempdir().expect("a directory");
    let config =
        StoreConfig { policy: EvictionPolicy::Lru, ..config(&dir.path().join("kv"), 8 << 20) };
    let store = Store::open(&config).expect("opens");
    let models = two_models(&store);
    let [(small, _), (large, bytes)] = &models;
    let put_small = |path: u32| {
        let keys = chain(small, path, 1);
        store.put(small, &keys, blocks_of(&keys), &PutOptions::default()).expect("open").wait();
        flush(&store);
        keys
    };
    let put_large = |path: u32| {
        let keys = chain(large, path, 1);
        let blocks = vec![vec![1u8; *bytes]];
        let put = store.put(large, &keys, blocks, &PutOptions::default()).expect("open").wait();
        flush(&store);
        (keys, put.statuses)
    };
    // Seven segments of four small blocks, and one with a large one.
    let all: Vec<_> = (0..28).map(&put_small).collect();
    let (first, _) = put_large(1);
    // In every segment one block newer than the large one, so that none is worth less as a whole.
    for path in (0..28).step_by(4) {
        store.delete(small, &Delete::Keys(all[path].clone())).expect("open").wait();
        put_small(100 + path as u32);
    }
    let evicted = |name: &str| store.stats().counters.iter().find(|(n, _)| *n == name).map(|c| c.1);
    let (second, stored) = put_large(2);
    assert_eq!(stored, [PutStatus::Stored]);
    assert_eq!(evicted("evicted_dram"), Some(1), "its own, as no segment could be had for it");
    let lease = store.get(large, &second, &GetOptions::default()).expect("open").wait();
    assert_eq!(lease.hits(), 1);
    // Its only slot is leased: what is worth more than nothing goes, for a load and for a put.
    let loaded = store.get(large, &first, &GetOptions::default()).expect("open").wait();
    assert_eq!(loaded.items[0].as_ref().err(), None);
}
