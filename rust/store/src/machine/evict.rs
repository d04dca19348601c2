//! Making room, and taking blocks out: leaves first, clean ones only, never one that is held.

use super::alloc::Alloc;
use super::put::policy_shape;
use super::table::{BlockTable, OnDrive};
use super::{BlockId, DriveId, Machine, PutStatus, SlotId};
use crate::log::LogKind;
use crate::resident::Filling;
use smallvec::SmallVec;
use tiered_kv_policy::Standing;
use tiered_kv_types::{MissReason, Tier, round_up_to_page};

/// Most times that one allocation makes room.
const MAX_EVICTIONS: usize = 64;

/// What a block has to leave a tier for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Evicted {
    /// What needs its slots.
    Room,
    /// The quota of its namespace.
    Quota,
    /// Slots of another size, which its segment is to have.
    Class,
}

/// Whether a block may be evicted from memory and from its drive.
pub(super) struct Standings {
    dram: Standing,
    pub(super) drive: Standing,
}

/// Whether a block may be evicted: a clean leaf that nothing is in flight on. A held block does not
/// leave its last tier; `staging`: memory is none.
pub(super) fn standings(table: &BlockTable, id: BlockId, staging: bool) -> Option<Standings> {
    let block = table.get(id)?;
    let kin = table.kin(&block.key);
    let idle = block.dirty.is_none() && !block.doomed;
    let durable = block.is_durable();
    let dram = idle && block.in_dram && kin.dram == 0 && (block.holds == 0 || durable);
    let dram = dram && !block.expected;
    let drive = idle && durable && !block.is_being_read() && kin.drive == 0;
    let drive = drive && (block.holds == 0 || (block.in_dram && !staging));
    let standing = |may: bool| match (may, block.orphan) {
        (false, _) => Standing::Kept,
        (true, true) => Standing::Orphan,
        (true, false) => Standing::Candidate,
    };
    Some(Standings { dram: standing(dram), drive: standing(drive) })
}

impl Machine {
    /// Slots in memory for one block of a namespace: all of its slabs, or none.
    pub(super) fn memory_for(&mut self, ns: u32) -> Option<Filling> {
        let lens: SmallVec<[u64; 1]> = self.layout(ns).slab_bytes().into();
        self.memory_for_slabs(ns, &lens)
    }

    pub(super) fn memory_for_slabs(&mut self, ns: u32, lens: &[u64]) -> Option<Filling> {
        let bytes = lens.iter().map(|len| round_up_to_page(*len)).sum();
        if !self.has_quota(Tier::Dram, ns, bytes) {
            return None;
        }
        let mut filling = Filling::new(self.freed.clone(), self.next_generation);
        for len in lens {
            let class = round_up_to_page(*len);
            let id = self.memory_slot(class)?;
            let segment = u64::from(id.segment) * self.memory.geometry().segment_bytes;
            let Some(slot) = self.arena.take(segment + self.memory.offset(id), class) else {
                // Cannot happen while the allocator and the arena agree; the slot is not handed
                // out.
                tracing::error!(?id, "a free slot is still owned: it is left unused");
                return None;
            };
            self.charge_memory(id, ns);
            filling.push(slot, id, *len);
        }
        Some(filling)
    }

    fn memory_slot(&mut self, class: u64) -> Option<SlotId> {
        self.reclaim();
        for _ in 0..MAX_EVICTIONS {
            if let Alloc::Slot(id) = self.memory.alloc(class) {
                return Some(id);
            }
            if !self.make_room(Tier::Dram, 0, class) && !self.keep_one_less(None) {
                return None;
            }
        }
        None
    }

    /// Evicts what is worth least for a slot of `class`: the segment of another class, or a block
    /// with slots of this one.
    pub(super) fn make_room(&mut self, tier: Tier, home: DriveId, class: u64) -> bool {
        let own = self.find_victim(tier, home, |shape| shape.contains(&class));
        if self.take_segment(tier, home, class, own) {
            return true;
        }
        // Pinned since it was found: another is.
        own.is_some_and(|id| self.evict(tier, id, Evicted::Room))
            || self
                .find_victim(tier, home, |shape| shape.contains(&class))
                .is_some_and(|id| self.evict(tier, id, Evicted::Room))
    }

