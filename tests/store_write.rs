//! Write-behind and what bounds it: groups, amplification, deadlines, waiting puts.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{BLOCK, GatedDisk, blocks_of, chain, config, memory_only, namespace, seams};
use tiered_kv::io_seams::{Alignment, DiskOp, MemDisk};
use tiered_kv::{
    BlockKey, BlockSource, Delete, KvLayout, LogKind, LookupMode, NamespaceSpec, PutOptions,
    PutStatus, Store,
};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

fn put(store: &Store, keys: &[BlockKey], options: &PutOptions) -> Vec<PutStatus> {
    let ns = namespace(store);
    store.put(&ns, keys, blocks_of(keys), options).expect("open").wait().statuses
}

fn flush(store: &Store) {
    assert!(store.flush(None).expect("open").wait().all_durable());
}

fn counter(store: &Store, name: &str) -> u64 {
    let stats = store.stats();
    stats.counters.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no {name}")).1
}

fn gated() -> (Arc<GatedDisk>, Arc<Store>) {
    let disk = GatedDisk::new();
    let config = config("/simulated".as_ref(), 4 << 20);
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    (disk, store)
}

#[test]
fn each_payload_is_written_once_however_often_slots_are_recycled() {
    let disk = Arc::new(MemDisk::with_alignment(Alignment { memory: 1, offset: 512 }));
    let config = config("/simulated".as_ref(), 1 << 20);
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let (slots, bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counted = (slots.clone(), bytes.clone());
    disk.set_fault(Some(Box::new(move |op| {
        if let DiskOp::WriteAt { offset, len, .. } = op {
            counted.1.fetch_add(len as u64, Ordering::SeqCst);
            // Seven slots to a segment of 128 KiB: the table ends at 8 KiB.
            if offset >= 8192 {
                counted.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        None
    })));
    for path in 0..60 {
        put(&store, &chain(&namespace(&store), path, 4), &PutOptions::default());
        flush(&store);
    }
    let offloaded = counter(&store, "offloaded");
    assert_eq!(offloaded, 240);
    assert!(
        counter(&store, "evicted_nvme") > 150,
        "a store of 49 slots was filled again and again"
    );
    assert_eq!(slots.load(Ordering::SeqCst), offloaded, "no payload is moved or written twice");
    let written = bytes.load(Ordering::SeqCst) as f64 / (offloaded * BLOCK as u64) as f64;
    assert!(written < 1.1, "headers and tables are all that is added: {written}");
}

#[test]
fn what_waits_to_be_durable_is_written_in_groups() {
    let (disk, store) = gated();
    disk.shut_writes(true);
    put(&store, &chain(&namespace(&store), 1, 1), &PutOptions::default());
    for path in 2..22 {
        put(&store, &chain(&namespace(&store), path, 1), &PutOptions::default());
    }
    disk.shut_writes(false);
    flush(&store);
    let groups = counter(&store, "groups");
    assert!((1..=3).contains(&groups), "21 puts, 2 groups: {groups}");
}

#[test]
fn a_flush_ends_at_its_deadline_and_says_what_is_pending() {
    let (disk, store) = gated();
    disk.shut_writes(true);
    put(&store, &chain(&namespace(&store), 1, 3), &PutOptions::default());
    let report = store.flush(Some(SHORT)).expect("open").wait();
    disk.shut_writes(false);
    assert_eq!((report.pending, report.all_durable()), (3, false));
    flush(&store);
}

#[test]
fn a_delete_whose_deadline_passes_has_deleted_and_is_not_durable() {
    let (disk, store) = gated();
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 2);
    put(&store, &keys, &PutOptions::default());
    flush(&store);
    disk.shut_writes(true);
    let (sent, ended) = std::sync::mpsc::channel();
    let what = Delete::Keys(keys.clone());
    let done = move |report| sent.send(report).expect("held");
    store.delete_with(&ns, &what, Some(SHORT), done).expect("open");
    let report = ended.recv().expect("it ends while the device stalls");
    disk.shut_writes(false);
    assert_eq!((report.removed, report.durable), (2, false));
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Prefix).hits, 0);
}

#[test]
fn dirty_blocks_are_not_evicted_and_without_clean_ones_puts_are_throttled() {
    let disk = GatedDisk::new();
    let mut config = config("/simulated".as_ref(), 4 << 20);
    config.dirty_high_fraction = 1.0;
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let ns = namespace(&store);
    let clean = chain(&ns, 1, 4);
    put(&store, &clean, &PutOptions::default());
    flush(&store);
    let leases = store.get(&ns, &clean, &Default::default()).expect("open").wait();
    disk.shut_writes(true);
    let dirty = chain(&ns, 2, 28);
    assert_eq!(put(&store, &dirty, &PutOptions::default()), [PutStatus::Stored; 28]);
    let more = chain(&ns, 3, 1);
    // Below the mark of 32 blocks: it is the slots that are lacking.
    assert_eq!(put(&store, &more, &PutOptions::default()), [PutStatus::Throttled]);
    drop(leases);
    assert_eq!(put(&store, &more, &PutOptions::default()), [PutStatus::Stored], "a clean one goes");
    assert_eq!(store.lookup(&ns, &dirty, LookupMode::Prefix).hits, 28);
    disk.shut_writes(false);
}

