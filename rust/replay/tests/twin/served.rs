//! The twin's service models: every token and every number of loaded blocks one by one.

use tiered_kv_policy::Request;
use tiered_kv_replay::Service;

pub(super) fn seconds(seconds: f64) -> String {
    format!("{seconds:.9}")
}

pub(super) fn times_line(all: [f64; 8]) -> String {
    all.map(seconds).join(" ")
}

/// One service model, and the times of all requests.
pub(super) struct Served {
    service: Service,
    tiers: Vec<f64>,
    instances: Vec<f64>,
    alone: Vec<f64>,
    queued: Vec<f64>,
    read_s: Vec<f64>,
    read_blocks: Vec<u64>,
    sums: (f64, f64, u64, u64),
}

impl Served {
    pub(super) fn new(service: &Service) -> Self {
        let count = service.read_s.len();
        Self {
            service: service.clone(),
            tiers: vec![0.0; count],
            instances: vec![0.0; service.instances],
            alone: Vec::new(),
            queued: Vec::new(),
            read_s: vec![0.0; count],
            read_blocks: vec![0; count],
            sums: (0.0, 0.0, 0, 0),
        }
    }

    fn compute(&self, from: f64, to: f64) -> f64 {
        // Token by token.
        let mut all = 0.0;
        let mut at = from;
        while at < to {
            all += self.service.token_s + self.service.pair_s * (at + 0.5);
            at += 1.0;
        }
        all
    }

    fn blocks_of(found: &[usize], tier: usize) -> usize {
        found.iter().filter(|one| **one == tier).count()
    }

    fn load(&self, found: &[usize]) -> f64 {
        let each = (0..self.tiers.len()).filter_map(|tier| {
            let blocks = Self::blocks_of(found, tier);
            let seconds = self.service.latency_s[tier] + blocks as f64 * self.service.read_s[tier];
            (blocks > 0).then_some(seconds)
        });
        each.fold(0.0, f64::max)
    }

    /// The tokens to compute with so many blocks loaded.
    fn left(loaded: usize, request: &Request<'_>) -> (f64, f64) {
        let to = f64::from(request.input_tokens.max(1));
        ((loaded as f64 * f64::from(request.block_tokens)).min(to - 1.0), to)
    }

    pub(super) fn request(&mut self, found: &[usize], request: &Request<'_>) -> usize {
        let time = |loaded: usize| {
            let (from, to) = Self::left(loaded, request);
            self.load(&found[..loaded]) + self.compute(from, to)
        };
        let mut best = 0;
        for loaded in 1..=found.len() {
            // As many as possible of equally fast ones, whatever the last bits say.
            if time(loaded) <= time(best) + 1e-12 {
                best = loaded;
            }
        }
        let now = request.now as f64 * 1e-9;
        let (from, to) = Self::left(best, request);
        let (load, compute) = (self.load(&found[..best]), self.compute(from, to));
        let mut ready = now;
        for tier in 0..self.tiers.len() {
            let blocks = Self::blocks_of(&found[..best], tier);
            if blocks > 0 {
                let reading = blocks as f64 * self.service.read_s[tier];
                self.tiers[tier] = self.tiers[tier].max(now) + reading;
                ready = ready.max(self.tiers[tier] + self.service.latency_s[tier]);
                self.read_s[tier] += reading;
                self.read_blocks[tier] += blocks as u64;
            }
        }
        self.instances.sort_by(f64::total_cmp);
        let end = self.instances[0].max(ready) + compute;
        self.instances[0] = end;
        self.alone.push(load + compute);
        self.queued.push(end - now);
        self.sums.0 += compute;
        self.sums.1 += load;
        self.sums.2 += (to - from) as u64;
        self.sums.3 += (found.len() - best) as u64;
        best
    }

    pub(super) fn lines(mut self) -> [String; 2] {
        let mut four = |which: bool| {
            let all = if which { &mut self.queued } else { &mut self.alone };
            all.sort_by(f64::total_cmp);
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            // The least that as large a part is not above.
            let rank = |part: f64| {
                let enough = |time: &&f64| {
                    let within = all.iter().filter(|one| *one <= *time).count();
                    within as f64 >= part * all.len() as f64 - 1e-9
                };
                *all.iter().find(enough).unwrap()
            };
            [mean, rank(0.5), rank(0.9), rank(0.99)]
        };
        let [a, b, c, d] = four(false);
        let [e, f, g, h] = four(true);
        let read: Vec<String> = self.read_s.iter().copied().map(seconds).collect();
        let sums = self.sums;
        let line = format!(
            "{} {} {} {:?} {read:?} {}",
            seconds(sums.0),
            seconds(sums.1),
            sums.2,
            self.read_blocks,
            sums.3
        );
        [times_line([a, b, c, d, e, f, g, h]), line]
    }
}
