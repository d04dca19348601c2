//! What operators do: listing, explaining, clearing, verifying and resizing.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use support::{BLOCK, GatedDisk, blocks_of, chain, config, memory_only, namespace, seams, spec};
use tiered_kv::{
    BlockFilter, BlockKey, BlockRow, Cause, Delete, ErrorKind, GetOptions, LookupMode, Namespace,
    NamespaceSpec, OnNvme, Operator, PutOptions, Quota, Store, StoreConfig, TenantId, resize,
};

const LONG: Duration = Duration::from_secs(60);

fn put(store: &Store, ns: &Namespace, keys: &[BlockKey], tenant: &str) -> usize {
    let options = PutOptions { tenant: tenant.to_owned(), ..PutOptions::default() };
    store.put(ns, keys, blocks_of(keys), &options).expect("open").wait().stored()
}

fn flush(store: &Store) {
    assert!(store.flush(None).expect("open").wait().all_durable());
}

fn hits(store: &Store, ns: &Namespace, keys: &[BlockKey]) -> Vec<bool> {
    let found = store.lookup(ns, keys, LookupMode::Each);
    found.states.iter().map(|s| s.is_hit()).collect()
}

fn other_spec() -> NamespaceSpec {
    NamespaceSpec { weights: "others".to_owned(), ..spec() }
}

fn all_blocks(operator: &Operator, filter: BlockFilter) -> Vec<BlockRow> {
    let (mut rows, mut from) = (Vec::new(), Some(0));
    while let Some(at) = from {
        let page = operator.blocks(at, filter).expect("answered");
        rows.extend(page.rows);
        from = page.next;
    }
    rows
}

/// Every file of a directory.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = std::fs::read_dir(dir).expect("reads").map(|file| file.expect("reads").path());
    files.map(|path| (path.clone(), std::fs::read(path).expect("reads"))).collect()
}

/// A closed store of two namespaces: four blocks of nobody's, and six of a tenant's.
struct Closed {
    dir: tempfile::TempDir,
    config: StoreConfig,
    keys: Vec<BlockKey>,
    others: Vec<BlockKey>,
}

fn closed() -> Closed {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(dir.path(), 4 << 20);
    let store = Store::open(&config).expect("opens");
    let (ns, other) = (namespace(&store), store.namespace(&other_spec()).expect("valid"));
    let (keys, others) = (chain(&ns, 1, 4), chain(&other, 2, 6));
    assert_eq!(put(&store, &ns, &keys, ""), 4);
    assert_eq!(put(&store, &other, &others, "acme"), 6);
    flush(&store);
    store.close();
    Closed { dir, config, keys, others }
}

impl Closed {
    fn dirs(&self) -> Vec<PathBuf> {
        vec![self.dir.path().to_path_buf()]
    }

    /// The one segment that is in use.
    fn segment(&self) -> PathBuf {
        self.dir.path().join("segment-000000.tkv")
    }
}

#[test]
fn a_closed_store_is_read_without_a_change_and_without_an_owner_meanwhile() {
    let setup = closed();
    let before = contents(setup.dir.path());
    let operator = Operator::read(&setup.dirs()).expect("reads");
    let rows = all_blocks(&operator, BlockFilter::default());
    assert_eq!(rows.len(), 10);
    let row = rows.iter().find(|row| row.key == setup.others[1].0).expect("stored");
    assert_eq!((row.depth, row.parent), (1, Some(setup.others[0].0)));
    assert_eq!(
        (row.tenant, row.in_dram, row.nvme),
        (TenantId::of("acme").0, false, OnNvme::Durable)
    );
    let acme = BlockFilter { tenant: Some(TenantId::of("acme").0), ..BlockFilter::default() };
    assert_eq!(all_blocks(&operator, acme).len(), 6);
    let nobody = BlockFilter { tenant: Some([0; 16]), ..BlockFilter::default() };
    assert_eq!(all_blocks(&operator, nobody).len(), 4);
    let page = operator.namespaces(0).expect("answered");
    assert_eq!((page.rows.len(), page.next), (2, None));
    let named = page.rows.iter().find(|row| row.usage.nvme_blocks == 6).expect("there");
    assert_eq!(named.fields.as_ref().expect("kept")["weights"], "others");
    assert_eq!(named.usage.nvme_bytes, 6 * BLOCK as u64);
    let survey = operator.survey(0).expect("answered");
    let counted: Vec<u64> = survey.rows.iter().map(|row| row.blocks).collect();
    assert_eq!(counted.iter().sum::<u64>(), 10);
    let found = operator.inspect(None, setup.keys[0]).expect("answered");
    assert_eq!(found.len(), 1);
    assert!(found[0].slabs[0].place.is_some());
    assert!(operator.inspect(None, BlockKey([9; 32])).expect("answered").is_empty());
    let refused = Store::open(&setup.config).expect_err("it is being read");
    assert_eq!(refused.kind(), ErrorKind::InUse, "{refused}");
    let second = Operator::read(&setup.dirs()).expect("several may read");
    second.close();
    operator.close();
    assert_eq!(contents(setup.dir.path()), before);
    let store = Store::open(&setup.config).expect("opens");
    assert_eq!(hits(&store, &namespace(&store), &setup.keys), [true; 4]);
    let busy = Operator::read(&setup.dirs()).expect_err("it has an owner");
    assert_eq!(busy.kind(), ErrorKind::InUse, "{busy}");
}

