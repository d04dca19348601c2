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
    /// Puts that were begun and have not ended.
    in_flight: u32,
    /// The one that must be returned, since it was acknowledged and nothing has happened to it.
    current: Option<u64>,
    /// Log number from which an event can explain that it is gone.
    since: u64,
    /// Versions that a durable delete took, and when it was called: to what is asked later they
    /// never come back, whatever happens.
    buried: BTreeMap<u64, u64>,
    /// When it was acknowledged; a get asked earlier may have been decided before.
    at: u64,
    /// A fault that nobody was told of touched versions up to this one on a drive.
    touched: u64,
    /// A drive kept the headers of versions up to this one, which it said it had zeroed.
    risen: u64,
}

impl Known {
    fn newest(&self) -> u64 {
        self.offered.last().copied().unwrap_or(0)
    }
}

/// What was reported durable.
#[derive(Clone, Copy, Debug)]
struct Promise {
    /// `None` where several puts of the key may have been the last.
    version: Option<u64>,
    /// Log number from which an event can explain that it is gone.
    since: u64,
}

/// A block that a flush speaks of: its key, its version, and the number in the log from which an
/// event can explain that it is gone.
pub(super) type Promised = (BlockKey, u64, u64);

/// What a drive holds of a block that recovery believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Version(u64),
    /// Bytes that are no version of it: a read of it will miss.
    Damaged,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    keys: BTreeMap<BlockKey, Known>,
    durable: BTreeMap<BlockKey, Promise>,
    /// There is no T1: a block that cannot be written is nowhere, nor is what it replaced.
    staging: bool,
    /// Promises that were checked after a restart.
    pub(super) checked: u64,
}

impl Oracle {
    /// The oracle of a store with or, where it is `staging`, without T1.
    pub(super) fn new(staging: bool) -> Self {
        Self { staging, ..Self::default() }
    }

    /// A put may make this payload visible at any moment from now on.
    pub(super) fn offered(&mut self, key: BlockKey, version: u64) {
        let known = self.keys.entry(key).or_default();
        known.offered.insert(version);
        known.in_flight += 1;
    }

    /// A put of the key has ended, however it did.
    pub(super) fn ended(&mut self, key: BlockKey) {
        self.keys.entry(key).or_default().in_flight -= 1;
    }

    /// Of what is stored under the key nothing is known any more.
    pub(super) fn unsure(&mut self, key: BlockKey, at: u64) {
        let known = self.keys.entry(key).or_default();
        known.at = at;
        known.current = None;
        self.durable.remove(&key);
    }

    /// A put that waited became visible at some moment before it was acknowledged.
    pub(super) fn stored_some_time(&mut self, key: BlockKey, version: u64, at: u64) {
        self.unsure(key, at);
        self.keys.entry(key).or_default().stored.insert(version);
    }

    pub(super) fn stored(&mut self, key: BlockKey, version: u64, log: u64, at: u64) {
        self.stored_some_time(key, version, at);
        let known = self.keys.entry(key).or_default();
        known.current = Some(version);
        known.since = log;
    }

    /// Whether no other put of the key can have replaced this version since it was `asked` for.
    pub(super) fn is_alone(&self, key: &BlockKey, version: u64, asked: u64) -> bool {
        self.keys.get(key).is_none_or(|known| known.newest() == version && known.at <= asked)
    }

