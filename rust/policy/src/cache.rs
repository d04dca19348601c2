//! A cache as a replay sees it: whole requests in, hits out.

use crate::Nanos;
use tiered_kv_types::BlockType;

/// What kind of traffic a request is of: a feature of the predictor, and a category of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// A person's conversation, and what is not known to be anything else.
    #[default]
    Chat,
    /// An agent's step.
    Agent,
    /// An agent's step that waits for its tools.
    AgentN,
    /// An agent's step that streams.
    AgentS,
    /// Generated traffic.
    Synthetic,
    /// A caller's own label, by its index.
    Label(u8),
}

impl RequestKind {
    /// The value of the predictor's feature, at most 15.
    pub fn index(self) -> u8 {
        match self {
            Self::Chat => 0,
            Self::Agent => 1,
            Self::AgentN => 2,
            Self::AgentS => 3,
            Self::Synthetic => 4,
            Self::Label(label) => label.min(15),
        }
    }

    /// Whether an agent sent it: what its later turns insert is the output of tools.
    pub fn is_agent(self) -> bool {
        matches!(self, Self::Agent | Self::AgentN | Self::AgentS)
    }
}

/// One request: one access to each of its blocks.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// When it came; requests come in ascending order of time.
    pub now: Nanos,
    /// The caller's label of the session, if there is one.
    pub session: Option<u64>,
    /// What kind of traffic it is.
    pub kind: RequestKind,
    /// Keys of its blocks in the order of the chain, each once: the prompt's, then the output's. A
    /// key stands for the whole prefix up to its block, so it always has the same block before it.
    pub blocks: &'a [u64],
    /// How many of `blocks` are the prompt's: these may be hits.
    pub prompt: usize,
    /// What the caller says the blocks are; blocks beyond its end, and unknown ones, are inferred.
    pub types: &'a [BlockType],
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens of the output.
    pub output_tokens: u32,
    /// Tokens of a full block.
    pub block_tokens: u32,
}

/// A cache of a fixed number of blocks under one policy.
pub trait Cache: Send {
    /// The name under which results are reported.
    fn name(&self) -> &'static str;
    /// Counts the leading blocks of the prompt that are resident, then applies the request: its
    /// blocks are accessed, those that were absent are inserted, and as many leave as must.
    fn request(&mut self, request: &Request<'_>) -> usize;
    /// How many blocks are resident, never more than the capacity between two requests.
    fn residents(&self) -> usize;
}
