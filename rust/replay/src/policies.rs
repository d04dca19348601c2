//! Policies by name.

use std::fmt;
use tiered_kv_policy::classic::{Ali, Arc, Classic, Fifo, Frequency, LeastRecent, Lhd, Min};
use tiered_kv_policy::classic::{NextUses, S3Fifo, Sieve, TinyLfu, TwoQ};
use tiered_kv_policy::{Beta, BetaOptions, Cache};

/// All policies that `all` stands for.
pub const ALL: &[&str] = &[
    "fifo",
    "lru",
    "lfu-da",
    "gdsf",
    "2q",
    "arc",
    "s3-fifo",
    "sieve",
    "w-tinylfu",
    "lhd",
    "ali",
    "beta",
    "beta-spec",
    "min",
];

/// The ablation, from the class alone to the policy as specified.
pub const ABLATION: &[&str] = &[
    "beta-class",
    "beta-age",
    "beta-ghosts",
    "beta-leaf",
    "beta-session",
    "beta-gap",
    "beta-spec",
];

/// From the policy as specified to the default, one change more in each, and that with the guard.
pub const STEPS: &[&str] =
    &["beta-spec", "beta-draw-256", "beta-growth", "beta-fit", "beta-pace", "beta", "beta-guard"];

/// What was tried besides to do better than the policy as specified, one change each.
pub const TRIED: &[&str] = &[
    "beta-draw-1024",
    "beta-slack-0",
    "beta-gap-0.5",
    "beta-prior-20",
    "beta-prior-80",
    "beta-half-20000",
    "beta-no-left",
];

/// A name that no policy has.
#[derive(Clone, Debug)]
pub struct Unknown(pub String);

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "policies: `{}` is none; there are all, ablation, steps, tried, {}",
            self.0,
            ALL.join(", ")
        )
    }
}

impl std::error::Error for Unknown {}

/// The name as the program keeps it, if a policy has it.
pub fn known(name: &str) -> Option<&'static str> {
    ALL.iter().chain(ABLATION).chain(STEPS).chain(TRIED).find(|known| **known == name).copied()
}

/// The options of the predictor of this name, if it is one.
pub fn predictor(name: &str) -> Option<BetaOptions> {
    BetaOptions::named(name)
}

/// Whether draws decide: then seeds differ.
pub(crate) fn is_seeded(name: &str) -> bool {
    name.starts_with("beta") || name == "lhd"
}

/// An empty cache of `capacity` blocks under the policy of this name, which is a known one.
pub(crate) fn make<'a>(
    name: &str,
    capacity: usize,
    seed: u64,
    future: &'a NextUses,
) -> Box<dyn Cache + 'a> {
    match name {
        "fifo" => Box::new(Classic(Fifo::new(capacity))),
        "lru" => Box::new(Classic(LeastRecent::new(capacity))),
        "lfu-da" => Box::new(Classic(Frequency::lfu_da(capacity))),
        "gdsf" => Box::new(Classic(Frequency::gdsf(capacity))),
        "2q" => Box::new(Classic(TwoQ::new(capacity))),
        "arc" => Box::new(Classic(Arc::new(capacity))),
        "s3-fifo" => Box::new(Classic(S3Fifo::new(capacity))),
        "sieve" => Box::new(Classic(Sieve::new(capacity))),
        "w-tinylfu" => Box::new(Classic(TinyLfu::new(capacity))),
        "lhd" => Box::new(Classic(Lhd::new(capacity, seed))),
        "ali" => Box::new(Classic(Ali::new(capacity))),
        "min" => Box::new(Min::new(capacity, future)),
        _ => {
            let options = BetaOptions::named(name).unwrap_or(BetaOptions::DEFAULT);
            Box::new(Beta::new(capacity, options, seed))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_has_the_name_that_it_was_asked_for_by() {
        let future = NextUses::default();
        for name in ALL.iter().chain(ABLATION).chain(STEPS).chain(TRIED) {
            assert_eq!(make(name, 10, 1, &future).name(), *name);
            assert_eq!(known(name), Some(*name));
        }
        assert_eq!(known("clairvoyant"), None);
    }
}
