//! Segments change hands between size classes: one is evicted whole where another class makes
//! better use of its bytes, as when two models with blocks of different sizes take turns.

use super::evict::Evicted;
use super::table::OnDrive;
use super::{BlockId, DriveId, Machine};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use tiered_kv_types::Tier;

/// Segments that one attempt looks at closely, those worth least.
const CLOSE_LOOKS: usize = 4;
/// Slots that a class asks for between an attempt that failed and the next one, since an attempt
/// looks at every block of the tier; doubled with each failure.
const MIN_PAUSE: u32 = 64;
const MAX_PAUSE: u32 = 4096;

#[derive(Clone, Copy, Debug)]
struct Pause {
    left: u32,
    length: u32,
}

/// The classes whose last attempt failed, by tier and drive, and whether they had a block of their
/// own to evict instead: that nothing was worth less than it says nothing of what can be had.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    pauses: BTreeMap<(Tier, DriveId, u64, bool), Pause>,
}

/// What is known of a segment of another class.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    slots: u32,
    /// What its most valuable block is worth.
    worth: f64,
}

impl Machine {
    /// Takes a segment from another class for `class`, if all blocks in it and all that hang on
    /// them are worth less than `own`, the block of its own that the class would evict instead.
    pub(super) fn take_segment(
        &mut self,
        tier: Tier,
        home: DriveId,
        class: u64,
        own: Option<BlockId>,
    ) -> bool {
        let at = (tier, home, class, own.is_some());
        let pause = self.handovers.pauses.get(&at).copied();
        if let Some(Pause { left: 1.., .. }) = pause {
            self.handovers.pauses.entry(at).and_modify(|pause| pause.left -= 1);
            return false;
        }
        let limit = own.map_or(f64::INFINITY, |id| self.policy.worth(tier, id));
        let other = self.find_victim(tier, home, |shape| !shape.contains(&class));
        if other.is_none_or(|id| self.policy.worth(tier, id) >= limit) {
            return false;
        }
        if self.evict_cheapest_segment(tier, home, class, limit) {
            self.handovers.pauses.remove(&at);
            return true;
        }
        let length = pause.map_or(MIN_PAUSE, |pause| (pause.length * 2).min(MAX_PAUSE));
        self.handovers.pauses.insert(at, Pause { left: length, length });
        false
    }

    fn slots_of(&self, tier: Tier, home: DriveId) -> &super::SlotAllocator {
        match tier {
            Tier::Dram => &self.memory,
            _ => &self.drives[usize::from(home)].slots,
        }
    }

    fn evict_cheapest_segment(
        &mut self,
        tier: Tier,
        home: DriveId,
        class: u64,
        limit: f64,
    ) -> bool {
        for segment in self.cheap_segments(tier, home, class, limit) {
            let Some(doomed) = self.all_in_segment(tier, home, segment, limit) else { continue };
            let evicted = doomed.into_iter().all(|id| self.evict(tier, id, Evicted::Class));
            if evicted && self.slots_of(tier, home).is_empty(segment) {
                return true;
            }
        }
        false
    }

    /// The segments of other classes that hold idle blocks only, all worth less than `limit`.
    fn cheap_segments(
        &self,
        tier: Tier,
        home: DriveId,
        class: u64,
        limit: f64,
    ) -> SmallVec<[u32; CLOSE_LOOKS]> {
        let mut seen: BTreeMap<u32, Seen> = BTreeMap::new();
        for (id, _) in self.table.iter() {
            for segment in self.idle_in_segments(tier, home, id) {
                let seen = seen.entry(segment).or_default();
                seen.slots += 1;
                seen.worth = seen.worth.max(self.policy.worth(tier, id));
            }
        }
        let slots = self.slots_of(tier, home);
        let mut cheap: Vec<(f64, u32)> = seen
            .into_iter()
            .filter(|(segment, _)| slots.slot_bytes(*segment) != class)
            .filter(|(segment, seen)| slots.is_takeable(*segment, seen.slots))
            .map(|(segment, seen)| (seen.worth, segment))
            .filter(|(worth, _)| *worth < limit)
            .collect();
        cheap.sort_by(|a, b| a.0.total_cmp(&b.0));
        cheap.into_iter().map(|(_, segment)| segment).take(CLOSE_LOOKS).collect()
    }

    /// The segments in which the block has its slots; none where something is in flight on it.
    fn idle_in_segments(&self, tier: Tier, home: DriveId, id: BlockId) -> SmallVec<[u32; 1]> {
        let block = self.table.get(id).expect("the caller holds a live block");
        if block.doomed || block.dirty.is_some() || block.is_being_read() || block.holds > 0 {
            return SmallVec::new();
        }
        match &block.drive {
            _ if tier == Tier::Dram && block.in_dram => block.memory.clone(),
            OnDrive::Durable(slots) if tier == Tier::Nvme && block.home == home => {
                slots.iter().map(|slot| slot.segment).collect()
            }
            _ => SmallVec::new(),
        }
    }

    /// The blocks of a segment and all that hang on them in the tier, leaves first; `None` where
    /// one is busy, or worth `limit` or more.
    fn all_in_segment(
        &self,
        tier: Tier,
        home: DriveId,
        segment: u32,
        limit: f64,
    ) -> Option<Vec<BlockId>> {
        let ids = self.table.iter().map(|(id, _)| id);
        let roots = ids.filter(|id| self.idle_in_segments(tier, home, *id).contains(&segment));
        let mut order: Vec<BlockId> = Vec::new();
        let mut known = std::collections::BTreeSet::new();
        let mut stack: Vec<(BlockId, bool)> = roots.map(|id| (id, false)).collect();
        while let Some((id, children_done)) = stack.pop() {
            if children_done {
                order.push(id);
                continue;
            }
            if !known.insert(id) {
                continue;
            }
            let block = self.table.get(id).expect("listed blocks exist");
            let idle = !self.idle_in_segments(tier, block.home, id).is_empty();
            let pinned = tier == Tier::Dram && !self.index.is_unpinned(&block.key);
            if !idle || pinned || self.policy.worth(tier, id) >= limit {
                return None;
            }
            stack.push((id, true));
            let before = stack.len();
            let children = self.table.children(&block.key);
            stack.extend(children.filter(|id| self.is_in(tier, *id)).map(|id| (id, false)));
            let kin = self.table.kin(&block.key);
            let counted = if tier == Tier::Dram { kin.dram } else { kin.drive };
            if (stack.len() - before) as u64 != u64::from(counted) {
                // A child is on its way into the tier.
                return None;
            }
        }
        Some(order)
    }

    fn is_in(&self, tier: Tier, id: BlockId) -> bool {
        let block = self.table.get(id).expect("linked blocks exist");
        if tier == Tier::Dram { block.in_dram } else { block.drive != OnDrive::None }
    }
}
