//! A store without T1: blocks pass through a small arena on their way to a drive, or from one into
//! memory that was not registered, and stay for no longer.
//!
//! A put ends when its blocks are durable; only then does a lookup find them. One that could not be
//! written is reported and gone.

use super::{BlockId, Command, Machine, Op, OpId, PutStatus};
use crate::index::FullKey;
use std::collections::BTreeSet;
use tiered_kv_types::{MissReason, round_up_to_page};

/// What a store without T1 keeps beside the table.
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// There is no T1.
    pub(super) on: bool,
    /// Durable blocks that are still in memory, until nobody copies from them.
    leaving: BTreeSet<BlockId>,
    /// Blocks that could not be written, with their generation.
    unstored: Vec<(BlockId, u64)>,
    /// What became of blocks that puts wait for, told at the end of the step.
    settled: Vec<(OpId, usize, PutStatus)>,
}

impl Staging {
    pub(super) fn new(on: bool) -> Self {
        Self { on, ..Self::default() }
    }
}

impl Machine {
    /// Whether all slabs of one block fit in the staging memory together. `Err` says how many bytes
    /// would do.
    pub(super) fn staging_fits(&self, classes: &[u64]) -> Result<(), u64> {
        let mut distinct: BTreeSet<u64> = classes.iter().copied().collect();
        distinct.retain(|class| *class > 0);
        let geometry = self.memory.geometry();
        let mut segments = 0;
        for class in distinct {
            let count = classes.iter().filter(|c| **c == class).count() as u64;
            let slots = u64::from(geometry.cut(class).0);
            segments += if slots == 0 { u64::MAX / 128 } else { count.div_ceil(slots) };
        }
        let fits = segments <= u64::from(geometry.segments);
        let block: u64 = classes.iter().map(|class| round_up_to_page(*class)).sum();
        if fits { Ok(()) } else { Err(8 * block) }
    }

    /// Lets a put wait until the block under `key`, which another call or this one is writing, is
    /// durable. False where it is, or where there is none.
    pub(super) fn await_write(
        &mut self,
        key: &FullKey,
        op: OpId,
        item: usize,
        status: PutStatus,
    ) -> bool {
        let Some(id) = self.table.id(key).filter(|_| self.staging.on) else { return false };
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        if block.is_durable() {
            return false;
        }
        block.writers.push((op, item, status));
        true
    }

    /// Tells the puts that wait for a block what became of it: what they wait for, or `instead`.
    pub(super) fn settle_writers(&mut self, id: BlockId, instead: Option<PutStatus>) {
        let Some(block) = self.table.get_mut(id) else { return };
        for (op, item, status) in std::mem::take(&mut block.writers) {
            self.staging.settled.push((op, item, instead.unwrap_or(status)));
        }
    }

    /// A block that is in memory only for as long as somebody copies from it.
    pub(super) fn is_leaving(&mut self, id: BlockId) {
        let in_dram = self.table.get(id).is_some_and(|b| b.in_dram && !b.doomed);
        if self.staging.on && in_dram {
            self.staging.leaving.insert(id);
        }
    }

    /// A block that left memory, by whatever way.
    pub(super) fn has_left(&mut self, id: BlockId) {
        self.staging.leaving.remove(&id);
    }

    /// A block that will not become durable: without T1 it has no place at all.
    pub(super) fn is_unstored(&mut self, id: BlockId) {
        if let Some(block) = self.table.get(id).filter(|_| self.staging.on) {
            self.staging.unstored.push((id, block.generation));
        }
    }

    /// Takes out what could not be written. Not while blocks are being chosen or judged, which
    /// counts on all of them being there.
    pub(super) fn drop_unstored(&mut self) {
        for (id, generation) in std::mem::take(&mut self.staging.unstored) {
            let Some(block) = self.table.get(id) else { continue };
            let written_after_all =
                block.drive != super::table::OnDrive::None || block.dirty.is_some();
            if block.generation == generation && !block.doomed && !written_after_all {
                self.settle_writers(id, Some(PutStatus::Failed));
                self.remove_block(id, MissReason::IoError);
            }
        }
    }

    /// Frees the memory of durable blocks that nobody copies from, and tells the puts.
    pub(super) fn settle_staging(&mut self, out: &mut Vec<Command>) {
        if !self.staging.on {
            return;
        }
        self.drop_unstored();
        for id in self.staging.leaving.clone() {
            let block = self.table.get(id).expect("a block in memory exists");
            let key = block.key;
            if self.index.evict(&key) {
                self.leave_memory(id);
                self.refresh_with_parent(id);
            }
        }
        self.reclaim();
        for (op, item, status) in std::mem::take(&mut self.staging.settled) {
            if let Some(Op::Put(put)) = self.ops.get_mut(&op)
                && put.written(item, status)
            {
                self.publish_put(op, out);
            }
        }
    }
}