    /// The block of `tier`, on drive `home`, that should go first among those whose slots are of
    /// matching classes.
    pub(super) fn find_victim(
        &mut self,
        tier: Tier,
        home: DriveId,
        matches: impl Fn(&[u64]) -> bool,
    ) -> Option<BlockId> {
        let mut first: Option<(f64, BlockId)> = None;
        for shape in 0..self.shapes.len() {
            if !matches(&self.shapes[shape].classes) {
                continue;
            }
            let shape = u32::try_from(shape).expect("few shapes");
            let Some(id) = self.victim_of(tier, home, shape) else { continue };
            let worth = self.policy.worth(tier, id);
            if first.is_none_or(|(least, _)| worth < least) {
                first = Some((worth, id));
            }
        }
        first.map(|(_, id)| id)
    }

    /// The block of one shape that should go first.
    pub(super) fn victim_of(&mut self, tier: Tier, home: DriveId, shape: u32) -> Option<BlockId> {
        let shape = policy_shape(tier, home, shape);
        let (table, index) = (&self.table, &self.index);
        let mut busy = |id: BlockId| {
            tier == Tier::Dram && table.get(id).is_none_or(|b| !index.is_unpinned(&b.key))
        };
        self.policy.victim(tier, shape, self.now.mono, &mut busy)
    }

    pub(super) fn evict(&mut self, tier: Tier, id: BlockId, why: Evicted) -> bool {
        let evicted = match tier {
            Tier::Dram => self.evict_from_memory(id),
            _ => self.evict_from_drive(id),
        };
        let counters = &mut self.counters;
        let counter = match (why, tier) {
            (Evicted::Room, _) => return evicted,
            (Evicted::Quota, Tier::Dram) => &mut counters.evicted_dram_quota,
            (Evicted::Quota, _) => &mut counters.evicted_nvme_quota,
            (Evicted::Class, Tier::Dram) => &mut counters.evicted_dram_class,
            (Evicted::Class, _) => &mut counters.evicted_nvme_class,
        };
        *counter += u64::from(evicted);
        evicted
    }

    fn evict_from_memory(&mut self, id: BlockId) -> bool {
        let Some(block) = self.table.get(id) else { return false };
        let (key, bytes, durable) = (block.key, block.bytes(), block.is_durable());
        if !self.index.evict(&key) {
            return false;
        }
        self.leave_memory(id);
        self.counters.evicted_dram += 1;
        self.counters.evicted_dram_bytes += bytes;
        self.log.push(self.now, LogKind::Evicted, &key, Some(Tier::Dram));
        if durable {
            self.refresh_with_parent(id);
        } else {
            self.remove_block(id, MissReason::Absent);
        }
        self.reclaim();
        true
    }

    /// Books a block out of memory, after its copy left the index.
    pub(super) fn leave_memory(&mut self, id: BlockId) {
        self.goes(id);
        let block = self.table.get_mut(id).expect("the caller holds a live block");
        block.in_dram = false;
        block.memory.clear();
        let ns = block.key.ns;
        self.has_left(id);
        self.dram_blocks -= 1;
        self.usage_of(ns).dram_blocks -= 1;
        self.policy.removed(Tier::Dram, id);
        self.table.count_child(id, Tier::Dram, false);
    }

    pub(super) fn evict_from_drive(&mut self, id: BlockId) -> bool {
        let Some(block) = self.table.get(id) else { return false };
        if !block.is_durable() || block.is_being_read() {
            return false;
        }
        let (key, bytes, in_dram) = (block.key, block.bytes(), block.in_dram);
        if in_dram {
            // It may be written again, to other slots: the headers of both would be found.
            self.clear_headers(id);
        }
        self.leave_drive(id);
        self.counters.evicted_nvme += 1;
        self.counters.evicted_nvme_bytes += bytes;
        self.log.push(self.now, LogKind::Evicted, &key, Some(Tier::Nvme));
        if in_dram && !self.staging.on {
            self.refresh_with_parent(id);
        } else {
            self.remove_block(id, MissReason::Absent);
        }
        true
    }

