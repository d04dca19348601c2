//! Counters and gauges.

use crate::latency::Latencies;
use crate::machine::NamespaceRow;
use serde::{Deserialize, Deserializer, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use tiered_kv_types::{MissReason, Tier};

const REASONS: usize = MissReason::ALL.len() + 1;
const TIERS: usize = 6;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters that the state machine keeps; they only grow.
        #[derive(Clone, Debug, Default)]
        pub(crate) struct Counters {
            $($(#[$doc])* pub(crate) $name: u64,)*
            pub(crate) hits: [u64; TIERS],
            pub(crate) hit_bytes: [u64; TIERS],
            pub(crate) misses: [u64; REASONS],
        }

        impl Counters {
            /// Name and value of each counter.
            pub(crate) fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Blocks stored.
    put_stored,
    /// Payload bytes stored.
    put_bytes,
    /// Puts of a key that was stored already.
    put_exists,
    /// Puts refused for want of room.
    throttled,
    /// Blocks written to the drive and made durable.
    offloaded,
    offloaded_bytes,
    /// Blocks loaded from the drive into memory.
    onboarded,
    onboarded_bytes,
    evicted_dram,
    evicted_dram_bytes,
    evicted_nvme,
    evicted_nvme_bytes,
    /// Of the blocks evicted, those that were to keep a namespace within its quota, and those that
    /// were to turn a segment over to slots of another size.
    evicted_dram_quota,
    evicted_nvme_quota,
    evicted_dram_class,
    evicted_nvme_class,
    /// Groups committed.
    groups,
    /// Blocks that could not be made durable.
    undurable,
    /// Of these, those for which the budget of writes had no room.
    not_admitted,
    /// Block writes that failed.
    write_faults,
    /// Segments that could not be prepared.
    segment_faults,
    /// Loads that failed, corrupt ones included.
    load_faults,
    corrupt_dram,
    corrupt_nvme,
    /// Blocks read into a caller's registered memory.
    direct_reads,
    direct_bytes,
    /// Reads that nobody wanted any more before the device had them.
    loads_cancelled,
    /// Times that a drive was no longer asked, and that one answered again.
    circuits_opened,
    circuits_closed,
    /// Reads that tried whether a drive answers.
    probes,
    /// Blocks read back by scrubs and found whole, their bytes, and blocks that were not.
    scrubbed,
    scrubbed_bytes,
    scrub_faults,
    /// Times that the background has read back everything.
    scrub_rounds,
    /// Copies on the drive taken out of use.
    quarantined,
    /// Loads begun ahead of a request.
    prefetched,
    /// Blocks moved up ahead since they are stored behind what was read; of these, those that were
    /// read, and those that left memory unread.
    ahead_loaded,
    ahead_used,
    ahead_wasted,
    /// Blocks that were read past memory and moved up as they are worth it.
    promoted,
    /// Keys of prefetches that had nowhere to go, without T1.
    prefetch_ignored,
    /// Holds that ended by time.
    holds_expired,
    /// Blocks that callers deleted.
    deleted,
    /// Pages of tombstones that retired.
    tombstones_retired,
    /// Records that recovery dropped since a tombstone covers them.
    buried,
    /// Blocks found again at open.
    recovered,
    recovered_bytes,
    /// Headers at open that were neither empty nor sound.
    damaged_headers,
    /// Blocks that close dropped before they were durable.
    dropped_at_close,
    /// Times that what the predictor had learned was damaged at open: it began anew.
    learned_damaged,
}

impl Counters {
    pub(crate) fn hit(&mut self, tier: Tier, bytes: u64) {
        self.hits[tier as usize] += 1;
        self.hit_bytes[tier as usize] += bytes;
    }

    pub(crate) fn missed(&mut self, reason: MissReason) {
        self.misses[reason as usize] += 1;
    }
}

/// Hits of leases, and misses that no machine saw.
#[derive(Debug, Default)]
pub(crate) struct FastCounters {
    pub(crate) dram_hits: AtomicU64,
    pub(crate) dram_hit_bytes: AtomicU64,
    pub(crate) nvme_hits: AtomicU64,
    pub(crate) nvme_hit_bytes: AtomicU64,
    pub(crate) absent: AtomicU64,
    pub(crate) lease_cap: AtomicU64,
    pub(crate) closed: AtomicU64,
    pub(crate) accesses_dropped: AtomicU64,
    pub(crate) requested: AtomicU64,
    pub(crate) lookups: AtomicU64,
}

impl FastCounters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// A lease of so many bytes, or why there is none; all but the cap the machine has counted.
    pub(crate) fn leased(&self, source: Tier, lease: Result<u64, &MissReason>) {
        let (hits, hit_bytes) = match source {
            Tier::Nvme => (&self.nvme_hits, &self.nvme_hit_bytes),
            _ => (&self.dram_hits, &self.dram_hit_bytes),
        };
        match lease {
            Ok(bytes) => {
                Self::add(hits, 1);
                Self::add(hit_bytes, bytes);
            }
            Err(MissReason::LeaseCap) => Self::add(&self.lease_cap, 1),
            Err(_) => {}
        }
    }
}

/// Counters of callers, beside those of the machine.
pub(crate) const LOOKUPS: &str = "lookups";
pub(crate) const ACCESSES_DROPPED: &str = "accesses_dropped";

/// Counters by name, as another process sent them; names that this program has not are left out.
fn named<'de, D: Deserializer<'de>>(
    de: D,
) -> std::result::Result<Vec<(&'static str, u64)>, D::Error> {
    let mut names: Vec<&'static str> = MissReason::ALL.iter().map(|reason| reason.name()).collect();
    names.extend(Counters::default().rows().iter().map(|(name, _)| *name));
    names.extend([LOOKUPS, ACCESSES_DROPPED]);
    let rows = Vec::<(String, u64)>::deserialize(de)?;
    let known = |(name, count): (String, u64)| {
        names.iter().find(|known| **known == name).map(|known| (*known, count))
    };
    Ok(rows.into_iter().filter_map(known).collect())
}

/// Bytes of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStats {
    /// Bytes that the tier may hold.
    pub capacity_bytes: u64,
    /// Bytes of all used slots.
    pub used_bytes: u64,
    /// Blocks resident.
    pub blocks: u64,
    /// Blocks served from it.
    pub hits: u64,
    /// Payload bytes served from it.
    pub hit_bytes: u64,
}

/// Reuses that the predictor expected of the blocks that it watches, and those that came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReuseStats {
    /// How many were predicted, each before it could come.
    pub predicted: f64,
    /// How many came.
    pub reuses: u64,
}

