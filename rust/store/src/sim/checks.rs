//! What must hold after a step beyond what calls return: of holds, chains, tombstones and tables.

use super::faults::Counted;
use super::world::{DRIVE, JOURNAL_PAGES, STORE, World, children};
use crate::directory::read_journal;
use crate::index::{FullKey, Residency};
use crate::io::JOURNAL;
use crate::log::{LogEntry, LogKind};
use crate::machine::{Doomed, HoldId};
use tiered_kv_io::Disk;
use tiered_kv_types::record::RECORD_BYTES;
use tiered_kv_types::{BlockKey, Buried, NamespaceId, RecordHeader, Tier, Tombstone};

/// A hold that has not been used, and those of its blocks that are still the ones that it held.
pub(super) struct Held {
    pub(super) id: HoldId,
    pub(super) keys: Vec<BlockKey>,
    pub(super) expires: u64,
}

fn full(key: &BlockKey) -> FullKey {
    FullKey { ns: u32::from(key.0[9]), key: *key }
}

impl World {
    /// Of `keys` other blocks may be stored from now on, or none: no hold speaks of them any more.
    pub(super) fn no_longer_held(&mut self, keys: &[BlockKey]) {
        for hold in &mut self.holds {
            hold.keys.retain(|key| !keys.contains(key));
        }
    }

    /// What the machine has just evicted was not the last copy of a held block, nor did it leave
    /// memory before its children.
    pub(super) fn check_evicted(&mut self, logged: &[LogEntry]) {
        let now = self.now.mono;
        self.holds.retain(|hold| hold.expires > now);
        for entry in logged {
            if entry.kind != LogKind::Evicted {
                self.no_longer_held(&[entry.key]);
                continue;
            }
            let held = self.holds.iter().any(|hold| hold.keys.contains(&entry.key));
            let gone = self.index.residency(&full(&entry.key)).0 == Residency::Absent;
            assert!(!held || !gone, "{:?}: evicted from its last tier while held", entry.key);
            if entry.tier == Some(Tier::Dram) && !self.staging {
                self.check_childless(&entry.key);
            }
        }
    }

    fn check_childless(&self, key: &BlockKey) {
        if self.index.pin(&full(key)).is_some() {
            return;
        }
        for child in children(key) {
            let resident = self.index.pin(&full(&child)).is_some();
            assert!(!resident, "{key:?}: evicted from memory before its child {child:?}");
        }
    }

    /// A delete that is called durable has its tombstones on every drive, whatever a power cut
    /// takes; but for one journal, which may be damaged at will.
    pub(super) fn check_buried(&self, ns: u32, doomed: &Doomed) {
        let namespace = NamespaceId([ns as u8 + 1; 32]);
        for (number, disk) in self.disks.iter().enumerate() {
            if !self.calm && number == self.journal_victim {
                continue;
            }
            let disk = disk.crash(|_| false);
            let (file, _) = disk.open(JOURNAL).expect("there");
            let (found, _) = read_journal(&disk, file, JOURNAL_PAGES, &STORE).expect("reads");
            let has = |buried: &Buried| {
                let ours = |t: &Tombstone| t.namespace == namespace && t.buried == *buried;
                assert!(found.iter().any(ours), "drive {number} has no tombstone of {buried:?}");
            };
            match doomed {
                Doomed::Keys(keys) => keys.iter().for_each(|key| has(&Buried::Key(*key))),
                Doomed::StoredBefore(unix_ns) => has(&Buried::StoredBefore(*unix_ns)),
            }
        }
    }

    /// Recovery believes a record only where it lies.
    pub(super) fn check_tables(&self) {
        for number in 0..self.disks.len() {
            for Counted { record, header, .. } in self.counted_on(number as u16) {
                let mut bytes = vec![0; DRIVE.header_stride as usize];
                let disk = &self.disks[number];
                disk.read_at(header.file, header.offset, &mut bytes).expect("reads");
                let lies = RecordHeader::decode(&bytes[..RECORD_BYTES]).valid();
                assert_eq!(lies, Some(record), "drive {number}: believed, and not in the table");
            }
        }
    }
}
