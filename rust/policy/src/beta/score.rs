//! The request score: which requests are followed by more reuse than their cell predicts.

use super::fit::{self, Fit};

/// Features that the score as specified looks at, each of 16 values; the fitted one has more.
const FEATURES: usize = 6;
pub(crate) const VALUES: usize = 16;
/// Strength of the prior around "as predicted", in reuses.
const PRIOR: f32 = 30.0;

/// The values of a request's features, four bits each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features(u64);

impl Features {
    pub(crate) fn new(values: [u8; fit::FEATURES]) -> Self {
        let pack = |packed, value: u8| packed << 4 | u64::from(value.min(15));
        Self(values.into_iter().rev().fold(0, pack))
    }

    pub(crate) fn value(self, feature: usize) -> usize {
        (self.0 >> (4 * feature)) as usize & 15
    }
}

/// What is known of a request when its features are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// Requests of the session up to this one.
    pub(crate) turn: u32,
    pub(crate) new_tokens: u32,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    /// Seconds since the session's last request.
    pub(crate) gap: f64,
    pub(crate) kind: u8,
    /// Blocks at the front that were known.
    pub(crate) known: u32,
    /// Tokens of the session's last output, and new ones of its last prompt; zero if it had none.
    pub(crate) last_output: u32,
    pub(crate) last_new: u32,
    /// The moving average of log2 of the session's gaps, meaningless on its first request.
    pub(crate) average: f32,
    /// Seconds since the session's first request.
    pub(crate) age: f32,
}

/// Where each bucket of turns ends.
const TURNS: [u32; 9] = [1, 2, 3, 4, 5, 7, 10, 15, 25];

/// The floor of log2 of a number of tokens, less `offset`, as a feature's value.
fn log2(tokens: u32, offset: u32) -> u8 {
    tokens.max(1).ilog2().saturating_sub(offset).min(15) as u8
}

impl Facts {
    pub(crate) fn features(&self) -> Features {
        let turn = TURNS.iter().take_while(|last| self.turn > **last).count();
        let gap = if self.turn <= 1 { 0.0 } else { 1.0 + (1.0 + self.gap.max(0.0)).log2() };
        Features::new([
            turn as u8,
            log2(self.new_tokens, 0),
            log2(self.input_tokens, 2),
            log2(self.output_tokens, 0),
            gap.clamp(0.0, 15.0) as u8,
            self.kind.min(15),
            log2(self.known.saturating_add(1), 0),
            log2(self.last_output, 0),
            log2(self.last_new, 0),
            if self.turn <= 1 { 0 } else { (self.average + 2.0).clamp(1.0, 15.0) as u8 },
            (1.0 + self.age.max(0.0)).log2().clamp(0.0, 15.0) as u8,
        ])
    }
}

/// Reuses seen and expected for each value of each feature.
#[derive(Clone, Debug)]
pub(crate) struct Scores {
    reuses: [[f32; VALUES]; FEATURES],
    expected: [[f32; VALUES]; FEATURES],
    /// How much more reuse a value brings: frozen between rebuilds.
    ratio: [[f32; VALUES]; FEATURES],
    log2: [[f32; VALUES]; FEATURES],
    /// In place of all that.
    fit: Option<Fit>,
}

impl Scores {
    /// A score that is fitted, or one as specified.
    pub(crate) fn new(fitted: bool) -> Self {
        let zero = [[0.0; VALUES]; FEATURES];
        let ratio = [[1.0; VALUES]; FEATURES];
        let fit = fitted.then(Fit::new);
        Self { reuses: zero, expected: zero, ratio, log2: zero, fit }
    }

    /// The level of a request, 0 to 7: half a doubling of intensity each, 4 as predicted.
    pub(crate) fn level(&self, features: Features) -> usize {
        let sum: f32 = match &self.fit {
            Some(fit) => fit.log2(features),
            None => (0..FEATURES).map(|f| self.log2[f][features.value(f)]).sum(),
        };
        (sum / 0.5 + 4.0).clamp(0.0, 7.0) as usize
    }

    /// Counts as many reuses as were expected at the global hazard, and one if `reused`. A feature
    /// is expected to account for what the others leave, or correlated features would count twice.
    pub(crate) fn add(&mut self, features: Features, expected: f32, reused: bool) {
        if let Some(fit) = &mut self.fit {
            return fit.add(features, expected, reused);
        }
        let ratios: [f32; FEATURES] =
            std::array::from_fn(|feature| self.ratio[feature][features.value(feature)]);
        let all = expected * ratios.iter().product::<f32>();
        for (feature, ratio) in ratios.into_iter().enumerate() {
            let value = features.value(feature);
            self.expected[feature][value] += all / ratio;
            if reused {
                self.reuses[feature][value] += 1.0;
            }
        }
    }

    /// The weights that take the place of the counts, where the score is fitted.
    pub(crate) fn fit(&self) -> Option<&Fit> {
        self.fit.as_ref()
    }

    pub(crate) fn fit_mut(&mut self) -> Option<&mut Fit> {
        self.fit.as_mut()
    }

    /// Reuses and expected reuses of every value of every feature.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (f32, f32)> + '_ {
        let reuses = self.reuses.as_flattened().iter().copied();
        reuses.zip(self.expected.as_flattened().iter().copied())
    }

    /// The same, to be set.
    pub(crate) fn counts_mut(&mut self) -> impl Iterator<Item = (&mut f32, &mut f32)> + '_ {
        self.reuses.as_flattened_mut().iter_mut().zip(self.expected.as_flattened_mut())
    }

    /// Lets the counts fade and takes the ratios anew.
    pub(crate) fn rebuild(&mut self, decay: f32) {
        if let Some(fit) = &mut self.fit {
            return fit.rebuild(decay);
        }
        for feature in 0..FEATURES {
            for value in 0..VALUES {
                let reuses = &mut self.reuses[feature][value];
                let expected = &mut self.expected[feature][value];
                *reuses *= decay;
                *expected *= decay;
                let ratio = (*reuses + PRIOR) / (*expected + PRIOR);
                self.ratio[feature][value] = ratio;
                self.log2[feature][value] = ratio.log2();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_floored_and_bounded() {
        let facts = Facts {
            turn: 8,
            new_tokens: 0,
            input_tokens: 1023,
            output_tokens: u32::MAX,
            gap: 7.5,
            kind: 200,
            known: 0,
            last_output: 300,
            last_new: 0,
            average: -9.0,
            age: 1e9,
        };
        let features = facts.features();
        let values: Vec<usize> = (0..fit::FEATURES).map(|f| features.value(f)).collect();
        assert_eq!(values, [6, 0, 7, 15, 4, 15, 0, 8, 0, 1, 15]);
        let first = Facts { turn: 1, gap: 9.0, ..facts }.features();
        assert_eq!((first.value(0), first.value(4)), (0, 0));
    }

    #[test]
    fn a_value_that_brings_reuse_raises_the_level() {
        let (often, never) = (Features::new([1; _]), Features::new([2; _]));
        for fitted in [false, true] {
            let mut scores = Scores::new(fitted);
            for _ in 0..300 {
                scores.add(often, 0.1, true);
                scores.add(never, 0.1, false);
            }
            assert_eq!(scores.level(often) > 4, fitted, "ratios are frozen until the rebuild");
            scores.rebuild(1.0);
            assert!(scores.level(often) > 4);
            assert!(scores.level(never) < 4);
        }
    }
}
