//! Small random traces: prefixes shared, left and extended, sessions labelled or not, ties in time.

use crate::rng::Rng;
use crate::{Request, RequestKind};

/// A request that owns its blocks.
#[derive(Clone, Debug)]
pub(crate) struct Owned {
    pub(crate) now: u64,
    pub(crate) session: Option<u64>,
    pub(crate) kind: RequestKind,
    pub(crate) blocks: Vec<u64>,
    pub(crate) prompt: usize,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
}

impl Owned {
    pub(crate) fn request(&self) -> Request<'_> {
        Request {
            now: self.now,
            session: self.session,
            kind: self.kind,
            blocks: &self.blocks,
            prompt: self.prompt,
            types: &[],
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            block_tokens: 16,
        }
    }
}

/// `requests` requests. Block numbers are dense, and each always comes behind the same one.
pub(crate) fn trace(seed: u64, requests: usize) -> Vec<Owned> {
    let mut rng = Rng::new(seed);
    let mut parents: Vec<Option<u64>> = Vec::new();
    let labelled = rng.below(3) != 0;
    let outputs = rng.below(2) == 0;
    let breadth = 2 + rng.below(12);
    let mut now = 0u64;
    let mut all: Vec<Owned> = Vec::new();
    for _ in 0..requests {
        now += [0, 3_000_000, 700_000_000, 40_000_000_000][rng.below(4)];
        let mut blocks = Vec::new();
        let mut session = rng.below(breadth) as u64;
        if !all.is_empty() && rng.below(8) != 0 {
            // Most go on from, or back to, what one of the last requests had.
            let back = 1 + rng.below(breadth.min(all.len()));
            let before = &all[all.len() - back];
            let keep = match rng.below(3) {
                0 => rng.below(before.blocks.len() + 1),
                1 => before.prompt,
                _ => before.blocks.len(),
            };
            blocks.extend(&before.blocks[..keep]);
            if rng.below(4) != 0 {
                session = before.session.unwrap_or(session);
            }
        }
        for _ in 0..rng.below(7) {
            let parent = blocks.last().copied();
            let known: Vec<u64> =
                (0..parents.len() as u64).filter(|b| parents[*b as usize] == parent).collect();
            let block = if !known.is_empty() && rng.below(3) == 0 {
                known[rng.below(known.len())]
            } else {
                parents.push(parent);
                parents.len() as u64 - 1
            };
            blocks.push(block);
        }
        let out = if outputs { rng.below(3).min(blocks.len()) } else { 0 };
        let prompt = blocks.len() - out;
        let partial = if rng.below(4) == 0 { 5 } else { 0 };
        let kinds = [RequestKind::Chat, RequestKind::Agent, RequestKind::Label(7)];
        all.push(Owned {
            now,
            session: labelled.then_some(session),
            kind: kinds[rng.below(6).saturating_sub(3)],
            prompt,
            input_tokens: (prompt as u32 * 16).saturating_sub(partial),
            output_tokens: out as u32 * 16,
            blocks,
        });
    }
    all
}

/// How many blocks the traces of [`trace`] name at most.
pub(crate) fn universe(trace: &[Owned]) -> u64 {
    trace.iter().flat_map(|r| &r.blocks).max().map_or(0, |block| block + 1)
}