/// A snapshot of counters and gauges.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Stats {
    /// T1; all zero where it has no capacity.
    pub dram: TierStats,
    /// T3.
    pub nvme: TierStats,
    /// Blocks asked for by `get` and `get_into`; equals hits of all tiers plus misses once all are
    /// done.
    pub requested: u64,
    /// Misses by reason.
    #[serde(deserialize_with = "named")]
    pub misses: Vec<(&'static str, u64)>,
    /// All other counters by name.
    #[serde(deserialize_with = "named")]
    pub counters: Vec<(&'static str, u64)>,
    /// Bytes that leases pin.
    pub leased_bytes: u64,
    /// Bytes that wait to be durable.
    pub dirty_bytes: u64,
    /// Bytes being loaded.
    pub loading_bytes: u64,
    /// Bytes that the policy keeps of blocks, here or gone, and of what it learned.
    #[serde(default)]
    pub metadata_bytes: u64,
    /// Blocks whose parent is not stored.
    pub orphans: u64,
    /// Blocks known in any tier.
    pub blocks: u64,
    /// Calls in progress.
    pub calls: u64,
    /// Without T1: bytes that the memory for passing through has.
    pub staging_bytes: u64,
    /// Bytes of it in use.
    pub staging_used_bytes: u64,
    /// Usage and quota of the namespaces that use most, at most 64, the largest first.
    pub namespaces: Vec<NamespaceRow>,
    /// Holds in force, and the bytes that they keep.
    pub holds: u64,
    /// Bytes that holds keep.
    pub held_bytes: u64,
    /// How long loads and commits took.
    pub latencies: Latencies,
    /// Since the open, by pair of block type and transition; empty without a predictor.
    pub reuses_by_pair: Vec<ReuseStats>,
    /// The same by class of predicted chances: a half and more, a quarter to a half, and so on.
    pub reuses_by_chance: Vec<ReuseStats>,
}
