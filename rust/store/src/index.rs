//! The read index: what a caller sees of every block, without waiting for the state machine.
//!
//! Sharded by key into groups of tables. A group's lock guards its tables and is held for a few
//! keys at a time, never across I/O; whoever looks up many keys holds all of them for that long,
//! since a lock a key would cost more than the lookup. The state machine alone writes to it, while
//! it decides, so that the index never runs ahead of the data: an entry appears after its bytes and
//! checksums are in place.
//!
//! Batches leased as a whole ([`Ledger`]) pin their blocks through it: no copy leaves it before
//! such a batch holds its own references.

use crate::batch::Ledger;
use crate::entries::{Entries, Entry};
use crate::machine::DriveId;
use crate::resident::{FreedSlots, Resident};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, RwLock, RwLockReadGuard};
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;
use tiered_kv_io::in_parallel;
use tiered_kv_types::{BlockInfo, BlockKey, KEY_BYTES, Tier};

/// A key and the namespace it lives in; compared whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FullKey {
    /// Number of the namespace in this store.
    pub(crate) ns: u32,
    /// The key.
    pub(crate) key: BlockKey,
}

impl Hash for FullKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The key is a digest: eight bytes of it and the namespace spread evenly. Comparison is
        // whole.
        state.write_u64(head(self.ns, &self.key));
    }
}

/// Eight bytes of the key, and the namespace.
#[inline]
pub(crate) fn head(ns: u32, key: &BlockKey) -> u64 {
    let (words, _) = key.0.as_chunks::<8>();
    u64::from_le_bytes(words[0]) ^ u64::from(ns).rotate_left(32)
}

impl Default for FullKey {
    fn default() -> Self {
        Self { ns: 0, key: BlockKey([0; KEY_BYTES]) }
    }
}

pub(crate) type KeyHasher = foldhash::quality::FixedState;

/// What a lookup says of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Residency {
    /// Nothing is stored under it.
    Absent,
    /// A put of it is under way.
    Writing,
    /// It is on a slower tier and on its way into memory.
    Loading,
    /// It can be had from this tier.
    In(Tier),
    /// It is on a drive that is not asked at present: a `get` would miss.
    Shut,
}

impl Residency {
    /// Whether a `get` would find it.
    pub fn is_hit(self) -> bool {
        matches!(self, Self::Loading | Self::In(_))
    }
}

impl Entry {
    /// `staging`: what is in memory only passes through, and counts for nothing.
    fn residency(&self, staging: bool, shut: &ShutDrives) -> Residency {
        let on_drive = self.on_nvme().filter(|_| staging || self.resident.is_none());
        if let Some(drive) = on_drive {
            if shut.contains(drive) {
                Residency::Shut
            } else if self.loading && !staging {
                Residency::Loading
            } else {
                Residency::In(Tier::Nvme)
            }
        } else if staging && self.resident.is_some() {
            Residency::Writing
        } else if self.resident.is_some() {
            Residency::In(Tier::Dram)
        } else if self.writing > 0 {
            Residency::Writing
        } else {
            Residency::Absent
        }
    }
}

/// Drives that are not asked at present.
#[derive(Debug, Default)]
struct ShutDrives([AtomicU64; 4]);

impl ShutDrives {
    fn place(&self, drive: DriveId) -> (&AtomicU64, u64) {
        let drive = usize::from(drive);
        (&self.0[drive / 64], 1 << (drive % 64))
    }

    #[inline]
    fn contains(&self, drive: DriveId) -> bool {
        let (word, bit) = self.place(drive);
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn set(&self, drive: DriveId, shut: bool) {
        let (word, bit) = self.place(drive);
        if shut {
            word.fetch_or(bit, Ordering::Relaxed)
        } else {
            word.fetch_and(!bit, Ordering::Relaxed)
        };
    }
}

/// Locks: all of them are taken by whoever looks up many keys, so few.
const GROUPS: usize = 4;
/// Tables behind one lock: one that grows is rehashed under it, so many.
const TABLES: usize = 16;
/// Keys that are looked up before a writer is let in.
pub(crate) const KEYS_A_TURN: usize = 16;

/// Keys of a recovery from which on it is worth several threads.
pub(crate) const RESTORED_TOGETHER: usize = 16 << 10;

/// Where a key is: its group and its table there.
#[inline]
fn place(key: &BlockKey) -> (usize, usize) {
    // A key is a digest, and the table inside hashes another part of it. Keys that are none crowd
    // in one table, which is slower and nothing worse.
    let byte = usize::from(key.0[8]);
    (byte % GROUPS, byte / GROUPS % TABLES)
}

#[derive(Debug)]
struct Group([Entries; TABLES]);

impl Group {
    #[inline]
    fn get(&self, ns: u32, key: &BlockKey) -> Option<&Entry> {
        self.0[place(key).1].get(ns, key)
    }

