//! How a store's requests are learned from.

use super::Predictor;
use crate::beta::chain::{NONE, UNCLAIMED};
use crate::beta::{Turn, Visit, seconds};
use crate::{Accesses, BlockId, Nanos, Request};
use tiered_kv_types::BlockType;

impl Predictor {
    /// Counts a request of which more is told later: its prompt, before it is answered.
    pub fn begun(&mut self, accesses: &Accesses<'_>) -> Turn {
        self.advance(accesses.request.now);
        self.learn(accesses)
    }

    /// Takes in all blocks of a request that [`Predictor::begun`] has counted: what is known of
    /// them is not counted again, or each request would be used twice.
    pub fn ended(&mut self, accesses: &Accesses<'_>, turn: Turn) {
        self.advance(accesses.request.now);
        self.run = None;
        self.apply(accesses, (self.now * 1e9) as Nanos, Some(turn));
    }

    pub(super) fn learn(&mut self, accesses: &Accesses<'_>) -> Turn {
        // The last request's own blocks may not go together with the next one's.
        self.run = None;
        if accesses.bare
            && let Some(then) = self.stored_unclaimed(accesses)
        {
            // No request told of them when they were stored: that was an access of its own.
            self.apply(accesses, then, None);
        }
        let now = (self.now * 1e9) as Nanos;
        self.apply(accesses, now.max(accesses.request.now), None)
    }

    /// Counts what outlived the last request, and computes the index anew where that is due: after
    /// what left since that request, as a replay does.
    fn catch_up(&mut self) {
        if let Some(now) = self.learned.take() {
            self.beta.sweep(now);
            self.beta.maintain();
        }
    }

    /// When the last of those blocks was stored that no request has named.
    fn stored_unclaimed(&self, accesses: &Accesses<'_>) -> Option<Nanos> {
        let nodes = &self.beta.chain.nodes;
        let slots = accesses.ids.iter().flatten().filter_map(|block| self.slot(*block));
        let last =
            slots.filter(|slot| self.is_unclaimed(*slot)).map(|slot| nodes[slot as usize].last);
        last.reduce(f64::max).map(|last| (last.max(0.0) * 1e9) as Nanos)
    }

    fn apply(&mut self, accesses: &Accesses<'_>, now: Nanos, rest_of: Option<Turn>) -> Turn {
        self.catch_up();
        let (mut keys, mut types) =
            (std::mem::take(&mut self.keys), std::mem::take(&mut self.types));
        let before = self.assemble(accesses, &mut keys, &mut types);
        let prompt = before + accesses.request.prompt;
        let told = accesses.request;
        let tokens = (before as u32).saturating_mul(told.block_tokens);
        let input_tokens = told.input_tokens.saturating_add(tokens);
        let (blocks, types_of) = (&keys[..], &types[..]);
        let mut request = Request { now, blocks, types: types_of, prompt, input_tokens, ..told };
        let [_, _, mut known] = self.beta.look_up(&request);
        if self.make_room(keys.len() - known) {
            // It may have been what was forgotten.
            [_, _, known] = self.beta.look_up(&request);
        }
        let wanted = keys.len() - known;
        if self.beta.chain.room() < wanted {
            // The request's own first: they are named now, and get others.
            self.release_own(accesses.ids, known.saturating_sub(before));
            self.claim_room(wanted);
        }
        let fit = known + self.beta.chain.room().min(keys.len() - known);
        request.blocks = &keys[..fit];
        request.prompt = prompt.min(fit);
        let turn = self.count(&request, known, accesses.turn, rest_of);
        self.claim(accesses.ids, before);
        for at in (0..fit).rev() {
            if self.beta.path[at] != NONE {
                self.settle(self.beta.path[at]);
            }
        }
        self.learned = Some(seconds(now));
        self.tell_lists();
        (self.keys, self.types) = (keys, types);
        turn
    }

    /// Counts a request, or the rest of one whose session is still known.
    fn count(
        &mut self,
        request: &Request<'_>,
        known: usize,
        told_turn: u32,
        rest_of: Option<Turn>,
    ) -> Turn {
        let beta = &mut self.beta;
        if let Some(turn) = rest_of
            && let Some(session) = beta.sessions.get(turn.session)
        {
            // One that began later has told more of the session.
            if session.turn == turn.number {
                session.answered(request.output_tokens);
            }
            beta.apply(&Visit::new(request, turn, true));
            return turn;
        }
        beta.told_turn = told_turn;
        beta.requests += 1;
        let session = beta.session_of(request, known);
        let (visit, end) = beta.visit(request, session, known);
        if beta.options.left_behind {
            beta.leave_behind(&visit, end);
        }
        beta.apply(&visit);
        visit.turn
    }

    /// Takes the nodes of those of the request's blocks, from one on, that no request has named.
    fn release_own(&mut self, ids: &[Option<BlockId>], from: usize) {
        for block in ids.iter().skip(from).flatten() {
            let own = self.slot(*block).filter(|slot| self.is_unclaimed(*slot));
            if let Some(slot) = own {
                self.release(slot);
            }
        }
    }

    /// The keys of the request's blocks, behind those of the blocks before them: a request that
    /// begins in the midst of a chain uses what is before it. How many these are.
    fn assemble(
        &self,
        accesses: &Accesses<'_>,
        keys: &mut Vec<u64>,
        types: &mut Vec<BlockType>,
    ) -> usize {
        keys.clear();
        types.clear();
        let nodes = &self.beta.chain.nodes;
        let first = accesses.ids.first().copied().flatten().and_then(|block| self.slot(block));
        let mut above = first.map_or(NONE, |slot| nodes[slot as usize].parent);
        while above != NONE {
            keys.push(nodes[above as usize].key);
            above = nodes[above as usize].parent;
        }
        keys.reverse();
        let before = keys.len();
        types.resize(before, BlockType::Unknown);
        keys.extend(accesses.request.blocks);
        types.extend(accesses.request.types);
        before
    }

    /// Ties the store's blocks to the nodes of the request's path.
    fn claim(&mut self, ids: &[Option<BlockId>], before: usize) {
        let stamp = self.beta.requests as u32;
        for (at, block) in ids.iter().enumerate() {
            let slot = self.beta.path.get(before + at).copied().unwrap_or(NONE);
            let Some(block) = block.filter(|_| slot != NONE) else { continue };
            let node = &self.beta.chain.nodes[slot as usize];
            let old = self.slots.get(block as usize).copied();
            // A block without an entry left between the request and now.
            let Some(old) = old.filter(|old| *old != slot && node.request == stamp) else {
                continue;
            };
            if node.block != NONE || self.tiers.iter().all(|lists| lists.entry(block).is_none()) {
                continue;
            }
            self.link(block, slot);
            self.beta.chain.moved.push(slot);
            if old != NONE {
                self.unlink(old);
            }
        }
    }

    /// Brings the lists in step with the nodes that changed.
    fn tell_lists(&mut self) {
        let mut moved = std::mem::take(&mut self.beta.chain.moved);
        for slot in moved.drain(..) {
            let node = &self.beta.chain.nodes[slot as usize];
            let (block, seen) = (node.block, (node.last, node.cell));
            if block != NONE && !node.has(UNCLAIMED) {
                self.tiers.iter_mut().for_each(|lists| lists.refresh(block, seen));
            }
        }
        self.beta.chain.moved = moved;
    }
}
