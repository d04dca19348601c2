//! Committing groups: headers after payloads, fdatasync after headers, in the order of the groups.

use super::drive::{Drive, DriveId};
use super::offload::Phase;
use super::table::{Block, OnDrive};
use super::{BlockId, Command, HeaderWrite, Machine, SlotId};
use crate::log::LogKind;
use std::collections::{BTreeMap, BTreeSet};
use tiered_kv_types::layout::{coordinate, full_mask};
use tiered_kv_types::record::RECORD_BYTES;
use tiered_kv_types::{Checkpoint, MissReason, RecordHeader, Tier};

type Entry = (SlotId, [u8; RECORD_BYTES]);

impl Machine {
    /// Moves the oldest group on: groups commit in order, so that parents are durable first.
    pub(super) fn advance_groups(&mut self, out: &mut Vec<Command>) {
        let Some(group) = self.groups.under_way.front() else { return };
        if group.phase != Phase::Payloads || group.left > 0 {
            return;
        }
        self.groups.join_written();
        let Some(group) = self.groups.under_way.front_mut() else { return };
        group.phase = Phase::Headers;
        let id = group.id;
        let (blocks, failed) = (group.blocks.clone(), group.failed.clone());
        let clears = group.clears.clone();
        let mut entries: BTreeMap<DriveId, Vec<Entry>> = BTreeMap::new();
        for block in blocks.iter().filter(|b| !failed.contains(b)) {
            self.headers_of(*block, &mut entries);
        }
        let of_drive = |(drive, entries): (&DriveId, &Vec<Entry>)| -> Vec<(DriveId, SlotId)> {
            entries.iter().map(|(slot, _)| (*drive, *slot)).collect()
        };
        let written: BTreeSet<(DriveId, SlotId)> = entries.iter().flat_map(of_drive).collect();
        for (drive, slot) in clears.into_iter().filter(|clear| !written.contains(clear)) {
            entries.entry(drive).or_default().push((slot, [0; RECORD_BYTES]));
        }
        let group = self.groups.get_mut(id).expect("the front group");
        group.left = entries.len();
        if entries.is_empty() {
            return self.finish_group(id, out);
        }
        for (drive, entries) in entries {
            let writes = header_writes(&self.drives[usize::from(drive)], entries);
            out.push(Command::WriteHeaders { group: id, drive, writes });
        }
    }

    fn headers_of(&self, id: BlockId, entries: &mut BTreeMap<DriveId, Vec<Entry>>) {
        let block = self.table.get(id).expect("a block being written is kept");
        let OnDrive::Writing(slots) = &block.drive else { return };
        if !block.doomed {
            let entries = entries.entry(block.home).or_default();
            let headers = self.records_of(block, slots);
            entries.extend(slots.iter().copied().zip(headers.map(|h| h.encode())));
        }
    }