    fn resident(&self, key: &FullKey) -> Option<Arc<Resident>> {
        self.get(key.ns, &key.key).and_then(|entry| entry.resident.clone())
    }
}

#[derive(Debug)]
pub(crate) struct ReadIndex {
    groups: [RwLock<Group>; GROUPS],
    /// There is no T1.
    staging: bool,
    shut: ShutDrives,
    /// Batches leased as a whole.
    pub(crate) ledger: Ledger,
}

/// The whole index, as long as no writer may change it.
pub(crate) struct Tables<'a> {
    groups: [RwLockReadGuard<'a, Group>; GROUPS],
    index: &'a ReadIndex,
}

impl Tables<'_> {
    #[inline]
    fn get(&self, ns: u32, key: &BlockKey) -> Option<&Entry> {
        self.groups[place(key).0].get(ns, key)
    }

    /// What a caller may know of `key`.
    #[inline]
    pub(crate) fn residency(&self, ns: u32, key: &BlockKey) -> (Residency, BlockInfo) {
        self.index.residency_of(self.get(ns, key))
    }

    /// Pins the copy in memory, if there is one.
    pub(crate) fn pin(&self, key: &FullKey) -> Option<Arc<Resident>> {
        self.groups[place(&key.key).0].resident(key)
    }

    /// Pins the copy in memory, or tells where else the key is.
    pub(crate) fn pin_or_residency(
        &self,
        key: &FullKey,
    ) -> std::result::Result<Arc<Resident>, Residency> {
        let entry = self.get(key.ns, &key.key);
        let resident = entry.and_then(|entry| entry.resident.clone());
        resident.ok_or_else(|| self.index.residency_of(entry).0)
    }

    /// The block's flags, where a copy is in memory; else where the key is.
    #[inline]
    pub(crate) fn resident_flags(
        &self,
        ns: u32,
        key: &BlockKey,
    ) -> std::result::Result<u8, Residency> {
        match self.get(ns, key) {
            Some(entry) if entry.resident.is_some() => Ok(entry.info.flags()),
            entry => Err(self.index.residency_of(entry).0),
        }
    }
}

impl ReadIndex {
    /// `freed`: whose books count what is leased.
    pub(crate) fn new(seed: u64, staging: bool, freed: FreedSlots) -> Self {
        let table = |_| Entries::new(seed);
        let group = |_| RwLock::new(Group(std::array::from_fn(table)));
        let (groups, ledger) = (std::array::from_fn(group), Ledger::new(freed));
        Self { groups, staging, shut: ShutDrives::default(), ledger }
    }

    /// Adds `n` keys that are on drives, as a recovery has found them; `found` tells of each. The
    /// caller's thread does `meanwhile` first.
    ///
    /// Group by group, each in the order in which keys were found: what is read then lies in a row.
    pub(crate) fn restore(
        &self,
        n: usize,
        threads: usize,
        found: impl Fn(usize) -> (FullKey, BlockInfo, DriveId) + Sync,
        meanwhile: impl FnOnce(),
    ) {
        let by_group = OnceLock::new();
        let sort = || {
            let mut groups: [Vec<u32>; GROUPS] = std::array::from_fn(|_| Vec::new());
            groups.iter_mut().for_each(|group| group.reserve(n / GROUPS + n / GROUPS / 8));
            for number in 0..n {
                let at = u32::try_from(number).expect("fewer than 2^32 blocks");
                groups[place(&found(number).0.key).0].push(at);
            }
            groups
        };
        let fill = |at: usize| {
            let mine = &by_group.get_or_init(sort)[at];
            let share = mine.len() / TABLES;
            // Nobody looks for a key before the recovery is over.
            let mut group = self.groups[at].write();
            group.0.iter_mut().for_each(|table| table.reserve(share + share / 8));
            for at in mine {
                let (key, info, drive) = found(*at as usize);
                let entry = group.0[place(&key.key).1].entry(&key);
                entry.info = info;
                entry.set_on_nvme(Some(drive));
            }
        };
        in_parallel(GROUPS, threads, fill, meanwhile);
    }

    /// What is on a drive counts for nothing while it is shut.
    pub(crate) fn shut_drive(&self, drive: DriveId, shut: bool) {
        self.shut.set(drive, shut);
    }

    #[inline]
    fn group(&self, key: &FullKey) -> &RwLock<Group> {
        &self.groups[place(&key.key).0]
    }

    fn residency_of(&self, entry: Option<&Entry>) -> (Residency, BlockInfo) {
        match entry {
            Some(entry) => (entry.residency(self.staging, &self.shut), entry.info),
            None => (Residency::Absent, BlockInfo::default()),
        }
    }

