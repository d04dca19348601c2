//! What was learned as bytes, so that it outlives a process.
//!
//! A number for the policy's name u64, requests u64; reuses and expected reuses f32 of every value
//! of every feature, or, where the score is fitted, how many weights u16, and of each its number
//! u16, mean and variance f32; where gaps are expected, the sums of that regression f64; then cells
//! in ascending order: cell u16, its first bucket u8, how many u8, and reuses and trials f32 of
//! each. All numbers are little-endian.

use super::Beta;
use super::age::BUCKETS;
use super::hazard::{CELLS, Count};
use super::pace::Pace;
use super::score::Scores;

/// Cells of a score, and of a pair: what does not fit is added up over these.
const COARSER: [usize; 3] = [1, 8, 64];
/// Requests beyond it are as good as this many: only how often the table is rebuilt depends on it.
const MOST_REQUESTS: u64 = 1 << 20;
/// More was never counted: all counts fade.
const MOST: f32 = 1e9;

/// Reads numbers off the front of bytes.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    /// A count, if it is one.
    fn count(&mut self) -> Option<f32> {
        let count = f32::from_le_bytes(self.take()?);
        (0.0..=MOST).contains(&count).then_some(count)
    }
}

/// A policy's name as a number (FNV-1a): what one has learned is of no use to another.
fn number_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

type Cells = Vec<(usize, [Count; BUCKETS])>;

impl Beta {
    /// What was learned, in at most `most` bytes: as finely as these hold it. Empty where they hold
    /// nothing of it.
    pub(crate) fn save(&self, most: usize) -> Vec<u8> {
        let mut bytes = number_of(self.options.name).to_le_bytes().to_vec();
        bytes.extend(self.requests.min(MOST_REQUESTS).to_le_bytes());
        match self.scores.fit() {
            None => {
                for (reuses, expected) in self.scores.counts() {
                    bytes.extend(reuses.to_le_bytes());
                    bytes.extend(expected.to_le_bytes());
                }
            }
            Some(fit) => {
                bytes.extend((fit.told().count() as u16).to_le_bytes());
                for (number, mean, variance) in fit.told() {
                    bytes.extend(number.to_le_bytes());
                    bytes.extend(mean.to_le_bytes());
                    bytes.extend(variance.to_le_bytes());
                }
            }
        }
        if self.options.paces() {
            self.pace.sums().for_each(|sum| bytes.extend(sum.to_le_bytes()));
        }
        for group in COARSER {
            let before = bytes.len();
            for (cell, counts) in self.cells(group) {
                encode(&mut bytes, cell, &counts);
            }
            if bytes.len() <= most {
                return bytes;
            }
            bytes.truncate(before);
        }
        Vec::new()
    }

    /// The cells in use; those of a group add up in the one of them with most evidence.
    fn cells(&self, group: usize) -> Cells {
        let trials = |cell: &usize| -> f32 {
            self.table.counts(*cell).map_or(0.0, |counts| counts.iter().map(|c| c.trials).sum())
        };
        let mut cells = Cells::new();
        for first in (0..CELLS).step_by(group) {
            let used = || (first..first + group).filter(|cell| self.table.counts(*cell).is_some());
            let Some(most) = used().max_by(|a, b| trials(a).total_cmp(&trials(b))) else {
                continue;
            };
            let mut sum = [Count::default(); BUCKETS];
            for counts in used().filter_map(|cell| self.table.counts(cell)) {
                for (sum, count) in sum.iter_mut().zip(counts) {
                    sum.reuses += count.reuses;
                    sum.trials += count.trials;
                }
            }
            cells.push((most, sum));
        }
        cells
    }

    /// Whether bytes are what another policy has learned.
    pub(crate) fn is_of_another(&self, bytes: &[u8]) -> bool {
        let number = Source(bytes).take().map(u64::from_le_bytes);
        number.is_some_and(|number| number != number_of(self.options.name))
    }

    /// Takes in what [`Beta::save`] gave; false, and nothing is changed, where it is anything else.
    pub(crate) fn load(&mut self, bytes: &[u8]) -> bool {
        let (mut scores, mut pace) = (self.scores.clone(), self.pace.clone());
        let mut source = Source(bytes);
        let Some(requests) = self.load_scores(&mut source, &mut scores, &mut pace) else {
            return false;
        };
        let Some(cells) = decode(source) else { return false };
        self.requests = self.requests.max(requests);
        (self.scores, self.pace) = (scores, pace);
        for (cell, counts) in &cells {
            self.table.add_counts(*cell, counts);
        }
        if self.scores.fit().is_none() {
            self.scores.rebuild(1.0);
        }
        self.pace.rebuild(1.0);
        self.table.rebuild(1.0);
        self.chain.revalue();
        self.last_rebuild = self.requests;
        self.next_rebuild = self.requests + (self.requests / 4).clamp(16, 256);
        true
    }

