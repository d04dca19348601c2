//! Least recently used, leaves first.

use crate::{Accesses, BlockId, Facts, Nanos, Policy, Standing};
use std::collections::{BTreeMap, BTreeSet};
use tiered_kv_types::Tier;

/// Most busy candidates that one search passes over, so that a put never scans without bound.
const MAX_SKIPS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Resident {
    shape: u32,
    stamp: u64,
    standing: Standing,
}

#[derive(Debug, Default)]
struct TierState {
    /// By block number: these are small and dense.
    residents: Vec<Option<Resident>>,
    candidates: BTreeMap<u32, BTreeSet<(Standing, u64, BlockId)>>,
    count: usize,
}

/// The policy of a store that learned nothing yet: the candidate used longest ago goes first.
///
/// Order is by a counter, not by time, so that blocks of one request keep their order: the caller
/// reports leaves first, and a root is always younger than the leaves behind it.
#[derive(Debug, Default)]
pub struct Lru {
    tiers: BTreeMap<Tier, TierState>,
    next_stamp: u64,
}

impl Lru {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }

    fn stamp(&mut self) -> u64 {
        self.next_stamp += 1;
        self.next_stamp
    }

    fn accessed(&mut self, block: BlockId) {
        let stamp = self.stamp();
        for state in self.tiers.values_mut() {
            let Some(resident) = state.resident(block) else { continue };
            let old = *resident;
            resident.stamp = stamp;
            let new = *resident;
            if new.standing != Standing::Kept {
                state.unlist(block, old);
                state.list(block, new);
            }
        }
    }
}

impl TierState {
    fn resident(&mut self, block: BlockId) -> Option<&mut Resident> {
        self.residents.get_mut(block as usize)?.as_mut()
    }

    fn unlist(&mut self, block: BlockId, resident: Resident) {
        if resident.standing != Standing::Kept
            && let Some(set) = self.candidates.get_mut(&resident.shape)
            && set.remove(&(resident.standing, resident.stamp, block))
        {
            self.count -= 1;
        }
    }

