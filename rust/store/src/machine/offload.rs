//! Write-behind to the drives: root first, in groups; payloads, then headers, then fdatasync.
//!
//! A group spans the drives, so that a chain whose blocks lie on several of them commits together.

use super::alloc::Alloc;
use super::drive::{Drive, DriveId};
use super::table::OnDrive;
use super::{BlockId, Command, Machine, SlotId};
use crate::log::LogKind;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use tiered_kv_io::{FileId, Nanos};
use tiered_kv_types::{Tier, round_up_to_page};

/// Most blocks and bytes of one group.
const GROUP_BLOCKS: usize = 1024;
const GROUP_BYTES: u64 = 64 << 20;
/// Groups that write payloads at once: when one has written its last, the device already has the
/// next one's.
const WRITING: usize = 2;
/// Groups under way at once. A sync can take as long as writing several: those that have written
/// their payloads meanwhile commit together.
const GROUPS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Payloads,
    Headers,
    Sync,
}

#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: u64,
    pub(super) blocks: Vec<BlockId>,
    pub(super) failed: BTreeSet<BlockId>,
    /// Drives on which headers or a sync failed.
    pub(super) failed_drives: BTreeSet<DriveId>,
    pub(super) clears: Vec<(DriveId, SlotId)>,
    /// Writes or drives that the phase still waits for.
    pub(super) left: usize,
    pub(super) phase: Phase,
    /// Tombstones up to this page of the journal retire when the group is durable.
    pub(super) retires: Option<u64>,
    pub(super) begun: Nanos,
}

/// The groups under way, in the order in which they commit.
#[derive(Debug, Default)]
pub(super) struct Groups {
    pub(super) under_way: VecDeque<Group>,
    next: u64,
}

impl Group {
    /// Whether all of its payloads are where they belong.
    pub(super) fn is_written(&self) -> bool {
        self.phase != Phase::Payloads || self.left == 0
    }

    /// Whether it does no more than store.
    fn only_stores(&self) -> bool {
        self.retires.is_none()
    }
}

impl Groups {
    /// Joins to the oldest group, which has not begun to commit, those behind it that could commit
    /// too: they do it at once, with one sync.
    pub(super) fn join_written(&mut self) {
        let Some(mut front) = self.under_way.pop_front() else { return };
        // Few enough that ending it holds no caller up for long.
        while front.only_stores()
            && front.blocks.len() < GROUP_BLOCKS
            && self.under_way.front().is_some_and(|g| g.only_stores() && g.is_written())
        {
            let Some(next) = self.under_way.pop_front() else { break };
            front.blocks.extend(next.blocks);
            front.failed.extend(next.failed);
            front.clears.extend(next.clears);
        }
        self.under_way.push_front(front);
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Group> {
        self.under_way.iter_mut().find(|g| g.id == id)
    }
}

/// What became of the wish for slots on a drive.
enum DriveSlots {
    Got(DriveId, SmallVec<[SlotId; 1]>),
    Wait,
    Full,
}

impl Machine {
    /// Whether a block stored now would be written to a drive.
    pub(super) fn drive_writes(&self) -> bool {
        self.drives.iter().any(|d| d.is_writable())
    }

    /// Blocks that are to become durable and are not yet.
    pub(crate) fn blocks_waiting(&self) -> u64 {
        self.dirty.len() as u64
    }

    /// Whether nothing is on its way to a drive.
    pub(super) fn drives_idle(&self) -> bool {
        let idle = self.groups.under_way.is_empty() && self.journal.is_idle();
        idle && self.drives.iter().all(|d| d.preparing == 0)
    }

    /// Whether nothing is on its way to a drive, nor waits for more than room.
    pub(super) fn nothing_to_write(&self) -> bool {
        let clears = |d: &Drive| d.is_writable() && !d.clears.is_empty();
        let waits = !self.dirty.is_empty() || self.drives.iter().any(clears);
        self.drives_idle() && !waits && self.journal.is_settled()
    }

