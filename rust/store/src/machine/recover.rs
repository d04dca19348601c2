//! Recovery: which of the records found on the drive are believed.
//!
//! A record counts only where it lies where it says, in a segment of its own class epoch, and with
//! all the parts of its block; the newest generation of a key wins. Payloads are verified on first
//! read.

use super::evict::standings;
use super::put::facts;
use super::table::{Block, OnDrive, Siblings};
use super::{BlockId, DriveId, FoundSegment, Machine, SlotId};
use crate::index::{FullKey, KeyHasher, RESTORED_TOGETHER};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::BuildHasher as _;
use tiered_kv_io::{in_parallel, recovery_threads};
use tiered_kv_types::{
    BlockInfo, BlockKey, Buried, NamespaceId, RecordHeader, TenantId, Tier, Tombstone,
    round_up_to_page,
};

/// Parts into which hashes are sorted at once.
const SHARDS: usize = 8;

/// Which of the records found is meant: the segment's place among those found, the record's place
/// in it, and the number of its namespace.
#[derive(Clone, Copy, Debug)]
struct At {
    segment: u32,
    record: u32,
    ns: u32,
}

/// A record that is believed, or the first one of a block that is, with its place in the order in
/// which blocks are restored: older puts first, and in a put roots first. A million of them are
/// kept, so no more is than has to be.
#[derive(Clone, Copy, Debug)]
struct Winner {
    stored_unix_ns: u64,
    put: u64,
    generation: u64,
    depth: u32,
    /// The place of all parts among those of [`Winners`]; [`ONE`] where the block has no other.
    parts: u32,
    at: At,
}

/// Blocks whose places in the table are looked up at once.
const LOOKED_AHEAD: usize = 32;

const ONE: u32 = u32::MAX;
/// Whose other parts are not known yet.
const SOME: u32 = u32::MAX - 1;

/// The blocks that are believed.
#[derive(Debug, Default)]
struct Winners {
    all: Vec<Winner>,
    parts: Vec<SmallVec<[At; 1]>>,
}

/// What a segment's records came to.
#[derive(Debug, Default)]
struct Sorted {
    believed: Vec<Winner>,
    /// Of the whole keys of those.
    hashes: Vec<u64>,
    /// Their namespaces, by the numbers that they go by until the store's own are known.
    namespaces: Vec<NamespaceId>,
    /// Slots whose record a tombstone covers.
    buried: Vec<u32>,
    damaged: u64,
    next_generation: u64,
    next_put: u64,
}

