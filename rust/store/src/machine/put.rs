//! Putting blocks: slots first, then bytes, then visible, all or nothing for each block.

use super::table::{Block, BlockTable, OnDrive, Siblings};
use super::{BlockId, Command, DriveId, Machine, Op, OpId, Outcome, PutItem, PutStatus};
use crate::log::LogKind;
use crate::resident::{Filled, Filling};
use crate::sync::Arc;
use smallvec::SmallVec;
use std::collections::{BTreeSet, VecDeque};
use tiered_kv_io::Nanos;
use tiered_kv_policy::Facts;
use tiered_kv_types::{ComputedBy, MissReason, Tier};

/// The policy's name for blocks that can make room for each other: those with slots of the same
/// classes, and on the same drive.
pub(super) fn policy_shape(tier: Tier, home: DriveId, shape: u32) -> u32 {
    let home = if tier == Tier::Dram { 0 } else { u32::from(home) + 1 };
    (home << 16) | shape
}

/// What the policy is told of a block that became resident in `tier`.
pub(super) fn facts(table: &BlockTable, tier: Tier, id: BlockId, unix_ns: u64) -> Facts {
    let block = table.get(id).expect("the caller holds a live block");
    Facts {
        shape: policy_shape(tier, block.home, block.shape),
        depth: block.info.depth,
        block_type: block.info.block_type,
        key: block.key.key.number(),
        parent: table.parent_of(id),
        age: unix_ns.saturating_sub(block.stored_unix_ns),
    }
}

/// How soon puts that wait for room try again where nothing else happens.
const RETRY_WAITING: Nanos = 10_000_000;

/// A put in progress.
#[derive(Debug)]
pub(super) struct PutOp {
    ns: u32,
    items: Vec<PutItem>,
    statuses: Vec<Option<PutStatus>>,
    filled: Vec<Option<Filled>>,
    /// Blocks that wait for room, in their order.
    waiting: VecDeque<usize>,
    wait_until: Nanos,
    copying: usize,
    /// Without T1: blocks that are on their way to a drive.
    writing: BTreeSet<usize>,
    deadline: Nanos,
    ended: bool,
}

impl PutOp {
    pub(super) fn new(ns: u32, items: Vec<PutItem>, deadline: Nanos, wait_until: Nanos) -> Self {
        let n = items.len();
        Self {
            ns,
            items,
            statuses: vec![None; n],
            filled: std::iter::repeat_with(|| None).take(n).collect(),
            waiting: (0..n).collect(),
            wait_until: wait_until.min(deadline),
            copying: 0,
            writing: BTreeSet::new(),
            deadline,
            ended: false,
        }
    }

    /// A block that was on its way to a drive has got there, or has not; whether the call waited
    /// for it.
    pub(super) fn written(&mut self, item: usize, status: PutStatus) -> bool {
        let waited = self.writing.remove(&item);
        if waited {
            self.statuses[item] = Some(status);
        }
        waited
    }

    /// Whether nothing but writes to a drive is left of it.
    pub(super) fn only_writes(&self) -> bool {
        !self.writing.is_empty() && self.copying == 0 && self.waiting.is_empty()
    }
}

impl Machine {
    pub(super) fn put(&mut self, op: OpId, put: PutOp, out: &mut Vec<Command>) {
        let deadline = put.deadline;
        self.ops.insert(op, Op::Put(put));
        self.timers.insert((deadline, op));
        self.admit_waiting(op, out);
        self.publish_put(op, out);
    }

    /// Takes slots for blocks of a put, in their order. A block that is throttled waits if the
    /// call may wait, and so does everything behind it.
    fn admit_waiting(&mut self, op: OpId, out: &mut Vec<Command>) {
        let Some(Op::Put(mut put)) = self.ops.remove(&op) else { return };
        let may_wait = self.now.mono < put.wait_until && !put.ended;
        while let Some(item) = put.waiting.front().copied() {
            match self.admit(put.ns, &put.items[item]) {
                Ok(into) => {
                    self.mark_writing(put.ns, &put.items[item], true);
                    put.copying += 1;
                    out.push(Command::CopyIn { op, item, into });
                }
                Err(PutStatus::Throttled) if may_wait => break,
                Err(status) if self.await_item(&put, op, item, status) => {
                    put.writing.insert(item);
                }
                Err(status) => {
                    if status == PutStatus::Throttled {
                        self.throttled(put.ns, &put.items[item]);
                    }
                    put.statuses[item] = Some(status);
                }
            }
            put.waiting.pop_front();
        }
        if put.waiting.is_empty() {
            self.waiting_puts.remove(&op);
        } else {
            self.waiting_puts.insert(op);
        }
        self.ops.insert(op, Op::Put(put));
    }

    /// Lets puts that wait try again, the oldest first.
    pub(super) fn retry_puts(&mut self, out: &mut Vec<Command>) {
        let waiting: Vec<OpId> = self.waiting_puts.iter().copied().collect();
        for op in waiting {
            self.admit_waiting(op, out);
            self.publish_put(op, out);
        }
    }

