//! The window ahead of a request: what is stored behind the block that it reads from a slow tier is
//! moved up, and the window goes along with the position. Where the chain forks it follows what was
//! read last.

use super::AheadOutcome;
use super::hierarchy::{Hierarchy, Why};
use crate::trace::percent;
use tiered_kv_policy::Window;

/// No block.
const NONE: u32 = u32::MAX;

pub(super) struct Ahead {
    window: Window,
    /// The block that was last read behind each.
    next: Vec<u32>,
    /// What is moved up and not read by the request at hand.
    guesses: Vec<u32>,
    found: AheadOutcome,
}

impl Ahead {
    /// A window that may waste this part of what is moved; none at zero.
    pub(super) fn new(budget: f64) -> Self {
        let window = if budget > 0.0 { Window::within(budget) } else { Window::fixed(0) };
        Self { window, next: Vec::new(), guesses: Vec::new(), found: AheadOutcome::default() }
    }

    /// Moves the first `loaded` of a request's blocks up to the level `top`, and others ahead.
    pub(super) fn read(
        &mut self,
        tiers: &mut Hierarchy<'_>,
        top: usize,
        blocks: &[u64],
        loaded: usize,
    ) {
        for block in blocks {
            if std::mem::take(&mut tiers.unread[*block as usize]) {
                self.found.guessed_read += 1;
            }
        }
        let mut at = 0;
        while at < loaded {
            if !is_below(tiers, top, blocks[at]) {
                at += 1;
                continue;
            }
            let covered = self.look_ahead(tiers, top, &blocks[at..], loaded - at);
            let up = |tiers: &mut Hierarchy<'_>, block: u64, why| {
                let from = tiers.fastest(block);
                tiers.book(from, top, why);
            };
            up(tiers, blocks[at], Why::Demand);
            for block in &blocks[at + 1..=at + covered] {
                up(tiers, *block, Why::Ahead);
            }
            for guess in std::mem::take(&mut self.guesses) {
                up(tiers, u64::from(guess), Why::Ahead);
                tiers.enter_ahead(top, guess);
                self.found.guessed += 1;
            }
            self.found.demanded += 1;
            self.found.covered += covered as u64;
            at += 1 + covered;
        }
        self.follow(blocks);
    }

    /// How many blocks behind the first are moved before the request asks for them; the others that
    /// are moved with them are put into `guesses`.
    fn look_ahead(
        &mut self,
        tiers: &Hierarchy<'_>,
        top: usize,
        blocks: &[u64],
        loaded: usize,
    ) -> usize {
        let width = self.window.width();
        let (mut block, mut covered, mut on_path) = (blocks[0], 0, true);
        self.guesses.clear();
        while width > 0 && self.guesses.len() < width {
            let next = self.next.get(block as usize).copied().unwrap_or(NONE);
            let below = next != NONE && is_below(tiers, top, u64::from(next));
            // Where ids do not stand for prefixes, what follows may come round.
            if !below || self.guesses.contains(&next) {
                break;
            }
            block = u64::from(next);
            on_path &= covered + 1 < loaded && blocks[covered + 1] == block;
            if on_path {
                covered += 1;
            } else {
                self.guesses.push(next);
            }
        }
        self.window.told(1 + covered + self.guesses.len(), self.guesses.len());
        covered
    }

    fn follow(&mut self, blocks: &[u64]) {
        for pair in blocks.windows(2) {
            let before = pair[0] as usize;
            if self.next.len() <= before {
                self.next.resize((before + 1).next_power_of_two(), NONE);
            }
            self.next[before] = pair[1] as u32;
        }
    }

    pub(super) fn finish(&self, tiers: &Hierarchy<'_>) -> AheadOutcome {
        let found = self.found;
        let left_unread = tiers.unread.iter().filter(|unread| **unread).count() as u64;
        let wasted = (found.guessed - found.guessed_read) as f64;
        let moved = (found.demanded + found.covered + found.guessed) as f64;
        AheadOutcome {
            window: self.window.width(),
            evicted_unread: tiers.evicted_unread,
            left_unread,
            waste_pct: percent(wasted, moved),
            ..found
        }
    }
}

/// Whether only levels below `top` have a block.
fn is_below(tiers: &Hierarchy<'_>, top: usize, block: u64) -> bool {
    tiers.fastest(block).is_some_and(|level| level > top)
}
