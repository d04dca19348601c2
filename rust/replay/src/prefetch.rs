//! Two tiers: which hits of the slow one were moved ahead of their demand, and what was moved for
//! nothing.
//!
//! Both tiers are governed by the predictor, the slow one holds what the fast one does. When a
//! request reads its first block that only the slow tier has, the blocks behind it in the stored
//! chain are moved ahead, a window forward, and the window goes along with the position. Where the
//! chain forks the store does not know which way the request goes: it follows what was read last.

use crate::bench::{Options, Progress, capacity_blocks, watched};
use crate::trace::{Trace, percent};
use serde::Serialize;
use tiered_kv_policy::{Beta, BetaOptions, Cache, Request, Window};

/// No block.
const NONE: u32 = u32::MAX;

/// What prefetching between two tiers did.
#[derive(Clone, Debug, Serialize)]
pub struct Prefetched {
    /// Capacities in percent of the trace's unique prompt blocks.
    pub fast_pct: f64,
    /// The slow tier's, which holds what the fast one does.
    pub slow_pct: f64,
    /// Blocks of the window: the width that it had in the end, where it adapts.
    pub window: usize,
    /// Part of the moved blocks that may be wasted, in percent, where the window adapts to it.
    pub budget_pct: Option<f64>,
    /// Hits in the fast tier, and hits that only the slow tier had, in percent of the accesses.
    pub fast_hit_pct: f64,
    /// See `fast_hit_pct`.
    pub slow_hit_pct: f64,
    /// Percent of the slow tier's hits that were moved before their own demand.
    pub covered_pct: f64,
    /// Blocks moved, ahead or on demand, and percent of these that their request did not read.
    pub moved_blocks: u64,
    /// See `moved_blocks`.
    pub waste_pct: f64,
}

/// The tiers, and what was counted.
struct Tiers {
    fast: Beta,
    slow: Beta,
    window: Window,
    /// The block that was last read behind each.
    next: Vec<u32>,
    /// A chain to look up.
    chain: Vec<u64>,
    fast_hits: u64,
    slow_hits: u64,
    covered: u64,
    moved: u64,
    wasted: u64,
}

impl Tiers {
    /// Reads the blocks from `fast` up to `slow`, which only the slow tier has.
    fn read(&mut self, blocks: &[u64], fast: usize, slow: usize) {
        let mut at = fast;
        while at < slow {
            // The block at `at` is demanded; what is stored behind it is moved ahead.
            let width = self.window.width();
            self.chain.clear();
            self.chain.extend(&blocks[..=at]);
            let mut block = blocks[at];
            for _ in 0..slow - at - 1 + width {
                match self.next.get(block as usize) {
                    Some(next) if *next != NONE => block = u64::from(*next),
                    _ => break,
                }
                self.chain.push(block);
            }
            let stored = self.slow.leading(&self.chain).saturating_sub(at + 1);
            let guessed = self.chain[at + 1..].iter().zip(&blocks[at + 1..slow]);
            let read = guessed.take_while(|(guess, block)| guess == block).count().min(stored);
            let read = if width == 0 { 0 } else { read };
            let moved = stored.min(read + width);
            self.covered += read as u64;
            self.moved += 1 + moved as u64;
            self.wasted += (moved - read) as u64;
            self.window.told(1 + moved, moved - read);
            at += 1 + read;
        }
    }
}

impl Cache for Tiers {
    fn name(&self) -> &'static str {
        "prefetch"
    }

    fn request(&mut self, request: &Request<'_>) -> usize {
        let prompt = &request.blocks[..request.prompt];
        let slow = self.slow.leading(prompt);
        let fast = self.fast.leading(prompt).min(slow);
        self.fast_hits += fast as u64;
        self.slow_hits += (slow - fast) as u64;
        self.read(request.blocks, fast, slow);
        let mut before: Option<u64> = None;
        for block in request.blocks {
            if let Some(before) = before.replace(*block) {
                if self.next.len() <= before as usize {
                    self.next.resize((before as usize + 1).next_power_of_two(), NONE);
                }
                self.next[before as usize] = *block as u32;
            }
        }
        self.fast.request(request);
        self.slow.request(request)
    }

    fn residents(&self) -> usize {
        self.slow.residents()
    }
}

/// Windows of fixed widths that are shown, and the budget of the one that adapts, in percent.
const WIDTHS: [usize; 4] = [0, 4, 16, 64];
const BUDGET_PCT: f64 = 5.0;

/// [`prefetch`] with windows of some widths, and with one that adapts to a budget of 5 % waste.
pub fn prefetch_rows(
    trace: &Trace,
    options: Options,
    capacities: (f64, f64),
    progress: &Progress,
) -> Option<Vec<Prefetched>> {
    let fixed = WIDTHS.map(|width| (Window::fixed(width), None));
    let adapts = (Window::within(BUDGET_PCT / 100.0), Some(BUDGET_PCT));
    fixed
        .into_iter()
        .chain([adapts])
        .map(|(window, budget)| prefetch(trace, options, capacities, window, budget, progress))
        .collect()
}

/// Replays a trace over two tiers of the predictor, of so many percent of the trace's unique prompt
/// blocks; `None` if `progress` was told to stop.
pub fn prefetch(
    trace: &Trace,
    options: Options,
    capacities: (f64, f64),
    window: Window,
    budget_pct: Option<f64>,
    progress: &Progress,
) -> Option<Prefetched> {
    let (fast_pct, slow_pct) = capacities;
    let tier = |pct| Beta::new(capacity_blocks(trace, pct), BetaOptions::DEFAULT, 0);
    let mut tiers = Tiers {
        fast: tier(fast_pct),
        slow: tier(slow_pct.max(fast_pct)),
        window,
        next: Vec::new(),
        chain: Vec::new(),
        fast_hits: 0,
        slow_hits: 0,
        covered: 0,
        moved: 0,
        wasted: 0,
    };
    watched(trace, options, &mut tiers, progress);
    let accesses = trace.block_accesses as f64;
    (!progress.is_stopped()).then(|| Prefetched {
        fast_pct,
        slow_pct,
        window: tiers.window.width(),
        budget_pct,
        fast_hit_pct: percent(tiers.fast_hits as f64, accesses),
        slow_hit_pct: percent(tiers.slow_hits as f64, accesses),
        covered_pct: percent(tiers.covered as f64, tiers.slow_hits as f64),
        moved_blocks: tiers.moved,
        waste_pct: percent(tiers.wasted as f64, tiers.moved as f64),
    })
}
