//! Which resident block goes first: pure and deterministic.
//!
//! A policy does no I/O, reads no clock and draws no random number of its own: time comes in as an
//! argument, so that a simulator and the live store run the very same code.
#![forbid(unsafe_code)]

pub mod beta;
mod cache;
pub mod classic;
mod lru;
mod rng;
#[cfg(test)]
mod testing;
mod value;
mod window;

pub use beta::{Beta, BetaOptions, Predictor, Turn};
pub use cache::{Cache, Request, RequestKind};
pub use lru::Lru;
pub use rng::Rng;
use tiered_kv_types::{BlockType, Tier};
pub use value::{Batch, Costs, belongs};
pub use window::Window;

/// Number of a block in the store's table; reused after the block is gone.
pub type BlockId = u32;
/// Monotonic time in nanoseconds.
pub type Nanos = u64;

/// What a policy may know of a block when it becomes resident in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Which size classes its slots are of: a victim must free slots of the class that needs room.
    pub shape: u32,
    /// Blocks before it in its chain.
    pub depth: u32,
    /// What it holds.
    pub block_type: BlockType,
    /// What stands for its key: that of another block is most likely another one.
    pub key: u64,
    /// The block before it, where that is in the store.
    pub parent: Option<BlockId>,
    /// How long ago it was stored.
    pub age: Nanos,
}

/// What a store tells of one request.
#[derive(Clone, Copy, Debug)]
pub struct Accesses<'a> {
    /// The request; its blocks may begin in the midst of a chain.
    pub request: Request<'a>,
    /// The store's number of each of its blocks, where it has it.
    pub ids: &'a [Option<BlockId>],
    /// The caller's number of the turn, from 1; zero where it is not told.
    pub turn: u32,
    /// Nothing but these accesses is known of it: no engine told of a request.
    pub bare: bool,
}

/// Whether a resident block may be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// A leaf that no root reaches any more: it goes before every other.
    Orphan,
    /// A leaf, clean and not busy.
    Candidate,
    /// Not now.
    #[default]
    Kept,
}

/// Decides which block leaves a tier.
///
/// The store tells it what is resident and which residents are *candidates*: leaves of their chain
/// in that tier, clean and not busy. A policy only ever names a candidate, so no block is evicted
/// before its resident children.
pub trait Policy: Send {
    /// The name under which results are reported.
    fn name(&self) -> &'static str;
    /// `block` became resident in `tier`, counted as an access at `now`.
    fn inserted(&mut self, tier: Tier, block: BlockId, facts: &Facts, now: Nanos);
    /// What a recovery has found in `tier`, in the order in which it became resident; the numbers
    /// are new to the tier.
    fn restored(
        &mut self,
        tier: Tier,
        blocks: &mut dyn Iterator<Item = (BlockId, Facts, Standing)>,
        now: Nanos,
    ) {
        for (block, facts, standing) in blocks {
            self.inserted(tier, block, &facts, now);
            self.set_standing(tier, block, standing);
        }
    }
    /// A request has accessed its blocks: leaves count as accessed before their roots.
    fn requested(&mut self, accesses: &Accesses<'_>);
    /// `block` is no longer resident in `tier`.
    fn removed(&mut self, tier: Tier, block: BlockId);
    /// `block`, resident in `tier`, is of another shape from now on; nothing else of it changes.
    fn reshaped(&mut self, tier: Tier, block: BlockId, shape: u32);
    /// Whether `block`, resident in `tier`, may be evicted from it.
    fn set_standing(&mut self, tier: Tier, block: BlockId, standing: Standing);
    /// The candidate of `tier` and of this shape that should go first; `skip` passes over blocks
    /// that are busy at this moment. `None` where every candidate was passed over.
    fn victim(
        &mut self,
        tier: Tier,
        shape: u32,
        now: Nanos,
        skip: &mut dyn FnMut(BlockId) -> bool,
    ) -> Option<BlockId>;
    /// What it is worth to keep `block` in `tier`: less is evicted first, over all shapes.
    fn worth(&self, tier: Tier, block: BlockId) -> f64;
    /// Number of candidates in `tier`, over all size classes.
    fn candidates(&self, tier: Tier) -> usize;
    /// Bytes of memory that it keeps.
    fn metadata_bytes(&self) -> usize;
    /// The predictor, where it is one.
    fn predictor(&mut self) -> Option<&mut Predictor> {
        None
    }
}
