//! Write-behind to the drive: root first, in groups; payloads, then headers, then fdatasync.

use super::alloc::Alloc;
use super::table::OnDrive;
use super::{BlockId, Command, DriveParts, Machine, SlotAllocator, SlotId};
use crate::log::LogKind;
use smallvec::SmallVec;
use std::collections::{BTreeSet, VecDeque};
use tiered_kv_io::{FileId, Nanos};
use tiered_kv_types::record::SEGMENT_HEADER_BYTES;
use tiered_kv_types::{SegmentHeader, Tier, round_up_to_page};

/// Most blocks and bytes of one group.
const GROUP_BLOCKS: usize = 1024;
const GROUP_BYTES: u64 = 64 << 20;
/// Groups under way at once: one writes payloads while the one before it commits.
const GROUPS: usize = 2;
/// Failed groups or segments in a row after which writing pauses, and for how long.
const BREAKER_FAULTS: u32 = 3;
const BREAKER_PAUSE: Nanos = 5_000_000_000;

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
    pub(super) clears: Vec<SlotId>,
    pub(super) writes_left: usize,
    pub(super) phase: Phase,
}

/// The drive: slots, files, groups under way, and whether writing is paused after faults.
#[derive(Debug)]
pub(super) struct Drive {
    pub(super) store: [u8; 16],
    pub(super) slots: SlotAllocator,
    pub(super) files: Vec<Option<FileId>>,
    pub(super) groups: VecDeque<Group>,
    next_group: u64,
    /// Headers of quarantined slots, to be zeroed with the next group.
    pub(super) clears: BTreeSet<SlotId>,
    preparing: u32,
    pub(super) faults: u32,
    paused_until: Option<Nanos>,
}

impl Drive {
    pub(super) fn new(parts: DriveParts) -> Self {
        let segments = parts.geometry.segments as usize;
        Self {
            store: parts.store,
            slots: SlotAllocator::new(parts.geometry, true),
            files: vec![None; segments],
            groups: VecDeque::new(),
            next_group: 0,
            clears: BTreeSet::new(),
            preparing: 0,
            faults: 0,
            paused_until: None,
        }
    }

    pub(super) fn place(&self, slot: SlotId) -> (FileId, u64) {
        let file = self.files[slot.segment as usize].expect("a used slot's file is open");
        (file, self.slots.offset(slot))
    }

    pub(super) fn retry_at(&self) -> Option<Nanos> {
        self.paused_until
    }

    /// Whether nothing is on its way to the device.
    pub(super) fn is_idle(&self) -> bool {
        self.groups.is_empty() && self.preparing == 0
    }

    pub(super) fn fault(&mut self, now: Nanos) {
        self.faults += 1;
        if self.faults >= BREAKER_FAULTS {
            self.paused_until = Some(now + BREAKER_PAUSE);
        }
    }

    pub(super) fn group_mut(&mut self, id: u64) -> Option<&mut Group> {
        self.groups.iter_mut().find(|g| g.id == id)
    }
}

/// What became of the wish for a slot on the drive.
enum DriveSlots {
    Got(SmallVec<[SlotId; 1]>),
    Wait,
    Full,
}

impl Machine {
    /// Whether a block stored now would be written to a drive.
    pub(super) fn drive_writes(&self) -> bool {
        self.drive.as_ref().is_some_and(|d| d.paused_until.is_none())
    }

