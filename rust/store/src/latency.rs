//! How long things took, in buckets.

use serde::{Deserialize, Serialize};
use tiered_kv_io::Nanos;

/// Where the buckets of a [`Latency`] end, in nanoseconds; one more has what took longer.
pub const LATENCY_BOUNDS_NS: [Nanos; 14] = [
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// How often something took how long.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// By bucket, each without those before it.
    pub counts: [u64; LATENCY_BOUNDS_NS.len() + 1],
    /// All durations, in nanoseconds.
    pub sum_ns: u64,
}

impl Latency {
    /// Counts a duration.
    pub(crate) fn took(&mut self, duration: Nanos) {
        self.counts[LATENCY_BOUNDS_NS.partition_point(|bound| *bound < duration)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(duration);
    }
}

/// Latencies that the state machine sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latencies {
    /// Gets that had to wait for a drive, from the call to its end, however it ended.
    pub load: Latency,
    /// Groups of blocks written behind, from their first payload to durable or failed.
    pub commit: Latency,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_in_its_own_bucket() {
        let mut latency = Latency::default();
        for one in [0, 500_000, 500_001, 10_000_000_000, 10_000_000_001] {
            latency.took(one);
        }
        assert_eq!((latency.counts[0], latency.counts[1]), (2, 1));
        assert_eq!((latency.counts[13], latency.counts[14]), (1, 1));
        assert_eq!(latency.sum_ns, 20_001_000_002);
    }
}
