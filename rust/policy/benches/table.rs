//! The predictor with very many blocks: what an access, an eviction and a block's memory cost,
//! beside the order of use. Prints a line of JSON a figure: name, value, unit, and that of the
//! reference.
//!
//! `cargo bench -p tiered-kv-policy --bench table -- BLOCKS`; `benches/limits` runs it.
#![allow(clippy::print_stdout, reason = "its result")]

use std::time::Instant;
use tiered_kv_policy::{
    Accesses, BetaOptions, BlockId, Facts, Lru, Policy, Predictor, Request, RequestKind, Rng,
    Standing,
};
use tiered_kv_types::{BlockType, Tier};

/// Blocks of a chain, which is one session.
const CHAIN: u32 = 16;
const REQUESTS: u32 = 100_000;
const SECOND: u64 = 1_000_000_000;
const TIER: Tier = Tier::Nvme;

/// What was measured of one policy.
struct Figures {
    restore_ns: f64,
    access_ns: f64,
    evict_ns: f64,
    bytes: f64,
}

/// A policy, the blocks that it has, and how often each chain was stored anew.
struct Bench<P> {
    policy: P,
    rng: Rng,
    now: u64,
    chains: u32,
    stored: Vec<u32>,
}

impl<P: Policy> Bench<P> {
    fn key(&self, block: BlockId) -> u64 {
        let again = self.stored[(block / CHAIN) as usize];
        // Spread as a digest is.
        (u64::from(again) << 32 | u64::from(block)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn facts(&self, block: BlockId) -> Facts {
        let depth = block % CHAIN;
        Facts {
            shape: 0,
            depth,
            block_type: BlockType::User,
            key: self.key(block),
            parent: (depth > 0).then(|| block - 1),
            age: 0,
        }
    }

    fn standing(block: BlockId) -> Standing {
        if block % CHAIN == CHAIN - 1 { Standing::Candidate } else { Standing::Kept }
    }

    /// Takes all blocks in, as an open does; nanoseconds a block.
    fn restore(&mut self) -> f64 {
        let all: Vec<_> = (0..self.chains * CHAIN)
            .map(|block| (block, self.facts(block), Self::standing(block)))
            .collect();
        let begin = Instant::now();
        self.policy.restored(TIER, &mut all.iter().copied(), self.now);
        begin.elapsed().as_nanos() as f64 / all.len() as f64
    }

    /// Requests of whole chains, some much more often than others; nanoseconds a block.
    fn request(&mut self) -> f64 {
        let mut spent = 0;
        let (mut keys, mut ids) = (Vec::new(), Vec::new());
        for _ in 0..REQUESTS {
            let draw = self.rng.unit() * self.rng.unit();
            let chain = ((f64::from(self.chains) * draw) as u32).min(self.chains - 1);
            self.now += SECOND / 20;
            keys.clear();
            ids.clear();
            for block in chain * CHAIN..(chain + 1) * CHAIN {
                keys.push(self.key(block));
                ids.push(Some(block));
            }
            let request = Request {
                now: self.now,
                session: Some(u64::from(chain)),
                kind: RequestKind::Chat,
                blocks: &keys,
                prompt: keys.len(),
                types: &[],
                input_tokens: CHAIN * 16,
                output_tokens: 100,
                block_tokens: 16,
            };
            let begin = Instant::now();
            self.policy.requested(&Accesses { request, ids: &ids, turn: 0, bare: false });
            spent += begin.elapsed().as_nanos();
        }
        spent as f64 / f64::from(REQUESTS * CHAIN)
    }

    /// Chains leave, leaf by leaf, and others come in their places; nanoseconds a block that leaves
    /// and one that comes.
    fn evict(&mut self) -> f64 {
        let begin = Instant::now();
        let mut evicted = 0_u32;
        while evicted < REQUESTS {
            self.now += SECOND / 20;
            let victim = self.policy.victim(TIER, 0, self.now, &mut |_| false).expect("leaves");
            let first = victim / CHAIN * CHAIN;
            // The whole chain, so that its numbers can be used again.
            for block in (first..=victim).rev() {
                self.policy.removed(TIER, block);
                evicted += 1;
                if block > first {
                    self.policy.set_standing(TIER, block - 1, Standing::Candidate);
                }
            }
            self.stored[(victim / CHAIN) as usize] += 1;
            for block in first..=victim {
                let facts = self.facts(block);
                self.policy.inserted(TIER, block, &facts, self.now);
                self.policy.set_standing(TIER, block, Self::standing(block));
            }
        }
        begin.elapsed().as_nanos() as f64 / f64::from(evicted)
    }
}

fn measure(policy: impl Policy, blocks: u32) -> Figures {
    let chains = blocks / CHAIN;
    let stored = vec![0; chains as usize];
    let mut bench = Bench { policy, rng: Rng::new(1), now: SECOND, chains, stored };
    let restore_ns = bench.restore();
    let access_ns = bench.request();
    let evict_ns = bench.evict();
    let bytes = bench.policy.metadata_bytes() as f64 / f64::from(chains * CHAIN);
    Figures { restore_ns, access_ns, evict_ns, bytes }
}

fn main() {
    let told = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let blocks: u32 = told.unwrap_or(10_000_000);
    let lru = measure(Lru::new(), blocks);
    let beta = measure(Predictor::new(BetaOptions::DEFAULT, 8 << 30, 1), blocks);
    let rows = [
        ("access", "ns/block", beta.access_ns, lru.access_ns),
        ("evict and insert", "ns/block", beta.evict_ns, lru.evict_ns),
        ("restore", "ns/block", beta.restore_ns, lru.restore_ns),
        ("memory", "B/block", beta.bytes, lru.bytes),
        ("state of a resident block", "B/block", Predictor::block_bytes() as f64, 0.0),
    ];
    for (name, unit, ours, reference) in rows {
        println!(
            "{{\"name\": \"{name}\", \"unit\": \"{unit}\", \"blocks\": {blocks}, \
             \"beta\": {ours:.1}, \"lru\": {reference:.1}}}"
        );
    }
}