    /// When puts that wait try again: soon, since a lease or a reservation that is dropped gives
    /// its slots back without a word.
    pub(super) fn next_wait(&self) -> Option<Nanos> {
        let until = |op: &OpId| match self.ops.get(op) {
            Some(Op::Put(put)) => Some(put.wait_until),
            _ => None,
        };
        let soon = self.now.mono + RETRY_WAITING;
        self.waiting_puts.iter().filter_map(until).min().map(|until| until.min(soon))
    }

    /// Whether a put has to wait for the write of a block that is stored already, or just was.
    fn await_item(&mut self, put: &PutOp, op: OpId, item: usize, status: PutStatus) -> bool {
        let there = matches!(status, PutStatus::Stored | PutStatus::Exists);
        there && self.await_write(&Self::full(put.ns, put.items[item].key), op, item, status)
    }

    fn mark_writing(&self, ns: u32, item: &PutItem, writing: bool) {
        self.index.update(&Self::full(ns, item.key), |entry| {
            entry.writing = if writing { entry.writing + 1 } else { entry.writing - 1 };
        });
    }

    /// Slots for a block that is worth storing and can be stored now.
    fn admit(&mut self, ns: u32, item: &PutItem) -> Result<Filling, PutStatus> {
        if !self.supersedes(ns, item) {
            return Err(PutStatus::Exists);
        }
        let waiting = self.dirty_bytes + self.entering.get();
        let after = waiting + self.layout(ns).block_bytes();
        self.throttling &= waiting > self.limits.dirty_low_bytes;
        self.throttling |= after > self.limits.dirty_high_bytes;
        // Without T1 nothing can be stored while no drive takes writes.
        let refused = if self.drive_writes() { self.throttling } else { self.staging.on };
        if refused {
            return Err(PutStatus::Throttled);
        }
        let mut into = self.memory_for(ns).ok_or(PutStatus::Throttled)?;
        into.book(&self.entering);
        Ok(into)
    }

    fn throttled(&mut self, ns: u32, item: &PutItem) {
        self.counters.throttled += 1;
        self.log.push(self.now, LogKind::Throttled, &Self::full(ns, item.key), None);
    }

    /// Whether a complete put of `item` would become the key's copy: it has none, or the one it has
    /// was computed by decode and this one by prefill.
    fn supersedes(&self, ns: u32, item: &PutItem) -> bool {
        let Some(id) = self.table.id(&Self::full(ns, item.key)) else { return true };
        let old = self.table.get(id).expect("mapped blocks exist");
        old.info.computed == ComputedBy::Decode && item.info.computed == ComputedBy::Prefill
    }

    pub(super) fn copied_in(
        &mut self,
        op: OpId,
        item: usize,
        filled: Option<Filled>,
        out: &mut Vec<Command>,
    ) {
        let Some(Op::Put(put)) = self.ops.get_mut(&op) else { return };
        put.copying -= 1;
        if filled.is_none() {
            put.statuses[item] = Some(PutStatus::Ended);
            let (ns, item) = (put.ns, put.items[item]);
            self.mark_writing(ns, &item, false);
        } else {
            put.filled[item] = filled;
        }
        self.publish_put(op, out);
    }

    /// Once nothing of a put is being copied, makes what was copied visible at once, roots before
    /// leaves. Blocks that wait for room come later: nothing waits while it holds slots.
    pub(super) fn publish_put(&mut self, op: OpId, out: &mut Vec<Command>) {
        if !matches!(self.ops.get(&op), Some(Op::Put(put)) if put.copying == 0) {
            return;
        }
        let Some(Op::Put(mut put)) = self.ops.remove(&op) else { return };
        let mut published = Vec::new();
        for at in 0..put.items.len() {
            let Some(filled) = put.filled[at].take() else { continue };
            let status = if put.ended {
                PutStatus::Ended
            } else {
                self.publish_block(put.ns, &put.items[at], filled, &mut published)
            };
            self.mark_writing(put.ns, &put.items[at], false);
            if self.await_item(&put, op, at, status) {
                put.writing.insert(at);
            } else {
                put.statuses[at] = Some(status);
            }
        }
        self.finish_publish(&published);
        if put.waiting.is_empty() && put.writing.is_empty() {
            self.complete_put(op, put, out);
        } else {
            self.ops.insert(op, Op::Put(put));
        }
    }

    fn complete_put(&mut self, op: OpId, put: PutOp, out: &mut Vec<Command>) {
        let status = |s: Option<PutStatus>| s.expect("every block of a put has been decided");
        let statuses: Vec<PutStatus> = put.statuses.into_iter().map(status).collect();
        let exists = statuses.iter().filter(|s| **s == PutStatus::Exists).count();
        self.counters.put_exists += exists as u64;
        self.complete(op, put.deadline, Outcome::Put(statuses), out);
    }

