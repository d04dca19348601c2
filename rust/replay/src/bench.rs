//! Runs caches over a trace.

use crate::policies::{is_seeded, make};
use crate::trace::{Trace, percent};
use serde::Serialize;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use tiered_kv_policy::classic::{NextUses, next_uses};
use tiered_kv_policy::{Beta, BetaOptions, Cache, Request, RequestKind};

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

/// How far the runs are, and whether they shall end: for other threads than those that run.
#[derive(Debug, Default)]
pub struct Progress {
    requests: AtomicU64,
    stop: AtomicBool,
}

impl Progress {
    /// Requests in a step of the count.
    const STEP: u64 = 256;

    /// Requests applied so far, over all runs: in the end as many as the trace has, for each job.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Ends all runs soon.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether the runs shall end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn add(&self, requests: u64) {
        self.requests.fetch_add(requests, Ordering::Relaxed);
    }
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

/// Applies all requests of the trace to one cache; `each` sees the number and the hits of each, and
/// may end it. Hits in all, and the parts of the work saved and asked for.
pub fn replay(
    trace: &Trace,
    options: Options,
    cache: &mut dyn Cache,
    mut each: impl FnMut(usize, usize) -> ControlFlow<()>,
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
        hits += hit as u64;
        saved += cost(hit, trace.block_tokens);
        asked += cost(request.prompt, trace.block_tokens);
        if each(number, hit).is_break() {
            break;
        }
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

/// [`replay`] that another thread can watch and stop.
pub(crate) fn watched(
    trace: &Trace,
    options: Options,
    cache: &mut dyn Cache,
    progress: &Progress,
) -> (u64, f64, f64) {
    let found = replay(trace, options, cache, |number, _| {
        if !(number as u64 + 1).is_multiple_of(Progress::STEP) {
            return ControlFlow::Continue(());
        }
        progress.add(Progress::STEP);
        if progress.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    progress.add(trace.entries().len() as u64 % Progress::STEP);
    found
}

fn run_one(
    trace: &Trace,
    options: Options,
    job: Job,
    future: &NextUses,
    progress: &Progress,
) -> Outcome {
    let capacity = capacity_blocks(trace, job.capacity_pct);
    let mut cache = make(job.policy, capacity, job.seed, future);
    let start = Clock::start();
    let (hits, saved, asked) = watched(trace, options, cache.as_mut(), progress);
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

/// Runs all jobs, `threads` at a time; `ended` hears of each as it ends. Results are in the order
/// of the jobs; there are none if `progress` was told to stop.
pub fn run(
    trace: &Trace,
    options: Options,
    jobs: &[Job],
    threads: usize,
    progress: &Progress,
    ended: impl Fn(&Outcome) + Sync,
) -> Option<Vec<Outcome>> {
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
                while !progress.is_stopped()
                    && let number = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(job) = jobs.get(number)
                {
                    let outcome = run_one(trace, options, *job, &future, progress);
                    ended(&outcome);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((number, outcome));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(number, _)| *number);
    let whole = !progress.is_stopped() && done.len() == jobs.len();
    whole.then(|| done.into_iter().map(|(_, outcome)| outcome).collect())
}

/// What the predictor has learned at the end of the trace, at a capacity in blocks; `None` if
/// `progress` was told to stop.
pub fn learned(
    trace: &Trace,
    options: Options,
    predictor: BetaOptions,
    capacity: usize,
    progress: &Progress,
) -> Option<Beta> {
    let mut beta = Beta::new(capacity, predictor, 0);
    watched(trace, options, &mut beta, progress);
    (!progress.is_stopped()).then_some(beta)
}
