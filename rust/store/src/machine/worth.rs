//! Whether a load is worth its wait: how fast each drive has been lately, against the time in
//! which the caller would compute the blocks anew.

use super::get::{GetOp, State};
use super::{DriveId, Machine};
use smallvec::SmallVec;
use tiered_kv_io::Nanos;
use tiered_kv_types::MissReason;

/// Nanoseconds of reading after which half is left of what was measured before them.
const WINDOW: f64 = 100e6;

/// How fast a drive reads, as measured on the reads that it answered.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Bytes of reads under way.
    waiting: u64,
    /// Since when the oldest read under way has the drive to itself.
    since: Nanos,
    /// Of late: nanoseconds in which it read, and the bytes.
    ns: f64,
    bytes: f64,
    measured: Nanos,
}

impl Pace {
    pub(super) fn begun(&mut self, now: Nanos, bytes: u64) {
        if self.waiting == 0 {
            self.since = now;
        }
        self.waiting += bytes;
    }

    /// A read has ended; `answered` where the drive read it.
    pub(super) fn ended(&mut self, now: Nanos, bytes: u64, answered: bool) {
        self.waiting -= bytes;
        let took = now.saturating_sub(self.since);
        self.since = now;
        if answered {
            // Reads that end together were read together: the first has all the time. So it is time
            // that ages what was measured, not their number.
            let kept = WINDOW / (WINDOW + took as f64);
            self.ns = self.ns * kept + took as f64;
            self.bytes = self.bytes * kept + bytes as f64;
            self.measured = now;
        }
    }

    /// Bytes of reads under way.
    pub(super) fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Bytes a second of late; `None` where nothing was measured.
    pub(super) fn bytes_per_s(&self) -> Option<f64> {
        (self.bytes > 0.0).then(|| self.bytes * 1e9 / self.ns.max(1.0))
    }

    /// Nanoseconds until the drive will have read so many bytes, behind what it is reading. 0 where
    /// nothing is known, or what is known is `old`: one who is never asked is never seen to be
    /// fast again.
    fn estimate(&self, bytes: u64, now: Nanos, old: Nanos) -> f64 {
        let known = self.waiting > 0 || now.saturating_sub(self.measured) < old;
        if self.bytes <= 0.0 || !known {
            return 0.0;
        }
        (self.waiting + bytes) as f64 * self.ns / self.bytes
    }
}

impl Machine {
    /// How many of a get's blocks are worth loading: up to where the time of the loads and that of
    /// computing the rest are least together. `recompute` is the caller's time for one block.
    ///
    /// Blocks in memory cost nothing, and absent ones are computed in any case.
    pub(super) fn worth_loading(&self, get: &GetOp, recompute: Nanos) -> usize {
        let (now, old) = (self.now.mono, self.limits.retry);
        let mut asked: SmallVec<[(DriveId, u64); 4]> = SmallVec::new();
        let (mut loaded, mut slowest) = (0_u64, 0.0_f64);
        // What is saved over loading nothing, at best.
        let (mut best, mut worth) = (0.0, 0);
        for (item, key) in get.keys().iter().enumerate() {
            let key = Self::full(get.ns(), *key);
            let Some(id) = self.table.id(&key) else { continue };
            let block = self.table.get(id).expect("mapped blocks exist");
            if block.in_dram && block.load.is_none() {
                continue;
            }
            let at = asked.iter().position(|(drive, _)| *drive == block.home);
            let at = at.unwrap_or_else(|| {
                asked.push((block.home, 0));
                asked.len() - 1
            });
            // What others load already waits in the drive's queue.
            asked[at].1 += if block.load.is_some() { 0 } else { block.bytes() };
            loaded += 1;
            let pace = &self.drives[usize::from(block.home)].pace;
            slowest = slowest.max(pace.estimate(asked[at].1, now, old));
            let saved = loaded as f64 * recompute as f64 - slowest;
            if saved >= best {
                (best, worth) = (saved, item + 1);
            }
        }
        worth
    }

    /// A block whose load is not worth it.
    pub(super) fn not_worth(&mut self, get: &GetOp, item: usize) -> State {
        let key = Self::full(get.ns(), get.keys()[item]);
        let tier = Some(tiered_kv_types::Tier::Nvme);
        self.log.push(self.now, crate::log::LogKind::Recompute, &key, tier);
        State::Miss(MissReason::Recompute)
    }
}

#[cfg(test)]
mod tests {
    use super::Pace;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_pace_is_that_of_the_reads_whatever_is_in_flight_beside_them() {
        let mut alone = Pace::default();
        let mut together = Pace::default();
        for read in 0..40 {
            alone.begun(read * 10 * MS, 1 << 20);
            alone.ended(read * 10 * MS + 2 * MS, 1 << 20, true);
        }
        // Four in flight: each ends 8 ms after it began, and one ends every 2 ms.
        (0..4).for_each(|_| together.begun(0, 1 << 20));
        for read in 1..40 {
            together.begun(read * 2 * MS, 1 << 20);
            together.ended(read * 2 * MS, 1 << 20, true);
        }
        for pace in [&alone, &together] {
            let rate = pace.bytes_per_s().expect("measured");
            let expected = f64::from(1 << 20) / 0.002;
            assert!((rate / expected - 1.0).abs() < 0.01, "{rate} for {expected}");
        }
        let now = 400 * MS;
        assert!((alone.estimate(3 << 20, now, 1000 * MS) / (6 * MS) as f64 - 1.0).abs() < 0.01);
        let behind = together.estimate(1 << 20, now, 1000 * MS);
        assert!((behind / (10 * MS) as f64 - 1.0).abs() < 0.01, "four wait before it");
    }

    #[test]
    fn reads_that_end_together_count_with_the_time_of_all_and_the_last_ones_most() {
        let mut pace = Pace::default();
        for batch in 0..4 {
            (0..16).for_each(|_| pace.begun(batch * 100 * MS, 1 << 20));
            (0..16).for_each(|_| pace.ended(batch * 100 * MS + 32 * MS, 1 << 20, true));
        }
        let rate = pace.bytes_per_s().expect("measured") / f64::from(1 << 20);
        assert!((rate / 500.0 - 1.0).abs() < 0.01, "{rate} MiB/s, of 16 in 32 ms");
        for read in 0..3 {
            pace.begun((1000 + read * 300) * MS, 1 << 20);
            pace.ended((1000 + read * 300 + 200) * MS, 1 << 20, true);
        }
        let slower = pace.bytes_per_s().expect("measured") / f64::from(1 << 20);
        assert!(slower < 20.0, "{slower} MiB/s, of one in 200 ms");
    }

    #[test]
    fn nothing_is_said_of_a_drive_that_was_not_asked_for_long() {
        let mut pace = Pace::default();
        assert_eq!(pace.estimate(1 << 20, 0, MS), 0.0, "never asked");
        pace.begun(0, 4096);
        pace.ended(50 * MS, 4096, false);
        assert_eq!(pace.bytes_per_s(), None, "it failed: nothing was read");
        pace.begun(60 * MS, 4096);
        pace.ended(90 * MS, 4096, true);
        assert!(pace.estimate(4096, 90 * MS, MS) > 29e6);
        assert_eq!(pace.estimate(4096, 92 * MS, MS), 0.0, "old");
        pace.begun(100 * MS, 4096);
        assert!(pace.estimate(4096, 100 * MS, MS) > 59e6, "it is being measured anew");
    }
}
