//! Batches leased as a whole: what a resident prefix costs a caller is its lookups.
//!
//! A pin is a reference to a block's copy, taken and dropped by an atomic operation each: twice 64
//! of them are most of what a batch of 64 costs. So a batch first enters a ledger, with its keys
//! only, and every copy stays in the read index while a batch in the ledger names it. Before the
//! state machine takes any copy out, it *settles*: all batches in the ledger take their references
//! then, once each. A batch that lives shorter than that never takes any.
//!
//! Why no copy gets away: a batch enters the ledger while it holds all locks of the index for
//! reading, as since its first lookup; whoever removes a copy settles while it holds the copy's
//! lock for writing. So a batch has either entered before, and is settled, or looks up afterwards,
//! and finds nothing. Locks are taken in this order: index, ledger.

use crate::answers::Leases;
use crate::index::{FullKey, ReadIndex, Residency};
use crate::resident::{FreedSlots, Lease, Resident};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard};
use smallvec::SmallVec;
use tiered_kv_io::Origin;
use tiered_kv_types::{BlockKey, MissReason, Tier};

/// Longest batch that is leased as a whole: writers of the index wait for its lookups.
const MAX_BATCH: usize = 512;
/// Most keys in the ledger: the state machine settles them all at once.
const MAX_KEYS: usize = 8192;

/// What the state machine has to know of a batch.
#[derive(Debug)]
enum Record {
    /// No batch: the number of the next such place.
    Free(Option<usize>),
    /// Its first `hits` keys are leased, through the index.
    Whole { ns: u32, keys: Arc<[BlockKey]>, hits: usize },
    /// It has references of its own.
    Settled(Vec<Arc<Resident>>),
}

#[derive(Debug, Default)]
struct Records {
    places: Vec<Record>,
    free: Option<usize>,
    /// Keys of the batches that are not settled.
    keys: usize,
}

impl Records {
    fn enter(&mut self, record: Record) -> usize {
        match self.free {
            Some(place) => {
                let Record::Free(next) = std::mem::replace(&mut self.places[place], record) else {
                    unreachable!("a free place has no batch")
                };
                self.free = next;
                place
            }
            None => {
                self.places.push(record);
                self.places.len() - 1
            }
        }
    }

    fn leave(&mut self, place: usize) -> Record {
        let record = std::mem::replace(&mut self.places[place], Record::Free(self.free));
        self.free = Some(place);
        if let Record::Whole { hits, .. } = &record {
            self.keys -= hits;
        }
        record
    }
}

/// The batches leased as a whole.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// Guards what every live batch has entered.
    records: Mutex<Records>,
    /// Keys of the batches that are not settled; changes under the lock only.
    keys: AtomicUsize,
    freed: FreedSlots,
    origin: Origin,
}

impl Ledger {
    pub(crate) fn new(freed: FreedSlots) -> Self {
        let (records, keys) = (Mutex::default(), AtomicUsize::new(0));
        Self { records, keys, freed, origin: Origin::here() }
    }

    /// Whether there may be a batch to settle. Reliable under a lock of the index for writing.
    pub(crate) fn has_whole(&self) -> bool {
        self.keys.load(Ordering::Relaxed) > 0
    }

    /// Has every batch take its own references, as `pin` finds them. The caller holds locks of the
    /// index, so that no copy leaves meanwhile.
    pub(crate) fn settle(&self, pin: impl Fn(&FullKey) -> Option<Arc<Resident>>) {
        if !self.has_whole() {
            return;
        }
        let mut records = self.records.lock();
        for record in &mut records.places {
            if let Record::Whole { ns, keys, hits } = record {
                *record = Record::Settled(pinned(*ns, &keys[..*hits], &pin));
            }
        }
        records.keys = 0;
        self.keys.store(0, Ordering::Relaxed);
    }

    /// Enters a batch, unless the ledger is full. The caller holds the index as since its lookups.
    fn enter(&self, ns: u32, keys: &Arc<[BlockKey]>, hits: usize) -> Option<usize> {
        // Where another thread is at it, its own references are as cheap as to wait.
        let mut records = self.records.try_lock()?;
        if records.keys + hits > MAX_KEYS {
            return None;
        }
        records.keys += hits;
        self.keys.store(records.keys, Ordering::Relaxed);
        Some(records.enter(Record::Whole { ns, keys: keys.clone(), hits }))
    }

    fn leave(&self, place: usize) -> Record {
        self.left(self.records.lock(), place)
    }

    fn left(&self, mut records: MutexGuard<'_, Records>, place: usize) -> Record {
        let record = records.leave(place);
        self.keys.store(records.keys, Ordering::Relaxed);
        record
    }
}

fn pinned(
    ns: u32,
    keys: &[BlockKey],
    pin: impl Fn(&FullKey) -> Option<Arc<Resident>>,
) -> Vec<Arc<Resident>> {
    let resident = |key: &BlockKey| pin(&FullKey { ns, key: *key });
    keys.iter()
        .map(|key| resident(key).expect("no copy leaves before the batch is settled"))
        .collect()
}

