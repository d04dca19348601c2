//! Deletes, and the journal that keeps what was deleted from coming back.
//!
//! A delete takes the blocks out of every tier at once. Before it is acknowledged, a tombstone is
//! durable on every drive: recovery drops records at or below it, whatever headers a crash left.
//! Tombstones retire once no header that they cover can remain: after the headers of all free slots
//! were zeroed, or after recovery has read every table and zeroed what they covered.

use super::drive::DriveId;
use super::{BlockId, Command, Machine, Op, OpId, Outcome};
use crate::log::LogKind;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use tiered_kv_io::Nanos;
use tiered_kv_types::tombstone::{JOURNAL_PAGE_BYTES, TOMBSTONES_PER_PAGE, encode_page};
use tiered_kv_types::{BlockKey, Buried, MissReason, Tombstone};

/// How long after a failure retiring is tried again.
const RETRY_RETIRING: Nanos = 1_000_000_000;

/// What is to be deleted in a namespace.
#[derive(Clone, Debug)]
pub(crate) enum Doomed {
    Keys(Vec<BlockKey>),
    /// Everything stored before this time, in ns since 1970; `u64::MAX` for everything.
    StoredBefore(u64),
}

/// How a delete ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteReport {
    /// Blocks that were there.
    pub removed: u64,
    /// The delete is on every drive: nothing of it comes back after a crash. Where it is not, a
    /// drive failed the write of its tombstone.
    pub durable: bool,
}

/// A delete in progress.
#[derive(Debug)]
pub(super) struct DeleteOp {
    left: usize,
    report: DeleteReport,
    deadline: Nanos,
}

/// One page on its way to all drives.
#[derive(Debug)]
struct Flight {
    left: usize,
    ok: bool,
    ops: Vec<OpId>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Retiring {
    #[default]
    No,
    /// As soon as no group is under way: all pages, or as many as were found at open. What those
    /// cover was found with them; what later ones cover may lie in any free slot.
    Wanted { found: Option<u64> },
    /// A group zeroes the headers that the tombstones cover.
    Clearing,
    /// The pages are being zeroed.
    Zeroing { upto: u64, left: usize },
}

/// The journal, the same pages on every drive: a ring of pages counted on without end.
#[derive(Debug, Default)]
pub(super) struct Journal {
    /// Pages of the ring.
    pages: u64,
    first: u64,
    next: u64,
    /// Retiring failed and is not tried again before this time.
    not_before: Nanos,
    pending: VecDeque<(Tombstone, OpId)>,
    flight: Option<Flight>,
    retiring: Retiring,
    /// Every drive of the configuration is there, and every segment was read: else what returns may
    /// need the tombstones.
    pub(super) complete: bool,
}

impl Journal {
    pub(super) fn new(pages: u64) -> Self {
        Self { pages, ..Self::default() }
    }

    /// From how many pages in use on retiring begins.
    fn retire_from(&self) -> u64 {
        self.pages * 3 / 4
    }

    /// Nothing is under way. What waits for room in vain does not count: with a drive away the
    /// journal fills up and nothing retires.
    pub(super) fn is_idle(&self) -> bool {
        let stuck = self.used() >= self.pages && !self.complete;
        let writing = self.flight.is_some() || (!self.pending.is_empty() && !stuck);
        !writing && !matches!(self.retiring, Retiring::Clearing | Retiring::Zeroing { .. })
    }

    /// Idle, and no tombstone waits to retire.
    pub(super) fn is_settled(&self) -> bool {
        self.is_idle() && self.retiring == Retiring::No
    }

    fn may_begin_retiring(&self, now: Nanos) -> bool {
        self.retiring == Retiring::No && now >= self.not_before
    }

    /// When retiring is tried again, where somebody waits for room.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        (!self.pending.is_empty() && self.not_before > 0).then_some(self.not_before)
    }

    pub(super) fn wants_to_retire(&self) -> bool {
        matches!(self.retiring, Retiring::Wanted { .. })
    }

    fn used(&self) -> u64 {
        self.next - self.first
    }

    /// Books pages found at open. What they cover was cleared if every table was read.
    pub(super) fn found(&mut self, pages: u64, tables_read: bool) {
        self.first = 0;
        self.next = pages;
        if pages > 0 && tables_read && self.complete {
            self.retiring = Retiring::Wanted { found: Some(pages) };
        }
    }
}

impl Machine {
    pub(super) fn delete(
        &mut self,
        op: OpId,
        ns: u32,
        doomed: Doomed,
        deadline: Nanos,
        out: &mut Vec<Command>,
    ) {
        let generation = self.next_generation;
        self.next_generation += 1;
        let namespace = self.namespaces[ns as usize].id;
        let tombstone = |buried| Tombstone { namespace, buried, generation };
        let (blocks, tombstones): (Vec<BlockId>, Vec<Tombstone>) = match &doomed {
            Doomed::Keys(keys) => (
                keys.iter().filter_map(|k| self.table.id(&Self::full(ns, *k))).collect(),
                keys.iter().map(|key| tombstone(Buried::Key(*key))).collect(),
            ),
            Doomed::StoredBefore(unix_ns) => {
                let meant = |b: &super::table::Block| {
                    b.key.ns == ns && !b.doomed && b.stored_unix_ns < *unix_ns
                };
                let blocks = self.table.iter().filter(|(_, b)| meant(b)).map(|(id, _)| id);
                (blocks.collect(), vec![tombstone(Buried::StoredBefore(*unix_ns))])
            }
        };
        if matches!(doomed, Doomed::StoredBefore(u64::MAX)) {
            self.namespaces[ns as usize].epoch = generation;
        }
        let mut report = DeleteReport { removed: 0, durable: true };
        for id in blocks {
            let Some(block) = self.table.get(id).filter(|b| !b.doomed) else { continue };
            let key = block.key;
            self.log.push(self.now, LogKind::Deleted, &key, None);
            // A block being written has its headers cleared when its group has ended.
            if self.table.get(id).is_some_and(|b| b.is_durable()) {
                self.clear_headers(id);
            }
            self.remove_block(id, MissReason::Superseded);
            report.removed += 1;
        }
        self.counters.deleted += report.removed;
        let left = if self.drives.is_empty() { 0 } else { tombstones.len() };
        if left == 0 {
            return self.complete(op, deadline, Outcome::Deleted(report), out);
        }
        self.ops.insert(op, Op::Delete(DeleteOp { left, report, deadline }));
        self.timers.insert((deadline, op));
        self.journal.pending.extend(tombstones.into_iter().map(|t| (t, op)));
    }