#[test]
fn what_is_no_store_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("diary.txt"), "mine").expect("writes");
    let before = contents(dir.path());
    for open in [Operator::read, Operator::open] {
        let refused = open(&[dir.path().to_path_buf()]).expect_err("no store");
        assert_eq!(refused.kind(), ErrorKind::FormatMismatch, "{refused}");
        let missing = open(&[dir.path().join("none")]).expect_err("nothing there");
        assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
        assert_eq!(open(&[]).expect_err("none").kind(), ErrorKind::InvalidArgument);
    }
    assert!(resize(&[dir.path().to_path_buf()], 1 << 20, false).is_err());
    assert_eq!(contents(dir.path()), before);
    let setup = closed();
    std::fs::write(setup.dir.path().join("superblock.tkv"), [7; 4096]).expect("writes");
    let damaged = Operator::read(&setup.dirs()).expect_err("damaged");
    assert!(damaged.to_string().contains("damaged superblock"), "{damaged}");
}

#[test]
fn a_tenant_is_cleared_from_a_closed_store_and_stays_so() {
    let setup = closed();
    let reader = Operator::read(&setup.dirs()).expect("reads");
    assert_eq!(
        reader.delete_keys(spec().id().unwrap(), &setup.keys, LONG).unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    reader.close();
    let operator = Operator::open(&setup.dirs()).expect("opens");
    let acme = BlockFilter { tenant: Some(TenantId::of("acme").0), ..BlockFilter::default() };
    let keys: Vec<BlockKey> =
        all_blocks(&operator, acme).iter().map(|row| BlockKey(row.key)).collect();
    let report = operator.delete_keys(other_spec().id().unwrap(), &keys, LONG).expect("deleted");
    assert_eq!((report.removed, report.durable), (6, true));
    let unknown = tiered_kv::NamespaceId([3; 32]);
    let none = operator.delete_before(unknown, None, LONG).expect("nothing to do");
    assert_eq!((none.removed, none.durable), (0, true));
    operator.close();
    let store = Store::open(&setup.config).expect("opens");
    let other = store.namespace(&other_spec()).expect("valid");
    assert_eq!(hits(&store, &other, &setup.others), [false; 6]);
    assert_eq!(hits(&store, &namespace(&store), &setup.keys), [true; 4]);
}

#[test]
fn a_store_of_several_directories_is_changed_as_a_whole() {
    let dir = tempfile::tempdir().expect("a directory");
    let dirs = vec![dir.path().join("a"), dir.path().join("b")];
    let config = StoreConfig { nvme_paths: dirs.clone(), ..config(dir.path(), 4 << 20) };
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 12);
    put(&store, &ns, &keys, "");
    flush(&store);
    store.close();
    let part = Operator::read(&dirs[..1]).expect("a part may be read");
    assert_eq!(part.closed().expect("closed").missing.len(), 1);
    part.close();
    let refused = Operator::open(&dirs[..1]).expect_err("a part may not be changed");
    assert!(refused.to_string().contains("name all of them"), "{refused}");
    let operator = Operator::open(&dirs).expect("opens");
    assert_eq!(operator.delete_before(ns.id(), None, LONG).expect("deleted").removed, 12);
    operator.close();
    let store = Store::open(&config).expect("opens");
    assert_eq!(hits(&store, &namespace(&store), &keys), [false; 12]);
}

