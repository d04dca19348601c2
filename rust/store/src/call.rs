//! Calls in progress: the caller's memory while the core uses it, and how a call ends.

use crate::driver::Asked;
use crate::machine::{FlushReport, Outcome, PutStatus};
use crate::owner::InFlight;
use std::any::Any;
use std::sync::Arc;
use tiered_kv_types::{MissReason, Tier};

/// The blocks of a put. The core keeps it until the put has ended, and reads it from its own
/// threads.
pub trait BlockSource: Send + Sync + 'static {
    /// Number of blocks.
    fn blocks(&self) -> usize;
    /// The bytes of block `index`.
    fn block(&self, index: usize) -> &[u8];
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> BlockSource for Vec<B> {
    fn blocks(&self) -> usize {
        self.len()
    }

    fn block(&self, index: usize) -> &[u8] {
        self[index].as_ref()
    }
}

/// Blocks that lie one behind the other in one buffer.
#[derive(Debug)]
pub struct Contiguous<B> {
    buffer: B,
    block_bytes: usize,
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> Contiguous<B> {
    /// `buffer` holds blocks of `block_bytes` each; a rest that fills no block is not a block.
    pub fn new(buffer: B, block_bytes: usize) -> Self {
        Self { buffer, block_bytes: block_bytes.max(1) }
    }
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> BlockSource for Contiguous<B> {
    fn blocks(&self) -> usize {
        self.buffer.as_ref().len() / self.block_bytes
    }

    fn block(&self, index: usize) -> &[u8] {
        &self.buffer.as_ref()[index * self.block_bytes..(index + 1) * self.block_bytes]
    }
}

/// A caller's buffer that the core fills, owned by the core until the call has ended.
pub(crate) trait WriteBuf: Any + Send + 'static {
    fn as_mut_slice(&mut self) -> &mut [u8];
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<B: AsMut<[u8]> + Send + 'static> WriteBuf for B {
    fn as_mut_slice(&mut self) -> &mut [u8] {
        self.as_mut()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

pub(crate) type WriteBufs = Vec<Option<Box<dyn WriteBuf>>>;

/// Told once, when a call has ended and the core no longer touches its memory.
pub(crate) type Reply = Box<dyn FnOnce(Outcome, WriteBufs) + Send>;

/// What the core holds for a call in progress.
pub(crate) struct Call {
    pub(crate) reply: Reply,
    pub(crate) source: Option<Arc<dyn BlockSource>>,
    pub(crate) buffers: WriteBufs,
    /// The handle that it was made through, until the caller has been told of its end.
    pub(crate) in_flight: Option<InFlight>,
    /// What it asks for, from its begin on.
    pub(crate) asked: Option<Asked>,
}

impl Call {
    /// A call that uses no memory of the caller's.
    pub(crate) fn plain(reply: Reply) -> Self {
        Self { reply, source: None, buffers: Vec::new(), in_flight: None, asked: None }
    }
}

/// How a put ended, block by block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutReport {
    /// What became of each block, in the order of the keys.
    pub statuses: Vec<PutStatus>,
}

impl PutReport {
    fn count(&self, status: PutStatus) -> usize {
        self.statuses.iter().filter(|s| **s == status).count()
    }

    /// Blocks stored by this call.
    pub fn stored(&self) -> usize {
        self.count(PutStatus::Stored)
    }

    /// Blocks that were there already.
    pub fn exists(&self) -> usize {
        self.count(PutStatus::Exists)
    }

    /// Blocks refused for want of room: try again later.
    pub fn throttled(&self) -> usize {
        self.count(PutStatus::Throttled)
    }
}

/// How a `get_into` ended: the buffers come back, and each says whether it was filled.
#[derive(Debug)]
pub struct IntoReport<B> {
    /// The tier that each block came from, or why its buffer was not filled.
    pub items: Vec<Result<Tier, MissReason>>,
    /// The buffers in the order of the keys. The bytes of one that was not filled mean nothing.
    pub buffers: Vec<B>,
}

impl<B> IntoReport<B> {
    /// Leading buffers that were filled.
    pub fn hits(&self) -> usize {
        self.items.iter().take_while(|item| item.is_ok()).count()
    }
}

/// How a close ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CloseReport {
    /// Blocks dropped before they were durable, because the deadline passed.
    pub dropped: u64,
}

impl Outcome {
    pub(crate) fn into_put(self) -> PutReport {
        match self {
            Self::Put(statuses) => PutReport { statuses },
            _ => unreachable!("a put ends as a put"),
        }
    }

    pub(crate) fn into_flush(self) -> FlushReport {
        match self {
            Self::Flush(report) => report,
            _ => unreachable!("a flush ends as a flush"),
        }
    }
}
