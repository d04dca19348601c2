//! Counting everything anew and comparing it with the books.

use super::table::OnDrive;
use super::{DriveId, Machine, SlotId, Usage};
use std::collections::BTreeSet;

/// Namespaces that statistics tell of.
const STATS_NAMESPACES: usize = 64;

/// The result of a recount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Bytes of slots in memory that blocks hold, by recount.
    pub dram_block_bytes: u64,
    /// Bytes of slots in memory that are used, by the books. Leases, fills and writes in flight may
    /// hold more than blocks do.
    pub dram_used_bytes: u64,
    /// Bytes of the arena's pages that somebody owns.
    pub dram_owned_bytes: u64,
    /// Bytes of slots on the drive that blocks hold, by recount.
    pub nvme_block_bytes: u64,
    /// Bytes of slots on the drive that are used, by the books.
    pub nvme_used_bytes: u64,
    /// Nothing is on its way to a drive, no block, no header, no tombstone, that has room there.
    pub drives_idle: bool,
    /// What does not fit together, in words; empty when all is well.
    pub faults: Vec<String>,
}

impl Machine {
    /// Recounts every block, slot, child and dirty byte.
    pub(crate) fn audit(&mut self) -> Audit {
        self.reclaim();
        let mut audit = Audit {
            dram_used_bytes: self.memory.used_bytes(),
            dram_owned_bytes: self.arena.taken_bytes(),
            nvme_used_bytes: self.drives.iter().map(|d| d.slots.used_bytes()).sum(),
            drives_idle: self.nothing_to_write(),
            ..Audit::default()
        };
        let mut drive_slots: BTreeSet<(DriveId, SlotId)> = BTreeSet::new();
        let mut dirty = 0;
        let mut loading = 0;
        let mut entries = 0;
        let (mut dram_blocks, mut nvme_blocks) = (0, 0);
        let mut usage = vec![Usage::default(); self.namespaces.len()];
        for (id, block) in self.table.iter() {
            let slots = block.slot_bytes();
            let key = block.key;
            let mut fault = |what: &str| audit.faults.push(format!("block {id} {key:?}: {what}"));
            let pinned = self.index.pin(&key);
            if !block.doomed {
                entries += 1;
                if block.in_dram != pinned.as_ref().is_some() {
                    fault("memory residency differs between the table and the index");
                }
                if let Some(resident) = &pinned
                    && resident.generation() != block.generation
                {
                    fault("the copy in memory is of another generation");
                }
                if self.table.id(&key) != Some(id) {
                    fault("its key maps elsewhere");
                }
            }
            let counted = &mut usage[key.ns as usize];
            counted.dram_blocks += u64::from(block.in_dram);
            counted.nvme_blocks += u64::from(block.is_durable());
            dram_blocks += u64::from(block.in_dram);
            nvme_blocks += u64::from(block.is_durable());
            loading += block.bytes() * (u64::from(block.load.is_some()) + u64::from(block.readers));
            dirty += if block.dirty.is_some() { block.bytes() } else { 0 };
            if block.in_dram && !block.doomed {
                audit.dram_block_bytes += slots;
                counted.dram_bytes += slots;
            }
            if let OnDrive::Writing(held) | OnDrive::Durable(held) = &block.drive {
                audit.nvme_block_bytes += slots;
                counted.nvme_bytes += slots;
                for slot in held {
                    if !drive_slots.insert((block.home, *slot)) {
                        audit.faults.push(format!("slot {slot:?} is held twice"));
                    }
                }
            }
        }
        if (dram_blocks, nvme_blocks) != (self.dram_blocks, self.nvme_blocks) {
            audit.faults.push(format!("blocks: {dram_blocks} and {nvme_blocks} counted"));
        }
        if loading != self.loading_bytes {
            let books = self.loading_bytes;
            audit.faults.push(format!("loading: {loading} counted, {books} in the books"));
        }
        self.check_usage(&usage, &mut audit);
        self.check_totals(dirty, entries, &mut audit);
        self.check_kin(&mut audit);
        audit
    }

