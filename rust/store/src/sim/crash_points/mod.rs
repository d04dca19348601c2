//! Crash points, enumerated: a script of calls on two simulated drives, with the power cut at every
//! operation on a disk, and for each with every part of the unsynced writes that could make a
//! difference.

pub(super) mod bench;
mod ledger;
mod watch;

use crate::machine::{Doomed, Event, Outcome, PutItem, PutStatus};
use bench::{Bench, DRIVES, Order, blank};
use parking_lot::Mutex;
use std::sync::Arc;
use tiered_kv_io::MemDisk;
use tiered_kv_types::{BlockInfo, BlockKey, ComputedBy, TenantId};
use watch::{Counts, Watch, watch};

/// Even and odd keys lie on different drives.
fn key(ns: usize, id: u8) -> BlockKey {
    let mut bytes = [0; 32];
    (bytes[0], bytes[1], bytes[8], bytes[9]) = (id, id, id, ns as u8);
    BlockKey(bytes)
}

/// A script in progress.
struct Script {
    bench: Bench,
    watch: Arc<Mutex<Watch>>,
    disks: Vec<Arc<MemDisk>>,
    order: Order,
    /// Without T1: what a put has acknowledged is durable.
    staging: bool,
    opened: u64,
    version: u64,
    /// What the script has exercised, added up over its opens.
    seen: Seen,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    class_changes: usize,
    evicted: u64,
    buried: u64,
    retired: u64,
}

const DECODE: ComputedBy = ComputedBy::Decode;
const PREFILL: ComputedBy = ComputedBy::Prefill;

impl Script {
    fn begin(order: Order, staging: bool) -> Self {
        let shared = Arc::new(Mutex::new(Watch::default()));
        let disks: Vec<Arc<MemDisk>> = (0..DRIVES).map(|_| Arc::new(blank())).collect();
        watch(&shared, &disks);
        let bench = Bench::open_with(&disks, 1_000_000, order, staging);
        let mut script = Self {
            bench,
            watch: shared,
            disks,
            order,
            staging,
            opened: 1,
            version: 0,
            seen: Seen::default(),
        };
        script.opened();
        script
    }

    fn opened(&mut self) {
        let watch = self.watch.clone();
        self.bench.on_log(Box::new(move |entry| watch.lock().ledger.event(entry)));
    }

    fn put(&mut self, ns: usize, ids: impl IntoIterator<Item = u8>, computed: ComputedBy) {
        let info = BlockInfo { tokens: 16, computed, ..BlockInfo::default() };
        let item = |id| PutItem { key: key(ns, id), parent: None, info, tenant: TenantId::NONE };
        let items: Vec<PutItem> = ids.into_iter().map(item).collect();
        let keys: Vec<BlockKey> = items.iter().map(|i| i.key).collect();
        let versions: Vec<u64> = (self.version + 1..).take(keys.len()).collect();
        self.version += keys.len() as u64;
        for (key, version) in keys.iter().zip(&versions) {
            let ledger = &mut self.watch.lock().ledger;
            ledger.offered(*key, *version);
            if self.staging {
                ledger.superseding(*key);
            }
        }
        let Outcome::Put(statuses) = self.bench.put(ns, items, &versions) else { unreachable!() };
        assert_eq!(statuses, vec![PutStatus::Stored; keys.len()]);
        for (key, version) in keys.iter().zip(&versions) {
            self.watch.lock().ledger.stored(*key, *version);
        }
        if self.staging {
            let ledger = &mut self.watch.lock().ledger;
            ledger.flushed(keys.into_iter().zip(versions).collect());
        }
    }

    fn flush(&mut self) {
        let promised = self.watch.lock().ledger.current();
        let outcome = self.bench.call(|op| Event::Flush { op, deadline: u64::MAX });
        let Outcome::Flush(report) = outcome else { unreachable!() };
        assert!(report.all_durable(), "{report:?}");
        self.watch.lock().ledger.flushed(promised);
    }

    fn delete(&mut self, ns: usize, doomed: Doomed) {
        let taken = self.watch.lock().ledger.doomed(|key| match &doomed {
            Doomed::Keys(keys) => keys.contains(key),
            Doomed::StoredBefore(_) => usize::from(key.0[9]) == ns,
        });
        let number = self.bench.ns[ns];
        let delete = |op| Event::Delete { op, ns: number, doomed, deadline: u64::MAX };
        let Outcome::Deleted(report) = self.bench.call(delete) else { unreachable!() };
        assert!(report.durable);
        self.watch.lock().ledger.buried(taken);
    }

    fn delete_keys(&mut self, ns: usize, ids: &[u8]) {
        self.delete(ns, Doomed::Keys(ids.iter().map(|id| key(ns, *id)).collect()));
    }

    /// Stores `twice` again while its slots are not the first to be taken, so that the header of
    /// its older copy stays where it is, behind a newer one elsewhere.
    fn leave_older_copy(&mut self, twice: [u8; 2], gone: [u8; 2], others: [u8; 2]) {
        self.put(0, twice.into_iter().chain(gone), DECODE);
        self.flush();
        self.put(0, others, PREFILL);
        self.put(0, twice, PREFILL);
        self.delete_keys(0, &gone);
        self.flush();
    }

    fn count(&mut self) {
        let machine = &self.bench.machine;
        self.seen.class_changes += self.bench.class_changes;
        self.seen.evicted += machine.counters.evicted_nvme;
        self.seen.buried += machine.counters.buried;
        self.seen.retired += machine.counters.tombstones_retired;
    }

    fn close_and_open(self) -> Self {
        self.open_again(|bench, disks| {
            bench.close();
            disks
        })
    }

