//! Committing groups: headers after payloads, fdatasync after headers, in the order of the groups.

use super::offload::{Drive, Phase};
use super::table::OnDrive;
use super::{BlockId, Command, HeaderWrite, Machine, SlotId};
use crate::log::LogKind;
use std::collections::BTreeSet;
use tiered_kv_types::record::RECORD_BYTES;
use tiered_kv_types::{MissReason, RecordHeader, Tier};

impl Machine {
    /// Moves the oldest group on: groups commit in order, so that parents are durable first.
    pub(super) fn advance_groups(&mut self, out: &mut Vec<Command>) {
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
        if let OnDrive::Writing(slots) = std::mem::replace(&mut block.drive, OnDrive::None) {
            block.drive = OnDrive::Durable(slots);
            self.nvme_blocks += 1;
        }
        if block.doomed {
            // Superseded meanwhile: its slots are freed when it is buried.
            return;
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
        let held = self.table.get(id).map(|b| &b.drive);
        if let Some(OnDrive::Writing(slots) | OnDrive::Durable(slots)) = held {
            drive.clears.extend(slots.iter().copied());
        }
    }

    /// Takes a block's copy on the drive out of use for good: corrupt or unreadable.
    pub(super) fn quarantine(&mut self, id: BlockId) {
        self.counters.quarantined += 1;
        self.clear_headers(id);
    }
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
