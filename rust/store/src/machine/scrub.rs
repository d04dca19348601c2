//! Reading back what is durable, so that a bad byte is found before somebody needs it.
//!
//! In the background at a limited rate, and only while nothing is being loaded or stored; and once
//! over everything where a caller asks for it. What is bad is taken out of use; a block that is
//! still in memory is written anew.

use super::{BlockId, Command, LoadFault, Machine, Op, OpId, Outcome};
use crate::log::LogKind;
use std::collections::VecDeque;
use tiered_kv_io::Nanos;
use tiered_kv_types::{MissReason, Tier};

/// Blocks that a caller's pass reads at once.
const DEPTH: u32 = 4;
/// How long a caller's pass waits for an idle moment before it reads one block all the same.
const PATIENCE: Nanos = 100_000_000;
/// Entries of the table that one step looks at, and how soon the next does.
const SCAN: u32 = 4096;
const NEXT_SCAN: Nanos = 1_000_000;
/// Least time from the begin of one pass in the background to that of the next.
const ROUND: Nanos = 60_000_000_000;

/// What one pass over everything durable found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Blocks read and found whole.
    pub blocks: u64,
    /// Payload bytes of these.
    pub bytes: u64,
    /// Blocks that were not what had been stored.
    pub corrupt: u64,
    /// Blocks that the drive could not read.
    pub unreadable: u64,
    /// Blocks that could not be looked at: their drive is not asked at present.
    pub skipped: u64,
    /// Everything durable when the pass began was looked at, but for the skipped.
    pub complete: bool,
}

/// A pass that a caller waits for.
#[derive(Debug)]
pub(super) struct ScrubOp {
    at: BlockId,
    end: BlockId,
    in_flight: u32,
    report: ScrubReport,
    deadline: Nanos,
}

#[derive(Debug, Default)]
pub(super) struct Scrub {
    /// Bytes a second in the background.
    rate: u64,
    /// The next block of the pass in the background, and when that may begin and has begun.
    at: BlockId,
    not_before: Nanos,
    begun: Nanos,
    in_flight: u32,
    /// Passes of callers, served one after the other.
    passes: VecDeque<OpId>,
    /// When one of them last read.
    last: Nanos,
    wake: Option<Nanos>,
}

impl Scrub {
    pub(super) fn new(rate: u64) -> Self {
        Self { rate, ..Self::default() }
    }
}

/// What a look at the table found.
enum Next {
    Block(BlockId),
    /// A block that cannot be read now.
    Shut,
    /// Not found yet, or in the way of itself: later.
    Later,
    End,
}

impl Machine {
    pub(super) fn scrub(&mut self, op: OpId, deadline: Nanos) {
        let (end, in_flight) = (self.table.end(), 0);
        let report = ScrubReport::default();
        self.ops.insert(op, Op::Scrub(ScrubOp { at: 0, end, in_flight, report, deadline }));
        self.timers.insert((deadline, op));
        self.scrub.passes.push_back(op);
    }

    /// Reads the next blocks, if it is time for that.
    pub(super) fn pump_scrub(&mut self, out: &mut Vec<Command>) {
        self.scrub.wake = None;
        if self.closing.is_some() || self.closed {
            return;
        }
        while let Some(op) = self.scrub.passes.front().copied() {
            if !self.pump_pass(op, out) {
                return;
            }
            self.end_scrub(op, true, out);
        }
        if self.scrub.rate > 0 && self.nvme_blocks > 0 {
            self.pump_background(out);
        }
    }

    /// Whether nothing is being loaded or stored.
    fn is_idle(&self) -> bool {
        let quiet = self.loading_bytes == 0 && self.entering.get() == 0 && self.dirty.is_empty();
        quiet && self.groups.under_way.is_empty()
    }

    /// Moves a caller's pass on. Returns whether it is over.
    fn pump_pass(&mut self, op: OpId, out: &mut Vec<Command>) -> bool {
        let now = self.now.mono;
        loop {
            let Some(Op::Scrub(pass)) = self.ops.get(&op) else { return true };
            let (mut at, end, in_flight) = (pass.at, pass.end, pass.in_flight);
            if at >= end {
                return in_flight == 0;
            }
            let patient = self.scrub.last + PATIENCE;
            if in_flight >= DEPTH || (!self.is_idle() && now < patient) {
                self.scrub.wake = (in_flight == 0).then_some(patient);
                return false;
            }
            let next = self.next_to_scrub(&mut at, end);
            let Some(Op::Scrub(pass)) = self.ops.get_mut(&op) else { return true };
            pass.at = at;
            match next {
                Next::Block(id) => {
                    pass.in_flight += 1;
                    self.scrub.last = now;
                    self.begin_scrub(id, Some(op), out);
                }
                Next::Shut => pass.report.skipped += 1,
                Next::Later => {
                    self.scrub.wake = Some(now + NEXT_SCAN);
                    return false;
                }
                Next::End => {}
            }
        }
    }