    /// Cuts the power: of the unsynced writes every second one has landed.
    fn cut_and_open(self) -> Self {
        self.watch.lock().ledger.power_cut();
        self.open_again(|_, disks| {
            let crash = |disk: Arc<MemDisk>| Arc::new(disk.crash(|write| write % 2 == 1));
            disks.into_iter().map(crash).collect()
        })
    }

    fn open_again(
        mut self,
        end: impl FnOnce(Bench, Vec<Arc<MemDisk>>) -> Vec<Arc<MemDisk>>,
    ) -> Self {
        self.count();
        let disks = end(self.bench, self.disks);
        watch(&self.watch, &disks);
        self.opened += 1;
        let begin = self.opened * 1_000_000_000;
        let bench = Bench::open_with(&disks, begin, self.order, self.staging);
        let mut next = Self { bench, disks, ..self };
        next.opened();
        next
    }

    /// Ends the script; says what was visited and exercised.
    fn end(mut self) -> (Counts, Seen, usize) {
        self.bench.settle();
        self.count();
        let mut watch = self.watch.lock();
        watch.visit();
        (watch.counts, self.seen, watch.ledger.graves())
    }
}

/// One drive has three segments: three blocks of the first namespace fill one of them, and a block
/// of the second takes a slot of 4 KiB and one of 12 KiB.
fn script(order: Order) -> (Counts, Seen, usize) {
    let mut s = Script::begin(order, false);
    s.leave_older_copy([0, 1], [2, 3], [4, 5]);
    s.put(1, [40, 41], PREFILL);
    s.put(1, [42, 43], PREFILL);
    s.flush();
    // A deleted key with an older copy elsewhere.
    s.delete_keys(0, &[0]);
    // Every slot is in use: others are evicted and written over.
    s.put(0, [6, 7, 16, 17], PREFILL);
    s.flush();
    s.put(0, [8, 9], DECODE);
    s.put(0, [8, 9], PREFILL);
    s.flush();
    // A deleted key that is stored again.
    s.delete_keys(0, &[8, 9, 1]);
    s.put(0, [9], PREFILL);
    s.flush();
    // A new epoch empties the segments of both classes; they change hands.
    s.delete(1, Doomed::StoredBefore(u64::MAX));
    s.bench.settle();
    s.put(0, 10..16, PREFILL);
    s.flush();
    s.put(1, [44, 45], PREFILL);
    s.flush();
    let mut s = s.close_and_open();
    s.delete_keys(0, &[10]);
    s.put(0, [18, 19], PREFILL);
    s.flush();
    s.put(0, [20, 21, 10], PREFILL);
    s.delete_keys(0, &[19]);
    // From the tables: what is deleted is cleared, and the tombstones retire.
    let mut s = s.cut_and_open();
    s.bench.settle();
    s.put(0, [22, 23], PREFILL);
    s.flush();
    let before = s.bench.unix_ns();
    s.put(1, [46], PREFILL);
    s.delete(0, Doomed::StoredBefore(before));
    s.flush();
    s.bench.settle();
    // More deletes than the journal has pages: tombstones retire while the store is open, and
    // behind one of them there is an older copy elsewhere.
    s.leave_older_copy([30, 31], [32, 33], [34, 35]);
    s.delete_keys(0, &[30]);
    for id in 60..67 {
        s.delete_keys(0, &[id]);
    }
    s.bench.settle();
    s.put(0, [36, 9], PREFILL);
    s.flush();
    s.close_and_open().end()
}

/// Without T1 nothing is ever only in memory.
fn script_without_memory(order: Order) -> (Counts, Seen, usize) {
    let mut s = Script::begin(order, true);
    s.put(0, 0..4, DECODE);
    s.put(1, [40, 41], PREFILL);
    s.put(0, [0, 1], PREFILL);
    s.delete_keys(0, &[2]);
    s.put(0, 4..8, PREFILL);
    s.put(0, [2], PREFILL);
    let mut s = s.cut_and_open();
    s.put(0, [8, 9], PREFILL);
    s.delete(1, Doomed::StoredBefore(u64::MAX));
    s.put(1, [42, 43], PREFILL);
    s.close_and_open().end()
}

#[test]
fn without_memory_what_a_put_acknowledged_is_there_at_every_crash_point() {
    let (counts, seen, graves) = script_without_memory(Order::OldestFirst);
    let operations = counts.writes + counts.syncs + counts.files;
    assert_eq!(counts.points, operations + 1, "a crash point at every operation");
    assert!(counts.writes > 40 && counts.promises >= 6 && graves >= 3, "{counts:?}, {seen:?}");
}

/// Runs the script and sees that it was not idle.
#[expect(clippy::print_stdout, reason = "a test says how many points it has visited")]
fn enumerate(order: Order) {
    let (counts, seen, graves) = script(order);
    println!("{order:?}: {counts:?}, {seen:?}, {graves} keys deleted");
    let operations = counts.writes + counts.syncs + counts.files;
    assert_eq!(counts.points, operations + 1, "a crash point at every operation");
    assert!(counts.images >= 2 * (counts.writes + counts.syncs) + counts.torn);
    assert!(counts.torn >= 4 * counts.writes, "every write is torn at several places");
    assert!(counts.writes > 100 && counts.syncs > 50, "the script writes: {counts:?}");
    assert!(counts.promises >= 8 && graves >= 10, "and promises something");
    assert!(seen.class_changes >= 2 && seen.evicted >= 8, "{seen:?}");
    assert!(seen.buried >= 1 && seen.retired >= 8, "tombstones count and retire: {seen:?}");
}

#[test]
fn at_every_crash_point_only_what_may_be_is_found_with_the_oldest_operation_first() {
    enumerate(Order::OldestFirst);
}

#[test]
fn at_every_crash_point_only_what_may_be_is_found_with_the_newest_operation_first() {
    enumerate(Order::NewestFirst);
}
