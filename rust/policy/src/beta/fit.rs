//! The request score, fitted: a log-linear intensity whose weights have Gaussian posteriors.
//!
//! Each life under observation is an observation of a Poisson intensity, and moves all weights that
//! it has a part in at once, each by how uncertain it still is. So features that say the same share
//! what they explain, and those that say nothing cost little: more of them can be asked, and pairs.

use super::score::{Features, VALUES};

/// Features of a request that have weights, and pairs of features that have weights of their own.
pub(crate) const FEATURES: usize = 11;
const PAIRS: [(usize, usize); 3] = [(0, 1), (0, 3), (1, 3)];
/// Where the weights of pairs begin: behind the one of all requests, and those of features.
const FIRST_PAIR: usize = 1 + FEATURES * VALUES;
const WEIGHTS: usize = FIRST_PAIR + PAIRS.len() * VALUES * VALUES;
/// How many weights a request has a part in.
const ACTIVE: usize = 1 + FEATURES + PAIRS.len();

/// Variances of the weights before there is evidence: of a feature's as much as 30 reuses leave.
const VARIANCE: f32 = 1.0 / 30.0;
const VARIANCE_OF_PAIR: f32 = 1.0 / 60.0;
const VARIANCE_OF_ALL: f32 = 0.0001;
/// Bound of a logarithm of an intensity.
const MOST: f32 = 6.0;

/// A weight's posterior.
#[derive(Clone, Copy, Debug)]
struct Weight {
    mean: f32,
    variance: f32,
}

/// The weights.
#[derive(Clone, Debug)]
pub(crate) struct Fit(Vec<Weight>);

fn prior(weight: usize) -> f32 {
    match weight {
        0 => VARIANCE_OF_ALL,
        1..FIRST_PAIR => VARIANCE,
        _ => VARIANCE_OF_PAIR,
    }
}

/// The weights that such a request has a part in.
fn active(features: Features) -> [usize; ACTIVE] {
    std::array::from_fn(|at| match at {
        0 => 0,
        1..=FEATURES => 1 + VALUES * (at - 1) + features.value(at - 1),
        _ => {
            let pair = at - 1 - FEATURES;
            let (a, b) = PAIRS[pair];
            let values = features.value(a) * VALUES + features.value(b);
            FIRST_PAIR + pair * VALUES * VALUES + values
        }
    })
}

impl Fit {
    pub(crate) fn new() -> Self {
        let weight = |number| Weight { mean: 0.0, variance: prior(number) };
        Self((0..WEIGHTS).map(weight).collect())
    }

    /// log2 of how much more reuse such a request brings than all do.
    pub(crate) fn log2(&self, features: Features) -> f32 {
        let sum: f32 = active(features).iter().map(|weight| self.0[*weight].mean).sum();
        sum * std::f32::consts::LOG2_E
    }

    /// Counts as many reuses as were expected at the global hazard, and one if `reused`.
    pub(crate) fn add(&mut self, features: Features, expected: f32, reused: bool) {
        let active = active(features);
        let (mut sum, mut spread) = (0.0, 0.0);
        for weight in active {
            sum += self.0[weight].mean;
            spread += self.0[weight].variance;
        }
        let rate = expected * sum.clamp(-MOST, MOST).exp();
        let surprise = if reused { 1.0 - rate } else { -rate };
        // The information of the observation is the rate: a Kalman step with a diagonal covariance.
        let share = 1.0 / (1.0 + rate * spread);
        for weight in active {
            let Weight { mean, variance } = &mut self.0[weight];
            *mean += *variance * surprise * share;
            *variance -= *variance * *variance * rate * share;
        }
    }

    /// The weights that were told anything: number, mean and variance.
    pub(crate) fn told(&self) -> impl Iterator<Item = (u16, f32, f32)> + '_ {
        let all = self.0.iter().enumerate();
        let told = all.filter(|(number, weight)| weight.variance < prior(*number));
        told.map(|(number, weight)| (number as u16, weight.mean, weight.variance))
    }

    /// Sets a weight, if it is one and could have been told this.
    pub(crate) fn set(&mut self, (number, mean, variance): (u16, f32, f32)) -> bool {
        let sound = mean.is_finite() && mean.abs() < 100.0 && variance > 0.0;
        match self.0.get_mut(usize::from(number)) {
            Some(weight) if sound && variance <= prior(number.into()) => {
                *weight = Weight { mean, variance };
                true
            }
            _ => false,
        }
    }

    /// Lets evidence fade: what it moved the means by goes with it.
    pub(crate) fn rebuild(&mut self, decay: f32) {
        for (number, weight) in self.0.iter_mut().enumerate() {
            let prior = prior(number);
            let told = 1.0 - weight.variance / prior;
            if told > f32::EPSILON {
                let evidence = (1.0 / weight.variance - 1.0 / prior) * decay;
                weight.variance = 1.0 / (evidence + 1.0 / prior);
                weight.mean *= (1.0 - weight.variance / prior) / told;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Lives of requests whose first feature alone decides: a reuse in half of them, or none. The
    /// second one has always the same value as the first, the others are noise.
    fn taught(lives: usize) -> Fit {
        let (mut fit, mut rng) = (Fit::new(), Rng::new(5));
        for _ in 0..lives {
            let own = rng.below(2) as u8;
            let noise: [u8; FEATURES - 2] = std::array::from_fn(|_| rng.below(16) as u8);
            let mut values = [own; FEATURES];
            values[2..].copy_from_slice(&noise);
            fit.add(Features::new(values), 0.25, own == 1 && rng.below(2) == 0);
        }
        fit
    }

    #[test]
    fn features_that_say_the_same_do_not_count_twice() {
        let fit = taught(20_000);
        let (high, low) = (Features::new([1; FEATURES]), Features::new([0; FEATURES]));
        assert!((fit.log2(high) - 1.0).abs() < 0.3, "twice as many: {}", fit.log2(high));
        assert!(fit.log2(low) < -2.0, "hardly any: {}", fit.log2(low));
    }

    #[test]
    fn evidence_fades() {
        let mut fit = taught(2000);
        let features = Features::new([1; FEATURES]);
        let before = fit.log2(features);
        fit.rebuild(1.0);
        assert!((fit.log2(features) - before).abs() < 1e-4, "nothing passed");
        (0..40).for_each(|_| fit.rebuild(0.5));
        assert!(fit.log2(features).abs() < 1e-3, "{before}, then {}", fit.log2(features));
        let prior = Fit::new();
        for (faded, new) in fit.0.iter().zip(&prior.0) {
            assert!((faded.variance / new.variance - 1.0).abs() < 1e-3, "as uncertain as ever");
        }
    }
}
