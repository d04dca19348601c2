//! Write-behind to the drive: root first, in groups; payloads, then headers, then fdatasync.

use super::alloc::Alloc;
use super::table::OnDrive;
use super::{BlockId, Command, DriveParts, HeaderWrite, Machine, SlotAllocator, SlotId};
use crate::log::LogKind;
use smallvec::SmallVec;
use std::collections::{BTreeSet, VecDeque};
use tiered_kv_io::{FileId, Nanos};
use tiered_kv_types::record::{RECORD_BYTES, SEGMENT_HEADER_BYTES};
use tiered_kv_types::{MissReason, RecordHeader, SegmentHeader, Tier, round_up_to_page};

/// Most blocks and bytes of one group.
const GROUP_BLOCKS: usize = 1024;
const GROUP_BYTES: u64 = 64 << 20;
/// Groups under way at once: one writes payloads while the one before it commits.
const GROUPS: usize = 2;
/// Failed groups or segments in a row after which writing pauses, and for how long.
const BREAKER_FAULTS: u32 = 3;
const BREAKER_PAUSE: Nanos = 5_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Payloads,
    Headers,
    Sync,
}

#[derive(Debug)]
struct Group {
    id: u64,
    blocks: Vec<BlockId>,
    failed: BTreeSet<BlockId>,
    clears: Vec<SlotId>,
    writes_left: usize,
    phase: Phase,
}

/// The drive: slots, files, groups under way, and whether writing is paused after faults.
#[derive(Debug)]
pub(super) struct Drive {
    pub(super) store: [u8; 16],
    pub(super) slots: SlotAllocator,
    pub(super) files: Vec<Option<FileId>>,
    groups: VecDeque<Group>,
    next_group: u64,
    /// Headers of quarantined slots, to be zeroed with the next group.
    clears: BTreeSet<SlotId>,
    preparing: u32,
    faults: u32,
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

    fn fault(&mut self, now: Nanos) {
        self.faults += 1;
        if self.faults >= BREAKER_FAULTS {
            self.paused_until = Some(now + BREAKER_PAUSE);
        }
    }