#[test]
fn every_bad_payload_is_found_and_can_be_taken_out() {
    let setup = closed();
    let operator = Operator::read(&setup.dirs()).expect("reads");
    let mut work = operator.verify().expect("closed");
    assert_eq!(work.total(), (10, 10 * BLOCK as u64));
    let mut slabs = 0;
    // A step checks at least one, however few bytes it may.
    while let Some(done) = work.step(1).expect("memory") {
        slabs += done.slabs;
        assert_eq!((done.slabs, done.bad.len(), done.damaged_headers), (1, 0, 0));
    }
    assert_eq!(slabs, 10);
    let place = operator.inspect(None, setup.keys[2]).expect("answered")[0].slabs[0].place;
    drop(work);
    operator.close();
    let mut bytes = std::fs::read(setup.segment()).expect("reads");
    let payload = support::bytes_of(&setup.keys[2]);
    let at = bytes.windows(BLOCK).position(|w| w == payload).expect("stored");
    bytes[at + 77] ^= 1;
    // And a header that no record has.
    let header = 4096 + 512 * 9;
    bytes[header + 40] ^= 1;
    std::fs::write(setup.segment(), bytes).expect("writes");
    let operator = Operator::read(&setup.dirs()).expect("reads");
    let mut work = operator.verify().expect("closed");
    let done = work.step(u64::MAX).expect("memory").expect("there is work");
    assert_eq!(work.step(1).expect("memory"), None);
    let whats: Vec<&str> = done.bad.iter().map(|bad| bad.what).collect();
    assert_eq!((done.bad.len(), done.damaged_headers), (2, 1), "{whats:?}");
    let bad = done.bad.iter().find(|bad| bad.what == "corrupt").expect("found");
    assert_eq!((bad.key, Some((bad.segment, bad.slot))), (setup.keys[2].0, place));
    assert!(whats.contains(&"header"), "the checkpoint knows more than the table");
    let bad: Vec<_> = done.bad.iter().map(|b| (b.namespace, BlockKey(b.key))).collect();
    operator.close();
    let operator = Operator::open(&setup.dirs()).expect("opens");
    for (ns, key) in bad {
        let ns = tiered_kv::NamespaceId(ns);
        assert_eq!(operator.delete_keys(ns, &[key], LONG).expect("deleted").removed, 1);
    }
    operator.close();
    let operator = Operator::read(&setup.dirs()).expect("reads");
    let mut work = operator.verify().expect("closed");
    let done = work.step(u64::MAX).expect("memory").expect("there is work");
    assert_eq!((done.slabs, done.bad.len()), (8, 0));
    let live = Store::open(&memory_only(1 << 20)).expect("opens");
    assert_eq!(live.operator().verify().unwrap_err().kind(), ErrorKind::Unsupported);
}

/// A store of `n` blocks in segments of 256 KiB, 15 blocks each.
fn filled(dir: &Path, n: u32) -> (StoreConfig, Vec<BlockKey>) {
    let config = StoreConfig {
        segment_bytes: Some(256 << 10),
        dram_capacity: Some(4 << 20),
        ..config(dir, 4 << 20)
    };
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, n);
    assert_eq!(put(&store, &ns, &keys, "acme"), n as usize);
    flush(&store);
    store.close();
    (config, keys)
}

fn open_smaller(config: &StoreConfig, capacity: u64) -> (Arc<Store>, Namespace) {
    let config = StoreConfig { nvme_capacity: capacity, ..config.clone() };
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    (store, ns)
}

fn intact(store: &Store, ns: &Namespace, keys: &[BlockKey]) -> usize {
    let leases = store.get(ns, keys, &GetOptions::default()).expect("open").wait();
    let mut found = 0;
    for (key, item) in keys.iter().zip(&leases.items) {
        if let Ok(lease) = item {
            assert_eq!(lease.slab(0), support::bytes_of(key));
            found += 1;
        }
    }
    found
}

