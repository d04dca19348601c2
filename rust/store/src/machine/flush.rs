//! Waiting for durability, and closing.

use super::{Command, FlushReport, Machine, Op, OpId, Outcome};
use tiered_kv_io::Nanos;

/// A flush in progress.
#[derive(Debug)]
pub(super) struct FlushOp {
    /// Blocks made dirty before this number are waited for.
    before: u64,
    failed: u64,
    deadline: Nanos,
}

impl Machine {
    pub(super) fn flush(&mut self, op: OpId, deadline: Nanos) {
        let before = self.next_dirty;
        let failed = std::mem::take(&mut self.undurable_unreported);
        self.ops.insert(op, Op::Flush(FlushOp { before, failed, deadline }));
        self.flushes.insert(op);
        self.timers.insert((deadline, op));
    }

    /// Counts a block that will not become durable for every flush that waits for it, else for the
    /// next.
    pub(super) fn flush_failed(&mut self, seq: u64) {
        let mut reported = false;
        for op in &self.flushes {
            if let Some(Op::Flush(flush)) = self.ops.get_mut(op)
                && seq < flush.before
            {
                flush.failed += 1;
                reported = true;
            }
        }
        // Without T1 the put has told.
        self.undurable_unreported += u64::from(!reported && !self.staging.on);
    }

    fn pending_before(&self, before: u64) -> u64 {
        self.dirty.range(..before).count() as u64
    }

    /// Completes each flush whose last block is settled, and the close once nothing is dirty.
    pub(super) fn settle_flushes(&mut self, out: &mut Vec<Command>) {
        let first_dirty = self.dirty.first_key_value().map_or(u64::MAX, |(seq, _)| *seq);
        let ready = |op: &OpId| match self.ops.get(op) {
            Some(Op::Flush(flush)) => first_dirty >= flush.before,
            _ => true,
        };
        let done: Vec<OpId> = self.flushes.iter().copied().filter(ready).collect();
        for op in done {
            self.end_flush(op, out);
        }
        if let Some(op) = self.closing
            && self.dirty.is_empty()
            && self.drives_idle()
        {
            self.finish_close(op, out);
        }
    }

    pub(super) fn end_flush(&mut self, op: OpId, out: &mut Vec<Command>) {
        self.flushes.remove(&op);
        let Some(Op::Flush(flush)) = self.ops.get(&op) else { return };
        let (deadline, failed, before) = (flush.deadline, flush.failed, flush.before);
        let pending = self.pending_before(before);
        let no_durable_tier = self.drives.is_empty();
        let report = FlushReport { pending, failed, no_durable_tier };
        self.complete(op, deadline, Outcome::Flush(report), out);
    }

    pub(super) fn close(&mut self, op: OpId, deadline: Nanos, out: &mut Vec<Command>) {
        let calls: Vec<OpId> = self.timers.iter().map(|(_, op)| *op).collect();
        for call in calls {
            if matches!(self.ops.get(&call), Some(Op::Put(put)) if put.only_writes()) {
                // Drained with the rest.
                continue;
            }
            self.end_op(call, tiered_kv_types::MissReason::Closed, out);
        }
        self.ops.insert(op, Op::Close { deadline });
        self.timers.insert((deadline, op));
        self.closing = Some(op);
    }

    pub(super) fn finish_close(&mut self, op: OpId, out: &mut Vec<Command>) {
        let Some(Op::Close { deadline }) = self.ops.get(&op) else { return };
        let deadline = *deadline;
        self.closing = None;
        self.closed = true;
        let left: Vec<OpId> = self.timers.iter().map(|(_, op)| *op).collect();
        for call in left {
            if matches!(self.ops.get(&call), Some(Op::Put(_))) {
                self.end_put(call, out);
            }
        }
        let dropped = self.dirty.len() as u64;
        self.counters.dropped_at_close += dropped;
        self.complete(op, deadline, Outcome::Closed(dropped), out);
    }
}
