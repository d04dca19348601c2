//! The read index, resident copies, leases and the way of a slot back to the allocator.

use crate::batch::{LeaseBatch, Looked};
use crate::index::{FullKey, KeyHasher, ReadIndex};
use crate::machine::SlotId;
use crate::memory::Arena;
use crate::resident::{Filling, FreedSlots, LeaseBudget, Resident};
use crate::sync::Arc;
use loom::thread;
use tiered_kv_types::{BlockInfo, BlockKey};

const KEY: FullKey = FullKey { ns: 0, key: BlockKey([7; 32]) };
const PAGE: u64 = 4096;
const SLOT: SlotId = SlotId { segment: 0, index: 0 };
const BYTES: u64 = 8;

struct Store {
    arena: Arena,
    freed: FreedSlots,
    index: Arc<ReadIndex>,
    budget: Arc<LeaseBudget>,
}

impl Store {
    /// One slot of memory, with a block in it.
    fn new(cap: u64) -> Arc<Self> {
        let freed = FreedSlots::default();
        let index = Arc::new(ReadIndex::new(1, false, freed.clone()));
        let budget = LeaseBudget::new(cap, freed.clone());
        let store = Self { arena: Arena::new(1), freed, index, budget };
        store.publish(1);
        Arc::new(store)
    }

    /// Fills the slot with a new copy and makes it visible.
    fn publish(&self, generation: u64) {
        let slot = self.arena.take(0, PAGE).expect("pages come back before their number does");
        let mut filling = Filling::new(self.freed.clone(), 0);
        filling.push(slot, SLOT, BYTES);
        let filled = filling.fill_from(&generation.to_le_bytes());
        let resident = Arc::new(filled.into_resident(generation, BlockInfo::default()));
        self.index.update(&KEY, |entry| entry.resident = Some(resident));
    }

    /// As a caller does: pins what is there, and reads it.
    fn read(&self) -> bool {
        let Some(resident) = self.index.pin(&KEY) else { return false };
        let Some(lease) = self.budget.lease(resident) else { return false };
        assert_eq!(lease.as_slice(), lease.generation().to_le_bytes(), "leased bytes changed");
        let shared = lease.share();
        drop(lease);
        assert_eq!(shared.as_slice(), shared.generation().to_le_bytes());
        true
    }

    fn batch(&self) -> Option<LeaseBatch> {
        let keys = Arc::from_std(std::sync::Arc::from([KEY.key].as_slice()));
        match LeaseBatch::lease(&self.index, KEY.ns, &keys, BYTES, |n| self.budget.take(n)) {
            Looked::Leased(batch) => Some(batch),
            _ => None,
        }
    }

    /// As a caller that leases a batch as a whole does, and reads it.
    fn read_batch(&self) {
        let Some(batch) = self.batch() else { return };
        for lease in batch.into_leases().items.into_iter().flatten() {
            assert_eq!(lease.as_slice(), lease.generation().to_le_bytes(), "leased bytes changed");
        }
    }
}

/// A copy is evicted beside callers that read it: not while it is pinned.
fn evict_beside(readers: &[fn(&Store)]) -> Arc<Store> {
    let store = Store::new(u64::MAX);
    let beside = |read: &fn(&Store)| {
        let (store, read) = (store.clone(), *read);
        thread::spawn(move || read(&store))
    };
    let readers: Vec<_> = readers.iter().map(beside).collect();
    if store.index.evict(&KEY) {
        assert_eq!(store.freed.pop(), Some(SLOT), "what was evicted is free at once");
        store.publish(2);
    }
    readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
    assert!(store.index.is_unpinned(&KEY), "nobody is left");
    assert_eq!(store.budget.leased_bytes(), 0);
    store
}

pub(crate) fn pin_or_evict() {
    evict_beside(&[|store| _ = store.read()]);
}

pub(crate) fn batch_or_evict() {
    evict_beside(&[Store::read_batch]);
}

/// Two batches of one block, one of which is never read, and an eviction.
pub(crate) fn two_batches() {
    let store = evict_beside(&[Store::read_batch, |store| drop(store.batch())]);
    assert!(!store.index.ledger.has_whole(), "nor in the ledger");
}

/// A block is deleted while it is leased: whoever is last gives the slot back, its pages first.
fn delete_beside(read: fn(&Store)) -> Arc<Store> {
    let store = Store::new(u64::MAX);
    let reader = {
        let store = store.clone();
        thread::spawn(move || read(&store))
    };
    store.index.update(&KEY, |entry| entry.resident = None);
    let early = store.freed.pop();
    if early.is_some() {
        store.publish(2);
    }
    reader.join().expect("no panic");
    if early.is_none() {
        assert_eq!(store.freed.pop(), Some(SLOT), "the last owner gives it back");
        store.publish(2);
    }
    assert_eq!(store.budget.leased_bytes(), 0);
    store
}

pub(crate) fn last_owner() {
    let store = delete_beside(|store| _ = store.read());
    assert!(store.read() && store.freed.pop().is_none(), "and once");
}

pub(crate) fn batch_or_delete() {
    delete_beside(Store::read_batch);
}

pub(crate) fn cap() {
    let store = Store::new(2 * BYTES);
    let large = {
        let store = store.clone();
        thread::spawn(move || assert!(!store.budget.take(3 * BYTES), "over the cap"))
    };
    let other = {
        let store = store.clone();
        thread::spawn(move || {
            let resident = store.index.pin(&KEY).expect("it stays");
            drop(store.budget.lease(resident).expect("it fits, whatever is refused meanwhile"));
        })
    };
    let resident = store.index.pin(&KEY).expect("it stays");
    let lease = store.budget.lease(resident).expect("two fit");
    assert!(store.budget.leased_bytes() <= 2 * BYTES);
    drop(lease);
    large.join().expect("no panic");
    other.join().expect("no panic");
    assert_eq!(store.budget.leased_bytes(), 0);
}
