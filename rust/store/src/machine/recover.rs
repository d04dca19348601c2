//! Recovery: which of the records found on the drive are believed.
//!
//! A record counts only where it lies where it says, in a segment of its own class epoch, and with
//! all the parts of its block; the newest generation of a key wins. Payloads are verified on first
//! read.

use super::table::{Block, OnDrive, Siblings};
use super::{BlockId, DriveId, FoundSegment, Machine, SlotId};
use crate::index::FullKey;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use tiered_kv_types::{
    BlockKey, Buried, NamespaceId, RecordHeader, Tier, Tombstone, round_up_to_page,
};

/// A record and where it was found.
type Record = (DriveId, SlotId, RecordHeader);

/// Records collected until all segments are read, by key and generation.
#[derive(Debug, Default)]
pub(super) struct Found {
    records: BTreeMap<(FullKey, u64), Vec<Record>>,
    segments: Vec<FoundSegment>,
    keys: HashMap<(NamespaceId, BlockKey), u64>,
    spans: Vec<Tombstone>,
    pages: u64,
}

impl Machine {
    /// Takes in one segment file. Only called between the start and `Recovered`.
    pub(super) fn found_segment(&mut self, found: FoundSegment) {
        self.found.get_or_insert_default().segments.push(found);
    }

    /// Takes in the tombstones of the drives' journals.
    pub(super) fn found_tombstones(&mut self, tombstones: Vec<Tombstone>, pages: u64) {
        let found = self.found.get_or_insert_default();
        found.pages = pages;
        for tombstone in tombstones {
            self.next_generation = self.next_generation.max(tombstone.generation + 1);
            match &tombstone.buried {
                Buried::Key(key) => {
                    let known = found.keys.entry((tombstone.namespace, *key)).or_default();
                    *known = (*known).max(tombstone.generation);
                }
                Buried::StoredBefore(_) => found.spans.push(tombstone),
            }
        }
    }

    /// Rebuilds the table from everything found.
    pub(super) fn recovered(&mut self, complete: bool, tables_read: bool) {
        self.journal.complete = complete;
        // Above everything that a drive which is away may hold: its records must stay the older.
        self.next_generation = self.next_generation.max(self.now.unix_ns);
        let Some(mut found) = self.found.take() else { return };
        self.journal.found(found.pages, tables_read);
        for segment in std::mem::take(&mut found.segments) {
            self.sort_segment(segment, &mut found);
        }
        let mut winners: BTreeMap<FullKey, Vec<Record>> = BTreeMap::new();
        // In rising order of generation, so that the newest complete one stays.
        for ((key, _), records) in found.records {
            if is_complete(&records) {
                winners.insert(key, records);
            }
        }
        self.restore_segments(&winners);
        let mut blocks: Vec<Vec<Record>> = winners.into_values().collect();
        blocks.sort_by_key(|records| {
            let (_, _, r) = records[0];
            (r.stored_unix_ns, r.put_id, r.info.depth, r.generation)
        });
        let ids: Vec<BlockId> = blocks.into_iter().map(|b| self.restore_block(b)).collect();
        // Older puts first; within a put leaves first, so that roots are younger.
        let mut order: Vec<(u64, u64, std::cmp::Reverse<u32>, BlockId)> = Vec::new();
        for id in &ids {
            let b = self.table.get(*id).expect("just restored");
            order.push((b.stored_unix_ns, b.put_id, std::cmp::Reverse(b.info.depth), *id));
        }
        order.sort_unstable();
        for (_, _, _, id) in order {
            self.admit_to_policy(id, Tier::Nvme);
        }
        for id in ids {
            self.refresh(id);
        }
    }