    /// Begins the next group, if there is something to write and room in the pipeline.
    pub(super) fn pump_offload(&mut self, out: &mut Vec<Command>) {
        if self.drives.is_empty() {
            return;
        }
        for drive in &mut self.drives {
            drive.resume(self.now.mono);
        }
        if !self.drive_writes() {
            return self.give_up_dirty();
        }
        let groups = &self.groups.under_way;
        let writing = groups.iter().filter(|g| !g.is_written()).count();
        if writing >= WRITING || groups.len() >= GROUPS {
            return;
        }
        let all_writable = self.drives.iter().all(Drive::is_writable);
        if all_writable && self.journal.wants_to_retire() {
            if groups.is_empty() {
                self.begin_retiring(out);
            }
            return;
        }
        if !self.dirty.is_empty() || self.drives.iter().any(|d| !d.clears.is_empty()) {
            self.begin_group(None, out);
        }
    }

    /// While writing is paused nothing waits for it: blocks stay in memory only, and may be
    /// evicted.
    fn give_up_dirty(&mut self) {
        let waiting: Vec<BlockId> = self.dirty.values().copied().collect();
        for id in waiting {
            let block = self.table.get(id).expect("dirty blocks exist");
            if block.drive == OnDrive::None {
                self.undurable(id);
            }
        }
    }

    /// A block has no place on a drive, or is behind one that has none. One that was given up
    /// before is only an ancestor here.
    fn give_up(&mut self, id: BlockId) {
        if self.table.get(id).is_some_and(|block| block.dirty.is_some()) {
            self.undurable(id);
        }
    }

    /// Books a block that will not become durable.
    pub(super) fn undurable(&mut self, id: BlockId) {
        let block = self.table.get(id).expect("the caller holds a live block");
        let (key, dirty) = (block.key, block.dirty);
        self.flush_failed(dirty.unwrap_or(u64::MAX));
        self.counters.undurable += 1;
        self.log.push(self.now, LogKind::Undurable, &key, Some(Tier::Nvme));
        self.make_clean(id);
        self.refresh_with_parent(id);
        self.is_unstored(id);
    }

    pub(super) fn begin_group(&mut self, retires: Option<u64>, out: &mut Vec<Command>) {
        let blocks = self.choose_blocks(out);
        let mut clears = Vec::new();
        for (number, drive) in (0..).zip(&mut self.drives) {
            if drive.is_writable() {
                let slots = std::mem::take(&mut drive.clears);
                clears.extend(slots.into_iter().map(|slot| (number, slot)));
            }
        }
        if blocks.is_empty() && clears.is_empty() && retires.is_none() {
            return;
        }
        let id = self.groups.next;
        self.groups.next += 1;
        self.lay_out(&blocks);
        self.write_payloads(id, &blocks, out);
        self.groups.under_way.push_back(Group {
            id,
            left: blocks.len(),
            blocks,
            failed: BTreeSet::new(),
            failed_drives: BTreeSet::new(),
            clears,
            phase: Phase::Payloads,
            retires,
            begun: self.now.mono,
        });
        self.keep_classes();
        self.advance_groups(out);
    }

    /// Segments whose headers a group under way will zero keep their class until it has.
    pub(super) fn keep_classes(&mut self) {
        let clears = || self.groups.under_way.iter().flat_map(|g| &g.clears);
        for (number, drive) in (0..).zip(&mut self.drives) {
            let ours = clears().filter(|(home, _)| *home == number);
            drive.slots.set_busy(ours.map(|(_, slot)| slot.segment).collect());
        }
    }

    /// Takes slots for the blocks of the next group, roots before what hangs on them.
    fn choose_blocks(&mut self, out: &mut Vec<Command>) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        let mut bytes = 0;
        // Those of the groups under way are still dirty.
        let waits = |id: &BlockId| self.table.get(*id).is_some_and(|b| b.drive == OnDrive::None);
        let dirty = self.dirty.values().copied();
        let waiting: Vec<BlockId> = dirty.filter(waits).take(GROUP_BLOCKS).collect();
        for id in waiting {
            if blocks.len() >= GROUP_BLOCKS || bytes >= GROUP_BYTES {
                break;
            }
            if self.table.get(id).is_none_or(|block| block.dirty.is_none()) {
                // Given up with its root.
                continue;
            }
            let mut full = false;
            for id in self.root_first(id) {
                if full {
                    // Behind a root that has no place, it would be unreachable.
                    self.give_up(id);
                    continue;
                }
                match self.assign_drive_slots(id, out) {
                    DriveSlots::Got(home, slots) => {
                        bytes += self.start_write(id, home, slots);
                        blocks.push(id);
                    }
                    DriveSlots::Wait => break,
                    DriveSlots::Full => {
                        self.give_up(id);
                        full = true;
                    }
                }
            }
        }
        blocks
    }

