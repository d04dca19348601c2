//! Requests: one access a block, counted when the request finishes.

use crate::driver::Core;
use crate::namespace::Namespace;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use tiered_kv_types::{BlockKey, BlockType};

/// What an engine knows of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestContext {
    /// The session that it belongs to, empty if not known.
    pub session: String,
    /// Its turn in the session, from 1; 0 if not known.
    pub turn: u32,
    /// The tenant that pays for it, empty for none.
    pub tenant: String,
    /// Kind of workload, such as `chat` or `agent`; empty if not known.
    pub kind: String,
    /// What its blocks hold, where they are all alike.
    pub block_type: BlockType,
}

#[derive(Debug, Default)]
struct Observed {
    /// Position, number of the namespace, and key.
    blocks: Vec<(u64, u32, BlockKey)>,
    finished: bool,
}

/// A request in progress.
///
/// Lookups and gets on its behalf have no effect on what is evicted; [`Request::finish`] counts one
/// access for each block observed. Dropping a request that was not finished counts nothing.
pub struct Request {
    core: Arc<Core>,
    context: RequestContext,
    /// Guards the blocks observed so far.
    observed: Mutex<Observed>,
}

impl Request {
    pub(crate) fn new(core: Arc<Core>, context: RequestContext) -> Self {
        Self { core, context, observed: Mutex::new(Observed::default()) }
    }

    /// What was told of the request.
    pub fn context(&self) -> &RequestContext {
        &self.context
    }

    /// The request uses these blocks; `position` is the place of the first in the sequence, in
    /// blocks. Observing a block again, or after [`Request::finish`], changes nothing.
    pub fn observe(&self, ns: &Namespace, keys: &[BlockKey], position: u64) {
        let mut observed = self.observed.lock();
        if observed.finished {
            return;
        }
        let place = |at: usize| position.saturating_add(at as u64);
        let blocks = keys.iter().enumerate().map(|(at, key)| (place(at), ns.number, *key));
        observed.blocks.extend(blocks);
    }

    /// Counts one access a block, leaf first. A second finish counts nothing.
    ///
    /// `output_tokens` is what the request generated, `engine_hit_tokens` what the engine's own
    /// cache
    /// served; the reuse predictor learns from both.
    pub fn finish(&self, output_tokens: u64, engine_hit_tokens: u64) {
        let _ = (output_tokens, engine_hit_tokens);
        let mut observed = self.observed.lock();
        if std::mem::replace(&mut observed.finished, true) {
            return;
        }
        let mut blocks = std::mem::take(&mut observed.blocks);
        drop(observed);
        blocks.sort_unstable_by(|a, b| b.cmp(a));
        let mut seen = HashSet::with_capacity(blocks.len());
        let mut leaf_first: BTreeMap<u32, Vec<BlockKey>> = BTreeMap::new();
        for (_, ns, key) in blocks {
            if seen.insert((ns, key)) {
                leaf_first.entry(ns).or_default().push(key);
            }
        }
        for (ns, keys) in leaf_first {
            self.core.count_access(ns, keys.into_iter().rev().collect());
        }
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("context", &self.context).finish_non_exhaustive()
    }
}
