//! What may be written to a drive, so that it lasts: a budget of bytes over time, spent first on
//! the blocks that are most likely to be used again.

use std::collections::VecDeque;
use tiered_kv_io::Nanos;

/// Seconds of the budget that may be written at once.
const BURST_S: f64 = 3600.0;
/// Blocks that a new one is compared with.
const SEEN: usize = 256;

/// The budget of one drive.
#[derive(Debug)]
pub(super) struct WriteBudget {
    /// 0: no bound.
    bytes_per_s: f64,
    /// Bytes that may be written now.
    left: f64,
    at: Nanos,
    /// What the last blocks were worth that asked to be written.
    seen: VecDeque<f64>,
}

impl WriteBudget {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        let bytes_per_s = bytes_per_s as f64;
        Self { bytes_per_s, left: bytes_per_s * BURST_S, at: 0, seen: VecDeque::new() }
    }

    /// Whether a block of this worth is to be written now. With half the burst left everything is,
    /// below that only what is worth more than most, the fewer the less is left.
    ///
    /// So the drive fills as fast as the budget allows, whatever the blocks are worth: a bound on
    /// the worth itself would leave a drive empty whose blocks are all worth little.
    pub(super) fn admits(&mut self, now: Nanos, bytes: u64, worth: f64) -> bool {
        if self.bytes_per_s <= 0.0 {
            return true;
        }
        let burst = self.bytes_per_s * BURST_S;
        let passed = now.saturating_sub(self.at) as f64 / 1e9;
        self.at = now;
        self.left = (self.left + passed * self.bytes_per_s).min(burst);
        let part = 2.0 * self.left / burst;
        let below = self.seen.iter().filter(|seen| **seen < worth).count();
        let rank = below as f64 / self.seen.len().max(1) as f64;
        self.left >= bytes as f64 && rank >= 1.0 - part
    }

    /// A block was written, or refused (no bytes).
    pub(super) fn book(&mut self, bytes: u64, worth: f64) {
        if self.bytes_per_s <= 0.0 {
            return;
        }
        self.left -= bytes as f64;
        self.seen.push_back(worth);
        if self.seen.len() > SEEN {
            self.seen.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BURST_S, WriteBudget};

    const BLOCK: u64 = 1000;
    const SECOND: u64 = 1_000_000_000;

    /// Blocks written of one asked for each second, for so many seconds, by their worth.
    fn written(seconds: u64, worth: impl Fn(u64) -> f64) -> Vec<f64> {
        // One block in ten seconds.
        let mut budget = WriteBudget::new(BLOCK / 10);
        let mut written = Vec::new();
        for second in 0..seconds {
            let worth = worth(second);
            let admitted = budget.admits(second * SECOND, BLOCK, worth);
            budget.book(if admitted { BLOCK } else { 0 }, worth);
            written.extend(admitted.then_some(worth));
        }
        written
    }

    #[test]
    fn no_more_is_written_than_the_budget_allows_and_hardly_less() {
        let burst = (BURST_S / 10.0) as usize;
        for worth in [|_| 1.0, |second: u64| (second % 7) as f64, |second: u64| 1.0 / second as f64]
        {
            let blocks = written(40_000, worth).len();
            assert!(blocks <= 4_000 + burst, "{blocks}");
            assert!(blocks >= 4_000, "{blocks}: a drive that could be filled is not");
        }
    }

    #[test]
    fn what_is_worth_most_is_written_first() {
        let blocks = written(40_000, |second| (second % 20) as f64);
        let later = &blocks[blocks.len() / 2..];
        // A tenth can be written, that is two of twenty.
        let best = later.iter().filter(|worth| **worth >= 16.0).count();
        assert!(best * 10 >= later.len() * 9, "{best} of {}", later.len());
    }

    #[test]
    fn without_a_budget_everything_is_written() {
        let mut budget = WriteBudget::new(0);
        budget.book(u64::MAX, 1.0);
        assert!(budget.admits(0, u64::MAX, 0.0));
    }
}