#[test]
fn a_store_that_shrinks_moves_what_fits_and_loses_no_more() {
    let dir = tempfile::tempdir().expect("a directory");
    let dirs = [dir.path().to_path_buf()];
    let (config, keys) = filled(dir.path(), 42);
    let (store, ns) = open_smaller(&config, config.nvme_capacity);
    // Room in the first segments: every third block goes, leaves its slot and takes its header.
    let gone: Vec<BlockKey> = keys.iter().copied().step_by(3).collect();
    store.delete(&ns, &Delete::Keys(gone)).expect("open").wait();
    store.close();
    let kept: Vec<BlockKey> =
        keys.iter().enumerate().filter(|(at, _)| at % 3 != 0).map(|(_, key)| *key).collect();
    let capacity = ((2 * 256) << 10) + (64 << 10) + (32 << 10);
    let too_small = resize(&dirs, 100 << 10, false).expect_err("less than a segment");
    assert_eq!(too_small.kind(), ErrorKind::InvalidArgument, "{too_small}");
    let before = contents(dir.path());
    let would = resize(&dirs, capacity, true).expect("reads").remove(0);
    assert_eq!(contents(dir.path()), before, "a dry run changes nothing");
    let old_segment = std::fs::read(dir.path().join("segment-000002.tkv")).expect("reads");
    let done = resize(&dirs, capacity, false).expect("resized").remove(0);
    assert_eq!((would.moved_blocks, would.lost_blocks), (done.moved_blocks, done.lost_blocks));
    assert_eq!((done.segments, done.files_before, done.files_after), (2, 3, 2));
    assert_eq!((done.moved_blocks, done.lost_blocks), (8, 0), "28 blocks are left, and 30 slots");
    let (store, ns) = open_smaller(&config, capacity);
    assert_eq!(intact(&store, &ns, &kept), kept.len());
    let rows = all_blocks(&store.operator(), BlockFilter::default());
    assert!(rows.iter().all(|row| row.tenant == TenantId::of("acme").0));
    store.close();
    // As after a crash before the old file was gone: blocks in two places are there once.
    std::fs::remove_file(dir.path().join("checkpoint.tkv")).expect("closed cleanly");
    std::fs::write(dir.path().join("segment-000002.tkv"), old_segment).expect("writes");
    let (store, ns) = open_smaller(&config, config.nvme_capacity);
    assert_eq!(intact(&store, &ns, &kept), kept.len());
    assert!(store.audit().faults.is_empty(), "{:?}", store.audit().faults);
}

#[test]
fn a_full_store_that_shrinks_keeps_the_roots_and_one_that_grows_everything() {
    let dir = tempfile::tempdir().expect("a directory");
    let dirs = [dir.path().to_path_buf()];
    let (config, keys) = filled(dir.path(), 42);
    let grown = resize(&dirs, 64 << 20, false).expect("resized").remove(0);
    assert_eq!((grown.files_after, grown.moved_blocks, grown.lost_blocks), (3, 0, 0));
    let capacity = ((2 * 256) << 10) + (64 << 10) + (32 << 10);
    let done = resize(&dirs, capacity, false).expect("resized").remove(0);
    assert!(done.lost_blocks > 0 && done.lost_bytes == done.lost_blocks * BLOCK as u64);
    let (store, ns) = open_smaller(&config, capacity);
    let found = hits(&store, &ns, &keys);
    let there = found.iter().filter(|hit| **hit).count();
    assert_eq!(there as u64, 42 - done.lost_blocks);
}