    /// Reads all but the cells: how many requests that is of.
    fn load_scores(
        &self,
        source: &mut Source<'_>,
        scores: &mut Scores,
        pace: &mut Pace,
    ) -> Option<u64> {
        if u64::from_le_bytes(source.take()?) != number_of(self.options.name) {
            return None;
        }
        let requests = u64::from_le_bytes(source.take()?);
        if let Some(fit) = scores.fit_mut() {
            for _ in 0..u16::from_le_bytes(source.take()?) {
                let number = u16::from_le_bytes(source.take()?);
                let mean = f32::from_le_bytes(source.take()?);
                let variance = f32::from_le_bytes(source.take()?);
                fit.set((number, mean, variance)).then_some(())?;
            }
        } else {
            for (reuses, expected) in scores.counts_mut() {
                (*reuses, *expected) = (source.count()?, source.count()?);
            }
        }
        if self.options.paces() {
            for sum in pace.sums_mut() {
                *sum = f64::from_le_bytes(source.take()?);
                (sum.abs() < f64::from(MOST)).then_some(())?;
            }
        }
        (requests <= MOST_REQUESTS).then_some(requests)
    }
}

fn encode(bytes: &mut Vec<u8>, cell: usize, counts: &[Count; BUCKETS]) {
    let used = |count: &Count| count.trials > 0.0 || count.reuses > 0.0;
    let Some(first) = counts.iter().position(used) else { return };
    let last = counts.iter().rposition(used).unwrap_or(first);
    bytes.extend((cell as u16).to_le_bytes());
    bytes.extend([first as u8, (last - first + 1) as u8]);
    for count in &counts[first..=last] {
        bytes.extend(count.reuses.min(MOST).to_le_bytes());
        bytes.extend(count.trials.min(MOST).to_le_bytes());
    }
}

fn decode(mut source: Source<'_>) -> Option<Cells> {
    let mut cells = Cells::new();
    while !source.0.is_empty() {
        let cell = usize::from(u16::from_le_bytes(source.take()?));
        let [first, len] = source.take()?.map(usize::from);
        let ascending = cells.last().is_none_or(|(last, _)| *last < cell);
        if cell >= CELLS || !ascending || len == 0 || first + len > BUCKETS {
            return None;
        }
        let mut counts = [Count::default(); BUCKETS];
        for count in &mut counts[first..first + len] {
            // There may be more reuses: one that comes early in a bucket is a part of a trial.
            *count = Count { reuses: source.count()?, trials: source.count()? };
        }
        cells.push((cell, counts));
    }
    Some(cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::trace;
    use crate::{BetaOptions, Cache};

    fn taught() -> Beta {
        taught_of(BetaOptions::DEFAULT)
    }

    fn taught_of(options: BetaOptions) -> Beta {
        let mut beta = Beta::new(40, options, 1);
        for owned in trace(5, 4000) {
            beta.request(&owned.request());
        }
        beta
    }

    #[test]
    fn what_is_saved_is_learned_again() {
        for options in [BetaOptions::DEFAULT, BetaOptions::SPEC] {
            let beta = taught_of(options);
            let bytes = beta.save(1 << 20);
            let mut again = Beta::new(40, options, 9);
            assert!(again.load(&bytes));
            assert_eq!(again.save(1 << 20), bytes);
            for (old, new) in beta.posterior().iter().zip(again.posterior()) {
                assert_eq!((old.mean, old.interval), (new.mean, new.interval));
            }
            let mut other = Beta::new(40, BetaOptions { name: "other", ..options }, 1);
            assert!(!other.load(&bytes), "another policy has no use for it");
        }
    }

    #[test]
    fn what_does_not_fit_is_kept_less_finely() {
        let beta = taught();
        let all = beta.save(usize::MAX);
        let mut sizes = vec![all.len()];
        while let Some(most) = sizes.last().copied().filter(|size| *size > 0) {
            let less = beta.save(most - 1);
            assert!(less.len() < most);
            sizes.push(less.len());
        }
        assert_eq!(sizes.len(), 4, "three grains, and nothing: {sizes:?}");
        let mut again = Beta::new(40, BetaOptions::DEFAULT, 1);
        assert!(again.load(&beta.save(sizes[2])));
        for (old, new) in beta.posterior().iter().zip(again.posterior()) {
            assert!((old.lives - new.lives).abs() <= 1e-3 * (1.0 + old.lives), "{old:?}");
        }
    }

    #[test]
    fn what_is_not_sound_changes_nothing() {
        let bytes = taught().save(1 << 20);
        let before = Beta::new(40, BetaOptions::DEFAULT, 1).save(1 << 20);
        for end in (0..bytes.len()).step_by(61) {
            let mut beta = Beta::new(40, BetaOptions::DEFAULT, 1);
            if !beta.load(&bytes[..end]) {
                assert_eq!(beta.save(1 << 20), before, "cut at {end}");
            }
            let mut bent = bytes.clone();
            bent[end..(end + 4).min(bytes.len())].fill(0xff);
            if beta.load(&bent) {
                let sound = beta.posterior().iter().all(|pair| (0.0..=1.0).contains(&pair.mean));
                assert!(sound, "bent at {end}");
            }
        }
        let mut beta = Beta::new(40, BetaOptions::DEFAULT, 1);
        assert!(
            !beta.load(&[]) && !beta.load(&bytes[..7]) && !beta.load(&bytes[..bytes.len() - 1])
        );
    }
}
