//! Namespace handles and what a put tells of its blocks.

use crate::index::FullKey;
use crate::machine::PutItem;
use crate::store::Store;
use std::time::Duration;
use tiered_kv_types::{
    BlockInfo, BlockKey, BlockType, ComputedBy, Error, ErrorKind, KvLayout, NamespaceId,
    NamespaceSpec, Result, TenantId, Tier, key,
};

/// A namespace opened in a store.
#[derive(Clone, Debug)]
pub struct Namespace {
    pub(crate) number: u32,
    /// Number of the core that it was opened in; 0 for one of a process that is attached.
    pub(crate) core: u64,
    pub(crate) id: NamespaceId,
    pub(crate) layout: KvLayout,
}

/// What a put tells of its blocks.
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// The keys are one chain, each the parent of the next.
    pub chain: bool,
    /// Key of the block before the first.
    pub parent: Option<BlockKey>,
    /// Depth of the first block; derived from the parent where that is stored.
    pub depth: u32,
    /// Tokens in each block; all full where empty.
    pub tokens: Vec<u32>,
    /// For each block, whether a prefill chunk ended at its last token; none where empty.
    pub chunk_ends: Vec<bool>,
    /// How the blocks were computed.
    pub computed: ComputedBy,
    /// What the blocks hold.
    pub block_type: BlockType,
    /// The tenant that pays for them, empty for none.
    pub tenant: String,
    /// How long a block that is throttled may wait for room; not at all where absent.
    pub wait: Option<Duration>,
    /// How long copying may take; the configuration's `put_timeout_s` where absent.
    pub timeout: Option<Duration>,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self {
            chain: true,
            parent: None,
            depth: 0,
            tokens: Vec::new(),
            chunk_ends: Vec::new(),
            computed: ComputedBy::Prefill,
            block_type: BlockType::Unknown,
            tenant: String::new(),
            wait: None,
            timeout: None,
        }
    }
}

fn bad(op: &'static str, context: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, op, context)
}

impl Namespace {
    /// Digest of everything that the namespace stands for.
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// Shape of its blocks.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Chained keys of the full blocks of a token sequence that follows `parent`.
    pub fn keys_from_tokens(&self, tokens: &[u32], parent: Option<BlockKey>) -> Vec<BlockKey> {
        key::keys_from_tokens(&self.id, parent, tokens, self.layout.tokens_per_block(), false)
    }

    /// The same, with a key of the tail where the tokens do not fill the last block.
    pub fn keys_with_tail(&self, tokens: &[u32], parent: Option<BlockKey>) -> Vec<BlockKey> {
        key::keys_from_tokens(&self.id, parent, tokens, self.layout.tokens_per_block(), true)
    }

    /// Keys of an engine's own packed hashes of `width` bytes each.
    ///
    /// # Errors
    /// `InvalidArgument` where the bytes are no multiple of the width.
    pub fn keys_from_opaque(&self, packed: &[u8], width: usize) -> Result<Vec<BlockKey>> {
        key::keys_from_opaque(&self.id, packed, width)
    }

    pub(crate) fn full(&self, key: BlockKey) -> FullKey {
        FullKey { ns: self.number, key }
    }

    pub(crate) fn check_count(
        &self,
        op: &'static str,
        field: &str,
        keys: usize,
        given: usize,
    ) -> Result<()> {
        if keys != given {
            return Err(bad(op, format!("`{field}` has {given} for {keys} keys: give one a key")));
        }
        Ok(())
    }

    pub(crate) fn check_len(&self, op: &'static str, index: usize, len: usize) -> Result<()> {
        let block_bytes = self.layout.block_bytes();
        if len as u64 != block_bytes {
            return Err(bad(
                op,
                format!(
                    "buffer {index} holds {len} bytes, but a block of the namespace's layout has \
                     {block_bytes}: check dtype, layers, heads and tokens_per_block"
                ),
            ));
        }
        Ok(())
    }

    pub(crate) fn put_items(
        &self,
        keys: &[BlockKey],
        options: &PutOptions,
        depth: u32,
    ) -> Result<Vec<PutItem>> {
        let full = self.layout.tokens_per_block();
        for (field, given) in
            [("tokens", options.tokens.len()), ("chunk_ends", options.chunk_ends.len())]
        {
            if given != 0 {
                self.check_count("put", field, keys.len(), given)?;
            }
        }
        if let Some(tokens) = options.tokens.iter().find(|t| **t == 0 || **t > full) {
            return Err(bad("put", format!("`tokens` holds {tokens}: give 1 to {full} a block")));
        }
        let tenant = TenantId::of(&options.tenant);
        let mut items = Vec::with_capacity(keys.len());
        let mut parent = options.parent;
        for (at, key) in keys.iter().enumerate() {
            let below = if options.chain { u32::try_from(at).unwrap_or(u32::MAX) } else { 0 };
            let info = BlockInfo {
                depth: depth.saturating_add(below),
                tokens: options.tokens.get(at).copied().unwrap_or(full),
                chunk_end: options.chunk_ends.get(at).copied().unwrap_or(false),
                computed: options.computed,
                block_type: options.block_type,
            };
            items.push(PutItem { key: *key, parent, info, tenant });
            if options.chain {
                parent = Some(*key);
            }
        }
        Ok(items)
    }
}

impl Store {
    /// Opens a namespace: a cheap handle that calls name.
    ///
    /// # Errors
    /// `InvalidArgument` for a field that is empty or too long, or a block that fits no slot;
    /// `Closed`.
    pub fn namespace(&self, spec: &NamespaceSpec) -> Result<Namespace> {
        self.check_open("namespace")?;
        let id = spec.id()?;
        let opened = self.core.with_machine(|m| m.open_namespace(id, &spec.layout));
        let number = opened.map_err(|(tier, bytes)| {
            if tier == Tier::Dram && self.owner.config.has_no_dram() {
                return Error::new(
                    ErrorKind::InvalidArgument,
                    "namespace",
                    format!(
                        "`layout`: a block does not fit in the staging memory: set \
                         `staging_capacity` to {bytes} bytes or more"
                    ),
                );
            }
            let field = if tier == Tier::Dram { "dram_capacity" } else { "segment_bytes" };
            Error::new(
                ErrorKind::InvalidArgument,
                "namespace",
                format!(
                    "`layout`: a slab of {bytes} bytes does not fit in a segment of tier {}: raise \
                     `{field}`, or use fewer tokens a block",
                    tier.name()
                ),
            )
        })?;
        self.owner.names.opened(id, spec);
        Ok(Namespace { number, core: self.core.number, id, layout: spec.layout.clone() })
    }
}
