//! What requests tell of the blocks that they used, on its way to the policy.

use super::Machine;
use crate::sync::Arc;
use tiered_kv_io::Nanos;
use tiered_kv_policy::{Accesses, BlockId, Request, RequestKind};
use tiered_kv_types::{BlockInfo, BlockKey, BlockType, ComputedBy, KvLayout};

/// What is known of a request beside its blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    /// Stands for its session.
    pub(crate) session: Option<u64>,
    /// Its turn in the session, from 1; 0 where it is not told.
    pub(crate) turn: u32,
    pub(crate) kind: RequestKind,
    /// What its blocks hold, where they are all alike and the store has them not.
    pub(crate) block_type: BlockType,
    pub(crate) output_tokens: u32,
    /// A `get` without a request.
    pub(crate) bare: bool,
}

impl Told {
    /// Of a `get` without a request.
    pub(crate) const BARE: Self = Self {
        session: None,
        turn: 0,
        kind: RequestKind::Chat,
        block_type: BlockType::Unknown,
        output_tokens: 0,
        bare: true,
    };
}

/// One request's blocks of one namespace.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) ns: u32,
    /// Root first.
    pub(crate) keys: Arc<[BlockKey]>,
    /// When it ended.
    pub(crate) now: Nanos,
    pub(crate) told: Told,
}

/// How long a request was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Blocks of the prompt, before those that the request generated.
    pub(crate) prompt: usize,
    /// Tokens of these.
    pub(crate) tokens: u32,
    /// Tokens of a full block.
    pub(crate) block_tokens: u32,
}

fn is_prompt(info: BlockInfo) -> bool {
    info.computed == ComputedBy::Prefill
}

/// What the policy is told of a request's blocks; kept, so that nothing is allocated for each.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    numbers: Vec<u64>,
    ids: Vec<Option<BlockId>>,
    types: Vec<BlockType>,
}

impl Machine {
    /// One access a block: the policy takes leaves first. A request that begins in the midst of a
    /// chain uses what is before it.
    pub(super) fn accessed(&mut self, access: &Access) {
        let Scratch { mut numbers, mut ids, mut types } = std::mem::take(&mut self.scratch);
        numbers.clear();
        ids.clear();
        types.clear();
        let Sizes { mut prompt, mut tokens, block_tokens } = self.sizes(access);
        for id in self.before(access) {
            let block = self.table.get(id).expect("just found");
            let info = block.info;
            (prompt, tokens) = (prompt + 1, tokens.saturating_add(info.tokens));
            types.push(info.block_type);
            numbers.push(block.key.key.number());
            ids.push(Some(id));
        }
        for key in access.keys.iter() {
            let id = self.table.id(&Self::full(access.ns, *key));
            let info = id.and_then(|id| self.table.get(id)).map(|block| block.info);
            let told = info.map(|info| info.block_type).filter(|t| *t != BlockType::Unknown);
            types.push(told.unwrap_or(access.told.block_type));
            numbers.push(key.number());
            ids.push(id);
        }
        let request = Request {
            now: access.now,
            session: access.told.session,
            kind: access.told.kind,
            blocks: &numbers,
            prompt,
            types: &types,
            input_tokens: tokens,
            output_tokens: access.told.output_tokens,
            block_tokens,
        };
        let Told { turn, bare, .. } = access.told;
        self.policy.requested(&Accesses { request, ids: &ids, turn, bare });
        self.went_on(&ids);
        self.scratch = Scratch { numbers, ids, types };
    }

    /// The blocks before the request's first one, root first, as far as they are here.
    fn before(&self, access: &Access) -> Vec<BlockId> {
        let first = access.keys.first();
        let first = first.and_then(|key| self.table.id(&Self::full(access.ns, *key)));
        let Some(block) = first.and_then(|id| self.table.get(id)) else { return Vec::new() };
        // What a caller says of parents need not be true.
        let most = block.info.depth as usize;
        let above = std::iter::successors(first, |id| self.table.parent_of(*id));
        let mut before: Vec<BlockId> = above.skip(1).take(most).collect();
        before.reverse();
        before
    }

    /// How many blocks have to be looked at to learn from a request: those before it count too.
    pub(crate) fn cost(&self, access: &Access) -> usize {
        let first = access.keys.first();
        let id = first.and_then(|key| self.table.id(&Self::full(access.ns, *key)));
        let before = id.and_then(|id| self.table.get(id)).map_or(0, |block| block.info.depth);
        access.keys.len() + before as usize
    }

    /// How long a request was, for who records it.
    pub(crate) fn sizes(&self, access: &Access) -> Sizes {
        let full = self.namespaces[access.ns as usize].layout.as_ref();
        let block_tokens = full.map_or(1, KvLayout::tokens_per_block);
        let info = |key: &BlockKey| {
            let id = self.table.id(&Self::full(access.ns, *key))?;
            self.table.get(id).map(|block| block.info)
        };
        // What a request generated comes behind what it was asked.
        let prompt = access.keys.iter().map(info);
        let prompt = prompt.take_while(|info| info.is_none_or(is_prompt));
        let (prompt, tokens) = prompt.fold((0, 0u32), |(prompt, tokens), info| {
            (prompt + 1, tokens.saturating_add(info.map_or(block_tokens, |info| info.tokens)))
        });
        Sizes { prompt, tokens, block_tokens }
    }

    /// The policy, for what is not part of a step.
    pub(crate) fn policy(&mut self) -> &mut dyn tiered_kv_policy::Policy {
        self.policy.as_mut()
    }
}