    /// Gives the slots of a group out again, in the order of its blocks: recycled ones come in any
    /// order, and what is read together is then read from one place after the other.
    fn lay_out(&mut self, blocks: &[BlockId]) {
        let mut places: BTreeMap<(DriveId, u64), Vec<SlotId>> = BTreeMap::new();
        for id in blocks {
            let block = self.table.get(*id).expect("assigned blocks exist");
            let OnDrive::Writing(slots) = &block.drive else { unreachable!("just assigned") };
            let drive = &self.drives[usize::from(block.home)].slots;
            for slot in slots {
                let of_class = (block.home, drive.slot_bytes(slot.segment));
                places.entry(of_class).or_default().push(*slot);
            }
        }
        // From the last: they are popped.
        places.values_mut().for_each(|slots| slots.sort_unstable_by(|a, b| b.cmp(a)));
        for id in blocks {
            let block = self.table.get_mut(*id).expect("assigned blocks exist");
            let home = block.home;
            let OnDrive::Writing(slots) = &mut block.drive else { unreachable!("just assigned") };
            let drive = &self.drives[usize::from(home)].slots;
            for slot in slots {
                let of_class = (home, drive.slot_bytes(slot.segment));
                *slot = places.get_mut(&of_class).and_then(Vec::pop).expect("as many as before");
            }
        }
    }

    fn write_payloads(&mut self, group: u64, blocks: &[BlockId], out: &mut Vec<Command>) {
        for id in blocks {
            let block = self.table.get(*id).expect("assigned blocks exist");
            let OnDrive::Writing(slots) = &block.drive else { unreachable!("just assigned") };
            let drive = &self.drives[usize::from(block.home)];
            let to = slots.iter().map(|slot| drive.place(*slot)).collect();
            let from = self.index.pin(&block.key).expect("a dirty block is in memory");
            out.push(Command::WriteSlabs { group, block: *id, drive: block.home, from, to });
        }
    }

    /// The block and those before it in its chain that are in memory and neither on a drive nor on
    /// their way there, root first: what a crash leaves must be reachable from its root.
    fn root_first(&self, id: BlockId) -> Vec<BlockId> {
        let mut chain = Vec::new();
        let mut at = Some(id);
        while let Some(id) = at {
            let block = self.table.get(id).expect("mapped blocks exist");
            if block.drive != OnDrive::None || !block.in_dram {
                break;
            }
            chain.push(id);
            at = self.table.parent_of(id);
        }
        chain.reverse();
        chain
    }

    /// The drive of a block: it follows from the key, among those that take writes now.
    fn home_of(&self, key: &crate::index::FullKey) -> Option<DriveId> {
        let writable = (0..).zip(&self.drives).filter(|(_, d)| d.is_writable());
        let homes: SmallVec<[DriveId; 8]> = writable.map(|(number, _)| number).collect();
        let spread = u64::from_le_bytes(key.key.0[8..16].try_into().expect("eight bytes"));
        let at = usize::try_from(spread % (homes.len().max(1) as u64)).expect("few drives");
        homes.get(at).copied()
    }

    fn count_on_drive(&mut self, id: BlockId, present: bool) {
        self.table.count_child(id, Tier::Nvme, present);
        if let Some(parent) = self.table.parent_of(id) {
            self.refresh(parent);
        }
    }

