//! The tiers of a node: what each of them would have served, what moves between them, and how long
//! it takes to the first token.
//!
//! The store's own policies decide, through the same calls as the store makes.

mod ahead;
mod hierarchy;
mod service;
mod spec;

pub use hierarchy::{Moved, Why};
pub use service::{Served, Times};
pub use spec::{Filled, NodeSpec, Service, TierSpec};

use crate::bench::{Options, Progress, watched};
use crate::trace::{Trace, percent};
use ahead::Ahead;
use hierarchy::Hierarchy;
use serde::Serialize;
use service::{Asked, Server};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use tiered_kv_policy::{Cache, Request};

/// What one tier served.
#[derive(Clone, Debug, Serialize)]
pub struct TierOutcome {
    /// Its name.
    pub tier: &'static str,
    /// Blocks that it holds.
    pub capacity_blocks: u64,
    /// Blocks that it held in the end.
    pub resident_blocks: usize,
    /// Accesses that it was the fastest tier to have.
    pub hits: u64,
    /// The same in percent of all accesses.
    pub hit_pct: f64,
    /// Of these hits, those that were computed again, as that was faster than to load them.
    pub recomputed: u64,
}

/// What the window ahead moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AheadOutcome {
    /// Blocks of the window in the end; zero without one.
    pub window: usize,
    /// Blocks that were moved up since a request asked for them.
    pub demanded: u64,
    /// Blocks that were moved up ahead of the request that read them.
    pub covered: u64,
    /// Blocks that were moved up ahead and not read by the request at hand.
    pub guessed: u64,
    /// Of these, those that a later request read before they left.
    pub guessed_read: u64,
    /// Of these, those that left unread.
    pub evicted_unread: u64,
    /// Of these, those that were there unread in the end.
    pub left_unread: u64,
    /// Guessed and never read, in percent of all that was moved up.
    pub waste_pct: f64,
}

/// What a replay over the tiers of a node found.
#[derive(Clone, Debug, Serialize)]
pub struct NodeOutcome {
    /// The store's policy.
    pub policy: String,
    /// Accesses that some tier had, in percent.
    pub hit_pct: f64,
    /// Accesses that no tier had.
    pub misses: u64,
    /// The tiers, fastest first.
    pub tiers: Vec<TierOutcome>,
    /// What was moved, by where from, where to and why.
    pub moved: Vec<Moved>,
    /// What the window ahead moved.
    pub ahead: AheadOutcome,
    /// What each service model made of it.
    pub services: Vec<Served>,
}

struct Node<'a> {
    hierarchy: Hierarchy<'a>,
    ahead: Ahead,
    servers: Vec<Server<'a>>,
    /// The tier of each of the prompt's leading blocks.
    found: Vec<u8>,
    hits: Vec<u64>,
    recomputed: Vec<u64>,
}

impl<'a> Node<'a> {
    fn new(spec: &'a NodeSpec, block_tokens: u32) -> Self {
        let hierarchy = Hierarchy::new(spec, block_tokens);
        Self {
            ahead: Ahead::new(spec.waste_budget),
            servers: spec.services.iter().map(Server::new).collect(),
            found: Vec::new(),
            hits: vec![0; hierarchy.levels()],
            recomputed: vec![0; hierarchy.levels()],
            hierarchy,
        }
    }

    /// Serves the request by every service model; how many blocks the first one loads.
    fn serve(&mut self, request: &Request<'_>) -> usize {
        let asked = Asked {
            now: request.now as f64 * 1e-9,
            found: &self.found,
            block_tokens: request.block_tokens,
            input_tokens: request.input_tokens,
        };
        let mut first = None;
        for server in &mut self.servers {
            let loaded = server.cut(asked);
            server.serve(asked, loaded);
            first = first.or(Some(loaded));
        }
        first.unwrap_or(0)
    }

    /// Moves up what is loaded from below the store's first tier, and books what is put there.
    fn move_up(&mut self, request: &Request<'_>, loaded: usize) {
        let levels = self.hierarchy.levels();
        for level in 0..levels {
            let of = self.found[..loaded].iter().filter(|tier| usize::from(**tier) == level);
            let blocks = of.count();
            if blocks > 0 {
                self.hierarchy.loaded(level, blocks);
            }
        }
        let Some(top) = self.hierarchy.top() else { return };
        self.ahead.read(&mut self.hierarchy, top, request.blocks, loaded);
        for (at, block) in request.blocks.iter().enumerate() {
            let computed = at >= loaded;
            if computed && !self.hierarchy.is_in(top, *block) {
                self.hierarchy.book(None, top, Why::Put);
            }
        }
    }