    /// A delete whose deadline passed: the blocks are gone, the tombstone is still on its way.
    pub(super) fn end_delete(&mut self, op: OpId, out: &mut Vec<Command>) {
        let Some(Op::Delete(delete)) = self.ops.get(&op) else { return };
        let report = DeleteReport { durable: false, ..delete.report };
        let deadline = delete.deadline;
        self.complete(op, deadline, Outcome::Deleted(report), out);
    }

    /// Writes the next page of tombstones, if one waits and there is room.
    pub(super) fn pump_journal(&mut self, out: &mut Vec<Command>) {
        let journal = &mut self.journal;
        if journal.flight.is_some() || journal.pending.is_empty() {
            return;
        }
        if journal.used() >= journal.retire_from()
            && journal.may_begin_retiring(self.now.mono)
            && journal.complete
        {
            journal.retiring = Retiring::Wanted { found: None };
        }
        if journal.used() >= journal.pages {
            return;
        }
        let page = journal.next % journal.pages;
        journal.next += 1;
        let n = journal.pending.len().min(TOMBSTONES_PER_PAGE);
        let (tombstones, ops): (Vec<Tombstone>, Vec<OpId>) = journal.pending.drain(..n).unzip();
        journal.flight = Some(Flight { left: self.drives.len(), ok: true, ops });
        for (drive, state) in (0..).zip(&self.drives) {
            let bytes = encode_page(&state.store, &tombstones).to_vec();
            out.push(Command::WriteJournal { drive, page, bytes, zero: false });
        }
    }

    pub(super) fn journal_written(
        &mut self,
        drive: DriveId,
        zero: bool,
        ok: bool,
        out: &mut Vec<Command>,
    ) {
        if !ok {
            self.drives[usize::from(drive)].fault(self.now.mono);
        }
        if zero {
            if let Retiring::Zeroing { upto, left } = &mut self.journal.retiring {
                *left -= 1;
                if *left == 0 {
                    self.journal.first = *upto;
                    self.journal.retiring = Retiring::No;
                }
            }
            return;
        }
        let Some(flight) = &mut self.journal.flight else { return };
        flight.left -= 1;
        flight.ok &= ok;
        if flight.left > 0 {
            return;
        }
        let flight = self.journal.flight.take().expect("checked above");
        for op in flight.ops {
            let Some(Op::Delete(delete)) = self.ops.get_mut(&op) else { continue };
            delete.left -= 1;
            delete.report.durable &= flight.ok;
            if delete.left == 0 {
                let (report, deadline) = (delete.report, delete.deadline);
                self.complete(op, deadline, Outcome::Deleted(report), out);
            }
        }
    }

    /// Zeroes every header that a tombstone may cover, so that the tombstones can go.
    pub(super) fn begin_retiring(&mut self, out: &mut Vec<Command>) {
        let Retiring::Wanted { found } = self.journal.retiring else { return };
        if self.journal.flight.is_some() {
            return;
        }
        if found.is_none() {
            for drive in &mut self.drives {
                let free = drive.slots.free_slots();
                drive.clears.extend(free);
            }
        }
        self.journal.retiring = Retiring::Clearing;
        let upto = found.unwrap_or(self.journal.next);
        self.begin_group(Some(upto), out);
    }

    /// The headers are zeroed: the pages up to `upto` are too, unless a drive failed.
    pub(super) fn cleared_for_retiring(&mut self, upto: u64, ok: bool, out: &mut Vec<Command>) {
        if !ok || !self.drives.iter().all(|d| d.is_writable()) {
            // Tried again later: a drive that fails now would fail at once.
            self.journal.retiring = Retiring::No;
            self.journal.not_before = self.now.mono + RETRY_RETIRING;
            return;
        }
        self.zero_pages(upto, out);
    }

    fn zero_pages(&mut self, upto: u64, out: &mut Vec<Command>) {
        let (first, ring) = (self.journal.first, self.journal.pages);
        let mut left = 0;
        let mut at = first;
        while at < upto {
            // One write for each stretch without the ring's seam.
            let end = upto.min((at / ring + 1) * ring);
            let len = usize::try_from(end - at).expect("few pages") * JOURNAL_PAGE_BYTES;
            for drive in 0..self.drives.len() {
                let drive = DriveId::try_from(drive).expect("few drives");
                let bytes = vec![0; len];
                out.push(Command::WriteJournal { drive, page: at % ring, bytes, zero: true });
                left += 1;
            }
            at = end;
        }
        self.journal.retiring =
            if left == 0 { Retiring::No } else { Retiring::Zeroing { upto, left } };
        self.counters.tombstones_retired += upto - first;
    }
}