    fn pump_background(&mut self, out: &mut Vec<Command>) {
        let now = self.now.mono;
        if self.scrub.in_flight > 0 || !self.is_idle() {
            return;
        }
        if self.scrub.not_before > now {
            self.scrub.wake = Some(self.scrub.not_before);
            return;
        }
        if self.scrub.at == 0 {
            self.scrub.begun = now;
        }
        let mut at = self.scrub.at;
        let next = self.next_to_scrub(&mut at, self.table.end());
        self.scrub.at = at;
        match next {
            Next::Block(id) => {
                let bytes = self.table.get(id).expect("just found").bytes();
                let pause = u128::from(bytes) * 1_000_000_000 / u128::from(self.scrub.rate);
                self.scrub.not_before = now + u64::try_from(pause).unwrap_or(ROUND);
                self.scrub.in_flight += 1;
                self.begin_scrub(id, None, out);
            }
            Next::Shut | Next::Later => self.scrub.wake = Some(now + NEXT_SCAN),
            Next::End => {
                self.counters.scrub_rounds += 1;
                self.scrub.at = 0;
                self.scrub.not_before = self.scrub.begun + ROUND;
                self.scrub.wake = Some(self.scrub.not_before.max(now + NEXT_SCAN));
            }
        }
    }

    /// The next durable block from `at` on, and `at` moved behind it.
    fn next_to_scrub(&self, at: &mut BlockId, end: BlockId) -> Next {
        for _ in 0..SCAN {
            if *at >= end {
                return Next::End;
            }
            let id = *at;
            match self.table.get(id) {
                Some(block) if block.is_scrubbed => return Next::Later,
                Some(block) if block.is_durable() && !block.doomed => {
                    *at += 1;
                    return if self.is_asked(id) { Next::Block(id) } else { Next::Shut };
                }
                _ => *at += 1,
            }
        }
        Next::Later
    }

    fn begin_scrub(&mut self, id: BlockId, pass: Option<OpId>, out: &mut Vec<Command>) {
        let reads = self.slab_reads(id);
        let block = self.table.get_mut(id).expect("the caller holds a live block");
        block.is_scrubbed = true;
        let drive = block.home;
        out.push(Command::Scrub { block: id, drive, reads, pass });
        self.refresh(id);
    }

    pub(super) fn scrubbed(
        &mut self,
        id: BlockId,
        pass: Option<OpId>,
        result: Result<(), LoadFault>,
        out: &mut Vec<Command>,
    ) {
        let block = self.table.get_mut(id).expect("a block is kept while it is read");
        block.is_scrubbed = false;
        let (bytes, home, doomed) = (block.bytes(), block.home, block.doomed);
        self.scrub_answered(home, &result, out);
        let mut unused = ScrubReport::default();
        let report = match pass.and_then(|op| self.ops.get_mut(&op)) {
            Some(Op::Scrub(pass)) => {
                pass.in_flight -= 1;
                &mut pass.report
            }
            _ => &mut unused,
        };
        match result {
            _ if doomed => {}
            Ok(()) => {
                report.blocks += 1;
                report.bytes += bytes;
                self.counters.scrubbed += 1;
                self.counters.scrubbed_bytes += bytes;
            }
            Err(LoadFault::Cancelled | LoadFault::NoMemory) => report.skipped += 1,
            Err(fault) => {
                report.corrupt += u64::from(fault == LoadFault::Corrupt);
                report.unreadable += u64::from(fault == LoadFault::Io);
                self.scrub_fault(id, fault);
            }
        }
        if pass.is_none() {
            self.scrub.in_flight -= 1;
        }
        self.bury(id);
        self.refresh(id);
    }

    /// A bad copy goes; where memory has the block, it is written anew.
    fn scrub_fault(&mut self, id: BlockId, fault: LoadFault) {
        self.counters.scrub_faults += 1;
        let block = self.table.get(id).expect("the caller holds a live block");
        let key = block.key;
        let rewritten = block.in_dram && !block.is_being_read() && !self.staging.on;
        if !rewritten {
            self.drive_fault(id, fault);
            return;
        }
        let corrupt = fault == LoadFault::Corrupt;
        let reason = if corrupt { MissReason::Corrupt } else { MissReason::IoError };
        self.counters.corrupt_nvme += u64::from(corrupt);
        self.log.push(self.now, LogKind::Fault(reason), &key, Some(Tier::Nvme));
        self.quarantine(id);
        self.leave_drive(id);
        self.make_dirty(id);
        self.refresh_with_parent(id);
    }

    /// Ends a pass of a caller's.
    pub(super) fn end_scrub(&mut self, op: OpId, complete: bool, out: &mut Vec<Command>) {
        self.scrub.passes.retain(|pass| *pass != op);
        let Some(Op::Scrub(pass)) = self.ops.get(&op) else { return };
        let (deadline, report) = (pass.deadline, ScrubReport { complete, ..pass.report });
        self.complete(op, deadline, Outcome::Scrubbed(report), out);
    }

    /// Reads back in the background from now on.
    #[cfg(test)]
    pub(crate) fn set_scrub_rate(&mut self, rate: u64) {
        self.scrub.rate = rate;
    }

    pub(super) fn next_scrub(&self) -> Option<Nanos> {
        self.scrub.wake.filter(|at| *at > self.now.mono)
    }
}
