//! The reuse predictor: a Bayesian survival model of blocks, and eviction by what it predicts.
//!
//! For each pair of a block type and a transition, and finer where there is evidence, the hazard
//! of a reuse in each bucket of ages has a Beta posterior. What a block is worth is the Gittins
//! index of that curve at its age: the hits a second of residence that the best rule to stop
//! would collect. The blocks are counted on *sentinels*, a few of each run of new blocks.

mod age;
mod calibration;
mod chain;
mod evict;
mod fit;
mod guard;
mod hazard;
mod index;
mod learned;
mod live;
mod options;
mod pace;
mod posterior;
mod score;
mod sentinel;
mod session;
mod slots;
#[cfg(test)]
mod tests;
mod touch;

pub use age::BUCKETS;
pub use calibration::{CHANCES, Calibration, Calibrations};
pub use hazard::PAIRS;
pub use index::gittins;
pub use live::Predictor;
pub use options::BetaOptions;
pub use posterior::{Evidence, PairPosterior, ages, pair_names};

use crate::rng::Rng;
use crate::{Cache, Nanos, Request};
use chain::{Chain, NONE, RECENT, RESIDENT};
use guard::Guard;
use hazard::{Scale, Table, UNSCALED};
use pace::Pace;
use score::{Features, Scores};
use sentinel::{Books, Sentinels};
use session::{Session, Sessions};

/// Least number of blocks that are remembered after they left.
const MIN_GHOSTS: usize = 65_536;
/// Least number of sessions that are remembered.
const MIN_SESSIONS: usize = 65_536;

/// The predictor and the cache that it governs.
///
/// Pure and deterministic: time comes with requests, and the seed with [`Beta::new`].
#[derive(Debug)]
pub struct Beta {
    options: BetaOptions,
    capacity: usize,
    chain: Chain,
    sessions: Sessions,
    sentinels: Sentinels,
    table: Table,
    scores: Scores,
    pace: Pace,
    guard: Guard,
    /// What a request lets the guard's sums fade by.
    fade: f64,
    rng: Rng,
    /// Requests so far.
    requests: u64,
    /// The request at which the table is computed anew, and the one at which it last was.
    next_rebuild: u64,
    last_rebuild: u64,
    /// The caller's number of the request's turn, zero where it is not told.
    told_turn: u32,
    /// Slots of the request's blocks, `NONE` where a block is not known.
    path: Vec<u32>,
}

/// As what a request was counted, for the rest of it that is told later.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    session: u32,
    /// Which of the session's requests it is.
    number: u32,
    /// The session's transition: first or continued.
    transition: usize,
    /// Score and gap levels of private blocks.
    score: usize,
    gap: usize,
    /// How fast private blocks age.
    scale: Scale,
    features: Features,
    /// Whether later turns of an agent insert what tools said.
    tools: bool,
}

/// What all of a request's blocks share.
struct Visit<'a> {
    request: &'a Request<'a>,
    now: f64,
    turn: Turn,
    /// Whether the prompt's last block is not full.
    partial: bool,
    /// Whether it is the rest of a request: what is known of it was counted then.
    is_rest: bool,
}

impl<'a> Visit<'a> {
    fn new(request: &'a Request<'a>, turn: Turn, is_rest: bool) -> Self {
        let full = request.prompt as u64 * u64::from(request.block_tokens);
        let partial = full > u64::from(request.input_tokens);
        Self { request, now: seconds(request.now), turn, partial, is_rest }
    }
}

/// Transitions; with a type they make a pair.
const SHARED: usize = 0;
const FIRST: usize = 1;
const CONTINUED: usize = 2;
const LEFT_BEHIND: usize = 3;

fn seconds(now: Nanos) -> f64 {
    now as f64 * 1e-9
}

/// log2 of a gap in seconds, of a hundredth at least.
fn log_gap(gap: f64) -> f32 {
    gap.max(0.01).log2() as f32
}

/// The gap level of a moving average.
fn gap_level(gap: f32) -> usize {
    // By way of the smaller number, which the processor converts at once.
    ((gap + 2.0) / 2.0).clamp(0.0, 6.0) as i32 as usize
}

/// The level of what has no gap yet.
const NO_GAP: usize = 7;

impl Beta {
    /// A predictor over a cache of `capacity` blocks, at least one.
    pub fn new(capacity: usize, options: BetaOptions, seed: u64) -> Self {
        let ghosts = if options.ghosts { MIN_GHOSTS.max(4 * capacity) } else { 0 };
        Self::with_ghosts(capacity, options, seed, ghosts)
    }

    /// [`Beta::new`], but so many blocks are remembered after they left.
    fn with_ghosts(capacity: usize, options: BetaOptions, seed: u64, ghosts: usize) -> Self {
        let capacity = capacity.max(1);
        let sessions = MIN_SESSIONS.max(ghosts / 4) as u32;
        Self {
            options,
            capacity,
            chain: Chain::new(ghosts, options.leaf_first),
            sessions: Sessions::new(sessions),
            sentinels: Sentinels::new(usize::MAX),
            table: Table::new(options.by_age, options.strength),
            scores: Scores::new(options.fit),
            pace: Pace::default(),
            guard: Guard::default(),
            fade: 0.5f64.powf(1.0 / f64::from(options.half_life)),
            rng: Rng::new(seed),
            requests: 0,
            next_rebuild: 16,
            last_rebuild: 0,
            told_turn: 0,
            path: Vec::new(),
        }
    }

