//! Visits every state that a power cut can leave: before and after each operation on a disk, with
//! each part of the unsynced writes landed that could make a difference.

use super::bench::{Bench, Order};
use super::ledger::Ledger;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use tiered_kv_io::{DiskOp, MemDisk};

const SECTOR: usize = 512;
/// Writes of up to this many sectors are torn at each of them, longer ones at each page.
const MOST_SECTORS: usize = 16;
/// A wall clock that no step of the script has reached.
const LATER: u64 = 1 << 50;

/// How much was enumerated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) writes: usize,
    pub(super) syncs: usize,
    /// Files made, replaced or removed.
    pub(super) files: usize,
    /// States of the disks' queues, one before each operation and one at the end.
    pub(super) points: usize,
    /// Writes of which only a part landed.
    pub(super) torn: usize,
    /// Disks that were opened after a power cut.
    pub(super) images: usize,
    /// Most keys that had to be found in one of them.
    pub(super) promises: usize,
}

#[derive(Default)]
pub(super) struct Watch {
    disks: Vec<Arc<MemDisk>>,
    pub(super) ledger: Ledger,
    pub(super) counts: Counts,
    /// The drive and the length of the write that has just ended.
    last: Option<(usize, usize)>,
    doing: String,
}

/// Watches disks: each operation on them is a crash point.
pub(super) fn watch(watch: &Arc<Mutex<Watch>>, disks: &[Arc<MemDisk>]) {
    watch.lock().disks = disks.to_vec();
    for (drive, disk) in disks.iter().enumerate() {
        let watch = watch.clone();
        disk.set_fault(Some(Box::new(move |op| {
            watch.lock().before(drive, &op);
            None
        })));
    }
}

impl Watch {
    fn before(&mut self, drive: usize, op: &DiskOp) {
        let count = match op {
            DiskOp::WriteAt { .. } => &mut self.counts.writes,
            DiskOp::Sync { .. } => &mut self.counts.syncs,
            DiskOp::Create { .. } | DiskOp::WriteFile { .. } | DiskOp::Remove { .. } => {
                &mut self.counts.files
            }
            _ => return,
        };
        *count += 1;
        self.doing = format!("before {op:?} on drive {drive}");
        self.visit();
        self.last = match op {
            DiskOp::WriteAt { len, .. } => Some((drive, *len)),
            _ => None,
        };
    }

    /// Opens every image that a power cut now can leave, and checks what is found in it.
    pub(super) fn visit(&mut self) {
        self.counts.points += 1;
        self.counts.promises = self.counts.promises.max(self.ledger.promises());
        for landed in self.subsets() {
            let image = |(drive, disk): (usize, &Arc<MemDisk>)| {
                disk.crash(|write| landed.contains(&(drive, write)))
            };
            let images = self.disks.iter().enumerate().map(image).collect();
            self.check(images, &format!("landed: {landed:?}"));
        }
        if let Some((torn, len)) = self.last.take() {
            self.tear(torn, len);
        }
    }

    /// Of the unsynced writes of all drives: none, all, only one of them, all but one of them.
    fn subsets(&self) -> BTreeSet<BTreeSet<(usize, usize)>> {
        let of = |(drive, disk): (usize, &Arc<MemDisk>)| {
            (0..disk.unsynced_writes()).map(move |write| (drive, write)).collect::<Vec<_>>()
        };
        let all: BTreeSet<_> = self.disks.iter().enumerate().flat_map(of).collect();
        let mut subsets = BTreeSet::from([BTreeSet::new(), all.clone()]);
        for one in &all {
            subsets.insert(BTreeSet::from([*one]));
            subsets.insert(all.iter().copied().filter(|write| write != one).collect());
        }
        subsets
    }

    /// The last write torn in two at each place, the front or the back of it landed, with all or
    /// none of the other writes.
    fn tear(&mut self, torn: usize, len: usize) {
        let Some(last) = self.disks[torn].unsynced_writes().checked_sub(1) else { return };
        let sectors = len.div_ceil(SECTOR);
        let step = if sectors <= MOST_SECTORS { 1 } else { 8 };
        for cut in (step..sectors).step_by(step) {
            for (front, others) in [(true, true), (true, false), (false, true), (false, false)] {
                let image = |(drive, disk): (usize, &Arc<MemDisk>)| {
                    disk.crash_torn(|write, sector| {
                        let this = drive == torn && write == last;
                        if this { (sector < cut) == front } else { others }
                    })
                };
                let images = self.disks.iter().enumerate().map(image).collect();
                self.counts.torn += 1;
                let part = if front { "front" } else { "back" };
                self.check(images, &format!("{part} of {cut}/{sectors}, others: {others}"));
            }
        }
    }

    fn check(&mut self, images: Vec<MemDisk>, how: &str) {
        self.counts.images += 1;
        let at = format!("crash {}, {how}", self.doing);
        let images: Vec<Arc<MemDisk>> = images.into_iter().map(Arc::new).collect();
        let mut bench = Bench::open(&images, LATER, Order::OldestFirst);
        for key in self.ledger.keys() {
            let found = bench.get(usize::from(key.0[9]), *key).ok();
            self.ledger.check(key, found, &at);
        }
        bench.settle();
        let audit = bench.machine.audit();
        assert!(audit.faults.is_empty(), "{:?}: {at}", audit.faults);
        assert_eq!(audit.nvme_used_bytes, audit.nvme_block_bytes, "drive: {at}");
        assert_eq!(audit.dram_used_bytes, audit.dram_block_bytes, "memory: {at}");
    }
}
