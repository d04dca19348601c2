//! What must be found after a crash, what may be, and what must not.

use crate::log::{LogEntry, LogKind};
use std::collections::{BTreeMap, BTreeSet};
use tiered_kv_types::{BlockKey, Tier};

#[derive(Debug, Default)]
struct Known {
    /// Versions of all puts, in rising order.
    offered: BTreeSet<u64>,
    /// The version that is visible, as long as nothing has happened to it.
    current: Option<u64>,
    /// The version that a flush reported durable, as long as nothing has happened to it.
    durable: Option<u64>,
    /// Versions that a durable delete took.
    buried: BTreeSet<u64>,
}

/// What the store has said about each key.
#[derive(Debug, Default)]
pub(super) struct Ledger(BTreeMap<BlockKey, Known>);

impl Ledger {
    pub(super) fn offered(&mut self, key: BlockKey, version: u64) {
        self.0.entry(key).or_default().offered.insert(version);
    }

    /// A put may take the place of what is there before it is acknowledged itself.
    pub(super) fn superseding(&mut self, key: BlockKey) {
        let known = self.0.entry(key).or_default();
        (known.current, known.durable) = (None, None);
    }

    pub(super) fn stored(&mut self, key: BlockKey, version: u64) {
        let known = self.0.entry(key).or_default();
        // From now on the older copy's slots may be written over.
        (known.current, known.durable) = (Some(version), None);
    }

    /// What a flush that is called now promises if it succeeds.
    pub(super) fn current(&self) -> Vec<(BlockKey, u64)> {
        self.0.iter().filter_map(|(key, known)| Some((*key, known.current?))).collect()
    }

    pub(super) fn flushed(&mut self, promised: Vec<(BlockKey, u64)>) {
        for (key, version) in promised {
            let known = self.0.entry(key).or_default();
            if known.current == Some(version) {
                known.durable = Some(version);
            }
        }
    }

    /// A delete was called: what it takes may be gone from now on. Returns what it takes.
    pub(super) fn doomed(&mut self, meant: impl Fn(&BlockKey) -> bool) -> Vec<(BlockKey, u64)> {
        let mut taken = Vec::new();
        for (key, known) in self.0.iter_mut().filter(|(key, _)| meant(key)) {
            (known.current, known.durable) = (None, None);
            taken.extend(known.offered.iter().map(|version| (*key, *version)));
        }
        taken
    }

    /// A delete was reported durable.
    pub(super) fn buried(&mut self, taken: Vec<(BlockKey, u64)>) {
        for (key, version) in taken {
            self.0.entry(key).or_default().buried.insert(version);
        }
    }

    /// An event that ends what was promised of its key.
    pub(super) fn event(&mut self, entry: &LogEntry) {
        let ends = match entry.kind {
            LogKind::Evicted => entry.tier == Some(Tier::Nvme),
            LogKind::Throttled => false,
            _ => true,
        };
        if let Some(known) = self.0.get_mut(&entry.key).filter(|_| ends) {
            (known.current, known.durable) = (None, None);
        }
    }

    /// The power was cut: what was in memory only is gone.
    pub(super) fn power_cut(&mut self) {
        self.0.values_mut().for_each(|known| known.current = known.durable);
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &BlockKey> {
        self.0.keys()
    }

    /// Checks the version found under a key, or that none was.
    pub(super) fn check(&self, key: &BlockKey, found: Option<u64>, at: &str) {
        let known = &self.0[key];
        let (id, durable) = (key.0[0], known.durable);
        let Some(version) = found else {
            assert_eq!(durable, None, "key {id} was durable and is gone: {at}");
            return;
        };
        assert!(known.offered.contains(&version), "key {id}: never stored: {at}");
        assert!(!known.buried.contains(&version), "key {id}: a deleted block is back: {at}");
        assert!(durable <= Some(version), "key {id}: {version} hides the newer {durable:?}: {at}");
    }

    /// How many keys must be found.
    pub(super) fn promises(&self) -> usize {
        self.0.values().filter(|known| known.durable.is_some()).count()
    }

    /// How many keys a durable delete took at some time.
    pub(super) fn graves(&self) -> usize {
        self.0.values().filter(|known| !known.buried.is_empty()).count()
    }
}