    fn list(&mut self, block: BlockId, resident: Resident) {
        let set = self.candidates.entry(resident.shape).or_default();
        if set.insert((resident.standing, resident.stamp, block)) {
            self.count += 1;
        }
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn inserted(&mut self, tier: Tier, block: BlockId, facts: &Facts, _now: Nanos) {
        let stamp = self.stamp();
        let state = self.tiers.entry(tier).or_default();
        let resident = Resident { shape: facts.shape, stamp, standing: Standing::Kept };
        if state.residents.len() <= block as usize {
            state.residents.resize(block as usize + 1, None);
        }
        if let Some(old) = state.residents[block as usize].replace(resident) {
            state.unlist(block, old);
        }
    }

    /// A list made at once from what is in order already, which inserting one by one would find
    /// out a million times.
    fn restored(
        &mut self,
        tier: Tier,
        blocks: &mut dyn Iterator<Item = (BlockId, Facts, Standing)>,
        _now: Nanos,
    ) {
        let state = self.tiers.entry(tier).or_default();
        let mut listed: BTreeMap<u32, Vec<(Standing, u64, BlockId)>> = BTreeMap::new();
        for (block, Facts { shape, .. }, standing) in blocks {
            self.next_stamp += 1;
            let stamp = self.next_stamp;
            if state.residents.len() <= block as usize {
                state.residents.resize(block as usize + 1, None);
            }
            let old = state.residents[block as usize].replace(Resident { shape, stamp, standing });
            debug_assert!(old.is_none(), "{block} was in the tier before");
            if standing != Standing::Kept {
                listed.entry(shape).or_default().push((standing, stamp, block));
            }
        }
        for (shape, mut listed) in listed {
            state.count += listed.len();
            let set = state.candidates.entry(shape).or_default();
            listed.extend(std::mem::take(set));
            *set = listed.into_iter().collect();
        }
    }

    fn requested(&mut self, accesses: &Accesses<'_>) {
        accesses.ids.iter().rev().flatten().for_each(|block| self.accessed(*block));
    }

    fn removed(&mut self, tier: Tier, block: BlockId) {
        if let Some(state) = self.tiers.get_mut(&tier)
            && let Some(old) = state.residents.get_mut(block as usize).and_then(Option::take)
        {
            state.unlist(block, old);
        }
    }

    fn reshaped(&mut self, tier: Tier, block: BlockId, shape: u32) {
        let Some(state) = self.tiers.get_mut(&tier) else { return };
        let Some(resident) = state.resident(block) else { return };
        let old = std::mem::replace(resident, Resident { shape, ..*resident });
        let new = *resident;
        if old.standing != Standing::Kept {
            state.unlist(block, old);
            state.list(block, new);
        }
    }

    fn set_standing(&mut self, tier: Tier, block: BlockId, standing: Standing) {
        let Some(state) = self.tiers.get_mut(&tier) else { return };
        let Some(resident) = state.resident(block) else { return };
        if resident.standing == standing {
            return;
        }
        let old = *resident;
        resident.standing = standing;
        let new = *resident;
        state.unlist(block, old);
        if standing != Standing::Kept {
            state.list(block, new);
        }
    }

    fn victim(
        &mut self,
        tier: Tier,
        shape: u32,
        _now: Nanos,
        skip: &mut dyn FnMut(BlockId) -> bool,
    ) -> Option<BlockId> {
        let set = self.tiers.get(&tier)?.candidates.get(&shape)?;
        set.iter().map(|(_, _, block)| *block).take(MAX_SKIPS).find(|block| !skip(*block))
    }

    fn worth(&self, tier: Tier, block: BlockId) -> f64 {
        let state = self.tiers.get(&tier);
        match state.and_then(|state| state.residents.get(block as usize)) {
            Some(Some(resident)) if resident.standing != Standing::Orphan => resident.stamp as f64,
            _ => 0.0,
        }
    }

    fn candidates(&self, tier: Tier) -> usize {
        self.tiers.get(&tier).map_or(0, |state| state.count)
    }

    /// Of the sets as they would be if every node of their trees were half full.
    fn metadata_bytes(&self) -> usize {
        let bytes = |state: &TierState| {
            state.residents.capacity() * size_of::<Option<Resident>>()
                + state.count * 2 * size_of::<(Standing, u64, BlockId)>()
        };
        self.tiers.values().map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tiered_kv_types::BlockType;

    const FACTS: Facts =
        Facts { shape: 1, depth: 0, block_type: BlockType::Unknown, key: 0, parent: None, age: 0 };

    #[test]
    fn the_candidate_used_longest_ago_goes_first() {
        let mut lru = Lru::new();
        for block in 0..4 {
            lru.inserted(Tier::Dram, block, &FACTS, 0);
            let kept = if block == 0 { Standing::Kept } else { Standing::Candidate };
            lru.set_standing(Tier::Dram, block, kept);
        }
        lru.accessed(1);
        let victim =
            |lru: &mut Lru, skip: &[u32]| lru.victim(Tier::Dram, 1, 0, &mut |b| skip.contains(&b));
        assert_eq!(victim(&mut lru, &[]), Some(2), "0 is no candidate, 1 was used again");
        assert_eq!(victim(&mut lru, &[2, 3]), Some(1));
        assert_eq!(victim(&mut lru, &[1, 2, 3]), None);
        lru.removed(Tier::Dram, 2);
        assert_eq!(victim(&mut lru, &[]), Some(3));
        assert_eq!(lru.candidates(Tier::Dram), 2);
        assert_eq!(lru.victim(Tier::Nvme, 1, 0, &mut |_| false), None);
        assert_eq!(lru.victim(Tier::Dram, 2, 0, &mut |_| false), None, "another size class");
    }

    #[test]
    fn another_shape_keeps_a_block_s_place() {
        let mut lru = Lru::new();
        for block in 0..3 {
            lru.inserted(Tier::Dram, block, &FACTS, 0);
            lru.set_standing(Tier::Dram, block, Standing::Candidate);
        }
        lru.reshaped(Tier::Dram, 1, 7);
        lru.reshaped(Tier::Dram, 0, 7);
        let victim = |lru: &mut Lru, shape| lru.victim(Tier::Dram, shape, 0, &mut |_| false);
        assert_eq!((victim(&mut lru, 7), victim(&mut lru, 1)), (Some(0), Some(2)));
        assert_eq!(lru.candidates(Tier::Dram), 3);
        lru.reshaped(Tier::Nvme, 2, 7);
        assert_eq!(victim(&mut lru, 1), Some(2), "it is not in that tier");
    }

    proptest::proptest! {
        /// A recovery's list is the same as if it had been made block by block.
        #[test]
        fn restored_equals_one_by_one(
            blocks in proptest::collection::vec((0u32..2, 0usize..3), 1..40),
            known in 0u32..4,
        ) {
            let all = [Standing::Orphan, Standing::Candidate, Standing::Kept];
            let (mut bulk, mut single) = (Lru::new(), Lru::new());
            for lru in [&mut bulk, &mut single] {
                for block in 0..known {
                    lru.inserted(Tier::Nvme, block, &FACTS, 0);
                    lru.set_standing(Tier::Nvme, block, Standing::Candidate);
                }
            }
            let found = blocks.iter().zip((known..).step_by(2)).map(|((shape, standing), block)| {
                (block, Facts { shape: *shape, ..FACTS }, all[*standing])
            });
            bulk.restored(Tier::Nvme, &mut found.clone(), 0);
            for (block, facts, standing) in found {
                single.inserted(Tier::Nvme, block, &facts, 0);
                single.set_standing(Tier::Nvme, block, standing);
            }
            loop {
                proptest::prop_assert_eq!(
                    bulk.candidates(Tier::Nvme),
                    single.candidates(Tier::Nvme)
                );
                let victim = |lru: &mut Lru| {
                    (0..2).find_map(|shape| lru.victim(Tier::Nvme, shape, 0, &mut |_| false))
                };
                let (block, expected) = (victim(&mut bulk), victim(&mut single));
                proptest::prop_assert_eq!(block, expected);
                let Some(block) = block else { break };
                proptest::prop_assert_eq!(
                    bulk.worth(Tier::Nvme, block),
                    single.worth(Tier::Nvme, block)
                );
                bulk.removed(Tier::Nvme, block);
                single.removed(Tier::Nvme, block);
            }
        }

        /// Equal to a naive implementation that keeps a list.
        #[test]
        fn equals_a_naive_list(ops in proptest::collection::vec((0u32..8, 0u8..6), 1..200)) {
            let mut lru = Lru::new();
            let mut naive: Vec<(u32, Standing)> = Vec::new();
            for (block, op) in ops {
                let at = naive.iter().position(|(b, _)| *b == block);
                match (op, at) {
                    (0, None) => {
                        lru.inserted(Tier::Dram, block, &FACTS, 0);
                        naive.push((block, Standing::Kept));
                    }
                    (1, Some(at)) => {
                        lru.accessed(block);
                        let entry = naive.remove(at);
                        naive.push(entry);
                    }
                    (2, Some(at)) => {
                        lru.removed(Tier::Dram, block);
                        naive.remove(at);
                    }
                    (3.., Some(at)) => {
                        let all = [Standing::Orphan, Standing::Candidate, Standing::Kept];
                        let standing = all[op as usize - 3];
                        lru.set_standing(Tier::Dram, block, standing);
                        naive[at].1 = standing;
                    }
                    _ => {}
                }
                let first = |wanted| naive.iter().find(|(_, s)| *s == wanted).map(|(b, _)| *b);
                let expected = first(Standing::Orphan).or(first(Standing::Candidate));
                let victim = lru.victim(Tier::Dram, 1, 0, &mut |_| false);
                proptest::prop_assert_eq!(victim, expected);
                let count = naive.iter().filter(|(_, s)| *s != Standing::Kept).count();
                proptest::prop_assert_eq!(lru.candidates(Tier::Dram), count);
            }
        }
    }
}