/// How a segment that is ours is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    store: [u8; 16],
    slots: u32,
    slot_bytes: u64,
    class_epoch: u32,
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
        // What a segment holds that could not be read, a later open may find.
        self.journal.complete &= !found.segments.iter().any(|segment| segment.unread);
        self.journal.found(found.pages, tables_read);
        let cut: Vec<Option<Cut>> =
            found.segments.iter().map(|segment| self.adopt_segment(segment)).collect();
        let threads = found.threads();
        let hasher = self.table.hasher();
        let sort = |number: usize| {
            let cut = cut[number]?;
            Some(found.sort_segment(number, &cut, hasher))
        };
        let mut sorted = in_parallel(found.segments.len(), threads, sort, || {});
        for (number, sorted) in sorted.iter_mut().enumerate() {
            if let Some(sorted) = sorted {
                self.take_in(&found.segments[number], sorted);
            }
        }
        let winners = found.winners(sorted.into_iter().flatten().collect(), threads);
        let index = self.index.clone();
        let known = |at: usize| found.brief(winners.all[at].at);
        // The index needs nothing of the table that is made meanwhile.
        index.restore(winners.all.len(), threads, known, || self.restore_blocks(&found, &winners));
    }

    /// Takes over a segment file; returns how it is cut where it is one of ours.
    fn adopt_segment(&mut self, segment: &FoundSegment) -> Option<Cut> {
        let drive = &mut self.drives[usize::from(segment.drive)];
        self.counters.damaged_headers += segment.damaged;
        drive.files[segment.segment as usize] = Some(segment.file);
        let header = segment.header.as_ref()?;
        drive.slots.set_class_epoch(segment.segment, header.class_epoch);
        let (slots, data_offset) = drive.slots.geometry().cut(header.slot_bytes);
        let ours = header.store == drive.store
            && header.segment == segment.segment
            && header.slots == slots
            && header.data_offset == data_offset
            && header.slot_bytes.is_multiple_of(tiered_kv_types::PAGE_BYTES)
            && drive.slots.restore(segment.segment, header.slot_bytes, header.class_epoch);
        ours.then_some(Cut {
            store: drive.store,
            slots,
            slot_bytes: header.slot_bytes,
            class_epoch: header.class_epoch,
        })
    }

    /// Takes in what was found of a segment's records, and numbers their namespaces.
    fn take_in(&mut self, segment: &FoundSegment, sorted: &mut Sorted) {
        self.counters.damaged_headers += sorted.damaged;
        self.counters.buried += sorted.buried.len() as u64;
        let clears = &mut self.drives[usize::from(segment.drive)].clears;
        let slot = |index: &u32| SlotId { segment: segment.segment, index: *index };
        clears.extend(sorted.buried.iter().map(slot));
        self.next_generation = self.next_generation.max(sorted.next_generation);
        self.next_put = self.next_put.max(sorted.next_put);
        let numbers: Vec<u32> = sorted.namespaces.iter().map(|id| self.namespace(*id)).collect();
        if numbers.iter().zip(0..).all(|(number, at)| *number == at) {
            return;
        }
        for winner in &mut sorted.believed {
            winner.at.ns = numbers[winner.at.ns as usize];
        }
    }

    /// Fills the table and tells the policy.
    fn restore_blocks(&mut self, found: &Found, winners: &Winners) {
        self.table.reserve(winners.all.len());
        let mut ids: Vec<BlockId> = Vec::with_capacity(winners.all.len());
        for some in winners.all.chunks(LOOKED_AHEAD) {
            for winner in some {
                self.table.look_ahead(&found.brief(winner.at).0);
            }
            for winner in some {
                ids.push(self.restore_block(found, winners.parts_of(winner)));
            }
        }
        self.drives.iter_mut().for_each(|drive| drive.slots.rebuild_free());
        // Leaves first within a put, so that roots are younger.
        let mut begin = 0;
        for put in winners.all.chunk_by(|a, b| a.put() == b.put()) {
            ids[begin..begin + put.len()].reverse();
            begin += put.len();
        }
        let (table, staging, unix_ns) = (&self.table, self.staging.on, self.now.unix_ns);
        let of_policy = |id: &BlockId| {
            let standing = standings(table, *id, staging).expect("just restored").drive;
            (*id, facts(table, Tier::Nvme, *id, unix_ns), standing)
        };
        self.policy.restored(Tier::Nvme, &mut ids.iter().map(of_policy), self.now.mono);
    }

    fn restore_block(&mut self, found: &Found, parts: &[At]) -> BlockId {
        let (home, first) = (found.home(parts[0]), found.record(parts[0]));
        let mut slabs: SmallVec<[(u64, u32); 1]> = SmallVec::new();
        let mut slots: SmallVec<[SlotId; 1]> = SmallVec::new();
        let mut classes: SmallVec<[u64; 1]> = SmallVec::new();
        let mut columns = 0;
        let allocator = &mut self.drives[usize::from(home)].slots;
        let mut add = |record: &RecordHeader| {
            slabs.push((record.payload_bytes, record.checksum));
            classes.push(round_up_to_page(record.payload_bytes));
            columns = columns.max(record.coordinate.1);
            // A record that is believed lies where it says.
            let slot = SlotId { segment: record.segment, index: record.slot };
            allocator.claim_slot(slot);
            slots.push(slot);
        };
        add(&first);
        parts[1..].iter().for_each(|at| add(&found.record(*at)));
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
            drive: OnDrive::Durable(slots),
            home,
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

    fn record(&self, at: At) -> RecordHeader {
        self.segments[at.segment as usize].records.get(at.record as usize).1
    }

    /// The drive that a record is on.
    fn home(&self, at: At) -> DriveId {
        self.segments[at.segment as usize].drive
    }

    /// What the read index wants to know of a block.
    fn brief(&self, at: At) -> (FullKey, BlockInfo, DriveId) {
        let (key, info) = self.segments[at.segment as usize].records.brief(at.record as usize);
        (FullKey { ns: at.ns, key }, info, self.home(at))
    }

    /// How many threads what was found is worth.
    fn threads(&self) -> usize {
        let records: usize = self.segments.iter().map(|segment| segment.records.len()).sum();
        if records < RESTORED_TOGETHER { 1 } else { recovery_threads() }
    }

    /// Says which records of a segment are believed.
    fn sort_segment(&self, number: usize, cut: &Cut, hasher: &KeyHasher) -> Sorted {
        let segment = &self.segments[number];
        let n = segment.records.len();
        let mut out = Sorted { believed: Vec::with_capacity(n), ..Sorted::default() };
        out.hashes.reserve_exact(n);
        let mut numbers: HashMap<NamespaceId, u32> = HashMap::new();
        let mut last = None;
        for at in 0..n {
            let (slot, record) = segment.records.get(at);
            let here = record.store == cut.store
                && record.segment == segment.segment
                && record.slot == slot
                && slot < cut.slots
                && record.class_epoch == cut.class_epoch
                && round_up_to_page(record.payload_bytes) == cut.slot_bytes;
            if !here {
                out.damaged += 1;
                continue;
            }
            if self.is_buried(&record) {
                out.buried.push(slot);
                continue;
            }
            let ns = match last {
                Some((id, ns)) if id == record.namespace => ns,
                _ => *numbers.entry(record.namespace).or_insert_with(|| {
                    out.namespaces.push(record.namespace);
                    u32::try_from(out.namespaces.len() - 1).expect("fewer than 2^32 namespaces")
                }),
            };
            last = Some((record.namespace, ns));
            // Blocks of one key meet, whatever their namespaces are called: their hashes say only
            // which keys may be there twice.
            out.hashes.push(hasher.hash_one(FullKey { ns: 0, key: record.key }));
            let place = |n: usize| u32::try_from(n).expect("fewer than 2^32 of them");
            let at = At { segment: place(number), record: place(at), ns };
            let whole = record.parts == 1 && record.slab == 0;
            out.believed.push(Winner::new(&record, at, if whole { ONE } else { SOME }));
            out.next_generation = out.next_generation.max(record.generation.saturating_add(1));
            out.next_put = out.next_put.max(record.put_id.saturating_add(1));
        }
        out
    }

    /// The blocks that are whole, each key's newest generation, in the order in which they are
    /// restored. Keys that are there once, in one part, as nearly all are, need no sorting by key.
    fn winners(&self, sorted: Vec<Sorted>, threads: usize) -> Winners {
        let twice = twice(&sorted, threads);
        let mut out = Winners::default();
        out.all.reserve_exact(sorted.iter().map(|sorted| sorted.believed.len()).sum());
        let mut groups: BTreeMap<(FullKey, u64), SmallVec<[At; 1]>> = BTreeMap::new();
        for Sorted { believed, hashes, .. } in sorted {
            if twice.is_empty() && believed.iter().all(|winner| winner.parts == ONE) {
                out.all.extend_from_slice(&believed);
                continue;
            }
            for (winner, hash) in believed.into_iter().zip(hashes) {
                if winner.parts == ONE && !twice.contains(&hash) {
                    out.all.push(winner);
                } else {
                    let key = self.brief(winner.at).0;
                    groups.entry((key, winner.generation)).or_default().push(winner.at);
                }
            }
        }
        // In rising order of generation, so that the newest complete one stays.
        let mut newest: BTreeMap<FullKey, SmallVec<[At; 1]>> = BTreeMap::new();
        for ((key, _), parts) in groups {
            if let Some(parts) = self.one_copy(&parts) {
                newest.insert(key, parts);
            }
        }
        for parts in newest.into_values() {
            let place = u32::try_from(out.parts.len()).expect("fewer than 2^32 blocks");
            out.all.push(Winner::new(&self.record(parts[0]), parts[0], place));
            out.parts.push(parts);
        }
        let order = |w: &Winner| (w.stored_unix_ns, w.put, w.depth, w.generation);
        out.all.sort_unstable_by_key(order);
        out
    }

    /// One whole copy of a block, its parts in their order, on one drive. A block that was evicted
    /// there and written again may be found twice, with the same bytes.
    fn one_copy(&self, parts: &[At]) -> Option<SmallVec<[At; 1]>> {
        let mut copies: BTreeMap<(DriveId, u64), BTreeMap<u16, At>> = BTreeMap::new();
        for at in parts {
            let record = self.record(*at);
            let copy = copies.entry((self.home(*at), record.parts)).or_default();
            copy.insert(record.slab, *at);
        }
        let is_whole = |wanted: u64, slabs: &BTreeMap<u16, At>| {
            wanted == slabs.keys().fold(0, |seen, slab| seen | 1 << slab)
        };
        let mut whole = copies.into_iter().filter(|((_, wanted), slabs)| is_whole(*wanted, slabs));
        whole.next().map(|(_, slabs)| slabs.into_values().collect())
    }
}