    /// Without T1 a put that has ended is durable. `since` is the log's number when it was called.
    pub(super) fn stored_durably(&mut self, key: BlockKey, since: u64) {
        let version = self.keys.get(&key).and_then(|known| known.current);
        self.durable.insert(key, Promise { version, since });
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
    pub(super) fn promised(&self) -> Vec<Promised> {
        let promise = |(key, known): (&BlockKey, &Known)| {
            known.current.map(|version| (*key, version, known.since))
        };
        self.keys.iter().filter_map(promise).collect()
    }

    /// A flush called at `asked` reported all of these durable; one that was stored again since, or
    /// is about to be, is not meant.
    pub(super) fn durable(&mut self, keys: Vec<Promised>, asked: u64) {
        for (key, version, since) in keys {
            let Some(known) = self.keys.get(&key) else { continue };
            if known.at <= asked && known.in_flight == 0 {
                self.durable.insert(key, Promise { version: Some(version), since });
            }
        }
    }

    /// A payload was returned: it must be one that was stored, and the current one if that is
    /// known.
    pub(super) fn returned(&mut self, key: BlockKey, version: u64, asked: u64) {
        let known = self.keys.get_mut(&key).expect("only stored keys return bytes");
        let buried = known.buried.get(&version).is_some_and(|at| *at < asked);
        let excused = version <= known.risen;
        assert!(!buried || excused, "{key:?}: a deleted payload came back");
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
        let removes = |kind| match kind {
            LogKind::Evicted | LogKind::Fault(_) | LogKind::Deleted => true,
            LogKind::Undurable => self.staging,
            _ => false,
        };
        let explains = |e: &LogEntry| e.key == key && e.seq >= known.since && removes(e.kind);
        assert!(log.iter().any(explains), "{key:?}: {reason:?} without a cause");
        known.current = None;
    }

    /// A fault that nobody was told of hit the key's copy on a drive.
    pub(super) fn touched(&mut self, key: &BlockKey) {
        let known = self.keys.entry(*key).or_default();
        known.touched = known.newest();
    }

    /// A header of the key that should have been zeroed was not.
    pub(super) fn risen(&mut self, key: &BlockKey) {
        let known = self.keys.entry(*key).or_default();
        known.risen = known.newest();
    }

    /// The power was cut: what was not durable may be gone. What was, and was not evicted, deleted
    /// or damaged since, must be there, whole, and be served from now on: what calls were told, and
    /// what the machine counted on just before (`counted`). `dropped` went at the restart.
    pub(super) fn restarted(
        &mut self,
        log: &[LogEntry],
        dropped: &BTreeSet<BlockKey>,
        counted: &BTreeMap<BlockKey, Found>,
        found: &BTreeMap<BlockKey, Found>,
    ) {
        for known in self.keys.values_mut() {
            known.current = None;
            known.since = 0;
        }
        for (key, counted) in counted {
            let touched = self.keys.get(key).map_or(0, |known| known.touched);
            match counted {
                Found::Version(version) if *version > touched && !dropped.contains(key) => {
                    self.checked += 1;
                    assert_eq!(found.get(key), Some(counted), "{key:?}: counted on, and lost");
                }
                Found::Damaged => assert!(touched > 0, "{key:?}: nothing damaged it"),
                Found::Version(_) => {}
            }
        }
        for (key, promise) in std::mem::take(&mut self.durable) {
            let known = self.keys.get_mut(&key).expect("what was stored is known");
            let lost = |e: &LogEntry| {
                let gone = matches!(e.kind, LogKind::Fault(_) | LogKind::Deleted);
                e.key == key && e.seq >= promise.since && (gone || e.tier == Some(Tier::Nvme))
            };
            let newest = known.stored.last().copied().unwrap_or(0);
            let touched = promise.version.unwrap_or(newest) <= known.touched;
            if touched || dropped.contains(&key) || known.in_flight > 0 || log.iter().any(lost) {
                continue;
            }
            self.checked += 1;
            match found.get(&key) {
                Some(Found::Version(version)) => {
                    let promised = promise.version.unwrap_or(*version);
                    assert_eq!(promised, *version, "{key:?}: not what was durable");
                    known.current = Some(*version);
                }
                Some(Found::Damaged) => panic!("{key:?} was durable and is damaged"),
                None => panic!("{key:?} was durable and is gone after the power cut"),
            }
            self.durable.insert(key, Promise { version: known.current, since: 0 });
        }
        for (key, found) in found {
            let known = self.keys.entry(*key).or_default();
            match found {
                Found::Version(version) => {
                    let back = known.buried.contains_key(version) && *version > known.risen;
                    assert!(!back, "{key:?}: a deleted payload came back with the restart");
                    assert!(known.offered.contains(version), "{key:?}: never stored");
                }
                // Its header had landed and its payload had not: the first read will tell.
                Found::Damaged => known.touched = known.newest(),
            }
        }
        self.keys.values_mut().for_each(|known| known.in_flight = 0);
    }
}