    fn assign_drive_slots(&mut self, id: BlockId, out: &mut Vec<Command>) -> DriveSlots {
        let block = self.table.get(id).expect("the caller holds a live block");
        let classes: SmallVec<[u64; 1]> =
            block.slabs.iter().map(|(bytes, _)| round_up_to_page(*bytes)).collect();
        let Some(home) = self.home_of(&block.key) else { return DriveSlots::Full };
        let (ns, bytes) = (block.key.ns, classes.iter().sum());
        // Nobody asks what a block is worth where all of them are written.
        let is_bounded = self.limits.write_bytes_per_s > 0;
        let worth = if is_bounded { self.policy.worth(Tier::Dram, id) } else { 0.0 };
        let budget = &mut self.drives[usize::from(home)].budget;
        if !budget.admits(self.now.mono, bytes, worth) {
            budget.book(0, worth);
            self.counters.not_admitted += 1;
            return DriveSlots::Full;
        }
        // Counted first, so that making room for a block does not evict its parent.
        self.count_on_drive(id, true);
        if !self.has_quota(Tier::Nvme, ns, bytes) {
            self.count_on_drive(id, false);
            return DriveSlots::Full;
        }
        let mut slots = SmallVec::new();
        let mut answer = None;
        for class in classes {
            match self.drive_slot(id, home, class, out) {
                Alloc::Slot(slot) => slots.push(slot),
                Alloc::Full => {
                    answer = Some(DriveSlots::Full);
                    break;
                }
                Alloc::Prepare(_) | Alloc::Wait => answer = answer.or(Some(DriveSlots::Wait)),
            }
        }
        let drive = &mut self.drives[usize::from(home)];
        let Some(answer) = answer else {
            // Their headers are written with the group; nothing is left to be zeroed.
            for slot in &slots {
                drive.clears.remove(slot);
            }
            drive.budget.book(bytes, worth);
            return DriveSlots::Got(home, slots);
        };
        // A slot given back is as it was: zeroing it would be a group of its own, again and again
        // while a segment is being prepared.
        slots.iter().for_each(|slot| drive.slots.free(*slot));
        self.count_on_drive(id, false);
        answer
    }

    fn drive_slot(
        &mut self,
        id: BlockId,
        home: DriveId,
        class: u64,
        out: &mut Vec<Command>,
    ) -> Alloc {
        let mut evictions = 0;
        loop {
            let drive = &mut self.drives[usize::from(home)];
            match drive.slots.alloc(class) {
                Alloc::Slot(slot) => return Alloc::Slot(slot),
                Alloc::Prepare(segment) => {
                    drive.preparing += 1;
                    // The new table is empty: nothing of the old one is left to be zeroed.
                    drive.clears.retain(|slot| slot.segment != segment);
                    let image = drive.segment_image(segment);
                    let file = drive.files[segment as usize];
                    out.push(Command::PrepareSegment { drive: home, segment, file, image });
                    return Alloc::Wait;
                }
                Alloc::Wait => return Alloc::Wait,
                Alloc::Full => {}
            }
            if self.limits.write_bytes_per_s > 0 && !self.belongs_on_drive(id, home, class) {
                self.counters.not_admitted += 1;
                return Alloc::Full;
            }
            evictions += 1;
            if !self.make_room(Tier::Nvme, home, class) || evictions > GROUP_BLOCKS {
                return Alloc::Full;
            }
        }
    }

    pub(super) fn segment_ready(
        &mut self,
        drive: DriveId,
        segment: u32,
        result: std::io::Result<FileId>,
    ) {
        let drive = &mut self.drives[usize::from(drive)];
        drive.preparing -= 1;
        match result {
            Ok(file) => {
                drive.files[segment as usize] = Some(file);
                drive.slots.ready(segment);
            }
            Err(err) => {
                tracing::warn!(segment, %err, "a segment could not be prepared");
                drive.slots.broken(segment);
                self.counters.segment_faults += 1;
                // On a full disk the next segment would fail too. Where nothing is there to be
                // recycled writing pauses then, and where no segment is left.
                let full = err.kind() == std::io::ErrorKind::StorageFull;
                let recycles = drive.slots.ready_segments().next().is_some();
                if !recycles && (full || !drive.slots.has_untried()) {
                    drive.pause(self.now.mono);
                }
            }
        }
    }

    fn start_write(&mut self, id: BlockId, home: DriveId, slots: SmallVec<[SlotId; 1]>) -> u64 {
        let block = self.table.get_mut(id).expect("the caller holds a live block");
        block.drive = OnDrive::Writing(slots);
        block.home = home;
        let (bytes, charged, ns) = (block.bytes(), block.slot_bytes(), block.key.ns);
        if block.dirty.is_none() {
            // An ancestor that had left the drive: back in the queue until it is durable again.
            let seq = self.next_dirty;
            self.next_dirty += 1;
            block.dirty = Some(seq);
            self.dirty.insert(seq, id);
            self.dirty_bytes += bytes;
        }
        self.usage_of(ns).nvme_bytes += charged;
        self.refresh(id);
        bytes
    }

    pub(super) fn slabs_written(
        &mut self,
        group: u64,
        block: BlockId,
        ok: bool,
        out: &mut Vec<Command>,
    ) {
        let Some(group) = self.groups.get_mut(group) else { return };
        group.left -= 1;
        if !ok {
            group.failed.insert(block);
        }
        self.advance_groups(out);
    }
}