    /// Frees a block's slots on the drive and books it out there.
    pub(super) fn leave_drive(&mut self, id: BlockId) {
        let block = self.table.get_mut(id).expect("the caller holds a live block");
        let key = block.key;
        let durable = block.is_durable();
        let slots = match std::mem::replace(&mut block.drive, OnDrive::None) {
            OnDrive::None => return,
            OnDrive::Writing(slots) | OnDrive::Durable(slots) => slots,
        };
        let (doomed, home) = (block.doomed, usize::from(block.home));
        self.nvme_blocks -= u64::from(durable);
        let bytes = block.slot_bytes();
        let usage = self.usage_of(key.ns);
        usage.nvme_blocks -= u64::from(durable);
        usage.nvme_bytes -= bytes;
        slots.iter().for_each(|slot| self.drives[home].slots.free(*slot));
        if !doomed {
            self.index.update(&key, |entry| entry.set_on_nvme(None));
            self.policy.removed(Tier::Nvme, id);
            self.table.count_child(id, Tier::Nvme, false);
        }
    }

    /// Takes a block out of every tier. Waiters of its load get `reason`; slots under a read or a
    /// write are freed when that has ended.
    pub(super) fn remove_block(&mut self, id: BlockId, reason: MissReason) {
        let Some(block) = self.table.get_mut(id) else { return };
        if block.doomed {
            return;
        }
        let key = block.key;
        let waiters = block.load.as_mut().map(|load| {
            load.cancel.set(true);
            std::mem::take(&mut load.waiters)
        });
        let in_flight = matches!(block.drive, OnDrive::Writing(_)) || block.is_being_read();
        self.settle_writers(id, Some(PutStatus::Ended));
        self.make_clean(id);
        self.index.update(&key, |entry| {
            entry.resident = None;
            entry.set_on_nvme(None);
            entry.loading = false;
        });
        if self.table.get(id).is_some_and(|b| b.in_dram) {
            self.leave_memory(id);
        }
        if in_flight {
            self.policy.removed(Tier::Nvme, id);
            self.table.count_child(id, Tier::Nvme, false);
        } else {
            self.leave_drive(id);
        }
        let parent = self.table.parent_of(id);
        let orphans = self.table.unmap(id);
        if !in_flight {
            self.table.forget(id);
        }
        for id in orphans.into_iter().chain(parent) {
            self.refresh(id);
        }
        for (op, item) in waiters.unwrap_or_default() {
            self.load_missed.push((op, item, reason));
        }
        self.reclaim();
    }

    /// Frees a doomed block once nothing is in flight on its slots.
    pub(super) fn bury(&mut self, id: BlockId) {
        let Some(block) = self.table.get(id) else { return };
        let in_flight = matches!(block.drive, OnDrive::Writing(_)) || block.is_being_read();
        if block.doomed && !in_flight {
            self.leave_drive(id);
            self.table.forget(id);
        }
    }

    /// Takes a block off the queue of those that wait to be durable.
    pub(super) fn make_clean(&mut self, id: BlockId) {
        let Some(block) = self.table.get_mut(id) else { return };
        if let Some(seq) = block.dirty.take() {
            self.dirty_bytes -= block.bytes();
            self.dirty.remove(&seq);
        }
    }

    /// Tells the policy whether the block may be evicted.
    pub(super) fn refresh(&mut self, id: BlockId) {
        let standings = standings(&self.table, id, self.staging.on);
        let Some(Standings { dram, drive }) = standings else { return };
        self.policy.set_standing(Tier::Dram, id, dram);
        self.policy.set_standing(Tier::Nvme, id, drive);
    }

    pub(super) fn refresh_with_parent(&mut self, id: BlockId) {
        self.refresh(id);
        if let Some(parent) = self.table.parent_of(id) {
            self.refresh(parent);
        }
    }
}
