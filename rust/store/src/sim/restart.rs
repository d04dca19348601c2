//! Power cuts, what is found after them, and the end of a run.

use super::Report;
use super::faults::{Fault, Place};
use super::memory::{REGION_SLOTS, fresh_slots};
use super::oracle::Found;
use super::world::{DRIVE, JOURNAL_PAGES, MEMORY, STORE, World, quota_of, version_of};
use crate::directory::{open_journal, read_journal};
use crate::found::look_at_segments;
use crate::index::{FullKey, KeyHasher, ReadIndex};
use crate::io::segment_name;
use crate::log::{LogEntry, LogKind};
use crate::machine::{Command, DriveId, DriveParts, Event, Limits, Machine, Parts};
use crate::resident::FreedSlots;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tiered_kv_io::{
    Arena, ArenaConfig, Disk, DiskOp, Entropy, FileId, MemDisk, SeededEntropy, crc32c,
};
use tiered_kv_policy::{BetaOptions, Lru, Policy, Predictor};
use tiered_kv_types::config::MIN_METADATA_BYTES;
use tiered_kv_types::{BlockKey, Checkpoint, KvLayout, NamespaceId, Tier};

impl World {
    pub(super) fn cut_power(&mut self) {
        let counted = self.inspect();
        self.struck(Fault::PowerCut, || format!("{counted:?}"));
        self.cut_in_flight();
        self.leases.clear();
        self.holds.clear();
        self.calls.clear();
        // Those of the calls that the crash ended.
        for (idle, region) in self.idle.iter_mut().zip(&self.regions) {
            idle.clear();
            *idle = fresh_slots(region);
        }
        for number in 0..self.disks.len() {
            self.disks[number] = self.crash(number);
        }
        self.count_up();
        let dropped = self.boot();
        let found = self.inspect();
        self.note(|| format!("found {found:?}"));
        self.check_found(&found);
        let log = std::mem::take(&mut self.log);
        self.oracle.restarted(&log, &dropped, &counted, &found);
        self.logged_before = 0;
    }

    /// Writes that were in flight may have ended, wholly or in part, with nobody told.
    fn cut_in_flight(&mut self) {
        for pending in std::mem::take(&mut self.pending) {
            let writes = matches!(
                pending.command,
                Command::WriteSlabs { .. }
                    | Command::WriteHeaders { .. }
                    | Command::WriteJournal { .. }
                    | Command::PrepareSegment { .. }
                    | Command::Sync { .. }
            );
            if writes && self.draw(2) == 0 {
                self.struck(Fault::CutInFlight, String::new);
                let fails = self.draw(3) == 0;
                drop(self.execute(pending.command, pending.buffer, fails));
            }
        }
    }

    /// What a drive holds after the power cut: of the unsynced writes, in any order, any part.
    fn crash(&mut self, number: usize) -> MemDisk {
        let writes = self.disks[number].unsynced_writes();
        let mut order: Vec<usize> = (0..writes).collect();
        if self.draw(2) == 0 {
            for at in (1..writes).rev() {
                order.swap(at, self.draw(at as u64 + 1) as usize);
            }
            if !order.is_sorted() {
                self.struck(Fault::Reordered, || format!("{writes} writes"));
            }
        }
        // Of each write nothing, some sectors, or all of it.
        let fates: Vec<u64> = (0..writes).map(|_| self.draw(4)).collect();
        for fate in &fates {
            match fate {
                0 => self.struck(Fault::Unsynced, String::new),
                1 => self.struck(Fault::Torn, String::new),
                _ => {}
            }
        }
        let coin = SeededEntropy::new(self.seed ^ self.now.mono ^ number as u64);
        self.disks[number].crash_reordered(&order, |write, _| match fates[write] {
            0 => false,
            1 => coin.next_u64().is_multiple_of(2),
            _ => true,
        })
    }

    fn check_found(&mut self, found: &BTreeMap<BlockKey, Found>) {
        for key in found.keys() {
            let full = FullKey { ns: u32::from(key.0[9]), key: *key };
            assert!(self.index.residency(&full).0.is_hit(), "{key:?} is not in the index");
        }
        self.check_tables();
        self.figure("recovered_blocks", found.len() as u64);
    }

