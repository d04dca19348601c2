//! What a replay over tiers is given: tiers in blocks, and service models in seconds.

use serde::Deserialize;
use tiered_kv_policy::BetaOptions;
use tiered_kv_types::Tier;

/// Most blocks of a tier, service models of a run, and instances of a model.
const MAX_BLOCKS: u64 = 1 << 40;
const MAX_SERVICES: usize = 256;
const MAX_INSTANCES: usize = 1 << 16;
/// Longest time that is not a mistake, in seconds.
const MAX_SECONDS: f64 = 1e9;

/// What fills a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Filled {
    /// Every block that is stored, as it is stored: it lands there or is written behind.
    Puts,
    /// What leaves the tier above, where it is worth more than what it would displace.
    Victims,
}

/// One tier.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierSpec {
    /// Which one. GPU memory is the serving engine's, which evicts by recency; all others are the
    /// store's.
    pub tier: Tier,
    /// Blocks that it holds, at least one.
    pub blocks: u64,
    /// What fills it; the first of the store's tiers is filled by puts whatever stands here.
    pub filled: Filled,
}

/// How long it takes to serve a request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Seconds to read a block, of each tier.
    pub read_s: Vec<f64>,
    /// Seconds until the first byte, of each tier.
    pub latency_s: Vec<f64>,
    /// Seconds to compute a token, without attention to those before it.
    pub token_s: f64,
    /// Seconds of a token's attention to one before it.
    pub pair_s: f64,
    /// Instances of the model, each of which computes one prompt at a time.
    pub instances: usize,
}

/// A replay over the tiers of a node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// The store's policy: `lru`, `beta`, or a variant of that.
    pub policy: String,
    /// Seed of its draws.
    pub seed: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Part of the moved blocks that a window ahead may waste; zero for no window.
    pub waste_budget: f64,
    /// The tiers, fastest first.
    pub tiers: Vec<TierSpec>,
    /// Service models. What moves follows from the first; the others say what it would take by
    /// them.
    pub services: Vec<Service>,
}

/// The policy that evicts by recency.
pub(super) const LRU: &str = "lru";

impl NodeSpec {
    /// What is wrong with it, if anything is.
    ///
    /// # Errors
    /// The field, and what to give.
    pub fn check(&self) -> Result<(), String> {
        if self.policy != LRU && BetaOptions::named(&self.policy).is_none() {
            let shown: String = self.policy.chars().take(60).collect();
            return Err(format!("`policy` is {shown:?}: give lru, beta or a variant of beta"));
        }
        if !(0.0..=1.0).contains(&self.waste_budget) {
            return Err(format!("`waste_budget` is {}: give a part of one", self.waste_budget));
        }
        if self.block_bytes == 0 {
            return Err("`block_bytes` is 0: give the bytes of a block".to_owned());
        }
        if self.tiers.is_empty() {
            return Err("`tiers` is empty: give at least one".to_owned());
        }
        for pair in self.tiers.windows(2) {
            if pair[0].tier >= pair[1].tier {
                let name = pair[1].tier.name();
                return Err(format!("`tiers` has {name} out of order: give each once, in order"));
            }
        }
        for tier in &self.tiers {
            if !(1..=MAX_BLOCKS).contains(&tier.blocks) {
                let name = tier.tier.name();
                let want = "give at least 1, or leave the tier out";
                return Err(format!("`tiers.{name}.blocks` is {}: {want}", tier.blocks));
            }
        }
        if !(1..=MAX_SERVICES).contains(&self.services.len()) {
            return Err(format!("`services` has {}: give 1 to 256", self.services.len()));
        }
        self.services.iter().try_for_each(|service| service.check(self.tiers.len()))
    }
}

impl Service {
    fn check(&self, tiers: usize) -> Result<(), String> {
        for (name, each) in [("read_s", &self.read_s), ("latency_s", &self.latency_s)] {
            if each.len() != tiers {
                return Err(format!("`{name}` has {} times: give one a tier", each.len()));
            }
        }
        let single = [self.token_s, self.pair_s];
        for seconds in self.read_s.iter().chain(&self.latency_s).chain(&single) {
            if !(0.0..=MAX_SECONDS).contains(seconds) {
                return Err(format!("a time of `services` is {seconds}: give seconds, from 0 on"));
            }
        }
        if !(1..=MAX_INSTANCES).contains(&self.instances) {
            return Err(format!("`instances` is {}: give 1 to 65536", self.instances));
        }
        Ok(())
    }

    /// Seconds to compute the tokens from `from` up to `to`.
    pub(super) fn compute_s(&self, from: f64, to: f64) -> f64 {
        self.token_s * (to - from) + self.pair_s * (to * to - from * from) / 2.0
    }
}
