//! What was learned of each pair, for people to look at.

use super::Beta;
use super::age::{BUCKETS, start};
use super::calibration::Calibrations;
use super::hazard::PAIRS;

/// Names of block types and of transitions, in the order of the pairs.
const TYPES: [&str; 4] = ["system", "tool", "user", "reasoning"];
const TRANSITIONS: [&str; 4] = ["shared", "first", "continued", "left_behind"];

/// The posterior of one pair: how likely the block of a pair is reused, ever.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairPosterior {
    /// What the block holds: system, tool, user or reasoning.
    pub block_type: &'static str,
    /// How it was reached: shared, first, continued or `left_behind`.
    pub transition: &'static str,
    /// Mean of the Beta posterior.
    pub mean: f64,
    /// Where its central 90 % begin, and where they end.
    pub interval: (f64, f64),
    /// Evidence that has not faded: lives that ended, in reuses of these.
    pub lives: f64,
    /// Lives that ended in a reuse.
    pub reuses: f64,
    /// For each age bucket, the chance that a block which was not reused before is reused in it:
    /// means of the Beta posteriors under the priors that the pair takes from its type.
    pub hazard: [f64; BUCKETS],
}

/// The block type and the transition of a pair by its number.
pub fn pair_names(pair: usize) -> (&'static str, &'static str) {
    (TYPES[pair / 4], TRANSITIONS[pair % 4])
}

/// Where each age bucket starts, in seconds; the last one is open.
pub fn ages() -> [f64; BUCKETS] {
    std::array::from_fn(start)
}

/// What the posteriors are computed from: small, and copied at once, so that a store need not hold
/// its lock for the quantiles.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// Reuses and lives of each pair.
    lives: [(f64, f64); PAIRS],
    hazards: Vec<[f64; BUCKETS]>,
}

impl Evidence {
    /// The posteriors of the 16 pairs, under a prior of one reuse in two lives.
    pub fn posterior(&self) -> [PairPosterior; PAIRS] {
        std::array::from_fn(|pair| {
            let (reuses, lives) = self.lives[pair];
            let (a, b) = (reuses + 1.0, (lives - reuses).max(0.0) + 1.0);
            let (block_type, transition) = pair_names(pair);
            PairPosterior {
                block_type,
                transition,
                mean: a / (a + b),
                interval: (quantile(a, b, 0.05), quantile(a, b, 0.95)),
                lives,
                reuses,
                hazard: self.hazards[pair],
            }
        })
    }
}

impl Beta {
    /// What the posteriors of the 16 pairs are computed from.
    pub fn evidence(&self) -> Evidence {
        let (_, hazards) = self.table.pair_hazards();
        Evidence { lives: std::array::from_fn(|pair| self.table.lives(pair)), hazards }
    }

    /// The posteriors of the 16 pairs, under a prior of one reuse in two lives.
    pub fn posterior(&self) -> [PairPosterior; PAIRS] {
        self.evidence().posterior()
    }

    /// How what was predicted compares with what came, since this was made.
    pub fn calibrations(&self) -> Calibrations {
        self.table.calibrations
    }
}

/// Logarithm of the gamma function, by Stirling's series after a few steps up.
fn log_gamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 10.0 {
        shift += x.ln();
        x += 1.0;
    }
    let series = 1.0 / (12.0 * x) - 1.0 / (360.0 * x.powi(3)) + 1.0 / (1260.0 * x.powi(5));
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series - shift
}

/// The chance that a Beta(a, b) variable is below `x`: the continued fraction of the incomplete
/// beta function, from its far end.
fn below(a: f64, b: f64, x: f64) -> f64 {
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - below(b, a, 1.0 - x);
    }
    if x <= 0.0 {
        return 0.0;
    }
    let mut fraction = 1.0;
    for m in (1..=400).rev() {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        fraction = 1.0 + even / (1.0 + odd / fraction);
    }
    let first = -(a + b) * x / (a + 1.0);
    let scale = log_gamma(a + b) - log_gamma(a) - log_gamma(b) + a * x.ln() + b * (1.0 - x).ln();
    scale.exp() / (a * (1.0 + first / fraction))
}

/// The value that a Beta(a, b) variable is below with chance `p`.
fn quantile(a: f64, b: f64, p: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if below(a, b, middle) < p { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::trace;
    use crate::{BetaOptions, Cache};

    #[test]
    fn quantiles_are_those_of_known_cases() {
        // Beta(1, 1) is uniform, Beta(n, 1) has x^n below x.
        assert!((quantile(1.0, 1.0, 0.3) - 0.3).abs() < 1e-9);
        assert!((quantile(7.0, 1.0, 0.05) - 0.05f64.powf(1.0 / 7.0)).abs() < 1e-9);
        assert!((quantile(1.0, 500.0, 0.95) - (1.0 - 0.05f64.powf(1.0 / 500.0))).abs() < 1e-9);
        for (a, b) in [(3.0, 4.0), (200.0, 10.0), (40_000.0, 90_000.0)] {
            let median = quantile(a, b, 0.5);
            let about = (a - 1.0 / 3.0) / (a + b - 2.0 / 3.0);
            assert!((median - about).abs() < 2e-3, "{a} {b}: {median}, about {about}");
        }
    }

    #[test]
    fn evidence_narrows_the_interval() {
        let mut beta = Beta::new(40, BetaOptions::SPEC, 1);
        let before = beta.posterior();
        assert!(before.iter().all(|pair| pair.lives == 0.0 && pair.mean == 0.5));
        for owned in trace(5, 4000) {
            beta.request(&owned.request());
        }
        let (copy, after) = (beta.evidence(), beta.posterior());
        for owned in trace(6, 100) {
            beta.request(&owned.request());
        }
        assert_eq!(copy.posterior(), after, "a copy stays what it was");
        assert_ne!(beta.posterior(), after);
        let width = |pair: &PairPosterior| pair.interval.1 - pair.interval.0;
        let mut seen = 0;
        for (before, after) in before.iter().zip(&after) {
            assert!(after.interval.0 <= after.mean && after.mean <= after.interval.1);
            if after.lives > 50.0 {
                seen += 1;
                assert!(width(after) < width(before) / 2.0, "{after:?}");
            }
        }
        assert!(seen > 3, "{after:?}");
        let ages = ages();
        assert!(ages[0] == 0.0 && ages.windows(2).all(|pair| pair[0] < pair[1]));
        let within = |hazard: &[f64; BUCKETS]| hazard.iter().all(|h| (0.0..1.0).contains(h));
        assert!(after.iter().all(|pair| within(&pair.hazard)), "{after:?}");
        let reused = after.iter().find(|pair| pair.reuses > 50.0).unwrap();
        assert!(reused.hazard.iter().sum::<f64>() > 0.2, "{reused:?}");
    }
}