    /// The index for the lookup of several keys: writers wait until it is dropped.
    #[inline]
    pub(crate) fn read(&self) -> Tables<'_> {
        Tables { groups: std::array::from_fn(|at| self.groups[at].read()), index: self }
    }

    /// The same without waiting for a lock.
    pub(crate) fn try_read(&self) -> Option<Tables<'_>> {
        let reversed = self.groups.iter().rev();
        let mut guards = reversed.map_while(RwLock::try_read).collect::<Vec<_>>();
        if guards.len() < GROUPS {
            return None;
        }
        let groups = std::array::from_fn(|_| guards.pop().expect("one a group"));
        Some(Tables { groups, index: self })
    }

    /// What a caller may know of `key`.
    pub(crate) fn residency(&self, key: &FullKey) -> (Residency, BlockInfo) {
        self.residency_of(self.group(key).read().get(key.ns, &key.key))
    }

    /// Pins the copy in memory, if there is one.
    pub(crate) fn pin(&self, key: &FullKey) -> Option<Arc<Resident>> {
        self.group(key).read().resident(key)
    }

    /// Changes the entry of `key`, made if absent and dropped if nothing is left of it.
    pub(crate) fn update<R>(&self, key: &FullKey, change: impl FnOnce(&mut Entry) -> R) -> R {
        let (at, table) = place(&key.key);
        let mut group = self.groups[at].write();
        let entry = group.0[table].entry(key);
        let before = entry.resident.clone();
        let result = change(entry);
        let left = before
            .filter(|before| entry.resident.as_ref().is_none_or(|now| !Arc::ptr_eq(now, before)));
        // First: an empty entry ends the searches for what was put behind it.
        if entry.is_empty() {
            group.0[table].remove_empty(key);
        }
        if let Some(before) = left {
            // Nobody can have begun a batch since: that takes the lock of every group.
            self.settle(at, &group, Some((key, &before)));
        }
        result
    }

    /// Has every batch leased as a whole hold its own references. `group` is locked for writing;
    /// `gone` has just left it.
    fn settle(&self, at: usize, group: &Group, gone: Option<(&FullKey, &Arc<Resident>)>) {
        self.ledger.settle(|key| match gone {
            Some((left, resident)) if left == key => Some(resident.clone()),
            _ if place(&key.key).0 == at => group.resident(key),
            // No other thread writes, so this waits for nobody.
            _ => self.pin(key),
        });
    }

    /// Whether only the index holds the copy in memory, so that it could be evicted now.
    pub(crate) fn is_unpinned(&self, key: &FullKey) -> bool {
        if self.ledger.has_whole() {
            self.settle_now();
        }
        let group = self.group(key).read();
        let resident = group.get(key.ns, &key.key).and_then(|entry| entry.resident.as_ref());
        resident.is_some_and(|r| Arc::strong_count(r) == 1)
    }

    fn settle_now(&self) {
        let tables = self.read();
        self.ledger.settle(|key| tables.pin(key));
    }

    /// Forgets everything, at the end of the core. What is leased stays, as its lease says.
    pub(crate) fn clear(&self) {
        self.settle_now();
        for group in &self.groups {
            group.write().0.iter_mut().for_each(Entries::clear);
        }
    }

    /// Takes the copy out of memory if nobody else holds it. The lock keeps a caller from pinning
    /// it between the check and the removal.
    pub(crate) fn evict(&self, key: &FullKey) -> bool {
        let (at, table) = place(&key.key);
        let mut group = self.groups[at].write();
        self.settle(at, &group, None);
        let Some(entry) = group.0[table].get_mut(key) else { return false };
        let Some(resident) = entry.resident.as_mut() else { return false };
        if Arc::get_mut(resident).is_none() {
            return false;
        }
        entry.resident = None;
        if entry.is_empty() {
            group.0[table].remove_empty(key);
        }
        true
    }

    /// Number of entries, for audits.
    pub(crate) fn len(&self) -> usize {
        self.groups.iter().map(|g| g.read().0.iter().map(Entries::len).sum::<usize>()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resident::tests::resident;

    #[test]
    fn what_is_leased_as_a_whole_is_found_behind_a_copy_that_leaves() {
        use crate::batch::{LeaseBatch, Looked};
        let freed = FreedSlots::default();
        let index = Arc::new(ReadIndex::new(1, false, freed.clone()));
        // Keys that differ where the hash does not look: each is searched for past those before it.
        let key = |number: u8| {
            let mut bytes = [0; 32];
            bytes[31] = number;
            FullKey { ns: 0, key: BlockKey(bytes) }
        };
        for number in 0..32 {
            index.update(&key(number), |entry| entry.resident = Some(resident(8, &freed)));
        }
        for first in 0..31 {
            let keys: Arc<[BlockKey]> = (first + 1..32).map(|n| key(n).key).collect();
            let Looked::Leased(batch) = LeaseBatch::lease(&index, 0, &keys, 8, |_| true) else {
                panic!("all are in memory")
            };
            index.update(&key(first), |entry| entry.resident = None);
            let leased = batch.into_leases().items;
            assert!(leased.iter().all(Result::is_ok) && leased.len() == keys.len());
        }
    }

    #[test]
    fn a_copy_that_somebody_holds_is_not_evicted() {
        let freed = FreedSlots::default();
        let index = ReadIndex::new(1, false, freed.clone());
        let key = FullKey::default();
        index.update(&key, |entry| entry.resident = Some(resident(8, &freed)));
        let held = index.pin(&key).expect("in memory");
        assert!(!index.evict(&key), "whoever holds it may have come since it was chosen");
        assert!(index.pin(&key).is_some());
        drop(held);
        assert!(index.evict(&key));
        assert!(index.pin(&key).is_none());
    }
}
