//! The read index: what a caller sees of every block, without waiting for the state machine.
//!
//! Sharded by key; a shard's lock guards only its own table and is held for one key at a time,
//! never across I/O. The state machine alone writes to it, while it decides, so that the index
//! never runs ahead of the data: an entry appears after its bytes and checksums are in place.

use crate::found::recovery_threads;
use crate::machine::DriveId;
use crate::resident::Resident;
use hashbrown::HashMap;
use parking_lot::RwLock;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tiered_kv_io::in_parallel;
use tiered_kv_types::{BlockInfo, BlockKey, Tier};

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
        let mut head = [0; 8];
        head.copy_from_slice(&self.key.0[..8]);
        state.write_u64(u64::from_le_bytes(head) ^ u64::from(self.ns).rotate_left(32));
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

#[derive(Debug, Default)]
pub(crate) struct Entry {
    pub(crate) resident: Option<Arc<Resident>>,
    /// The drive it is on.
    pub(crate) on_nvme: Option<DriveId>,
    pub(crate) loading: bool,
    pub(crate) writing: u32,
    pub(crate) info: BlockInfo,
}

impl Entry {
    /// `staging`: what is in memory only passes through, and counts for nothing.
    fn residency(&self, staging: bool, shut: &ShutDrives) -> Residency {
        let on_drive = self.on_nvme.filter(|_| staging || self.resident.is_none());
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

    fn is_empty(&self) -> bool {
        self.resident.is_none() && self.on_nvme.is_none() && !self.loading && self.writing == 0
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

type Shard = RwLock<HashMap<FullKey, Entry, KeyHasher>>;

const SHARDS: usize = 64;
/// Keys that one thread of a recovery adds before it looks for more.
const RESTORED_TOGETHER: usize = 16 << 10;

#[derive(Debug)]
pub(crate) struct ReadIndex {
    shards: Vec<Shard>,
    /// There is no T1.
    staging: bool,
    shut: ShutDrives,
}

impl ReadIndex {
    pub(crate) fn new(seed: u64, staging: bool) -> Self {
        let hasher = KeyHasher::with_seed(seed);
        let shard = |_| RwLock::new(HashMap::with_hasher(hasher.clone()));
        Self { shards: (0..SHARDS).map(shard).collect(), staging, shut: ShutDrives::default() }
    }

    /// Adds `n` keys that are on drives, as a recovery has found them; `found` tells of each. The
    /// caller's thread does `meanwhile` first.
    pub(crate) fn restore(
        &self,
        n: usize,
        found: impl Fn(usize) -> (FullKey, BlockInfo, DriveId) + Sync,
        meanwhile: impl FnOnce(),
    ) {
        let add = |chunk: usize| {
            let begin = chunk * RESTORED_TOGETHER;
            for at in begin..n.min(begin + RESTORED_TOGETHER) {
                let (key, info, drive) = found(at);
                self.update(&key, |entry| {
                    entry.info = info;
                    entry.on_nvme = Some(drive);
                });
            }
        };
        for shard in &self.shards {
            shard.write().reserve(n / SHARDS + n / SHARDS / 8);
        }
        in_parallel(n.div_ceil(RESTORED_TOGETHER), recovery_threads(), add, meanwhile);
    }

    /// What is on a drive counts for nothing while it is shut.
    pub(crate) fn shut_drive(&self, drive: DriveId, shut: bool) {
        self.shut.set(drive, shut);
    }

    #[inline]
    fn shard(&self, key: &FullKey) -> &Shard {
        // A key is a digest, and the table inside hashes another part of it. Keys that are none
        // crowd in one shard, which is slower and nothing worse.
        &self.shards[usize::from(key.key.0[8]) % SHARDS]
    }

    /// What a caller may know of `key`.
    pub(crate) fn residency(&self, key: &FullKey) -> (Residency, BlockInfo) {
        match self.shard(key).read().get(key) {
            Some(entry) => (entry.residency(self.staging, &self.shut), entry.info),
            None => (Residency::Absent, BlockInfo::default()),
        }
    }

    /// Pins the copy in memory, if there is one.
    pub(crate) fn pin(&self, key: &FullKey) -> Option<Arc<Resident>> {
        self.shard(key).read().get(key).and_then(|entry| entry.resident.clone())
    }

    /// Pins the copy in memory, or tells where else the key is.
    pub(crate) fn pin_or_residency(
        &self,
        key: &FullKey,
    ) -> std::result::Result<Arc<Resident>, Residency> {
        match self.shard(key).read().get(key) {
            Some(entry) => {
                entry.resident.clone().ok_or_else(|| entry.residency(self.staging, &self.shut))
            }
            None => Err(Residency::Absent),
        }
    }

    /// Changes the entry of `key`, made if absent and dropped if nothing is left of it.
    pub(crate) fn update<R>(&self, key: &FullKey, change: impl FnOnce(&mut Entry) -> R) -> R {
        let mut shard = self.shard(key).write();
        let entry = shard.entry(*key).or_default();
        let result = change(entry);
        if entry.is_empty() {
            shard.remove(key);
        }
        result
    }

    /// Whether only the index holds the copy in memory, so that it could be evicted now.
    pub(crate) fn is_unpinned(&self, key: &FullKey) -> bool {
        let shard = self.shard(key).read();
        let resident = shard.get(key).and_then(|entry| entry.resident.as_ref());
        resident.is_some_and(|r| Arc::strong_count(r) == 1)
    }

    /// Takes the copy out of memory if nobody else holds it. The lock keeps a caller from pinning
    /// it between the check and the removal.
    pub(crate) fn evict(&self, key: &FullKey) -> bool {
        let mut shard = self.shard(key).write();
        let Some(entry) = shard.get_mut(key) else { return false };
        let Some(resident) = entry.resident.as_mut() else { return false };
        if Arc::get_mut(resident).is_none() {
            return false;
        }
        entry.resident = None;
        if entry.is_empty() {
            shard.remove(key);
        }
        true
    }

    /// Number of entries, for audits.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.read().len()).sum()
    }
}
