//! What it takes to serve each request: load what the tiers have, compute the rest.
//!
//! Tiers read at the same time, each its blocks one after another; when the last one is through,
//! the rest of the prompt is computed. Without queues a request has the node to itself. With
//! queues, requests come as in the trace, and each tier and each instance of the model serves them
//! one by one in that order. Decoding and stores take nothing from either.

use super::spec::Service;
use serde::Serialize;

/// Times to the first token, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// The mean.
    pub mean: f64,
    /// Half of the requests were served in this time.
    pub p50: f64,
    /// Nine of ten.
    pub p90: f64,
    /// All but one in a hundred.
    pub p99: f64,
}

impl Times {
    /// Of all requests, by nearest rank.
    fn of(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        let rank = |part: f64| {
            let at = (part * all.len() as f64).ceil() as usize;
            all.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
        Self { mean, p50: rank(0.5), p90: rank(0.9), p99: rank(0.99) }
    }
}

/// What a service model made of the trace.
#[derive(Clone, Debug, Serialize)]
pub struct Served {
    /// Time to the first token where each request has the node to itself.
    pub ttft_s: Times,
    /// The same where requests wait for each other.
    pub queued_ttft_s: Times,
    /// Seconds of computing prompts, over all requests and instances.
    pub compute_s: f64,
    /// Seconds that requests waited for loads, without queues.
    pub load_s: f64,
    /// Tokens of prompts that were computed.
    pub computed_tokens: u64,
    /// Seconds that each tier read.
    pub read_s: Vec<f64>,
    /// Blocks that were read from each tier.
    pub read_blocks: Vec<u64>,
    /// Blocks that some tier had and that were computed all the same, as loading took longer.
    pub recomputed_blocks: u64,
}

/// One service model at work.
pub(super) struct Server<'a> {
    service: &'a Service,
    /// When each tier, and each instance, has served what it was given.
    tiers: Vec<f64>,
    instances: Vec<f64>,
    alone: Vec<f64>,
    queued: Vec<f64>,
    /// Blocks of the request at hand, of each tier.
    blocks: Vec<usize>,
    served: Served,
}

/// What is asked of a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    /// When, in seconds.
    pub(super) now: f64,
    /// The tier of each of the prompt's leading blocks that some tier has.
    pub(super) found: &'a [u8],
    pub(super) block_tokens: u32,
    pub(super) input_tokens: u32,
}

impl Asked<'_> {
    /// Tokens of the prompt that are behind its first `blocks`: the last one is always computed, as
    /// it gives the first token of the output.
    fn left(self, blocks: usize) -> (f64, f64) {
        let to = f64::from(self.input_tokens.max(1));
        let from = blocks as f64 * f64::from(self.block_tokens);
        (from.min(to - 1.0), to)
    }
}

impl<'a> Server<'a> {
    pub(super) fn new(service: &'a Service) -> Self {
        let tiers = service.read_s.len();
        Self {
            service,
            tiers: vec![0.0; tiers],
            instances: vec![0.0; service.instances],
            alone: Vec::new(),
            queued: Vec::new(),
            blocks: vec![0; tiers],
            served: Served {
                ttft_s: Times::default(),
                queued_ttft_s: Times::default(),
                compute_s: 0.0,
                load_s: 0.0,
                computed_tokens: 0,
                read_s: vec![0.0; tiers],
                read_blocks: vec![0; tiers],
                recomputed_blocks: 0,
            },
        }
    }

    /// How many of the found blocks are loaded: as many as make the request's time the shortest,
    /// and of equally many seconds the most blocks.
    pub(super) fn cut(&mut self, asked: Asked<'_>) -> usize {
        self.blocks.fill(0);
        let seconds = |blocks, load: f64| {
            let (from, to) = asked.left(blocks);
            load + self.service.compute_s(from, to)
        };
        let (mut load, mut best) = (0f64, (seconds(0, 0.0), 0));
        for (at, tier) in asked.found.iter().enumerate() {
            let tier = usize::from(*tier);
            self.blocks[tier] += 1;
            load = load.max(self.read_s(tier, self.blocks[tier]));
            let all = seconds(at + 1, load);
            if all <= best.0 {
                best = (all, at + 1);
            }
        }
        best.1
    }

    fn read_s(&self, tier: usize, blocks: usize) -> f64 {
        self.service.latency_s[tier] + blocks as f64 * self.service.read_s[tier]
    }

    /// Serves a request whose first `loaded` blocks are loaded.
    pub(super) fn serve(&mut self, asked: Asked<'_>, loaded: usize) {
        self.blocks.fill(0);
        asked.found[..loaded].iter().for_each(|tier| self.blocks[usize::from(*tier)] += 1);
        let (mut load, mut ready) = (0f64, asked.now);
        for tier in 0..self.tiers.len() {
            let blocks = self.blocks[tier];
            if blocks == 0 {
                continue;
            }
            load = load.max(self.read_s(tier, blocks));
            let reading = blocks as f64 * self.service.read_s[tier];
            let through = self.tiers[tier].max(asked.now) + reading;
            self.tiers[tier] = through;
            ready = ready.max(through + self.service.latency_s[tier]);
            self.served.read_s[tier] += reading;
            self.served.read_blocks[tier] += blocks as u64;
        }
        let (from, to) = asked.left(loaded);
        let compute = self.service.compute_s(from, to);
        let first = self.instances.iter_mut().min_by(|a, b| a.total_cmp(b));
        let instance = first.expect("there is an instance");
        *instance = instance.max(ready) + compute;
        self.queued.push(*instance - asked.now);
        self.alone.push(load + compute);
        self.served.compute_s += compute;
        self.served.load_s += load;
        self.served.computed_tokens += (to - from) as u64;
        self.served.recomputed_blocks += (asked.found.len() - loaded) as u64;
    }

    pub(super) fn finish(self) -> Served {
        let (ttft_s, queued_ttft_s) = (Times::of(self.alone), Times::of(self.queued));
        Served { ttft_s, queued_ttft_s, ..self.served }
    }
}
