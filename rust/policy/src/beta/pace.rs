//! When a session's next request comes: a regression of its gap on what is known of it.
//!
//! An agent's next step waits for the output to be written and for its tools; a person reads first.
//! So the length of an output says when to expect the next request, beside how long the last gaps
//! were. What is expected splits the cells in place of the gaps that were, and stretches ages.

use super::hazard::{Scale, UNSCALED};

/// What a gap is regressed on: one, whether there was a gap before, and what [`Before`] tells.
const TERMS: usize = 7;
/// Strength of the prior that a slope is zero: as many gaps as would have to speak for it.
const STRENGTH: f64 = 100.0;
/// What keeps the matrix positive definite where a term does not vary.
const LEAST: f64 = 1e-3;
/// Levels of gaps to expect, one a doubling, and the one of the mean gap.
const LEVELS: f32 = 8.0;
const MIDDLE: f32 = 4.0;

/// What is known of a request when the gap to the session's next one is expected.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Before {
    /// The moving average of log2 of the session's gaps in seconds, and the last one, if any.
    pub(crate) gaps: Option<(f32, f32)>,
    pub(crate) output_tokens: u32,
    pub(crate) input_tokens: u32,
    pub(crate) new_tokens: u32,
}

impl Before {
    fn terms(self) -> [f32; TERMS] {
        let log = |tokens: u32| (1.0 + tokens as f32).log2();
        let (has, (average, last)) = (self.gaps.is_some(), self.gaps.unwrap_or_default());
        let [output, input, new] =
            [self.output_tokens, self.input_tokens, self.new_tokens].map(log);
        [1.0, f32::from(u8::from(has)), average, last, output, input, new]
    }
}

/// The regression, over gaps that fade.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    squares: [[f64; TERMS]; TERMS],
    products: [f64; TERMS],
    /// Frozen between rebuilds.
    weights: [f32; TERMS],
    mean: f32,
}

impl Pace {
    /// After such a request the session's next one came after a gap with this log2.
    pub(crate) fn add(&mut self, before: Before, gap: f32) {
        let terms = before.terms();
        for (at, row) in self.squares.iter_mut().enumerate() {
            self.products[at] += f64::from(terms[at] * gap);
            for (sum, term) in row.iter_mut().zip(&terms) {
                *sum += f64::from(terms[at] * term);
            }
        }
    }

    /// How many doublings longer than the mean gap the one after such a request will be.
    pub(crate) fn expect(&self, before: Before) -> f32 {
        let terms = before.terms();
        terms.iter().zip(&self.weights).map(|(a, w)| a * w).sum::<f32>() - self.mean
    }

    /// All sums, for whoever keeps them.
    pub(crate) fn sums(&self) -> impl Iterator<Item = f64> + '_ {
        self.squares.iter().flatten().chain(&self.products).copied()
    }

    /// The same, to be set.
    pub(crate) fn sums_mut(&mut self) -> impl Iterator<Item = &mut f64> + '_ {
        self.squares.iter_mut().flatten().chain(&mut self.products)
    }

    /// Lets the gaps fade and takes the weights anew.
    pub(crate) fn rebuild(&mut self, decay: f32) {
        let fade = f64::from(decay);
        self.squares.iter_mut().flatten().chain(&mut self.products).for_each(|sum| *sum *= fade);
        self.mean = (self.products[0] / (self.squares[0][0] + 1.0)) as f32;
        self.weights = self.solve().map(|weight| weight as f32);
    }

    /// The weights, by elimination.
    fn solve(&self) -> [f64; TERMS] {
        let (mut a, mut x) = (self.squares, self.products);
        let count = self.squares[0][0].max(1.0);
        a[0][0] += LEAST;
        for (at, row) in a.iter_mut().enumerate().skip(1) {
            let mean = self.squares[0][at] / count;
            let variance = self.squares[at][at] / count - mean * mean;
            row[at] += STRENGTH * variance.max(0.0) + LEAST;
        }
        for at in 0..TERMS {
            let (above, below) = a.split_at_mut(at + 1);
            let pivot = &above[at];
            for (row, number) in below.iter_mut().zip(at + 1..) {
                let factor = row[at] / pivot[at];
                row.iter_mut().zip(pivot).for_each(|(to, from)| *to -= factor * from);
                x[number] -= factor * x[at];
            }
        }
        for at in (0..TERMS).rev() {
            let rest: f64 = (at + 1..TERMS).map(|column| a[at][column] * x[column]).sum();
            x[at] = (x[at] - rest) / a[at][at];
        }
        x
    }
}

/// The gap level of what is expected.
pub(crate) fn level(expected: f32) -> usize {
    (expected + MIDDLE).clamp(0.0, LEVELS - 1.0) as usize
}

/// The scale of ages at which the gap that is expected is as long as the mean one.
pub(crate) fn scale(expected: f32) -> Scale {
    (f32::from(UNSCALED) + 2.0 * expected + 0.5).clamp(0.0, f32::from(2 * UNSCALED - 1)) as Scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Gaps that double with each doubling of the output, and do not depend on anything else.
    fn taught(gaps: u32) -> (Pace, Rng) {
        let (mut pace, mut rng) = (Pace::default(), Rng::new(3));
        for _ in 0..gaps {
            let before = some(&mut rng);
            let noise = rng.unit() as f32 - 0.5;
            pace.add(before, (1.0 + before.output_tokens as f32).log2() - 3.0 + noise);
        }
        pace.rebuild(1.0);
        (pace, rng)
    }

    fn some(rng: &mut Rng) -> Before {
        let tokens = |rng: &mut Rng| (10.0 * rng.unit()).exp2() as u32;
        let gaps = (rng.below(2) == 0).then(|| (rng.unit() as f32, rng.unit() as f32));
        let (output_tokens, input_tokens, new_tokens) = (tokens(rng), tokens(rng), tokens(rng));
        Before { gaps, output_tokens, input_tokens, new_tokens }
    }

    #[test]
    fn what_decides_gaps_is_found_among_what_does_not() {
        let (pace, mut rng) = taught(5000);
        let expected = |before| pace.expect(before) + pace.mean;
        for _ in 0..100 {
            let before = some(&mut rng);
            let truth = (1.0 + before.output_tokens as f32).log2() - 3.0;
            assert!((expected(before) - truth).abs() < 0.2, "{before:?}: {}", expected(before));
        }
    }

    #[test]
    fn few_gaps_say_little() {
        let long = Before { output_tokens: 1 << 20, ..Before::default() };
        let (few, many) = (taught(10).0.expect(long), taught(5000).0.expect(long));
        assert!(few.abs() < many / 2.0 && many > 10.0, "{few} and {many}");
        assert_eq!(Pace::default().expect(long), 0.0, "as the mean, before there is any");
    }

    #[test]
    fn levels_and_scales_end_somewhere() {
        for (expected, level_of, scale_of) in
            [(0.0, 4, UNSCALED), (-99.0, 0, 0), (99.0, 7, 2 * UNSCALED - 1), (1.0, 5, UNSCALED + 2)]
        {
            assert_eq!((level(expected), scale(expected)), (level_of, scale_of), "{expected}");
        }
    }
}