    fn check_totals(&self, dirty: u64, entries: usize, audit: &mut Audit) {
        let mut check = |ok: bool, what: String| {
            if !ok {
                audit.faults.push(what);
            }
        };
        check(dirty == self.dirty_bytes, format!("dirty: {dirty} != {}", self.dirty_bytes));
        check(entries == self.table.len(), format!("table: {entries} != {}", self.table.len()));
        check(
            self.index.len() >= entries,
            format!("index: {} entries for {entries} blocks", self.index.len()),
        );
    }

    fn check_kin(&self, audit: &mut Audit) {
        let mut orphans = 0;
        let mut children: std::collections::BTreeMap<crate::index::FullKey, (u32, u32, u32)> =
            std::collections::BTreeMap::new();
        for (_, block) in self.table.iter().filter(|(_, b)| !b.doomed) {
            let Some(parent) = block.parent else { continue };
            let parent = Self::full(block.key.ns, parent);
            let above = self.table.id(&parent).and_then(|id| self.table.get(id));
            let orphan = above.is_none_or(|above| above.orphan);
            orphans += u64::from(orphan);
            if orphan != block.orphan {
                audit.faults.push(format!("{:?}: orphan is {}", block.key, block.orphan));
            }
            let count = children.entry(parent).or_default();
            count.0 += u32::from(block.in_dram);
            count.1 += u32::from(block.drive != OnDrive::None);
            count.2 += 1;
        }
        if orphans != self.table.orphans() {
            let books = self.table.orphans();
            audit.faults.push(format!("orphans: {orphans} counted, {books} in the books"));
        }
        for (parent, (dram, drive, all)) in children {
            let kin = self.table.kin(&parent);
            if (kin.dram, kin.drive, kin.all) != (dram, drive, all) {
                audit.faults.push(format!(
                    "children of {parent:?}: {:?} counted, {kin:?} in the books",
                    (dram, drive, all)
                ));
            }
        }
    }

    /// Fills in what the machine knows of the statistics.
    pub(crate) fn stats(&mut self) -> crate::stats::Stats {
        use crate::stats::ReuseStats;
        use tiered_kv_policy::beta::Calibration;
        use tiered_kv_types::{MissReason, Tier};
        self.reclaim();
        let mut stats = crate::stats::Stats {
            counters: self.counters.rows(),
            dirty_bytes: self.dirty_bytes,
            loading_bytes: self.loading_bytes,
            metadata_bytes: self.policy.metadata_bytes() as u64,
            orphans: self.table.orphans(),
            blocks: self.table.len() as u64,
            calls: self.ops.len() as u64,
            holds: self.holds.len() as u64,
            held_bytes: self.holds.bytes,
            namespaces: self.largest_namespaces(STATS_NAMESPACES),
            latencies: self.latencies.clone(),
            ..crate::stats::Stats::default()
        };
        let memory = (self.memory.capacity_bytes(), self.memory.used_bytes());
        if self.staging.on {
            (stats.staging_bytes, stats.staging_used_bytes) = memory;
        } else {
            (stats.dram.capacity_bytes, stats.dram.used_bytes) = memory;
            stats.dram.blocks = self.dram_blocks;
        }
        for drive in &self.drives {
            stats.nvme.capacity_bytes += drive.slots.capacity_bytes();
            stats.nvme.used_bytes += drive.slots.used_bytes();
        }
        stats.nvme.blocks = self.nvme_blocks;
        for (tier, row) in [(Tier::Dram, &mut stats.dram), (Tier::Nvme, &mut stats.nvme)] {
            row.hits = self.counters.hits[tier as usize];
            row.hit_bytes = self.counters.hit_bytes[tier as usize];
        }
        let count = |reason: &MissReason| (reason.name(), self.counters.misses[*reason as usize]);
        stats.misses = MissReason::ALL.iter().map(count).collect();
        if let Some(predictor) = self.policy.predictor() {
            let found = predictor.calibrations();
            let row =
                |one: &Calibration| ReuseStats { predicted: one.predicted, reuses: one.reuses };
            stats.reuses_by_pair = found.pairs.iter().map(row).collect();
            stats.reuses_by_chance = found.chances.iter().map(row).collect();
        }
        stats
    }

    /// How each drive does.
    pub(crate) fn drive_conditions(&self) -> Vec<super::DriveCondition> {
        self.drives.iter().map(super::drive::Drive::condition).collect()
    }
}