    /// How many blocks of a chain are resident, from the first one on.
    pub fn leading(&self, blocks: &[u64]) -> usize {
        let mut parent = NONE;
        let resident = |key: &&u64| {
            let Some(slot) = self.chain.child(parent, **key) else { return false };
            parent = slot;
            self.chain.nodes[slot as usize].has(RESIDENT)
        };
        blocks.iter().take_while(resident).count()
    }

    /// Looks the request's blocks up: how many of the prompt's are resident, from the first one on,
    /// how many would be if blocks left by recency, and how many of all are known.
    fn look_up(&mut self, request: &Request<'_>) -> [usize; 3] {
        self.path.clear();
        let (mut parent, mut guess, mut step) = (NONE, NONE, 1);
        let (mut resident, mut recent, mut known) = (None, None, None);
        for (at, key) in request.blocks.iter().enumerate() {
            let Some(slot) = self.chain.child_near(parent, *key, guess) else {
                known = known.or(Some(at));
                if self.options.leaf_first {
                    break;
                }
                self.path.push(NONE);
                (parent, guess) = (NONE, NONE);
                continue;
            };
            let node = &self.chain.nodes[slot as usize];
            if resident.is_none() && !node.has(RESIDENT) {
                resident = Some(at);
            }
            if recent.is_none() && !node.has(RECENT) {
                recent = Some(at);
            }
            self.path.push(slot);
            // Slots of a chain mostly follow one another, up or down.
            let apart = slot.wrapping_sub(parent);
            if apart == 1 || apart == u32::MAX {
                step = apart;
            }
            guess = slot.wrapping_add(step);
            parent = slot;
        }
        self.path.resize(request.blocks.len(), NONE);
        let known = known.unwrap_or(request.blocks.len());
        let hits = |found: Option<usize>| found.unwrap_or(known).min(known).min(request.prompt);
        [hits(resident), hits(recent), known]
    }

    /// The session that the request is of, new or known.
    fn session_of(&mut self, request: &Request<'_>, known: usize) -> u32 {
        if let Some(label) = request.session {
            let held = self.sessions.by_label(label);
            return held.unwrap_or_else(|| self.sessions.start(Some(label)));
        }
        if known >= 2 {
            let deepest = self.chain.nodes[self.path[known - 1] as usize];
            let short = u64::from(deepest.rend) <= known as u64 + self.options.infer_slack;
            let growth = self.options.infer_growth;
            let goes_on = |session: &mut Session| !growth || request.input_tokens >= session.tokens;
            if short && self.sessions.get(deepest.session).is_some_and(goes_on) {
                return deepest.session;
            }
        }
        self.sessions.start(None)
    }

    /// Takes the request, of which so many blocks are known, into its session's books; also where
    /// the session ended before.
    fn visit<'a>(
        &mut self,
        request: &'a Request<'a>,
        serial: u32,
        known: usize,
    ) -> (Visit<'a>, u32) {
        let options = self.options;
        let now = seconds(request.now);
        let session = self.sessions.get(serial).expect("a request's session is kept");
        let first = session.turn == 0;
        if !first {
            let gap = session.returned(now, options.gap_weight);
            self.pace.add(gap.0, gap.1);
        }
        let told = self.told_turn.saturating_sub(1);
        if first && told > 0 {
            // It began before it was seen here.
            (session.turn, session.last) = (told, now);
        } else {
            session.turn = session.turn.max(told);
        }
        let facts = session.take(request, known as u32, now);
        let features = facts.features();
        let mut gap = if first { NO_GAP } else { gap_level(session.gap) };
        let mut scale = UNSCALED;
        if options.pace || options.scale {
            let expected = self.pace.expect(session.before());
            gap = if options.pace { pace::level(expected) } else { gap };
            scale = if options.scale { pace::scale(expected) } else { scale };
        }
        let turn = Turn {
            session: serial,
            number: session.turn,
            transition: if first { FIRST } else { CONTINUED },
            score: if options.score { self.scores.level(features) } else { 0 },
            gap: if options.gap { gap } else { 0 },
            scale,
            features,
            tools: request.kind.is_agent() && !first,
        };
        (Visit::new(request, turn, false), session.end)
    }

    /// Computes hazards and index anew where that is due.
    fn maintain(&mut self) {
        if self.requests < self.next_rebuild {
            return;
        }
        let passed = (self.requests - self.last_rebuild) as f32;
        let decay = 0.5f32.powf(passed / self.options.half_life);
        self.scores.rebuild(decay);
        self.pace.rebuild(decay);
        self.table.rebuild(decay);
        self.chain.revalue();
        self.last_rebuild = self.requests;
        self.next_rebuild = self.requests + (self.requests / 4).clamp(16, 256);
    }

    fn sweep(&mut self, now: f64) {
        let mut books = Books { table: &mut self.table, scores: &mut self.scores };
        self.sentinels.sweep(&mut books, now);
    }
}

impl Cache for Beta {
    fn name(&self) -> &'static str {
        self.options.name
    }

    fn request(&mut self, request: &Request<'_>) -> usize {
        self.requests += 1;
        let [hits, recent, known] = self.look_up(request);
        if self.options.guard {
            self.guard.compare(hits, recent, request.prompt, self.fade);
        }
        let session = self.session_of(request, known);
        let (visit, end) = self.visit(request, session, known);
        if self.options.left_behind {
            self.leave_behind(&visit, end);
        }
        self.apply(&visit);
        self.evict(visit.now);
        self.sweep(visit.now);
        self.maintain();
        hits
    }

    fn residents(&self) -> usize {
        self.chain.residents()
    }
}
