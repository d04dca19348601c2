//! The Gittins index of a hazard curve: hits per second of residence under the best stopping rule.

use super::age::BUCKETS;

/// A stretch of buckets that any good rule keeps whole.
#[derive(Clone, Copy)]
struct Stretch {
    hits: f64,
    seconds: f64,
    survival: f64,
}

/// The index at each age bucket, for the probability `hazard` of a reuse in a bucket given that the
/// block reached it, and the buckets' `widths` in seconds.
///
/// It is the largest ratio of expected hits to expected residence over all ages to stop at. From
/// the last bucket back, a bucket takes in the stretch behind it while that one's ratio is higher:
/// the ratio of a stretch does not depend on the chance to reach it, so this finds the maximum.
pub fn gittins(hazard: &[f64; BUCKETS], widths: &[f64; BUCKETS]) -> [f32; BUCKETS] {
    let mut index = [0.0; BUCKETS];
    let mut stack = [Stretch { hits: 0.0, seconds: 1.0, survival: 1.0 }; BUCKETS];
    let mut depth = 0;
    for bucket in (0..BUCKETS).rev() {
        let h = hazard[bucket];
        let mut own =
            Stretch { hits: h, seconds: widths[bucket] * (1.0 - h / 2.0), survival: 1.0 - h };
        while depth > 0 {
            let next = stack[depth - 1];
            if next.hits * own.seconds <= own.hits * next.seconds {
                break;
            }
            own.hits += own.survival * next.hits;
            own.seconds += own.survival * next.seconds;
            own.survival *= next.survival;
            depth -= 1;
        }
        stack[depth] = own;
        depth += 1;
        index[bucket] = (own.hits / own.seconds) as f32;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beta::age::Ages;
    use crate::rng::Rng;

    /// The definition: every age to stop at, tried.
    fn exhaustive(hazard: &[f64; BUCKETS], widths: &[f64; BUCKETS]) -> [f64; BUCKETS] {
        std::array::from_fn(|from| {
            let (mut best, mut reach, mut hits, mut seconds) = (0f64, 1.0, 0.0, 0.0);
            for e in from..BUCKETS {
                hits += reach * hazard[e];
                seconds += reach * widths[e] * (1.0 - hazard[e] / 2.0);
                reach *= 1.0 - hazard[e];
                best = best.max(hits / seconds);
            }
            best
        })
    }

    #[test]
    fn equals_the_scan_of_every_stopping_age() {
        let widths = Ages::new().widths;
        let mut rng = Rng::new(7);
        for round in 0..500 {
            let hazard: [f64; BUCKETS] = std::array::from_fn(|_| {
                let u = rng.below(1 << 20) as f64 / f64::from(1 << 20);
                if round % 2 == 0 { u * 0.95 } else { u.powi(8) * 0.95 }
            });
            let (fast, slow) = (gittins(&hazard, &widths), exhaustive(&hazard, &widths));
            for bucket in 0..BUCKETS {
                let (a, b) = (f64::from(fast[bucket]), slow[bucket]);
                assert!((a - b).abs() <= 1e-6 * b, "round {round}, bucket {bucket}: {a} {b}");
            }
        }
    }
}
