//! Looking into a store: statistics, health, events, audits.

use crate::answers::{DriveHealth, DriveState, Health};
use crate::log::LogEntry;
use crate::machine::{Audit, DriveCondition};
use crate::open::OpenTimes;
use crate::owner::Owner;
use crate::stats::{ACCESSES_DROPPED, LOOKUPS, Stats};
use crate::store::Store;
use std::sync::atomic::Ordering;
use tiered_kv_types::StoreConfig;

/// Keys asked for in vain after which something is wrong with them.
const INERT_KEYS: u64 = 4096;

impl Store {
    /// A snapshot of counters and gauges.
    pub fn stats(&self) -> Stats {
        self.owner.stats()
    }

    /// Whether this handle takes no more calls; true in a forked child.
    pub fn is_closed(&self) -> bool {
        self.core.is_forked() || self.handle.calls.is_closed() || self.core.is_closed()
    }

    /// Whether this process is a forked child of the one that opened the store. Methods
    /// that return a `Result` then refuse, and lookups find nothing; of the others only
    /// [`Store::close`] may be called.
    pub fn is_forked(&self) -> bool {
        self.core.is_forked()
    }

    /// Number of the core in this process. Handles with the same number share one core, and with it
    /// namespaces, holds and requests.
    pub fn core_number(&self) -> u64 {
        self.core.number
    }

    /// State of the store's parts.
    pub fn health(&self) -> Health {
        let health = self.owner.health();
        Health { open: health.open && !self.is_closed(), ..health }
    }

    /// How long the parts of the open took.
    pub fn open_times(&self) -> OpenTimes {
        self.owner.times
    }

    /// The configuration in use.
    pub fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// Entries of the event log from number `from` on.
    pub fn events(&self, from: u64) -> Vec<LogEntry> {
        self.core.with_machine(|m| m.log.since(from))
    }

    /// Recounts everything and compares it with the books.
    pub fn audit(&self) -> Audit {
        self.core.with_machine(|m| m.audit())
    }
}

impl Owner {
    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.core.with_machine(|m| m.stats());
        let fast = &self.core.fast;
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        stats.dram.hits += load(&fast.dram_hits);
        stats.dram.hit_bytes += load(&fast.dram_hit_bytes);
        stats.nvme.hits += load(&fast.nvme_hits);
        stats.nvme.hit_bytes += load(&fast.nvme_hit_bytes);
        stats.requested = load(&fast.requested);
        for (name, count) in &mut stats.misses {
            *count += match *name {
                "absent" => load(&fast.absent),
                "lease_cap" => load(&fast.lease_cap),
                "closed" => load(&fast.closed),
                _ => 0,
            };
        }
        stats.leased_bytes = self.core.budget.leased_bytes();
        stats.counters.push((LOOKUPS, load(&fast.lookups)));
        stats.counters.push((ACCESSES_DROPPED, load(&fast.accesses_dropped)));
        stats
    }

    pub(crate) fn health(&self) -> Health {
        let disk = self.drives.first().map(|d| &d.disk);
        let conditions = self.core.with_machine(|m| m.drive_conditions());
        let regions = self.regions.report();
        Health {
            open: !self.core.is_closed() && self.core.failure().is_none(),
            backend: self.core.io.first().map_or("none", |io| io.backend()).to_owned(),
            backend_reason: self.core.io.first().map(|io| io.describe()).unwrap_or_default(),
            direct: disk.is_some_and(|d| d.is_direct()),
            direct_reason: disk.map(|d| d.direct_reason()).unwrap_or_default(),
            drive_paused: !conditions.iter().all(DriveCondition::is_well),
            drives: self.drives_health(&conditions),
            warnings: self.warnings(),
            store_id: self.store_id(),
            huge_bytes: self.arena.report().huge_bytes,
            regions: regions.count,
            regions_plain: regions.plain,
            region_reason: regions.reason,
            attach: self.attachable(),
        }
    }

    /// What is configured and of no effect: drives that get nothing, keys that nobody stores.
    fn warnings(&self) -> Vec<String> {
        let stats = self.stats();
        let counter =
            |name: &str| stats.counters.iter().find(|(n, _)| *n == name).map_or(0, |c| c.1);
        let mut warnings = Vec::new();
        if let Some(panic) = self.core.failure() {
            warnings.push(format!(
                "the store has failed and serves nothing ({panic}): close it and open it again; \
                 what was durable is kept"
            ));
        }
        let lost = self.lost.len();
        if lost > 0 {
            warnings.push(format!("{lost} drives are lost: what they hold is misses"));
        }
        let (stored, undurable) = (counter("put_stored"), counter("undurable"));
        if undurable > 0 && counter("offloaded") == 0 {
            warnings.push(format!(
                "of {stored} blocks stored since the open none became durable, {undurable} could \
                 not be written: see the drives' `fault`, their free space and their mount options"
            ));
        }
        let asked = stats.requested.max(counter(LOOKUPS));
        if asked >= INERT_KEYS && stored > 0 && stats.dram.hits + stats.nvme.hits == 0 {
            warnings.push(format!(
                "{asked} keys were asked for and none was got, though {stored} blocks are stored: \
                 compare the namespaces and the keys of puts and gets"
            ));
        }
        warnings
    }

    fn drives_health(&self, conditions: &[DriveCondition]) -> Vec<DriveHealth> {
        let bridges = self.core.io.iter();
        let all = self.drives.iter().zip(conditions).zip(bridges);
        let there = all.map(|((drive, condition), io)| DriveHealth {
            backend: io.describe(),
            path: drive.path.clone(),
            state: match (condition.fault, condition.paused) {
                (Some(_), _) => DriveState::CircuitOpen,
                (None, true) => DriveState::Paused,
                (None, false) => DriveState::Working,
            },
            reason: drive.disk.direct_reason(),
            store_id: drive.store_id(),
            fault: fault_text(condition, io.last_fault()),
            load_bytes_per_s: condition.load_bytes_per_s,
        });
        let lost = self.lost.iter().map(|(path, err)| DriveHealth {
            path: path.clone(),
            backend: String::new(),
            state: DriveState::Lost,
            reason: err.to_string(),
            store_id: String::new(),
            fault: err.to_string(),
            load_bytes_per_s: None,
        });
        there.chain(lost).collect()
    }
}

/// What is wrong with a drive, in words.
fn fault_text(condition: &DriveCondition, last: Option<String>) -> String {
    let now = match (condition.fault, condition.paused) {
        (Some(fault), _) => fault.to_string(),
        (None, true) => "writing pauses after faults".into(),
        (None, false) => String::new(),
    };
    match last {
        None => now,
        Some(last) if now.is_empty() => format!("the last error was: {last}"),
        Some(last) => format!("{now}; the last error was: {last}"),
    }
}
