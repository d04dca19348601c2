//! Recovery: which of the records found on the drive are believed.
//!
//! A record counts only where it lies where it says, in a segment of its own class epoch, and with
//! all the parts of its block; the newest generation of a key wins. Payloads are verified on first
//! read.

use super::evict::standings;
use super::put::facts;
use super::table::{Block, OnDrive, Siblings};
use super::{BlockId, DriveId, FoundSegment, Machine, SlotId};
use crate::index::FullKey;
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, HashMap, HashSet};
use tiered_kv_types::{
    BlockKey, Buried, NamespaceId, RecordHeader, TenantId, Tier, Tombstone, round_up_to_page,
};

/// Which of the records found is meant: the segment's place among those found, the record's place
/// in it, and the number of its namespace.
#[derive(Clone, Copy, Debug)]
struct At {
    segment: u32,
    record: u32,
    ns: u32,
    /// Of the whole key.
    hash: u64,
}

/// A block that is believed, with its place in the order in which blocks are restored: older puts
/// first, and in a put roots first.
#[derive(Debug)]
struct Winner {
    order: (u64, u64, u32, u64),
    parts: SmallVec<[At; 1]>,
}

/// What was found, collected until all of it is read.
#[derive(Debug, Default)]
pub(super) struct Found {
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
        let Some(found) = self.found.take() else { return };
        self.journal.found(found.pages, tables_read);
        let mut believed = Vec::new();
        for number in 0..found.segments.len() {
            self.sort_segment(number, &found, &mut believed);
        }
        let mut winners = Self::winners(&found, &believed);
        drop(believed);
        self.restore_segments(&found, &winners);
        winners.sort_unstable_by_key(|winner| winner.order);
        self.table.reserve(winners.len());
        let mut order: Vec<(u64, u64, BlockId)> = Vec::with_capacity(winners.len());
        for Winner { order: (stored, put, ..), parts } in winners {
            order.push((stored, put, self.restore_block(&found, &parts)));
        }
        drop(found);
        // Leaves first within a put, so that roots are younger.
        order.chunk_by_mut(|a, b| (a.0, a.1) == (b.0, b.1)).for_each(<[_]>::reverse);
        let (table, policy, now) = (&self.table, &mut self.policy, self.now.mono);
        let block = |id: BlockId| table.get(id).expect("just restored");
        let known = |at: usize| {
            let block = block(order[at].2);
            (block.key, block.info, block.home)
        };
        let of_policy = |(_, _, id): &(u64, u64, BlockId)| {
            let standing = standings(table, *id).expect("just restored").drive;
            (*id, facts(Tier::Nvme, block(*id)), standing)
        };
        self.index.restore(order.len(), known, || {
            policy.restored(Tier::Nvme, &mut order.iter().map(of_policy), now);
        });
    }

    /// Says which records of a segment are believed.
    fn sort_segment(&mut self, number: usize, found: &Found, believed: &mut Vec<At>) {
        let segment = &found.segments[number];
        let home = usize::from(segment.drive);
        let drive = &mut self.drives[home];
        self.counters.damaged_headers += segment.damaged;
        drive.files[segment.segment as usize] = Some(segment.file);
        let Some(header) = &segment.header else { return };
        drive.slots.set_class_epoch(segment.segment, header.class_epoch);
        let (slots, data_offset) = drive.slots.geometry().cut(header.slot_bytes);
        let ours = header.store == drive.store
            && header.segment == segment.segment
            && header.slots == slots
            && header.data_offset == data_offset
            && header.slot_bytes.is_multiple_of(tiered_kv_types::PAGE_BYTES)
            && drive.slots.restore(segment.segment, header.slot_bytes, header.class_epoch);
        if !ours {
            return;
        }
        let store = drive.store;
        believed.reserve(segment.records.len());
        for (at, (slot, record)) in (0..).zip(&segment.records) {
            let here = record.store == store
                && record.segment == segment.segment
                && record.slot == *slot
                && *slot < slots
                && record.class_epoch == header.class_epoch
                && round_up_to_page(record.payload_bytes) == header.slot_bytes;
            if !here {
                self.counters.damaged_headers += 1;
                continue;
            }
            if found.is_buried(record) {
                self.counters.buried += 1;
                let slot = SlotId { segment: segment.segment, index: *slot };
                self.drives[home].clears.insert(slot);
                continue;
            }
            let ns = self.namespace(record.namespace);
            let segment = u32::try_from(number).expect("fewer than 2^32 segments");
            let hash = self.table.hash(&Self::full(ns, record.key));
            believed.push(At { segment, record: at, ns, hash });
            self.next_generation = self.next_generation.max(record.generation.saturating_add(1));
            self.next_put = self.next_put.max(record.put_id.saturating_add(1));
        }
    }

    /// The blocks that are whole, each key's newest generation. Keys that are there once, in one
    /// part, as nearly all are, need no sorting by key.
    fn winners(found: &Found, believed: &[At]) -> Vec<Winner> {
        let key = |at: &At| Self::full(at.ns, found.record(*at).key);
        let mut sorted: Vec<u64> = believed.iter().map(|at| at.hash).collect();
        sorted.sort_unstable();
        let twice: HashSet<u64> =
            sorted.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
        drop(sorted);
        let mut winners = Vec::with_capacity(believed.len());
        let mut groups: BTreeMap<(FullKey, u64), SmallVec<[At; 1]>> = BTreeMap::new();
        for at in believed {
            let record = found.record(*at);
            if record.parts == 1 && record.slab == 0 && !twice.contains(&at.hash) {
                winners.push(found.winner(smallvec![*at]));
            } else {
                groups.entry((key(at), record.generation)).or_default().push(*at);
            }
        }
        // In rising order of generation, so that the newest complete one stays.
        let mut newest: BTreeMap<FullKey, SmallVec<[At; 1]>> = BTreeMap::new();
        for ((key, _), parts) in groups {
            if let Some(parts) = found.one_copy(&parts) {
                newest.insert(key, parts);
            }
        }
        winners.extend(newest.into_values().map(|parts| found.winner(parts)));
        winners
    }

    /// Marks the slots of the blocks that are believed as used.
    fn restore_segments(&mut self, found: &Found, winners: &[Winner]) {
        for at in winners.iter().flat_map(|winner| &winner.parts) {
            let (home, slot) = found.place(*at);
            self.drives[usize::from(home)].slots.claim_slot(slot);
        }
        for drive in &mut self.drives {
            drive.slots.rebuild_free();
        }
    }

    fn restore_block(&mut self, found: &Found, parts: &[At]) -> BlockId {
        let records = || parts.iter().map(|at| found.record(*at));
        let ((home, _), first) = (found.place(parts[0]), found.record(parts[0]));
        let slabs: SmallVec<[(u64, u32); 1]> =
            records().map(|r| (r.payload_bytes, r.checksum)).collect();
        let classes: SmallVec<[u64; 1]> =
            slabs.iter().map(|(bytes, _)| round_up_to_page(*bytes)).collect();
        let columns = records().map(|r| r.coordinate.1).max().unwrap_or(0);
        let head_groups = columns.saturating_add(1);
        let block = Block {
            key: Self::full(parts[0].ns, first.key),
            parent: first.parent,
            info: first.info,
            generation: first.generation,
            put_id: first.put_id,
            stored_unix_ns: first.stored_unix_ns,
            tenant: TenantId(first.tenant),
            shape: self.shape(&classes, None),
            slabs,
            head_groups,
            in_dram: false,
            memory: SmallVec::new(),
            drive: OnDrive::Durable(parts.iter().map(|at| found.place(*at).1).collect()),
            home,
            dirty: None,
            load: None,
            readers: 0,
            is_scrubbed: false,
            writers: Vec::new(),
            holds: 0,
            orphan: false,
            siblings: Siblings::default(),
            doomed: false,
        };
        let (key, bytes) = (block.key, block.bytes());
        // Everything is refreshed once all blocks are back.
        let (id, _) = self.table.insert(block);
        self.table.count_child(id, Tier::Nvme, true);
        self.nvme_blocks += 1;
        let usage = self.usage_of(key.ns);
        usage.nvme_blocks += 1;
        usage.nvme_bytes += classes.iter().sum::<u64>();
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

    fn record(&self, at: At) -> &RecordHeader {
        &self.segments[at.segment as usize].records[at.record as usize].1
    }

    fn place(&self, at: At) -> (DriveId, SlotId) {
        let segment = &self.segments[at.segment as usize];
        let (index, _) = segment.records[at.record as usize];
        (segment.drive, SlotId { segment: segment.segment, index })
    }

    fn winner(&self, parts: SmallVec<[At; 1]>) -> Winner {
        let r = self.record(parts[0]);
        Winner { order: (r.stored_unix_ns, r.put_id, r.info.depth, r.generation), parts }
    }

    /// One whole copy of a block, its parts in their order, on one drive. A block that was evicted
    /// there and written again may be found twice, with the same bytes.
    fn one_copy(&self, parts: &[At]) -> Option<SmallVec<[At; 1]>> {
        let mut copies: BTreeMap<(DriveId, u64), BTreeMap<u16, At>> = BTreeMap::new();
        for at in parts {
            let record = self.record(*at);
            let copy = copies.entry((self.place(*at).0, record.parts)).or_default();
            copy.insert(record.slab, *at);
        }
        let is_whole = |wanted: u64, slabs: &BTreeMap<u16, At>| {
            wanted == slabs.keys().fold(0, |seen, slab| seen | 1 << slab)
        };
        let mut whole = copies.into_iter().filter(|((_, wanted), slabs)| is_whole(*wanted, slabs));
        whole.next().map(|(_, slabs)| slabs.into_values().collect())
    }
}
