//! Whether what is predicted comes true: the reuses that the hazards say, beside those seen.
//!
//! Each trial of one sentinel in four has a chance of a reuse, as of the last rebuild, before its
//! outcome is counted. These chances add up to what a sound prediction expects to be reused, and
//! the difference to what was reused is noise around zero.

use super::hazard::PAIRS;

/// Classes of chances: half and more, a quarter up to half, and so on, the last one open.
pub const CHANCES: usize = 10;

/// Reuses of some sentinels since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Calibration {
    /// How many were predicted.
    pub predicted: f64,
    /// How many there were.
    pub reuses: u64,
}

/// What was predicted and what came, by pair of block type and transition, and by what the chance
/// of a whole trial was predicted to be.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Calibrations {
    /// By pair.
    pub pairs: [Calibration; PAIRS],
    /// By class of chances.
    pub chances: [Calibration; CHANCES],
}

/// The class of a chance: how often it has to be doubled to reach a half.
fn class(chance: f32) -> usize {
    let exponent = (chance.to_bits() >> 23) as usize;
    126usize.saturating_sub(exponent).min(CHANCES - 1)
}

impl Calibrations {
    /// A part of a trial whose chance of a reuse was predicted, and whether it was one.
    #[inline]
    pub(crate) fn count(&mut self, pair: usize, chance: f32, trials: f32, reused: bool) {
        let predicted = f64::from(chance) * f64::from(trials);
        for counted in [&mut self.pairs[pair], &mut self.chances[class(chance)]] {
            counted.predicted += predicted;
            counted.reuses += u64::from(reused);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::trace;
    use crate::{Beta, BetaOptions, Cache};

    #[test]
    fn chances_are_classed_by_halves() {
        assert_eq!([1.0, 0.5, 0.49, 0.25, 0.24].map(class), [0, 0, 1, 1, 2]);
        assert_eq!([1.0 / 1024.0, 1e-9, 0.0].map(class), [CHANCES - 1; 3]);
    }

    #[test]
    fn a_part_of_a_trial_predicts_a_part() {
        let mut seen = Calibrations::default();
        seen.count(3, 0.25, 0.5, false);
        seen.count(3, 0.25, 0.5, true);
        assert_eq!(seen.pairs[3], Calibration { predicted: 0.25, reuses: 1 });
        assert_eq!(seen.chances[1], seen.pairs[3]);
    }

    #[test]
    fn what_is_predicted_of_a_steady_load_comes_true() {
        let mut beta = Beta::new(40, BetaOptions::DEFAULT, 1);
        for owned in trace(5, 6000) {
            beta.request(&owned.request());
        }
        let before = beta.calibrations();
        for owned in trace(6, 6000) {
            beta.request(&owned.request());
        }
        let all = beta.calibrations();
        let sum = |of: &[Calibration; PAIRS]| {
            let add = |sum: (f64, f64), one: &Calibration| {
                (sum.0 + one.predicted, sum.1 + one.reuses as f64)
            };
            of.iter().fold((0.0, 0.0), add)
        };
        let (first, both) = (sum(&before.pairs), sum(&all.pairs));
        let (predicted, reuses) = (both.0 - first.0, both.1 - first.1);
        assert!(reuses > 100.0, "{all:?}");
        assert!((predicted / reuses - 1.0).abs() < 0.3, "{predicted} predicted, {reuses} came");
        let of_chances: u64 = all.chances.iter().map(|one| one.reuses).sum();
        assert_eq!(of_chances, all.pairs.iter().map(|one| one.reuses).sum());
    }
}
