//! Policies of others, to compare with: each sees one access a block, the request's tail first, so
//! that tails leave before the heads that they need.
//!
//! Keys are dense numbers here: tables are indexed by them.

mod ali;
mod arc;
mod heap;
mod lfu;
mod lhd;
mod list;
mod min;
mod queues;
mod s3fifo;
mod sieve;
#[cfg(test)]
mod tests;
mod tinylfu;
mod twoq;

pub use ali::Ali;
pub use arc::Arc;
pub use lfu::Frequency;
pub use lhd::Lhd;
pub use min::{Min, NextUses, next_uses};
pub use queues::{Fifo, LeastRecent};
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use tinylfu::TinyLfu;
pub use twoq::TwoQ;

use crate::{Cache, Request};

/// What a policy may know of an access.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// The block's number.
    pub block: u32,
    /// Blocks before it in its chain.
    pub depth: u32,
    /// When it is, in seconds.
    pub now: f64,
    /// The kind of its request.
    pub kind: u8,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// A cache of single blocks.
pub trait BlockCache: Send {
    /// The name under which results are reported.
    fn name(&self) -> &'static str;
    /// Called before a request's accesses.
    fn begin(&mut self, _request: &Request<'_>) {}
    /// A block is accessed: it is resident afterwards, or left at once.
    fn access(&mut self, access: &Access);
    /// Whether a block is resident.
    fn contains(&self, block: u32) -> bool;
    /// How many blocks are resident, at most the capacity.
    fn residents(&self) -> usize;
}

/// A cache of requests out of one of blocks.
#[derive(Debug)]
pub struct Classic<P>(pub P);

impl<P: BlockCache> Cache for Classic<P> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn request(&mut self, request: &Request<'_>) -> usize {
        let prompt = request.blocks.iter().take(request.prompt);
        let hits = prompt.take_while(|block| self.0.contains(**block as u32)).count();
        self.0.begin(request);
        for (depth, block) in request.blocks.iter().enumerate().rev() {
            self.0.access(&Access {
                block: *block as u32,
                depth: depth as u32,
                now: request.now as f64 * 1e-9,
                kind: request.kind.index(),
                block_tokens: request.block_tokens,
            });
        }
        hits
    }

    fn residents(&self) -> usize {
        self.0.residents()
    }
}
