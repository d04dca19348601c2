//! What may be returned, and what must be.

use crate::log::{LogEntry, LogKind};
use crate::machine::{Doomed, Now};
use std::collections::{BTreeMap, BTreeSet};
use tiered_kv_types::{BlockKey, MissReason, Tier};

/// What is known of one key.
#[derive(Debug, Default)]
struct Known {
    /// Every payload that an acknowledged put stored.
    stored: BTreeSet<u64>,
    /// Payloads of puts that were begun.
    offered: BTreeSet<u64>,
    /// The one that must be returned, since it was acknowledged and nothing has happened to it.
    current: Option<u64>,
    /// Log number from which an event can explain that it is gone.
    since: u64,
    /// Versions that a durable delete took, and when it was called: to what is asked later they
    /// never come back, whatever happens.
    buried: BTreeMap<u64, u64>,
    /// When it was acknowledged; a get asked earlier may have been decided before.
    at: u64,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    keys: BTreeMap<BlockKey, Known>,
    /// Keys that a flush called durable.
    durable: BTreeSet<BlockKey>,
}

/// Whether an event can explain that a key is gone altogether.
fn removes(kind: LogKind) -> bool {
    matches!(kind, LogKind::Evicted | LogKind::Fault(_) | LogKind::Deleted)
}

impl Oracle {
    /// A put may make this payload visible at any moment from now on.
    pub(super) fn offered(&mut self, key: BlockKey, version: u64) {
        // It may replace what is durable now, and be lost itself.
        self.durable.remove(&key);
        self.keys.entry(key).or_default().offered.insert(version);
    }

    /// A put that waited became visible at some moment before it was acknowledged: of what is
    /// current nothing is known then.
    pub(super) fn stored_some_time(&mut self, key: BlockKey, version: u64, at: u64) {
        let known = self.keys.entry(key).or_default();
        known.stored.insert(version);
        known.at = at;
        known.current = None;
        self.durable.remove(&key);
    }

    pub(super) fn stored(&mut self, key: BlockKey, version: u64, log: u64, at: u64) {
        let known = self.keys.entry(key).or_default();
        known.stored.insert(version);
        known.current = Some(version);
        known.since = log;
        known.at = at;
        self.durable.remove(&key);
    }

    /// Without T1 a put that has ended is durable.
    pub(super) fn stored_durably(&mut self, key: BlockKey) {
        self.durable.insert(key);
    }

    /// A durable delete: what was stored when it was asked for is gone for good.
    pub(super) fn deleted(&mut self, ns: u32, doomed: &Doomed, asked: Now) {
        for (key, known) in &mut self.keys {
            let meant = match doomed {
                Doomed::Keys(keys) => keys.contains(key),
                // The time a block is stored at is not known to the oracle: only whole namespaces.
                Doomed::StoredBefore(unix_ns) => *unix_ns == u64::MAX && u32::from(key.0[9]) == ns,
            };
            if meant && known.at < asked.mono {
                let taken = known.stored.iter().map(|version| (*version, asked.mono));
                known.buried.extend(taken);
            }
        }
    }

    /// Every key with a current payload, as a flush sees them when it is called.
    pub(super) fn promised(&self) -> Vec<BlockKey> {
        let current = self.keys.iter().filter(|(_, k)| k.current.is_some());
        current.map(|(key, _)| *key).collect()
    }

    /// A flush called at `asked` reported all of these durable; one stored again since is not
    /// meant.
    pub(super) fn durable(&mut self, keys: Vec<BlockKey>, asked: u64) {
        let unchanged = |key: &BlockKey| self.keys.get(key).is_some_and(|k| k.at <= asked);
        let keys: Vec<BlockKey> = keys.into_iter().filter(unchanged).collect();
        self.durable.extend(keys);
    }

    /// A payload was returned: it must be one that was stored, and the current one if that is
    /// known.
    pub(super) fn returned(&mut self, key: BlockKey, version: u64, asked: u64) {
        let known = self.keys.get_mut(&key).expect("only stored keys return bytes");
        let buried = known.buried.get(&version).is_some_and(|at| *at < asked);
        assert!(!buried, "{key:?}: a deleted payload came back");
        assert!(known.offered.contains(&version), "{key:?}: a payload that was never stored");
        if !known.stored.contains(&version) {
            return;
        }
        if let Some(current) = known.current
            && known.at < asked
        {
            assert_eq!(current, version, "{key:?}: an older payload came back");
        }
    }

    /// A key was missed: where a payload is expected, an event must explain it.
    pub(super) fn missed(
        &mut self,
        key: BlockKey,
        reason: MissReason,
        log: &[LogEntry],
        asked: u64,
    ) {
        let Some(known) = self.keys.get_mut(&key) else {
            let never = matches!(reason, MissReason::Absent | MissReason::Cancelled);
            assert!(never, "{key:?} was never stored");
            return;
        };
        let gone = matches!(reason, MissReason::Absent | MissReason::Corrupt | MissReason::IoError);
        if !gone || known.current.is_none() || known.at >= asked {
            return;
        }
        let explains = |e: &&LogEntry| e.key == key && e.seq >= known.since && removes(e.kind);
        assert!(log.iter().any(|e| explains(&e)), "{key:?}: {reason:?} without a cause");
        known.current = None;
    }

    /// The power was cut: what was not durable may be gone, and what was must be there.
    pub(super) fn power_cut(&mut self, log: &[LogEntry], found: impl Fn(&BlockKey) -> bool) {
        for key in std::mem::take(&mut self.durable) {
            let lost = |e: &LogEntry| {
                e.key == key
                    && (e.tier == Some(Tier::Nvme)
                        || matches!(e.kind, LogKind::Fault(_) | LogKind::Deleted))
            };
            if !log.iter().any(lost) {
                assert!(found(&key), "{key:?} was durable and is gone after the power cut");
            }
        }
        for known in self.keys.values_mut() {
            known.current = None;
            known.since = 0;
        }
    }
}