    /// The record header of each slab of a block on a drive.
    pub(super) fn records_of<'a>(
        &'a self,
        block: &'a Block,
        slots: &'a [SlotId],
    ) -> impl Iterator<Item = RecordHeader> + 'a {
        (0..slots.len()).map(|slab| self.record_of(block, slots, slab))
    }

    fn record_of(&self, block: &Block, slots: &[SlotId], slab: usize) -> RecordHeader {
        let (drive, slot) = (&self.drives[usize::from(block.home)], slots[slab]);
        RecordHeader {
            store: drive.store,
            namespace: self.namespaces[block.key.ns as usize].id,
            key: block.key.key,
            parent: block.parent,
            segment: slot.segment,
            slot: slot.index,
            class_epoch: drive.slots.class_epoch(slot.segment),
            info: block.info,
            coordinate: coordinate(block.head_groups, slab),
            slab: u16::try_from(slab).expect("at most 64 slabs"),
            parts: full_mask(slots.len()),
            put_id: block.put_id,
            generation: block.generation,
            stored_unix_ns: block.stored_unix_ns,
            payload_bytes: block.slabs[slab].0,
            checksum: block.slabs[slab].1,
            tenant: block.tenant.0,
        }
    }

    /// What a drive holds, once nothing is in flight any more: segment by segment, as the next
    /// open takes it in.
    pub(crate) fn checkpoint(&self, drive: DriveId) -> Checkpoint {
        let mut places: Vec<(SlotId, BlockId, usize)> = Vec::new();
        for (id, block) in self.table.iter().filter(|(_, b)| !b.doomed && b.home == drive) {
            if let OnDrive::Durable(slots) = &block.drive {
                places.extend((0..).zip(slots).map(|(slab, slot)| (*slot, id, slab)));
            }
        }
        places.sort_unstable();
        let record = |(_, id, slab): &(SlotId, BlockId, usize)| {
            let block = self.table.get(*id)?;
            let OnDrive::Durable(slots) = &block.drive else { return None };
            Some(self.record_of(block, slots, *slab))
        };
        let records = places.iter().filter_map(record).collect();
        let drive = &self.drives[usize::from(drive)];
        let segments = drive.slots.ready_segments().map(|segment| drive.segment_header(segment));
        Checkpoint { segments: segments.collect(), records }
    }

    pub(super) fn headers_written(
        &mut self,
        group: u64,
        drive: DriveId,
        ok: bool,
        out: &mut Vec<Command>,
    ) {
        let Some(group) = self.groups.get_mut(group) else { return };
        if !ok {
            group.failed_drives.insert(drive);
        }
        group.left -= 1;
        if group.left > 0 {
            return;
        }
        group.phase = Phase::Sync;
        let id = group.id;
        let mut segments: BTreeMap<DriveId, BTreeSet<u32>> = BTreeMap::new();
        for (drive, slot) in &group.clears {
            segments.entry(*drive).or_default().insert(slot.segment);
        }
        for block in &group.blocks {
            let Some(block) = self.table.get(*block) else { continue };
            if let OnDrive::Writing(slots) = &block.drive {
                let on_drive = segments.entry(block.home).or_default();
                on_drive.extend(slots.iter().map(|slot| slot.segment));
            }
        }
        segments.retain(|drive, _| !group.failed_drives.contains(drive));
        group.left = segments.len();
        if segments.is_empty() {
            return self.finish_group(id, out);
        }
        for (drive, segments) in segments {
            let files = &self.drives[usize::from(drive)].files;
            let files = segments.iter().filter_map(|s| files[*s as usize]).collect();
            out.push(Command::Sync { group: id, drive, files });
        }
    }

    pub(super) fn synced(&mut self, group: u64, drive: DriveId, ok: bool, out: &mut Vec<Command>) {
        let Some(group) = self.groups.get_mut(group) else { return };
        if !ok {
            group.failed_drives.insert(drive);
        }
        group.left -= 1;
        if group.left == 0 {
            let id = group.id;
            self.finish_group(id, out);
        }
    }

    fn finish_group(&mut self, group: u64, out: &mut Vec<Command>) {
        let groups = &mut self.groups.under_way;
        let Some(at) = groups.iter().position(|g| g.id == group) else { return };
        let group = groups.remove(at).expect("position found it");
        self.keep_classes();
        let lost = |id: &BlockId| {
            let home = self.table.get(*id).map(|b| b.home);
            group.failed.contains(id) || home.is_none_or(|h| group.failed_drives.contains(&h))
        };
        let (failed, durable): (Vec<BlockId>, Vec<BlockId>) =
            group.blocks.iter().copied().partition(lost);
        self.judge_drives(&group.failed_drives, &failed, &durable);
        for id in failed {
            self.write_failed(id);
        }
        // Leaves first, so that a root is younger in the policy's eyes than what hangs on it.
        for id in durable.iter().rev() {
            self.became_durable(*id);
        }
        for id in &durable {
            self.refresh_with_parent(*id);
            self.bury(*id);
        }
        self.counters.groups += 1;
        if !group.blocks.is_empty() {
            self.latencies.commit.took(self.now.mono.saturating_sub(group.begun));
        }
        if let Some(upto) = group.retires {
            self.cleared_for_retiring(upto, group.failed_drives.is_empty(), out);
        }
        self.advance_groups(out);
    }

    /// Counts faults in a row for each drive of a group.
    fn judge_drives(
        &mut self,
        failed_drives: &BTreeSet<DriveId>,
        failed: &[BlockId],
        durable: &[BlockId],
    ) {
        let homes = |ids: &[BlockId]| -> BTreeSet<DriveId> {
            ids.iter().filter_map(|id| self.table.get(*id)).map(|b| b.home).collect()
        };
        let mut faulty = homes(failed);
        faulty.extend(failed_drives);
        let healthy = homes(durable);
        for (number, drive) in (0..).zip(&mut self.drives) {
            if faulty.contains(&number) {
                drive.fault(self.now.mono);
            } else if healthy.contains(&number) {
                drive.healthy();
            }
        }
    }

    fn became_durable(&mut self, id: BlockId) {
        let Some(block) = self.table.get_mut(id) else { return };
        if let OnDrive::Writing(slots) = std::mem::replace(&mut block.drive, OnDrive::None) {
            block.drive = OnDrive::Durable(slots);
            self.nvme_blocks += 1;
            self.namespaces[block.key.ns as usize].usage.nvme_blocks += 1;
        }
        if block.doomed {
            // Superseded or deleted meanwhile: its header may have been written before that.
            self.clear_headers(id);
            return;
        }
        let (key, bytes, home) = (block.key, block.bytes(), block.home);
        self.index.update(&key, |entry| entry.set_on_nvme(Some(home)));
        self.make_clean(id);
        self.admit_to_policy(id, Tier::Nvme);
        self.settle_writers(id, None);
        self.is_leaving(id);
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
        let Some(block) = self.table.get(id) else { return };
        if let OnDrive::Writing(slots) | OnDrive::Durable(slots) = &block.drive {
            let drive = &mut self.drives[usize::from(block.home)];
            drive.clears.extend(slots.iter().copied());
        }
    }

    /// Takes a block's copy on a drive out of use for good: corrupt or unreadable.
    pub(super) fn quarantine(&mut self, id: BlockId) {
        self.counters.quarantined += 1;
        self.clear_headers(id);
    }
}

/// Table entries as writes, neighbours joined into one.
fn header_writes(drive: &Drive, mut entries: Vec<Entry>) -> Vec<HeaderWrite> {
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
