//! Usage and quotas of namespaces: every slot is charged to one, from when it is taken until it is
//! free again, whoever holds it meanwhile.

use super::evict::Evicted;
use super::put::policy_shape;
use super::{BlockId, DriveId, Machine, SlotId};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use tiered_kv_types::{Tier, round_up_to_page};

/// Most blocks that one admission evicts for the sake of a quota.
const MAX_EVICTIONS: usize = 64;
/// Most blocks that are evicted when a quota is lowered; admissions do the rest.
const MAX_TRIMMED: usize = 4096;
/// Most namespaces with a quota, each of which is a list of its own to the policy.
const MAX_OWN_SHAPES: usize = 4096;

/// What a namespace uses. Bytes are those of its slots, payloads rounded up to 4 KiB: in memory
/// also what is leased, being filled or being loaded, on the drives also what is being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Blocks in memory.
    pub dram_blocks: u64,
    /// Bytes in memory.
    pub dram_bytes: u64,
    /// Blocks durable on a drive.
    pub nvme_blocks: u64,
    /// Bytes on the drives.
    pub nvme_bytes: u64,
}

/// What a namespace may use, in bytes of slots; unlimited where absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// In memory.
    pub dram_bytes: Option<u64>,
    /// On the drives together.
    pub nvme_bytes: Option<u64>,
}

impl Quota {
    fn of(&self, tier: Tier) -> Option<u64> {
        if tier == Tier::Dram { self.dram_bytes } else { self.nvme_bytes }
    }
}

impl Usage {
    fn of(&self, tier: Tier) -> u64 {
        if tier == Tier::Dram { self.dram_bytes } else { self.nvme_bytes }
    }

    /// Whether it is within a quota.
    pub fn is_within(&self, quota: &Quota) -> bool {
        let within = |tier| quota.of(tier).is_none_or(|most| self.of(tier) <= most);
        within(Tier::Dram) && within(Tier::Nvme)
    }
}

/// Size classes of the slabs of a block, and the one namespace that it is for, where that has a
/// quota: its blocks are then a list of their own to the policy.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) classes: SmallVec<[u64; 1]>,
    pub(super) owner: Option<u32>,
}

/// Which namespace a slot in memory is charged to.
#[derive(Debug, Default)]
pub(super) struct SlotOwners {
    by_segment: Vec<Vec<u32>>,
}

impl SlotOwners {
    fn owner(&mut self, slot: SlotId) -> &mut u32 {
        let (segment, index) = (slot.segment as usize, slot.index as usize);
        if self.by_segment.len() <= segment {
            self.by_segment.resize_with(segment + 1, Vec::new);
        }
        let owners = &mut self.by_segment[segment];
        if owners.len() <= index {
            owners.resize(index + 1, u32::MAX);
        }
        &mut owners[index]
    }
}

impl Machine {
    pub(super) fn shape(&mut self, classes: &[u64], owner: Option<u32>) -> u32 {
        let same = |s: &Shape| s.owner == owner && s.classes.as_slice() == classes;
        let at = self.shapes.iter().position(same).unwrap_or_else(|| {
            self.shapes.push(Shape { classes: classes.into(), owner });
            self.shapes.len() - 1
        });
        u32::try_from(at).expect("few shapes")
    }

    pub(crate) fn usage(&self, ns: u32) -> Usage {
        self.namespaces[ns as usize].usage
    }

    pub(super) fn usage_of(&mut self, ns: u32) -> &mut Usage {
        &mut self.namespaces[ns as usize].usage
    }

    /// Charges a slot that was taken in memory.
    pub(super) fn charge_memory(&mut self, slot: SlotId, ns: u32) {
        *self.owners.owner(slot) = ns;
        self.usage_of(ns).dram_bytes += self.memory.slot_bytes(slot.segment);
    }

    /// Gives a slot in memory back.
    pub(super) fn free_memory(&mut self, slot: SlotId) {
        let ns = std::mem::replace(self.owners.owner(slot), u32::MAX);
        self.usage_of(ns).dram_bytes -= self.memory.slot_bytes(slot.segment);
        self.memory.free(slot);
    }