#[test]
fn a_put_that_waits_for_room_holds_no_slots() {
    let disk = GatedDisk::new();
    let mut config = config("/simulated".as_ref(), 4 << 20);
    config.dirty_high_fraction = 0.25;
    config.dirty_low_fraction = 0.25;
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    disk.shut_writes(true);
    let keys = chain(&namespace(&store), 1, 12);
    let patient = PutOptions { wait: Some(LONG), ..PutOptions::default() };
    let waiting = store.put(&namespace(&store), &keys, blocks_of(&keys), &patient).expect("open");
    let until = std::time::Instant::now() + LONG;
    while store.stats().dirty_bytes < 8 * BLOCK as u64 {
        assert!(std::time::Instant::now() < until, "eight blocks fit below the mark");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (audit, stats) = (store.audit(), store.stats());
    disk.shut_writes(false);
    assert_eq!(audit.dram_used_bytes, audit.dram_block_bytes, "its first blocks are stored");
    assert_eq!((stats.calls, stats.dirty_bytes), (1, 8 * BLOCK as u64), "and the rest waits");
    assert_eq!(waiting.wait().statuses, [PutStatus::Stored; 12]);
}

/// Tells on which thread its block is read.
struct Named {
    block: Vec<u8>,
    read_by: Arc<parking_lot::Mutex<Vec<String>>>,
}

impl BlockSource for Named {
    fn blocks(&self) -> usize {
        1
    }

    fn block(&self, _index: usize) -> &[u8] {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        self.read_by.lock().push(name);
        &self.block
    }
}

#[test]
fn copies_over_64_kib_run_on_the_cores_threads_and_others_on_the_callers() {
    let store = Store::open(&memory_only(4 << 20)).expect("opens");
    let here = std::thread::current().name().unwrap_or_default().to_owned();
    for (bytes, core) in [(64 << 10, false), ((64 << 10) + 1, true)] {
        let layout = KvLayout::uniform(4, bytes).expect("valid");
        let spec = NamespaceSpec::new("model", "weights", "float32", layout);
        let ns = store.namespace(&spec).expect("valid");
        let keys = ns.keys_from_tokens(&[1, 2, 3, 4], None);
        let read_by = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let source = Named { block: vec![1; bytes as usize], read_by: read_by.clone() };
        let put = store.put(&ns, &keys, source, &PutOptions::default()).expect("open").wait();
        assert_eq!(put.stored(), 1);
        let copied_by = read_by.lock().last().expect("it was copied").clone();
        assert_eq!(copied_by.starts_with("tkv-copy"), core, "{bytes} bytes: {copied_by}");
        assert_eq!(copied_by == here, !core, "{bytes} bytes: {copied_by}");
    }
}

#[test]
fn a_slot_is_the_payload_rounded_up_to_whole_pages() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    for (bytes, slot) in [(1, 4096), (4096, 4096), (4097, 8192)] {
        let layout = KvLayout::uniform(4, bytes).expect("valid");
        let ns = store.namespace(&NamespaceSpec::new("m", "w", "float32", layout)).expect("valid");
        let keys = ns.keys_from_tokens(&[1, 2, 3, 4], None);
        let before = store.stats().dram.used_bytes;
        let block = vec![vec![1; bytes as usize]];
        store.put(&ns, &keys, block, &PutOptions::default()).expect("open").wait();
        assert_eq!(store.stats().dram.used_bytes - before, slot, "{bytes} bytes");
    }
}

#[test]
fn the_event_log_keeps_its_bound_and_numbers_show_what_it_dropped() {
    let mut config = memory_only(512 << 10);
    config.event_log_entries = 10;
    let store = Store::open(&config).expect("opens");
    let ns = namespace(&store);
    for path in 0..20 {
        put(&store, &chain(&ns, path, 4), &PutOptions::default());
    }
    let events = store.events(0);
    assert_eq!(events.len(), 10);
    assert!(events.iter().all(|e| e.kind == LogKind::Evicted));
    assert_eq!(events[9].seq, counter(&store, "evicted_dram") - 1, "every eviction has a number");
    assert_eq!(events[0].seq, events[9].seq - 9);
}
