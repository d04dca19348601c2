//! Which of a tier's candidates goes first.

use super::Predictor;
use super::lists::Candidate;
use crate::beta::chain::NONE;
use crate::{BlockId, Standing};
use tiered_kv_types::Tier;

/// Most blocks of a chain that one draw lets go.
const BATCH: u32 = 64;
/// Most busy candidates that one search passes over, so that a put never scans without bound.
const MAX_SKIPS: usize = 4096;
/// How much an age counts beside what is predicted: less than the least difference of that.
const TIE: f64 = 1e-9;

/// A draw whose victim's ancestors go too, while they are worth no more than `limit`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    tier: Tier,
    list: usize,
    victim: BlockId,
    /// The victim's parent, once the victim has gone.
    next: Option<BlockId>,
    limit: f32,
    left: u32,
    /// When it was drawn: later, others may be worth less.
    now: f64,
}

impl Predictor {
    fn value(&self, (last, cell): (f64, crate::beta::hazard::Cell)) -> f32 {
        self.beta.table.value(cell, (self.now - last).max(0.0))
    }

    /// What it is worth to keep a block; of two that are worth the same the older is worth less.
    pub(super) fn value_of(&self, block: BlockId) -> f64 {
        let (last, cell) = self.seen(block);
        let age = (self.now - last).clamp(0.0, 1e12);
        f64::from(self.value((last, cell))) * (1.0 - TIE * (1.0 + age).log2())
    }

    /// The block has left a tier: if it was the last draw's, its parent comes next.
    pub(super) fn follow(&mut self, tier: Tier, block: BlockId) {
        let Some(run) = self.run.filter(|run| run.tier == tier && run.victim == block) else {
            return;
        };
        let nodes = &self.beta.chain.nodes;
        let parent = self.slot(block).map(|slot| nodes[slot as usize].parent);
        let next = parent.filter(|parent| *parent != NONE).map(|slot| nodes[slot as usize].block);
        self.run = next.filter(|next| *next != NONE).map(|next| Run { next: Some(next), ..run });
    }

    pub(super) fn choose(
        &mut self,
        tier: Tier,
        shape: u32,
        skip: &mut dyn FnMut(BlockId) -> bool,
    ) -> Option<BlockId> {
        let (now, list) = (self.now, self.lists(tier).number(shape)?);
        if let Some(next) = self.go_on(tier, list, skip) {
            return Some(next);
        }
        for standing in [Standing::Orphan, Standing::Candidate] {
            if let Some((victim, limit)) = self.draw(tier, list, standing, skip) {
                self.run =
                    Some(Run { tier, list, victim, next: None, limit, left: BATCH - 1, now });
                return Some(victim);
            }
        }
        None
    }

    /// The parent of the block that went last, where it may go in the same turn.
    fn go_on(
        &mut self,
        tier: Tier,
        list: usize,
        skip: &mut dyn FnMut(BlockId) -> bool,
    ) -> Option<BlockId> {
        let same = |run: &Run| run.tier == tier && run.list == list && run.now == self.now;
        let run = self.run.filter(|run| same(run) && run.left > 0)?;
        let next = run.next?;
        let lists = &self.tiers[tier as usize];
        let entry = lists.entry(next).filter(|entry| entry.is_listed(list))?;
        let worth_more = self.value(self.seen(next)) > run.limit;
        let orphans = entry.standing() == Standing::Candidate && !lists.lists[list][0].is_empty();
        if worth_more || orphans || skip(next) {
            return None;
        }
        self.run = Some(Run { victim: next, next: None, left: run.left - 1, ..run });
        Some(next)
    }

    /// The least of a draw, and what the next one is worth, infinite if there is none.
    fn draw(
        &mut self,
        tier: Tier,
        list: usize,
        standing: Standing,
        skip: &mut dyn FnMut(BlockId) -> bool,
    ) -> Option<(BlockId, f32)> {
        let draw = self.beta.options.draw;
        let count = self.tiers[tier as usize].lists[list][standing as usize].len();
        let at = |predictor: &Self, place: usize| {
            predictor.tiers[tier as usize].lists[list][standing as usize][place]
        };
        let mut best: Option<(f32, Candidate)> = None;
        let mut second = f32::INFINITY;
        for place in 0..count.min(draw) {
            let place = if count > draw { self.beta.rng.below(count) } else { place };
            let candidate = at(self, place);
            let key = self.value((candidate.last, candidate.cell));
            match best {
                Some((_, least)) if least.block == candidate.block => {}
                Some(least) if !self.goes_before((key, candidate), least) => {
                    second = second.min(key);
                }
                _ if skip(candidate.block) => {}
                _ => {
                    second = best.map_or(second, |(key, _)| key);
                    best = Some((key, candidate));
                }
            }
        }
        if best.is_none() && count > draw {
            // All that were drawn are busy.
            let from = self.beta.rng.below(count);
            let places = (0..count.min(MAX_SKIPS)).map(|step| (from + step) % count);
            let found = places.map(|place| at(self, place).block).find(|block| !skip(*block));
            return found.map(|block| (block, f32::INFINITY));
        }
        best.map(|(_, candidate)| (candidate.block, second))
    }

    fn goes_before(&self, one: (f32, Candidate), other: (f32, Candidate)) -> bool {
        let ((key, one), (least, other)) = (one, other);
        if key != least {
            return key < least;
        }
        if one.last != other.last {
            return one.last < other.last;
        }
        self.depth(one.block) > self.depth(other.block)
    }
}