    /// What the drives hold of each block that the machine calls durable.
    fn inspect(&self) -> BTreeMap<BlockKey, Found> {
        let mut blocks: BTreeMap<BlockKey, BTreeMap<u16, (Vec<u8>, bool)>> = BTreeMap::new();
        for (number, disk) in (0..).zip(&self.disks) {
            let Checkpoint { segments, records } = self.machine.checkpoint(number);
            let segments: BTreeMap<u32, _> = segments.iter().map(|s| (s.segment, s)).collect();
            for record in records {
                let segment = segments[&record.segment];
                let (file, _) = disk.open(&segment_name(record.segment)).expect("it was found");
                let offset = segment.data_offset + u64::from(record.slot) * segment.slot_bytes;
                let mut bytes = vec![0; usize::try_from(segment.slot_bytes).expect("small")];
                disk.read_at(file, offset, &mut bytes).expect("the simulated disk reads");
                bytes.truncate(usize::try_from(record.payload_bytes).expect("small"));
                let intact = crc32c(&bytes) == record.checksum;
                blocks.entry(record.key).or_default().insert(record.slab, (bytes, intact));
            }
        }
        let found = |(key, slabs): (BlockKey, BTreeMap<u16, (Vec<u8>, bool)>)| {
            if slabs.values().any(|(_, intact)| !intact) {
                return (key, Found::Damaged);
            }
            let bytes: Vec<u8> = slabs.into_values().flat_map(|(bytes, _)| bytes).collect();
            (key, Found::Version(version_of(&self.layouts[usize::from(key.0[9])], &key, &bytes)))
        };
        blocks.into_iter().map(found).collect()
    }

    /// A machine on what the disks hold. One read of a segment may fail. Gives the keys that went
    /// because more came back than the quota allows.
    fn boot(&mut self) -> BTreeSet<BlockKey> {
        let (mut machine, index) =
            machine(self.disks.len(), &self.layouts, self.staging, self.seed);
        let mut events = Vec::new();
        let mut tombstones = Vec::new();
        let mut pages = 0;
        for number in 0..self.disks.len() {
            let drive = number as DriveId;
            let fails_at = if self.calm { u64::MAX } else { self.draw(60) };
            let failed = fail_one_read(&self.disks[number], fails_at);
            let disk = &self.disks[number];
            // One thread: the reads, of which one fails, come in the same order in every run.
            let looked = look_at_segments(disk, drive, &DRIVE, None, 1).expect("only misses");
            looked.remove_misfits(disk).expect("the simulated disk removes");
            events.extend(looked.found.into_iter().map(Event::Found));
            disk.set_fault(None);
            let (file, used) = open_journal(disk, JOURNAL_PAGES).expect("there is room");
            let (found, last) = read_journal(disk, file, used, &STORE).expect("reads");
            tombstones.extend(found);
            pages = last.max(pages);
            let failed = failed.load(Ordering::Relaxed);
            if failed != u32::MAX {
                let at = Place { drive, file: FileId(failed), offset: 0 };
                self.struck(Fault::OpenError, || format!("{at:?}"));
                for key in self.keys_at(at, DRIVE.segment_bytes) {
                    self.oracle.touched(&key);
                }
            }
        }
        events.push(Event::FoundTombstones { tombstones, pages });
        events.push(Event::Recovered { complete: true, tables_read: true });
        machine.recover(self.now, events);
        hold_quota(&mut machine, self.seed);
        (self.machine, self.index) = (machine, index);
        let evicted = |e: &LogEntry| e.kind == LogKind::Evicted && e.tier == Some(Tier::Nvme);
        self.machine.log.since(0).into_iter().filter(evicted).map(|entry| entry.key).collect()
    }

    /// Lets everything in flight end.
    pub(super) fn drain(&mut self) {
        self.leases.clear();
        let mut left = 100_000;
        for _ in 0..3 {
            while !self.pending.is_empty() {
                left -= 1;
                assert!(left > 0, "seed {}: the machine never comes to rest", self.seed);
                let pending = self.pending.swap_remove(0);
                let event = self.execute(pending.command, pending.buffer, false);
                self.feed(event);
            }
            self.later(100_000_000_000);
        }
        // Gets that ended meanwhile may have taken leases.
        self.leases.clear();
        assert!(self.calls.is_empty(), "seed {}: a call never ended", self.seed);
        let idle: usize = self.idle.iter().map(Vec::len).sum();
        assert_eq!(idle, 2 * REGION_SLOTS, "seed {}: a slot was lost", self.seed);
        self.check_canaries();
    }

    /// Adds up what the machine counts; it starts anew with each restart.
    fn count_up(&mut self) {
        let counters = &self.machine.counters;
        let counted = [
            ("direct_reads", counters.direct_reads),
            ("loads_cancelled", counters.loads_cancelled),
            ("offloaded", counters.offloaded),
            ("tombstones_retired", counters.tombstones_retired),
        ];
        counted.into_iter().for_each(|(name, n)| self.figure(name, n));
    }

    pub(super) fn report(mut self, steps: usize) -> Report {
        self.count_up();
        self.figure("steps", steps as u64);
        self.figure("promises_checked", self.oracle.checked);
        for fault in Fault::ALL {
            self.figure(fault.name(), self.struck_by[fault as usize]);
        }
        Report { trace: self.trace, figures: self.figures.into_iter().collect() }
    }
}

