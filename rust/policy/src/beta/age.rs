//! Buckets of ages: two for each doubling, from a 64th of a second.

/// Number of age buckets; the last one is open.
pub const BUCKETS: usize = 56;

/// Where bucket 0 ends, in seconds.
const FIRST: f64 = 1.0 / 64.0;

/// The bucket of an age in seconds.
#[inline]
pub(crate) fn bucket(age: f64) -> usize {
    let units = age / FIRST;
    if units < 1.0 {
        return 0;
    }
    let bits = units.to_bits();
    let exponent = (bits >> 52) as usize - 1023;
    let half = (bits & ((1 << 52) - 1)) >= (std::f64::consts::SQRT_2.to_bits() & ((1 << 52) - 1));
    (1 + 2 * exponent + usize::from(half)).min(BUCKETS - 1)
}

/// Where a bucket starts, in seconds.
pub(crate) fn start(bucket: usize) -> f64 {
    if bucket == 0 { 0.0 } else { FIRST * 2f64.powf((bucket as f64 - 1.0) / 2.0) }
}

/// Starts and widths of all buckets, computed once.
#[derive(Clone, Debug)]
pub(crate) struct Ages {
    starts: [f64; BUCKETS],
    /// Width of each bucket in seconds; the open one is given the width it would have.
    pub(crate) widths: [f64; BUCKETS],
}

impl Ages {
    pub(crate) fn new() -> Self {
        let starts = std::array::from_fn(start);
        let widths = std::array::from_fn(|bucket| start(bucket + 1) - start(bucket));
        Self { starts, widths }
    }

    /// Where a bucket ends, in seconds; the last one does not.
    #[inline]
    pub(crate) fn end(&self, bucket: usize) -> f64 {
        self.starts.get(bucket + 1).copied().unwrap_or(f64::INFINITY)
    }

    /// The bucket of `age`, and which part of the bucket has passed at that age.
    pub(crate) fn place(&self, age: f64) -> (usize, f32) {
        let bucket = bucket(age);
        let part = (age - self.starts[bucket]) / self.widths[bucket];
        (bucket, part.clamp(0.0, 1.0) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_age_is_in_the_bucket_whose_bounds_hold_it() {
        let mut age = 1e-4;
        while age < 1e8 {
            let k = bucket(age);
            assert!(start(k) <= age * (1.0 + 1e-12), "{age} before bucket {k}");
            assert!(k == BUCKETS - 1 || age < start(k + 1) * (1.0 + 1e-12), "{age} after {k}");
            age *= 1.013;
        }
        assert_eq!((bucket(0.0), bucket(FIRST), bucket(f64::MAX)), (0, 1, BUCKETS - 1));
    }
}