    fn sort_segment(&mut self, segment: FoundSegment, found: &mut Found) {
        let home = segment.drive;
        let drive = &mut self.drives[usize::from(home)];
        let number = segment.segment;
        self.counters.damaged_headers += segment.damaged;
        drive.files[number as usize] = Some(segment.file);
        let Some(header) = segment.header else { return };
        drive.slots.set_class_epoch(number, header.class_epoch);
        let (slots, data_offset) = drive.slots.geometry().cut(header.slot_bytes);
        let ours = header.store == drive.store
            && header.segment == number
            && header.slots == slots
            && header.data_offset == data_offset
            && header.slot_bytes.is_multiple_of(tiered_kv_types::PAGE_BYTES)
            && drive.slots.restore(number, header.slot_bytes, header.class_epoch);
        if !ours {
            return;
        }
        let store = drive.store;
        for (slot, record) in segment.records {
            let here = record.store == store
                && record.segment == number
                && record.slot == slot
                && slot < slots
                && record.class_epoch == header.class_epoch
                && round_up_to_page(record.payload_bytes) == header.slot_bytes;
            if !here {
                self.counters.damaged_headers += 1;
                continue;
            }
            let slot = SlotId { segment: number, index: slot };
            if found.is_buried(&record) {
                self.counters.buried += 1;
                self.drives[usize::from(home)].clears.insert(slot);
                continue;
            }
            let ns = self.namespace(record.namespace);
            let key = (Self::full(ns, record.key), record.generation);
            found.records.entry(key).or_default().push((home, slot, record));
            self.next_generation = self.next_generation.max(record.generation.saturating_add(1));
            self.next_put = self.next_put.max(record.put_id.saturating_add(1));
        }
    }

    /// Marks the slots of the blocks that are believed as used.
    fn restore_segments(&mut self, winners: &BTreeMap<FullKey, Vec<Record>>) {
        for (home, slot, _) in winners.values().flatten() {
            self.drives[usize::from(*home)].slots.claim_slot(*slot);
        }
        for drive in &mut self.drives {
            drive.slots.rebuild_free();
        }
    }

    fn restore_block(&mut self, mut records: Vec<Record>) -> BlockId {
        records.sort_by_key(|(_, _, r)| r.slab);
        let (home, _, first) = records[0];
        let ns = self.namespace(first.namespace);
        let slabs: SmallVec<[(u64, u32); 1]> =
            records.iter().map(|(_, _, r)| (r.payload_bytes, r.checksum)).collect();
        let classes: SmallVec<[u64; 1]> =
            slabs.iter().map(|(bytes, _)| round_up_to_page(*bytes)).collect();
        let columns = records.iter().map(|(_, _, r)| r.coordinate.1).max().unwrap_or(0);
        let head_groups = columns.saturating_add(1);
        let block = Block {
            key: Self::full(ns, first.key),
            parent: first.parent,
            info: first.info,
            generation: first.generation,
            put_id: first.put_id,
            stored_unix_ns: first.stored_unix_ns,
            shape: self.shape(&classes),
            slabs,
            head_groups,
            in_dram: false,
            memory: SmallVec::new(),
            drive: OnDrive::Durable(records.iter().map(|(_, slot, _)| *slot).collect()),
            home,
            dirty: None,
            load: None,
            holds: 0,
            orphan: false,
            siblings: Siblings::default(),
            doomed: false,
        };
        let (key, info) = (block.key, block.info);
        let bytes = block.bytes();
        // Everything is refreshed once all blocks are back.
        let (id, _) = self.table.insert(block);
        self.index.update(&key, |entry| {
            entry.info = info;
            entry.on_nvme = true;
        });
        self.table.count_child(id, Tier::Nvme, true);
        self.nvme_blocks += 1;
        self.counters.recovered += 1;
        self.counters.recovered_bytes += bytes;
        id
    }
}

impl Found {
    fn is_buried(&self, record: &RecordHeader) -> bool {
        let (ns, generation) = (record.namespace, record.generation);
        let key = self.keys.get(&(ns, record.key)).is_some_and(|g| generation <= *g);
        let covers = |t: &Tombstone| t.covers(&ns, &record.key, generation, record.stored_unix_ns);
        key || self.spans.iter().any(covers)
    }
}

/// Whether every part of the block is there exactly once, on one drive.
fn is_complete(records: &[Record]) -> bool {
    let mut seen = 0u64;
    for (home, _, record) in records {
        let bit = 1 << record.slab;
        if seen & bit != 0 || record.parts != records[0].2.parts || *home != records[0].0 {
            return false;
        }
        seen |= bit;
    }
    records
        .first()
        .is_some_and(|(_, _, r)| r.parts == seen && (seen.count_ones() as usize) == records.len())
}