    pub(super) fn publish_filled(
        &mut self,
        op: OpId,
        ns: u32,
        items: Vec<(PutItem, Filled)>,
        out: &mut Vec<Command>,
    ) {
        let mut published = Vec::new();
        let mut statuses = Vec::new();
        for (item, filled) in items {
            statuses.push(self.publish_block(ns, &item, filled, &mut published));
        }
        self.finish_publish(&published);
        self.complete(op, 0, Outcome::Put(statuses), out);
    }

    pub(super) fn reserve(&mut self, op: OpId, ns: u32, items: &[PutItem], out: &mut Vec<Command>) {
        let mut slots = Vec::with_capacity(items.len());
        for item in items {
            let slot = self.admit(ns, item);
            if matches!(slot, Err(PutStatus::Throttled)) {
                self.throttled(ns, item);
            }
            slots.push(slot);
        }
        self.complete(op, 0, Outcome::Reserved(slots), out);
    }

    /// The first complete put of a key wins; a later one is a no-op unless it supersedes.
    fn publish_block(
        &mut self,
        ns: u32,
        item: &PutItem,
        filled: Filled,
        published: &mut Vec<BlockId>,
    ) -> PutStatus {
        if filled.begun() <= self.namespaces[ns as usize].epoch {
            return PutStatus::Ended;
        }
        if !self.supersedes(ns, item) {
            return PutStatus::Exists;
        }
        let key = Self::full(ns, item.key);
        if let Some(old) = self.table.id(&key) {
            published.retain(|id| *id != old);
            self.remove_block(old, MissReason::Superseded);
        }
        let generation = self.next_generation;
        self.next_generation += 1;
        let layout = self.layout(ns);
        let lens = layout.slab_bytes().iter().copied();
        let slabs: SmallVec<[(u64, u32); 1]> = lens.zip(filled.crcs().iter().copied()).collect();
        let shape = self.namespaces[ns as usize].shape.expect("opened");
        let block = Block {
            key,
            parent: item.parent,
            info: item.info,
            generation,
            put_id: self.next_put,
            stored_unix_ns: self.now.unix_ns,
            tenant: item.tenant,
            shape,
            head_groups: layout.head_groups(),
            slabs,
            in_dram: false,
            memory: SmallVec::new(),
            drive: OnDrive::None,
            home: 0,
            dirty: None,
            load: None,
            readers: 0,
            is_scrubbed: false,
            writers: Vec::new(),
            holds: 0,
            orphan: false,
            siblings: Siblings::default(),
            next: None,
            unread: false,
            expected: false,
            passed: false,
            doomed: false,
        };
        let bytes = block.bytes();
        let (id, adopted) = self.table.insert(block);
        self.enter_memory(id, filled);
        if !self.drives.is_empty() {
            self.make_dirty(id);
        }
        adopted.into_iter().for_each(|id| self.refresh(id));
        self.counters.put_stored += 1;
        self.counters.put_bytes += bytes;
        published.push(id);
        PutStatus::Stored
    }

    /// Tells the policy of a batch, leaves first, so that a root is younger than what hangs on it.
    fn finish_publish(&mut self, published: &[BlockId]) {
        self.next_put += 1;
        for id in published.iter().rev() {
            self.admit_to_policy(*id, Tier::Dram);
        }
        for id in published {
            self.refresh_with_parent(*id);
        }
    }

    /// Makes filled slots the block's copy in memory. The caller tells the policy.
    pub(super) fn enter_memory(&mut self, id: BlockId, filled: Filled) {
        let block = self.table.get_mut(id).expect("the caller holds a live block");
        block.in_dram = true;
        block.memory = filled.segments();
        let (key, info, generation) = (block.key, block.info, block.generation);
        let resident = Arc::new(filled.into_resident(generation, info));
        self.index.update(&key, |entry| {
            entry.info = info;
            entry.loading = false;
            entry.resident = Some(resident);
        });
        self.dram_blocks += 1;
        self.usage_of(key.ns).dram_blocks += 1;
        self.table.count_child(id, Tier::Dram, true);
    }

    pub(super) fn admit_to_policy(&mut self, id: BlockId, tier: Tier) {
        let facts = facts(&self.table, tier, id, self.now.unix_ns);
        self.policy.inserted(tier, id, &facts, self.now.mono);
    }

    pub(super) fn make_dirty(&mut self, id: BlockId) {
        let seq = self.next_dirty;
        self.next_dirty += 1;
        let block = self.table.get_mut(id).expect("the caller holds a live block");
        block.dirty = Some(seq);
        self.dirty_bytes += block.bytes();
        self.dirty.insert(seq, id);
    }

    /// A put that is over time ends when its copies have ended: they own the caller's memory till
    /// then.
    pub(super) fn end_put(&mut self, op: OpId, out: &mut Vec<Command>) {
        let Some(Op::Put(put)) = self.ops.get_mut(&op) else { return };
        put.ended = true;
        for item in put.waiting.drain(..) {
            put.statuses[item] = Some(PutStatus::Throttled);
        }
        for item in std::mem::take(&mut put.writing) {
            put.statuses[item] = Some(PutStatus::Ended);
        }
        self.waiting_puts.remove(&op);
        self.publish_put(op, out);
    }
}