    fn finish(mut self, spec: &NodeSpec, accesses: u64) -> NodeOutcome {
        let hits: u64 = self.hits.iter().sum();
        let tiers = (0..self.hierarchy.levels()).map(|level| TierOutcome {
            tier: self.hierarchy.name(level),
            capacity_blocks: spec.tiers[level].blocks,
            resident_blocks: self.hierarchy.residents(level),
            hits: self.hits[level],
            hit_pct: percent(self.hits[level] as f64, accesses as f64),
            recomputed: self.recomputed[level],
        });
        NodeOutcome {
            policy: spec.policy.clone(),
            hit_pct: percent(hits as f64, accesses as f64),
            misses: accesses - hits,
            tiers: tiers.collect(),
            ahead: self.ahead.finish(&self.hierarchy),
            moved: std::mem::take(&mut self.hierarchy.moved),
            services: self.servers.into_iter().map(Server::finish).collect(),
        }
    }
}

impl Cache for Node<'_> {
    fn name(&self) -> &'static str {
        "node"
    }

    fn request(&mut self, request: &Request<'_>) -> usize {
        self.hierarchy.now = request.now;
        self.hierarchy.know(request.blocks);
        self.found.clear();
        let tier = |block: &u64| self.hierarchy.fastest(*block);
        let prompt = request.blocks[..request.prompt].iter();
        self.found.extend(prompt.map_while(tier).map(|level| level as u8));
        let loaded = self.serve(request);
        for (at, tier) in self.found.iter().enumerate() {
            self.hits[usize::from(*tier)] += 1;
            self.recomputed[usize::from(*tier)] += u64::from(at >= loaded);
        }
        self.move_up(request, loaded);
        self.hierarchy.apply(request, &self.found, loaded);
        self.found.len()
    }

    fn residents(&self) -> usize {
        (0..self.hierarchy.levels()).map(|level| self.hierarchy.residents(level)).sum()
    }
}

/// Replays a trace over the tiers of a node; `None` if `progress` was told to stop.
///
/// # Errors
/// What is wrong with `spec`.
pub fn node(
    trace: &Trace,
    options: Options,
    spec: &NodeSpec,
    progress: &Progress,
) -> Result<Option<NodeOutcome>, String> {
    spec.check()?;
    let mut node = Node::new(spec, trace.block_tokens);
    watched(trace, options, &mut node, progress);
    Ok((!progress.is_stopped()).then(|| node.finish(spec, trace.block_accesses)))
}

/// [`node`] for several, `threads` at a time; results are in the order of `specs`.
///
/// # Errors
/// What is wrong with one of `specs`.
pub fn nodes(
    trace: &Trace,
    options: Options,
    specs: &[NodeSpec],
    threads: usize,
    progress: &Progress,
) -> Result<Option<Vec<NodeOutcome>>, String> {
    specs.iter().try_for_each(NodeSpec::check)?;
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, specs.len().max(1)) {
            scope.spawn(|| {
                while let number = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(spec) = specs.get(number)
                {
                    let found = node(trace, options, spec, progress);
                    let found = found.expect("it was checked");
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((number, found));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(number, _)| *number);
    Ok(done.into_iter().map(|(_, found)| found).collect())
}

/// [`nodes`] as JSON: an array of descriptions in, one of outcomes out.
///
/// # Errors
/// What is wrong with the descriptions.
pub fn nodes_json(
    trace: &Trace,
    options: Options,
    specs: &str,
    threads: usize,
    progress: &Progress,
) -> Result<Option<String>, String> {
    let specs: Vec<NodeSpec> = serde_json::from_str(specs).map_err(|error| error.to_string())?;
    let found = nodes(trace, options, &specs, threads, progress)?;
    let text = |found| serde_json::to_string_pretty(&found).map_err(|error| error.to_string());
    found.map(text).transpose()
}