#[test]
fn a_quota_holds_from_the_first_write_and_harms_nobody_else() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(&config(dir.path(), 8 << 20)).expect("opens");
    let (ns, other) = (namespace(&store), store.namespace(&other_spec()).expect("valid"));
    let most = 4 * BLOCK as u64;
    let quota = Quota { dram_bytes: Some(most), nvme_bytes: Some(2 * most) };
    assert!(store.set_quota(&ns, quota).expect("open"));
    let theirs = chain(&other, 9, 10);
    assert_eq!(put(&store, &other, &theirs, ""), 10);
    for path in 0..6 {
        let keys = chain(&ns, path, 3);
        let stored = put(&store, &ns, &keys, "");
        assert!(store.usage(&ns).expect("open").is_within(&quota), "path {path}");
        flush(&store);
        assert!(stored > 0, "its own blocks make room: path {path}");
        assert!(store.usage(&ns).expect("open").is_within(&quota), "path {path}");
    }
    let wide = chain(&ns, 50, 9);
    assert!(put(&store, &ns, &wide, "") <= 4, "a chain longer than the quota is throttled");
    assert_eq!(hits(&store, &other, &theirs), [true; 10]);
    assert!(store.stats().dram.blocks > 10);
    let own = store.usage(&ns).expect("open");
    assert_eq!(store.stats().namespaces.len(), 2);
    let row = store.stats().namespaces.into_iter().find(|row| row.quota == quota);
    assert_eq!(row.expect("listed").usage, own);
    assert!(store.audit().faults.is_empty(), "{:?}", store.audit().faults);
    // A lease keeps memory: until it ends the namespace is over a lowered quota.
    flush(&store);
    let key = wide[..1].to_vec();
    let lease = store.get(&ns, &key, &GetOptions::default()).expect("open").wait();
    let none = Quota { dram_bytes: Some(0), nvme_bytes: Some(0) };
    assert!(lease.hits() == 0 || !store.set_quota(&ns, none).expect("open"));
    drop(lease);
    assert!(store.set_quota(&ns, none).expect("open"));
    assert_eq!(put(&store, &ns, &chain(&ns, 60, 1), ""), 0);
    assert!(store.set_quota(&ns, Quota::default()).expect("open"));
    assert_eq!(put(&store, &ns, &chain(&ns, 60, 3), ""), 3);
}

fn cause(store: &Store, ns: &Namespace, key: BlockKey) -> Cause {
    store.operator().explain(ns.id(), &[key]).expect("answered").keys[0].cause
}

#[test]
fn a_miss_is_explained_by_what_happened_to_its_key() {
    let gate = GatedDisk::new();
    let config = config("/simulated".as_ref(), 4 << 20);
    let store = Store::open_with(&config, &seams(gate.clone())).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 8);
    put(&store, &ns, &keys, "");
    flush(&store);
    assert_eq!(cause(&store, &ns, keys[0]), Cause::Resident);
    assert_eq!(cause(&store, &ns, chain(&ns, 7, 1)[0]), Cause::NeverStored);
    store.delete(&ns, &Delete::Keys(vec![keys[7]])).expect("open").wait();
    assert_eq!(cause(&store, &ns, keys[7]), Cause::Deleted);
    // Out of memory, so that the rest must be loaded, which takes longer than its caller waits.
    let quota = Quota { dram_bytes: Some(0), nvme_bytes: None };
    assert!(store.set_quota(&ns, quota).expect("open"));
    assert!(store.set_quota(&ns, Quota::default()).expect("open"));
    gate.shut_reads(true);
    let options = GetOptions { timeout: Some(Duration::from_millis(1)), ..GetOptions::default() };
    store.get(&ns, &keys[..1], &options).expect("open").wait();
    assert_eq!(cause(&store, &ns, keys[0]), Cause::TooSlow);
    gate.shut_reads(false);
    let none = Quota { dram_bytes: None, nvme_bytes: Some(0) };
    store.set_quota(&ns, none).expect("open");
    assert_eq!(cause(&store, &ns, keys[6]), Cause::Evicted);
    let told = store.operator().explain(ns.id(), &keys).expect("answered");
    assert!(told.complete && told.keys.len() == 8);
    let tiers: Vec<_> = told.keys[6].events.iter().map(|e| e.tier.as_deref()).collect();
    assert_eq!(tiers, [Some("nvme"), Some("dram")], "the newest first");
    store.set_quota(&ns, Quota { dram_bytes: Some(0), nvme_bytes: None }).expect("open");
    let late = chain(&ns, 3, 1);
    assert_eq!(put(&store, &ns, &late, ""), 0);
    assert_eq!(cause(&store, &ns, late[0]), Cause::Throttled);
}

#[test]
fn a_short_log_says_that_it_does_not_know() {
    let config = StoreConfig { event_log_entries: 1, ..memory_only(512 << 10) };
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 3);
    put(&store, &ns, &keys, "");
    store.delete(&ns, &Delete::Keys(keys.clone())).expect("open").wait();
    let told = store.operator().explain(ns.id(), &keys).expect("answered");
    let causes: Vec<Cause> = told.keys.iter().map(|key| key.cause).collect();
    assert_eq!(causes, [Cause::Unknown, Cause::Unknown, Cause::Deleted]);
    assert!(!told.complete && told.since_unix_ns > 0);
    store.close();
    assert_eq!(store.operator().namespaces(0).unwrap_err().kind(), ErrorKind::Closed);
}
