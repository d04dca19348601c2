//! What a block is worth to a tier, by what it saves there: seconds, not only hits.

/// What it takes to have a block again, from a tier or by computing it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Seconds to compute it.
    pub recompute_s: f64,
    /// Seconds to load it from the tier.
    pub load_s: f64,
    /// Bytes that it takes up there.
    pub bytes: f64,
}

impl Costs {
    /// Whether a hit in the tier saves anything at all: if not, the answer is to recompute.
    pub fn saves(&self) -> bool {
        self.recompute_s > self.load_s
    }

    /// Seconds saved for each second of residence and byte, at `hits` expected hits a second.
    pub fn value(&self, hits: f64) -> f64 {
        hits * (self.recompute_s - self.load_s) / self.bytes.max(1.0)
    }
}

/// Whether a block of `value` belongs in a tier where `marginal` is what would have to go for it,
/// and `None` stands for room that is free.
pub fn belongs(value: f64, marginal: Option<f64>) -> bool {
    value > 0.0 && marginal.is_none_or(|marginal| value > marginal)
}

/// How many blocks the loads from a tier had: they share a latency.
///
/// Before the first load that counts as nothing. Counted whole it might keep a tier from ever being
/// filled, so that no load would tell.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch {
    loads: f64,
    blocks: f64,
}

/// What a load fades by for the next.
const FADE: f64 = 0.99;

impl Batch {
    /// A load of so many blocks, of which there is at least one.
    pub fn loaded(&mut self, blocks: usize) {
        self.loads = self.loads * FADE + 1.0;
        self.blocks = self.blocks * FADE + blocks.max(1) as f64;
    }

    /// Seconds to load one block of a usual load.
    pub fn load_s(&self, latency_s: f64, block_s: f64) -> f64 {
        latency_s * self.loads / self.blocks.max(1.0) + block_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_worth_the_seconds_that_its_hits_save() {
        let costs = Costs { recompute_s: 0.5, load_s: 0.1, bytes: 2e6 };
        assert!((costs.value(3.0) - 3.0 * 0.4 / 2e6).abs() < 1e-15);
        assert!(costs.saves());
        let slow = Costs { load_s: 0.6, ..costs };
        assert!(!slow.saves() && slow.value(3.0) < 0.0);
    }

    #[test]
    fn what_saves_nothing_belongs_nowhere_and_else_the_more_valuable_does() {
        assert!(belongs(0.1, None) && belongs(0.2, Some(0.1)));
        assert!(!belongs(0.1, Some(0.1)) && !belongs(0.0, None) && !belongs(-1.0, Some(-2.0)));
    }

    #[test]
    fn a_latency_is_shared_by_the_blocks_of_a_load() {
        let mut batch = Batch::default();
        assert_eq!(batch.load_s(1.0, 0.25), 0.25);
        batch.loaded(1);
        assert_eq!(batch.load_s(1.0, 0.25), 1.25);
        for _ in 0..2000 {
            batch.loaded(10);
        }
        assert!((batch.load_s(1.0, 0.25) - 0.35).abs() < 1e-6, "{batch:?}");
    }
}
