//! Requests: one access a block, counted when the request finishes.

use crate::driver::Core;
use crate::machine::Told;
use crate::namespace::Namespace;
use crate::store::FORKED;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use tiered_kv_policy::RequestKind;
use tiered_kv_types::{BlockKey, BlockType, Error, ErrorKind, Result};

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

    /// Checks that the request is of this process: in a forked child its calls do nothing.
    ///
    /// # Errors
    /// `Closed`.
    pub fn check_process(&self, op: &'static str) -> Result<()> {
        if self.core.is_forked() {
            return Err(Error::new(ErrorKind::Closed, op, FORKED));
        }
        Ok(())
    }

    /// The request uses these blocks; `position` is the place of the first in the sequence, in
    /// blocks. Observing a block again, or after [`Request::finish`], changes nothing.
    pub fn observe(&self, ns: &Namespace, keys: &[BlockKey], position: u64) {
        if self.core.is_forked() {
            return;
        }
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
    /// `output_tokens` is what the request generated: the reuse predictor learns from it.
    /// `engine_hit_tokens` is what the engine's own cache served.
    pub fn finish(&self, output_tokens: u64, engine_hit_tokens: u64) {
        let _ = engine_hit_tokens;
        if self.core.is_forked() {
            return;
        }
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
            let told = self.told(ns, output_tokens);
            self.core.count_access(ns, keys.into_iter().rev().collect(), told);
        }
    }

    /// What the policy learns of it, for its blocks of one namespace: each is a stream of its own.
    fn told(&self, ns: u32, output_tokens: u64) -> Told {
        let context = &self.context;
        let named = !context.session.is_empty();
        Told {
            session: named.then(|| label(ns, &context.session)),
            turn: context.turn,
            kind: request_kind(&context.kind),
            block_type: context.block_type,
            output_tokens: u32::try_from(output_tokens).unwrap_or(u32::MAX),
            bare: false,
        }
    }
}

/// A number that stands for a session's name in a namespace (FNV-1a).
fn label(ns: u32, name: &str) -> u64 {
    let bytes = ns.to_le_bytes().into_iter().chain(name.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The kind of traffic that a name stands for.
pub fn request_kind(name: &str) -> RequestKind {
    match name {
        "" | "chat" | "conversation" => RequestKind::Chat,
        "agent" => RequestKind::Agent,
        "agent-n" => RequestKind::AgentN,
        "agent-s" => RequestKind::AgentS,
        "synthetic" => RequestKind::Synthetic,
        other => RequestKind::Label(5 + (label(0, other) % 11) as u8),
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("context", &self.context).finish_non_exhaustive()
    }
}