impl Winner {
    fn new(record: &RecordHeader, at: At, parts: u32) -> Self {
        Self {
            stored_unix_ns: record.stored_unix_ns,
            put: record.put_id,
            generation: record.generation,
            depth: record.info.depth,
            parts,
            at,
        }
    }

    /// Blocks of one put share it.
    fn put(&self) -> (u64, u64) {
        (self.stored_unix_ns, self.put)
    }
}

impl Winners {
    fn parts_of<'a>(&'a self, winner: &'a Winner) -> &'a [At] {
        match winner.parts {
            ONE => std::slice::from_ref(&winner.at),
            parts => &self.parts[parts as usize],
        }
    }
}

/// The hashes that are there more than once.
fn twice(sorted: &[Sorted], threads: usize) -> HashSet<u64> {
    let in_shard = |shard: usize| {
        let mine = |hash: &u64| (hash >> 32) as usize % SHARDS == shard;
        let all = sorted.iter().flat_map(|sorted| &sorted.hashes);
        let mut hashes: Vec<u64> = all.copied().filter(mine).collect();
        hashes.sort_unstable();
        let pairs = hashes.windows(2).filter(|pair| pair[0] == pair[1]);
        pairs.map(|pair| pair[0]).collect::<Vec<u64>>()
    };
    in_parallel(SHARDS, threads, in_shard, || {}).into_iter().flatten().collect()
}
