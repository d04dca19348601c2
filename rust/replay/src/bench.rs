//! Runs caches over a trace.

use crate::policies::{is_seeded, make};
use crate::trace::{Trace, percent};
use serde::Serialize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use tiered_kv_policy::classic::{NextUses, next_uses};
use tiered_kv_policy::{Cache, Request, RequestKind};

/// Tokens of prefix at which attention costs as much as all the rest of a token's work: 2 x 8e9
/// operations against 4 x 32 layers x 4,096 for each token before it, as in an 8B model.
const ATTENTION_TOKENS: f64 = 30_518.0;

/// How requests are applied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Blocks of outputs are inserted, too.
    pub outputs: bool,
    /// Sessions and kinds of requests are not told.
    pub no_labels: bool,
}

/// One run: a policy at a capacity.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Percent of the trace's unique prompt blocks.
    pub capacity_pct: f64,
    /// A name out of [`crate::known`].
    pub policy: &'static str,
    /// Seed of the policy's draws.
    pub seed: u64,
}

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Percent of the trace's unique prompt blocks.
    pub capacity_pct: f64,
    /// Blocks.
    pub capacity_blocks: usize,
    /// The policy's name.
    pub policy: &'static str,
    /// Seed of its draws.
    pub seed: u64,
    /// Percent of the prompts' blocks that were hits.
    pub hit_pct: f64,
    /// Percent of the work of all prompts that hits saved: a token costs more behind a long prefix.
    pub cost_saved_pct: f64,
    /// Processor time of all bookkeeping and of unpacking the trace, over the accesses of prompts.
    pub ns_per_block: f64,
}

/// The capacity that is `pct` percent of the trace's unique prompt blocks, rounded down.
pub fn capacity_blocks(trace: &Trace, pct: f64) -> usize {
    // A hundredth of a block of slack: 0.5 % of 200 is one, whatever the binary fraction says.
    ((trace.unique_blocks as f64 * pct / 100.0 + 1e-6) as usize).max(1)
}

/// All combinations of capacities and policies, with `seeds` seeds where draws decide.
pub fn jobs(capacities: &[f64], policies: &[&'static str], seeds: u64) -> Vec<Job> {
    let mut jobs = Vec::new();
    for &policy in policies {
        for &capacity_pct in capacities {
            let seeds = if is_seeded(policy) { seeds.max(1) } else { 1 };
            jobs.extend((0..seeds).map(|seed| Job { capacity_pct, policy, seed }));
        }
    }
    jobs
}

/// The work of the first `blocks` blocks of a prompt, in tokens without attention.
fn cost(blocks: usize, block_tokens: u32) -> f64 {
    let tokens = blocks as f64 * f64::from(block_tokens);
    tokens + tokens * tokens / (2.0 * ATTENTION_TOKENS)
}

/// Applies all requests of the trace to one cache; `each` sees the hits of each. Hits in all, and
/// the parts of the work saved and asked for.
pub fn replay(
    trace: &Trace,
    options: Options,
    cache: &mut dyn Cache,
    mut each: impl FnMut(usize, usize),
) -> (u64, f64, f64) {
    let mut blocks = Vec::new();
    let (mut hits, mut saved, mut asked) = (0u64, 0f64, 0f64);
    for (number, entry) in trace.entries().iter().enumerate() {
        trace.blocks(entry, options.outputs, &mut blocks);
        let told = !options.no_labels;
        let request = Request {
            now: entry.now,
            session: entry.session.filter(|_| told).map(u64::from),
            kind: if told { entry.kind } else { RequestKind::Chat },
            blocks: &blocks,
            prompt: entry.prompt as usize,
            types: &[],
            input_tokens: entry.input_tokens,
            output_tokens: entry.output_tokens,
            block_tokens: trace.block_tokens,
        };
        let hit = cache.request(&request);
        each(number, hit);
        hits += hit as u64;
        saved += cost(hit, trace.block_tokens);
        asked += cost(request.prompt, trace.block_tokens);
    }
    (hits, saved, asked)
}

/// Time that a thread ran, so that others on the machine do not count; else time that passed.
struct Clock {
    wall: Instant,
    running: Option<u64>,
}

impl Clock {
    fn start() -> Self {
        Self { wall: Instant::now(), running: Self::running() }
    }

    /// Nanoseconds that this thread has run, where the system tells.
    fn running() -> Option<u64> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split_whitespace().next()?.parse().ok()
    }

    fn nanos(&self) -> f64 {
        match (self.running, Self::running()) {
            (Some(from), Some(to)) if to > from => (to - from) as f64,
            _ => self.wall.elapsed().as_nanos() as f64,
        }
    }
}

fn run_one(trace: &Trace, options: Options, job: Job, future: &NextUses) -> Outcome {
    let capacity = capacity_blocks(trace, job.capacity_pct);
    let mut cache = make(job.policy, capacity, job.seed, future);
    let start = Clock::start();
    let (hits, saved, asked) = replay(trace, options, cache.as_mut(), |_, _| ());
    let nanos = start.nanos();
    assert!(cache.residents() <= capacity, "{}: more resident than may be", job.policy);
    Outcome {
        capacity_pct: job.capacity_pct,
        capacity_blocks: capacity,
        policy: job.policy,
        seed: job.seed,
        hit_pct: percent(hits as f64, trace.block_accesses as f64),
        cost_saved_pct: percent(saved, asked),
        ns_per_block: nanos / (trace.block_accesses.max(1)) as f64,
    }
}

/// Runs all jobs, `threads` at a time; `progress` hears of each as it ends. Results are in the
/// order of the jobs.
pub fn run(
    trace: &Trace,
    options: Options,
    jobs: &[Job],
    threads: usize,
    progress: impl Fn(&Outcome) + Sync,
) -> Vec<Outcome> {
    let future = if jobs.iter().any(|job| job.policy == "min") {
        let entries = trace.entries();
        next_uses(entries.len(), |number, blocks| {
            trace.blocks(&entries[number], options.outputs, blocks);
            entries[number].prompt as usize
        })
    } else {
        NextUses::default()
    };
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(jobs.len()));
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                while let number = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(job) = jobs.get(number)
                {
                    let outcome = run_one(trace, options, *job, &future);
                    progress(&outcome);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((number, outcome));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}