    fn group_mut(&mut self, id: u64) -> Option<&mut Group> {
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

    /// While writing is paused nothing waits for it: blocks stay in memory only, and may be evicted.
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
    fn undurable(&mut self, id: BlockId) {
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

    /// The block and those before it in its chain that are in memory and neither on the drive nor on
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

    /// Moves the oldest group on: groups commit in order, so that parents are durable first.
    fn advance_groups(&mut self, out: &mut Vec<Command>) {
        let Some(drive) = &mut self.drive else { return };
        let Some(group) = drive.groups.front_mut() else { return };
        if group.phase != Phase::Payloads || group.writes_left > 0 {
            return;
        }
        group.phase = Phase::Headers;
        let id = group.id;
        let (blocks, failed) = (group.blocks.clone(), group.failed.clone());
        let clears = group.clears.clone();
        let mut entries: Vec<(SlotId, [u8; RECORD_BYTES])> = Vec::new();
        for block in blocks.iter().filter(|b| !failed.contains(b)) {
            self.headers_of(*block, &mut entries);
        }
        let drive = self.drive.as_ref().expect("checked above");
        let cleared = clears.into_iter().filter(|c| entries.iter().all(|(slot, _)| slot != c));
        let zero: Vec<SlotId> = cleared.collect();
        entries.extend(zero.into_iter().map(|slot| (slot, [0; RECORD_BYTES])));
        let writes = header_writes(drive, entries);
        out.push(Command::WriteHeaders { group: id, writes });
    }

    fn headers_of(&self, id: BlockId, entries: &mut Vec<(SlotId, [u8; RECORD_BYTES])>) {
        let block = self.table.get(id).expect("a block being written is kept");
        let OnDrive::Writing(slots) = &block.drive else { return };
        if block.doomed {
            return;
        }
        let drive = self.drive.as_ref().expect("the caller checked");
        let layout = self.layout(block.key.ns);
        for (slab, slot) in slots.iter().enumerate() {
            let header = RecordHeader {
                store: drive.store,
                namespace: self.namespaces[block.key.ns as usize].id,
                key: block.key.key,
                parent: block.parent,
                segment: slot.segment,
                slot: slot.index,
                class_epoch: drive.slots.class_epoch(slot.segment),
                info: block.info,
                coordinate: layout.coordinate(slab),
                slab: u16::try_from(slab).expect("at most 64 slabs"),
                parts: layout.full_mask(),
                put_id: block.put_id,
                generation: block.generation,
                stored_unix_ns: block.stored_unix_ns,
                payload_bytes: block.slabs[slab].0,
                checksum: block.slabs[slab].1,
                tenant: [0; 16],
            };
            entries.push((*slot, header.encode()));
        }
    }

    pub(super) fn headers_written(&mut self, group: u64, ok: bool, out: &mut Vec<Command>) {
        let Some(drive) = &mut self.drive else { return };
        let Some(at) = drive.groups.iter().position(|g| g.id == group) else { return };
        if !ok {
            return self.finish_group(group, false, out);
        }
        let group = &mut drive.groups[at];
        group.phase = Phase::Sync;
        let id = group.id;
        let mut segments: BTreeSet<u32> = group.clears.iter().map(|slot| slot.segment).collect();
        for block in &group.blocks {
            if let Some(OnDrive::Writing(slots)) = self.table.get(*block).map(|b| &b.drive) {
                segments.extend(slots.iter().map(|slot| slot.segment));
            }
        }
        let files = segments.iter().filter_map(|s| drive.files[*s as usize]).collect();
        out.push(Command::Sync { group: id, files });
    }

    pub(super) fn synced(&mut self, group: u64, ok: bool, out: &mut Vec<Command>) {
        self.finish_group(group, ok, out);
    }

    fn finish_group(&mut self, group: u64, ok: bool, out: &mut Vec<Command>) {
        let now = self.now.mono;
        let Some(drive) = &mut self.drive else { return };
        let Some(at) = drive.groups.iter().position(|g| g.id == group) else { return };
        let group = drive.groups.remove(at).expect("position found it");
        if ok && group.failed.is_empty() {
            drive.faults = 0;
        } else {
            drive.fault(now);
        }
        let written = |id: &&BlockId| ok && !group.failed.contains(id);
        for id in group.blocks.iter().filter(|id| !written(id)) {
            self.write_failed(*id);
        }
        let durable: Vec<BlockId> = group.blocks.iter().filter(written).copied().collect();
        // Leaves first, so that a root is younger in the policy's eyes than what hangs on it.
        for id in durable.iter().rev() {
            self.became_durable(*id);
        }
        for id in &durable {
            self.refresh_with_parent(*id);
            self.bury(*id);
        }
        self.counters.groups += 1;
        self.advance_groups(out);
    }

    fn became_durable(&mut self, id: BlockId) {
        let Some(block) = self.table.get_mut(id) else { return };
        if block.doomed {
            // Superseded meanwhile: its slots are freed when it is buried.
            if let OnDrive::Writing(slots) = std::mem::replace(&mut block.drive, OnDrive::None) {
                block.drive = OnDrive::Durable(slots);
            }
            return;
        }
        if let OnDrive::Writing(slots) = std::mem::replace(&mut block.drive, OnDrive::None) {
            block.drive = OnDrive::Durable(slots);
        }
        let (key, bytes) = (block.key, block.bytes());
        self.index.update(&key, |entry| entry.on_nvme = true);
        self.make_clean(id);
        self.admit_to_policy(id, Tier::Nvme);
        self.counters.offloaded += 1;
        self.counters.offloaded_bytes += bytes;
    }

    fn write_failed(&mut self, id: BlockId) {
        let Some(block) = self.table.get(id) else { return };
        let (key, doomed) = (block.key, block.doomed);
        self.counters.write_faults += 1;
        self.log.push(self.now, LogKind::Fault(MissReason::IoError), &key, Some(Tier::Nvme));
        self.clear_headers(id);
        self.leave_drive(id);
        if doomed {
            self.table.forget(id);
        } else {
            self.undurable(id);
        }
    }

    /// Queues the headers of a block's slots to be zeroed, so that recovery does not find them.
    pub(super) fn clear_headers(&mut self, id: BlockId) {
        let Some(drive) = &mut self.drive else { return };
        match self.table.get(id).map(|b| &b.drive) {
            Some(OnDrive::Writing(slots) | OnDrive::Durable(slots)) => {
                drive.clears.extend(slots.iter().copied());
            }
            _ => {}
        }
    }

    /// Takes a block's copy on the drive out of use for good: corrupt or unreadable.
    pub(super) fn quarantine(&mut self, id: BlockId) {
        self.counters.quarantined += 1;
        self.clear_headers(id);
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

/// Table entries as writes, neighbours joined into one.
fn header_writes(
    drive: &Drive,
    mut entries: Vec<(SlotId, [u8; RECORD_BYTES])>,
) -> Vec<HeaderWrite> {
    entries.sort_by_key(|(slot, _)| *slot);
    let geometry = drive.slots.geometry();
    let stride = geometry.header_stride as usize;
    let mut writes: Vec<HeaderWrite> = Vec::new();
    for (slot, bytes) in entries {
        let Some(file) = drive.files[slot.segment as usize] else { continue };
        let offset = geometry.header_offset(slot.index);
        let joins = |w: &HeaderWrite| w.file == file && w.offset + w.bytes.len() as u64 == offset;
        if !writes.last().is_some_and(joins) {
            writes.push(HeaderWrite { file, offset, bytes: Vec::new() });
        }
        let write = writes.last_mut().expect("pushed above");
        let at = write.bytes.len();
        write.bytes.resize(at + stride, 0);
        write.bytes[at..at + RECORD_BYTES].copy_from_slice(&bytes);
    }
    writes
}