/// A lease of a batch of blocks in memory: those of its first keys; the others are stored nowhere.
///
/// Its blocks are pinned until it is dropped or released, like those of a [`Lease`] each.
#[derive(Debug)]
pub struct LeaseBatch {
    index: Arc<ReadIndex>,
    /// Its place in the ledger, until it is released.
    place: Option<usize>,
    keys: usize,
    /// Payload bytes, as counted.
    bytes: u64,
    /// The flags of each block that is leased.
    flags: SmallVec<[u8; 64]>,
}

/// What the lookups of a batch found.
pub(crate) enum Looked {
    /// All that are there are leased.
    Leased(LeaseBatch),
    /// The blocks have to be leased one by one.
    OneByOne,
    /// Some have to be loaded.
    Elsewhere,
}

impl LeaseBatch {
    /// Leases `keys` as a whole: where the first of them are in memory and the others nowhere, the
    /// ledger has room, and the cap allows it. `block_bytes` are those of a block of the namespace.
    pub(crate) fn lease(
        index: &Arc<ReadIndex>,
        ns: u32,
        keys: &Arc<[BlockKey]>,
        block_bytes: u64,
        take: impl FnOnce(u64) -> bool,
    ) -> Looked {
        if keys.len() > MAX_BATCH {
            return Looked::OneByOne;
        }
        let mut flags = SmallVec::from_elem(0, keys.len());
        let mut hits = 0;
        let tables = index.read();
        for (key, flags) in keys.iter().zip(&mut flags) {
            match tables.resident_flags(ns, key) {
                Ok(found) => *flags = found,
                Err(Residency::Absent | Residency::Writing) => break,
                Err(_) => return Looked::Elsewhere,
            }
            hits += 1;
        }
        flags.truncate(hits);
        for key in &keys[hits..] {
            match tables.residency(ns, key).0 {
                Residency::Absent | Residency::Writing => {}
                Residency::In(Tier::Dram) => return Looked::OneByOne,
                _ => return Looked::Elsewhere,
            }
        }
        let bytes = block_bytes * hits as u64;
        if !take(bytes) {
            return Looked::OneByOne;
        }
        let place = index.ledger.enter(ns, keys, hits);
        drop(tables);
        let batch = Self { index: index.clone(), place, keys: keys.len(), bytes, flags };
        if place.is_none() {
            index.ledger.freed.give_back(batch.bytes);
            return Looked::OneByOne;
        }
        Looked::Leased(batch)
    }

    /// Number of keys.
    #[expect(clippy::len_without_is_empty, reason = "a batch of no keys is as good as any other")]
    pub fn len(&self) -> usize {
        self.keys
    }

    /// Leading blocks that were found, and with it all.
    pub fn hits(&self) -> usize {
        self.flags.len()
    }

    /// The flags of block `at`, or why there is no lease of it. A release changes nothing.
    pub fn outcome(&self, at: usize) -> Result<u8, MissReason> {
        self.flags.get(at).copied().ok_or(MissReason::Absent)
    }

    /// Whether the blocks were released.
    pub fn is_released(&self) -> bool {
        self.place.is_none()
    }

    /// Unpins the blocks.
    pub fn release(&mut self) {
        let ledger = &self.index.ledger;
        if ledger.origin.is_forked() {
            // The parent's: nothing of it is given back here.
            return;
        }
        if let Some(place) = self.place.take() {
            drop(ledger.leave(place));
            ledger.freed.give_back(self.bytes);
        }
    }

    /// A lease of each block. In a forked child that cannot tell them any more, none.
    pub fn into_leases(mut self) -> Leases {
        let (found, place) = (self.flags.len(), self.place.take());
        let mut items = Vec::with_capacity(self.keys);
        if let Some(residents) = place.and_then(|place| self.take_pinned(place)) {
            debug_assert_eq!(self.bytes, residents.iter().map(|r| r.bytes()).sum::<u64>());
            items.extend(residents.into_iter().map(|resident| Ok(Lease::counted(resident))));
        }
        items.resize_with(found, || Err(MissReason::Closed));
        items.resize_with(self.keys, || Err(MissReason::Absent));
        Leases { items, sources: vec![Tier::Dram; self.keys] }
    }

    /// The batch's own references, with which it leaves the ledger.
    fn take_pinned(&self, place: usize) -> Option<Vec<Arc<Resident>>> {
        let ledger = &self.index.ledger;
        let (tables, records) = if ledger.origin.is_forked() {
            // Whoever holds a lock there is not here to let it go.
            (self.index.try_read()?, ledger.records.try_lock()?)
        } else {
            (self.index.read(), ledger.records.lock())
        };
        match ledger.left(records, place) {
            Record::Whole { ns, keys, hits } => {
                Some(pinned(ns, &keys[..hits], |key| tables.pin(key)))
            }
            Record::Settled(residents) => Some(residents),
            Record::Free(_) => unreachable!("a batch leaves the ledger once"),
        }
    }
}

impl Drop for LeaseBatch {
    fn drop(&mut self) {
        self.release();
    }
}