    /// Begins the next group, if there is something to write and room in the pipeline.
    pub(super) fn pump_offload(&mut self, out: &mut Vec<Command>) {
        let now = self.now.mono;
        let Some(drive) = &mut self.drive else { return };
        if let Some(until) = drive.paused_until {
            if now < until {
                return self.give_up_dirty();
            }
            drive.paused_until = None;
            drive.slots.mend();
        }
        let writing = drive.groups.iter().any(|g| g.phase == Phase::Payloads);
        let idle = self.dirty.is_empty() && drive.clears.is_empty();
        if writing || idle || drive.groups.len() >= GROUPS {
            return;
        }
        self.begin_group(out);
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

    /// Books a block that will not become durable.
    pub(super) fn undurable(&mut self, id: BlockId) {
        let block = self.table.get(id).expect("the caller holds a live block");
        let (key, dirty) = (block.key, block.dirty);
        self.flush_failed(dirty.unwrap_or(u64::MAX));
        self.counters.undurable += 1;
        self.log.push(self.now, LogKind::Undurable, &key, Some(Tier::Nvme));
        self.make_clean(id);
        self.refresh_with_parent(id);
    }

    fn begin_group(&mut self, out: &mut Vec<Command>) {
        let mut blocks = Vec::new();
        let mut bytes = 0;
        let waiting: Vec<BlockId> = self.dirty.values().copied().take(GROUP_BLOCKS).collect();
        for id in waiting {
            if blocks.len() >= GROUP_BLOCKS || bytes >= GROUP_BYTES {
                break;
            }
            let mut full = false;
            for id in self.root_first(id) {
                if full {
                    // Behind a root that has no place, it would be unreachable.
                    self.undurable(id);
                    continue;
                }
                match self.assign_drive_slots(id, out) {
                    DriveSlots::Got(slots) => {
                        bytes += self.start_write(id, slots);
                        blocks.push(id);
                    }
                    DriveSlots::Wait => break,
                    DriveSlots::Full => {
                        self.undurable(id);
                        full = true;
                    }
                }
            }
        }
        let drive = self.drive.as_mut().expect("the caller checked");
        let clears: Vec<SlotId> = std::mem::take(&mut drive.clears).into_iter().collect();
        if blocks.is_empty() && clears.is_empty() {
            return;
        }
        let group = drive.next_group;
        drive.next_group += 1;
        let writes_left = blocks.len();
        self.write_payloads(group, &blocks, out);
        let drive = self.drive.as_mut().expect("the caller checked");
        let failed = BTreeSet::new();
        let phase = Phase::Payloads;
        drive.groups.push_back(Group { id: group, blocks, failed, clears, writes_left, phase });
        self.advance_groups(out);
    }

    fn write_payloads(&mut self, group: u64, blocks: &[BlockId], out: &mut Vec<Command>) {
        let drive = self.drive.as_ref().expect("the caller checked");
        for id in blocks {
            let block = self.table.get(*id).expect("assigned blocks exist");
            let OnDrive::Writing(slots) = &block.drive else { unreachable!("just assigned") };
            let to = slots.iter().map(|slot| drive.place(*slot)).collect();
            let from = self.index.pin(&block.key).expect("a dirty block is in memory");
            out.push(Command::WriteSlabs { group, block: *id, from, to });
        }
    }

    /// The block and those before it in its chain that are in memory and neither on the drive nor
    /// on their way there, root first: what a crash leaves must be reachable from its root.
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

    fn assign_drive_slots(&mut self, id: BlockId, out: &mut Vec<Command>) -> DriveSlots {
        // Counted first, so that making room for a block does not evict its parent.
        self.table.count_child(id, Tier::Nvme, true);
        if let Some(parent) = self.table.parent_of(id) {
            self.refresh(parent);
        }
        let block = self.table.get(id).expect("the caller holds a live block");
        let classes: SmallVec<[u64; 1]> =
            block.slabs.iter().map(|(bytes, _)| round_up_to_page(*bytes)).collect();
        let mut slots = SmallVec::new();
        let mut answer = None;
        for class in classes {
            match self.drive_slot(class, out) {
                Alloc::Slot(slot) => slots.push(slot),
                Alloc::Full => answer = Some(DriveSlots::Full),
                Alloc::Prepare(_) | Alloc::Wait => answer = answer.or(Some(DriveSlots::Wait)),
            }
        }
        let Some(answer) = answer else { return DriveSlots::Got(slots) };
        let drive = self.drive.as_mut().expect("the caller checked");
        slots.iter().for_each(|slot| drive.slots.free(*slot));
        self.table.count_child(id, Tier::Nvme, false);
        if let Some(parent) = self.table.parent_of(id) {
            self.refresh(parent);
        }
        answer
    }

    fn drive_slot(&mut self, class: u64, out: &mut Vec<Command>) -> Alloc {
        let mut evictions = 0;
        loop {
            let drive = self.drive.as_mut().expect("the caller checked");
            match drive.slots.alloc(class) {
                Alloc::Slot(slot) => {
                    drive.clears.remove(&slot);
                    return Alloc::Slot(slot);
                }
                Alloc::Prepare(segment) => {
                    drive.preparing += 1;
                    let image = segment_image(drive, segment);
                    let file = drive.files[segment as usize];
                    out.push(Command::PrepareSegment { segment, file, image });
                    return Alloc::Wait;
                }
                Alloc::Wait => return Alloc::Wait,
                Alloc::Full => {}
            }
            let owns = drive.slots.owns_segments(class);
            let evicted = self.evict_one(Tier::Nvme, class)
                || (!owns && self.evict_of_other_class(Tier::Nvme, class));
            evictions += 1;
            if !evicted || evictions > GROUP_BLOCKS {
                return Alloc::Full;
            }
        }
    }

    pub(super) fn segment_ready(&mut self, segment: u32, result: std::io::Result<FileId>) {
        let now = self.now.mono;
        let Some(drive) = &mut self.drive else { return };
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
                // A full or lost disk: the next segment would fail too, so writing pauses at once.
                drive.paused_until = Some(now + BREAKER_PAUSE);
            }
        }
    }

    fn start_write(&mut self, id: BlockId, slots: SmallVec<[SlotId; 1]>) -> u64 {
        let block = self.table.get_mut(id).expect("the caller holds a live block");
        block.drive = OnDrive::Writing(slots);
        let bytes = block.bytes();
        if block.dirty.is_none() {
            // An ancestor that had left the drive: back in the queue until it is durable again.
            let seq = self.next_dirty;
            self.next_dirty += 1;
            block.dirty = Some(seq);
            self.dirty.insert(seq, id);
            self.dirty_bytes += bytes;
        }
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
        let Some(group) = self.drive.as_mut().and_then(|d| d.group_mut(group)) else { return };
        group.writes_left -= 1;
        if !ok {
            group.failed.insert(block);
        }
        self.advance_groups(out);
    }
}

/// The header page of a segment and its empty table.
fn segment_image(drive: &Drive, segment: u32) -> Vec<u8> {
    let geometry = drive.slots.geometry();
    let (slots, data_offset) = drive.slots.shape(segment);
    let header = SegmentHeader {
        store: drive.store,
        segment,
        class_epoch: drive.slots.class_epoch(segment),
        slot_bytes: drive.slots.slot_bytes(segment),
        slots,
        header_stride: geometry.header_stride,
        segment_bytes: geometry.segment_bytes,
        data_offset,
    };
    let mut image = vec![0; usize::try_from(data_offset).expect("a table fits in memory")];
    image[..SEGMENT_HEADER_BYTES].copy_from_slice(&header.encode());
    image
}