/// Lets one read of a data file fail, the one of this number; tells of which file it was.
fn fail_one_read(disk: &MemDisk, number: u64) -> Arc<AtomicU32> {
    let failed = Arc::new(AtomicU32::new(u32::MAX));
    let (tell, mut left) = (failed.clone(), number);
    disk.set_fault(Some(Box::new(move |op| {
        let DiskOp::ReadAt { file, .. } = op else { return None };
        let fails = left == 0;
        left = left.wrapping_sub(1);
        fails.then(|| {
            tell.store(file.0, Ordering::Relaxed);
            std::io::Error::other("the simulated disk cannot read it")
        })
    })));
    failed
}

/// Gives the machine the quota of this seed, which holds at once: nothing is leased or written yet.
pub(super) fn hold_quota(machine: &mut Machine, seed: u64) {
    let within = quota_of(seed).is_none_or(|quota| machine.set_quota(0, quota) == Some(true));
    assert!(within, "seed {seed}: a quota holds from the first write");
}

/// Every fifth seed runs on the order of use, the others on predicted reuse.
fn policy_of(seed: u64) -> Box<dyn Policy> {
    if seed.is_multiple_of(5) {
        return Box::new(Lru::new());
    }
    Box::new(Predictor::new(BetaOptions::DEFAULT, MIN_METADATA_BYTES, seed))
}

/// Every seventh seed may write some twenty blocks to a drive, and then next to nothing.
fn write_budget_of(seed: u64) -> u64 {
    if seed % 7 == 3 { 64 } else { 0 }
}

pub(super) fn machine(
    drives: usize,
    layouts: &[KvLayout],
    staging: bool,
    seed: u64,
) -> (Machine, Arc<ReadIndex>) {
    let mut arena = ArenaConfig::new(MEMORY.segment_bytes * u64::from(MEMORY.segments));
    arena.huge_pages = false;
    let index = Arc::new(ReadIndex::new(1, staging, FreedSlots::default()));
    let mut machine = Machine::new(Parts {
        arena: Arena::new(arena).expect("a small arena"),
        index: index.clone(),
        freed: FreedSlots::default(),
        policy: policy_of(seed),
        limits: Limits {
            dirty_high_bytes: 96 << 10,
            dirty_low_bytes: 48 << 10,
            load_high_bytes: 64 << 10,
            held_high_bytes: 64 << 10,
            stall: 1_500_000_000,
            retry: 1_000_000_000,
            write_bytes_per_s: write_budget_of(seed),
            ahead_waste: [0.0, 0.05, 0.9][(seed / 3 % 3) as usize],
            scrub_bytes_per_s: 8 << 10,
        },
        memory: MEMORY,
        staging,
        drives: vec![DriveParts { store: STORE, geometry: DRIVE }; drives],
        journal_pages: JOURNAL_PAGES,
        hasher: KeyHasher::with_seed(2),
        log_entries: 1 << 20,
    });
    for (ns, layout) in layouts.iter().enumerate() {
        let id = NamespaceId([ns as u8 + 1; 32]);
        let number = machine.open_namespace(id, layout).expect("it fits");
        assert_eq!(number as usize, ns);
    }
    (machine, index)
}

#[cfg(test)]
mod tests {
    use super::super::faults::Counted;
    use super::*;
    use tiered_kv_types::RecordHeader;
    use tiered_kv_types::record::RECORD_BYTES;

    #[test]
    fn a_block_that_is_found_twice_is_found() {
        let mut world = World::new(1, None);
        assert!(world.calm && !world.staging);
        while world.inspect().is_empty() {
            world.put();
            (0..20).for_each(|_| world.perform());
        }
        let mut counted = world.counted_on(0);
        counted.extend(world.counted_on(1));
        let Counted { record, payload, header } = counted.swap_remove(0);
        // The last slot of a segment is the last that is taken.
        let slot_bytes = record.payload_bytes.next_multiple_of(4096);
        let (slots, data) = DRIVE.cut(slot_bytes);
        let last = slots - 1;
        assert_ne!(record.slot, last);
        let disk = &world.disks[usize::from(header.drive)];
        let mut bytes = vec![0; 4096];
        bytes[..RECORD_BYTES].copy_from_slice(&RecordHeader { slot: last, ..record }.encode());
        disk.write_at(header.file, DRIVE.header_offset(last), &bytes).expect("writes");
        let mut bytes = vec![0; usize::try_from(slot_bytes).expect("small")];
        disk.read_at(payload.file, payload.offset, &mut bytes).expect("reads");
        disk.write_at(payload.file, data + u64::from(last) * slot_bytes, &bytes).expect("writes");
        disk.sync(payload.file).expect("syncs");
        world.cut_power();
        assert!(matches!(world.inspect().get(&record.key), Some(Found::Version(_))));
    }
}