    /// Makes sure that a namespace has room for `bytes` more within its quota, evicting its own
    /// blocks where it has not. False where that is not enough.
    pub(super) fn has_quota(&mut self, tier: Tier, ns: u32, bytes: u64) -> bool {
        for _ in 0..MAX_EVICTIONS {
            if self.quota_left(tier, ns).is_none_or(|left| left >= bytes) {
                return true;
            }
            let kept = |machine: &mut Self| tier == Tier::Dram && machine.keep_one_less(Some(ns));
            if !self.evict_own(tier, ns) && !kept(self) {
                return false;
            }
        }
        self.quota_left(tier, ns).is_none_or(|left| left >= bytes)
    }

    fn quota_left(&mut self, tier: Tier, ns: u32) -> Option<u64> {
        let most = self.namespaces[ns as usize].quota.of(tier)?;
        if tier == Tier::Dram {
            self.reclaim();
        }
        Some(most.saturating_sub(self.usage_of(ns).of(tier)))
    }

    fn evict_own(&mut self, tier: Tier, ns: u32) -> bool {
        let entry = &self.namespaces[ns as usize];
        let Some(shape) = entry.shape.filter(|_| entry.own_shape) else { return false };
        let homes = if tier == Tier::Dram { 1 } else { self.drives.len() };
        let mut first: Option<(f64, BlockId)> = None;
        for home in 0..homes {
            let home = DriveId::try_from(home).expect("few drives");
            let Some(id) = self.victim_of(tier, home, shape) else { continue };
            let worth = self.policy.worth(tier, id);
            if first.is_none_or(|(least, _)| worth < least) {
                first = Some((worth, id));
            }
        }
        first.is_some_and(|(_, id)| self.evict(tier, id, Evicted::Quota))
    }

    /// Limits what a namespace that was opened may use. What it uses beyond that is evicted, as far
    /// as it can be at once; until it is within its quota, what it stores is throttled. `None`
    /// where too many namespaces have one.
    pub(crate) fn set_quota(&mut self, ns: u32, quota: Quota) -> Option<bool> {
        let limited = quota != Quota::default();
        if limited && !self.namespaces[ns as usize].own_shape && !self.give_own_shape(ns) {
            return None;
        }
        self.namespaces[ns as usize].quota = quota;
        for tier in [Tier::Nvme, Tier::Dram] {
            for _ in 0..MAX_TRIMMED {
                let over = quota.of(tier).is_some_and(|most| {
                    self.reclaim();
                    self.usage_of(ns).of(tier) > most
                });
                if !over || !self.evict_own(tier, ns) {
                    break;
                }
            }
        }
        Some(self.usage_of(ns).is_within(&quota))
    }

    fn give_own_shape(&mut self, ns: u32) -> bool {
        if self.shapes.len() >= MAX_OWN_SHAPES {
            return false;
        }
        let classes: SmallVec<[u64; 1]> =
            self.layout(ns).slab_bytes().iter().map(|b| round_up_to_page(*b)).collect();
        let shape = self.shape(&classes, Some(ns));
        let entry = &mut self.namespaces[ns as usize];
        (entry.shape, entry.own_shape) = (Some(shape), true);
        let of = |b: &super::table::Block| b.key.ns == ns && !b.doomed;
        let ids: Vec<BlockId> =
            self.table.iter().filter(|(_, b)| of(b)).map(|(id, _)| id).collect();
        for id in ids {
            let block = self.table.get_mut(id).expect("just listed");
            block.shape = shape;
            let home = block.home;
            for tier in [Tier::Dram, Tier::Nvme] {
                self.policy.reshaped(tier, id, policy_shape(tier, home, shape));
            }
        }
        true
    }

    /// Books every namespace anew and compares.
    pub(super) fn check_usage(&self, counted: &[Usage], audit: &mut super::Audit) {
        let mut total = Usage::default();
        for (number, (entry, counted)) in self.namespaces.iter().zip(counted).enumerate() {
            let books = entry.usage;
            total.dram_bytes += books.dram_bytes;
            total.nvme_bytes += books.nvme_bytes;
            // Leases, fills and writes in flight hold memory that no block does.
            let fits = counted.dram_bytes <= books.dram_bytes
                && Usage { dram_bytes: books.dram_bytes, ..*counted } == books;
            if !fits {
                let what =
                    format!("namespace {number}: {counted:?} counted, {books:?} in the books");
                audit.faults.push(what);
            }
        }
        let used = (audit.dram_used_bytes, audit.nvme_used_bytes);
        if (total.dram_bytes, total.nvme_bytes) != used {
            audit.faults.push(format!("namespaces use {total:?}, the tiers {used:?}"));
        }
    }
}
