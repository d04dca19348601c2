//! How a request changes the blocks that it touches, and those that it left behind.

use super::chain::{
    LABELLED, NONE, Node, PACED, PARTIAL, RECENT, RESIDENT, SHARED as SHARED_BLOCK,
};
use super::hazard::Cell;
use super::sentinel::{Books, Life, Sentinels};
use super::{Beta, CONTINUED, FIRST, LEFT_BEHIND, NO_GAP, SHARED, Visit};
use super::{gap_level, log_gap};
use tiered_kv_types::BlockType;

/// Types; with a transition they make a pair.
const SYSTEM: usize = 0;
const TOOL: usize = 1;
const USER: usize = 2;
const REASONING: usize = 3;

/// New blocks for each sentinel beyond the first of a run.
const SENTINEL_RUN: usize = 64;

/// New blocks of one pair in a row, as places in the path.
struct Run {
    first: usize,
    len: usize,
    pair: usize,
}

/// The level of a shared block by the accesses before this one.
fn count_level(count: u8) -> usize {
    match count {
        0..3 => 0,
        3..6 => 1,
        6..12 => 2,
        12.. => 3,
    }
}

impl Visit<'_> {
    /// The type that a block gets at insertion, and the flags that go with it.
    fn type_of(&self, at: usize) -> (usize, u8) {
        let output = at >= self.request.prompt;
        let partial = self.partial && at + 1 == self.request.prompt;
        let flag = if partial { PARTIAL } else { 0 };
        let told = match self.request.types.get(at) {
            Some(BlockType::System) => SYSTEM,
            Some(BlockType::Tool) => TOOL,
            Some(BlockType::User) => USER,
            Some(BlockType::Reasoning) => REASONING,
            Some(BlockType::Unknown) | None => {
                let inferred = match (output || partial, self.turn.tools) {
                    (true, _) => REASONING,
                    (false, true) => TOOL,
                    (false, false) => USER,
                };
                return (inferred, flag);
            }
        };
        (told, flag | LABELLED)
    }

    fn private(&self, pair: usize) -> Cell {
        Cell::new(pair, self.turn.score, self.turn.gap).scaled(self.turn.scale)
    }
}

impl Beta {
    /// Touches or inserts all blocks of the request.
    pub(super) fn apply(&mut self, visit: &Visit<'_>) {
        let stamp = self.requests as u32;
        let mut parent = NONE;
        let mut new: Option<Run> = None;
        // Neighbours were mostly accessed together: their gap is computed once.
        let mut gap = (f64::NAN, 0.0);
        for at in 0..visit.request.blocks.len() {
            let slot = self.path[at];
            if slot == NONE {
                let slot = self.insert(visit, at, parent);
                let pair = self.chain.nodes[slot as usize].cell.pair();
                match &mut new {
                    Some(run) if run.pair == pair => run.len += 1,
                    _ => {
                        let next = Run { first: at, len: 1, pair };
                        let before = new.replace(next);
                        self.observe(visit, before);
                    }
                }
                parent = slot;
                continue;
            }
            let node = self.chain.nodes[slot as usize];
            if visit.is_rest {
                self.observe(visit, new.take());
                self.go_on(visit, slot, parent);
                parent = slot;
                continue;
            }
            if node.request == stamp {
                // A key that came twice is no chain: what is behind it is not looked at.
                break;
            }
            self.observe(visit, new.take());
            if node.last != gap.0 {
                gap = (node.last, log_gap(visit.now - node.last));
            }
            self.touch(visit, slot, gap.1);
            if !node.has(RESIDENT) {
                self.chain.readmit(slot, parent);
            }
            parent = slot;
        }
        self.observe(visit, new.take());
        if parent != NONE {
            self.chain.list(parent);
        }
        if self.options.guard {
            self.guard.ended(&mut self.chain, parent, stamp, self.capacity);
        }
        let session = self.sessions.get(visit.turn.session).expect("a request's session is kept");
        if session.turn == visit.turn.number {
            session.end = parent;
        }
    }

    /// A block that was counted with the first of its request.
    fn go_on(&mut self, visit: &Visit<'_>, slot: u32, parent: u32) {
        let stamp = self.requests as u32;
        let node = self.chain.node(slot);
        // What came into the store in between is tied to it, as to a new one.
        node.request = stamp;
        if node.session == visit.turn.session {
            node.rend = visit.request.blocks.len() as u32;
        }
        if !node.has(RESIDENT) {
            self.chain.readmit(slot, parent);
        }
    }

    fn insert(&mut self, visit: &Visit<'_>, at: usize, parent: u32) -> u32 {
        let (own_type, flags) = visit.type_of(at);
        let transition = match (flags & PARTIAL != 0, self.options.session_state) {
            (true, _) => SHARED,
            (false, true) => visit.turn.transition,
            (false, false) => FIRST,
        };
        let cell = if self.options.session_state {
            visit.private(own_type * 4 + transition)
        } else {
            let gap = if self.options.gap { NO_GAP } else { 0 };
            Cell::new(own_type * 4 + transition, visit.turn.score, gap)
        };
        let mut node = Node::new(visit.request.blocks[at], parent, at as u32);
        node.last = visit.now;
        node.session = visit.turn.session;
        node.rend = visit.request.blocks.len() as u32;
        node.request = self.requests as u32;
        node.cell = cell;
        node.flags |= flags;
        node.count = 1;
        if self.options.guard {
            node.flags |= RECENT;
            self.guard.admitted();
        }
        let slot = self.chain.insert(node);
        self.path[at] = slot;
        slot
    }

    /// An access to a known block whose own gap has this log2.
    fn touch(&mut self, visit: &Visit<'_>, slot: u32, gap: f32) {
        let options = self.options;
        let stamp = self.requests as u32;
        let node = self.chain.node(slot);
        let foreign = node.session != visit.turn.session;
        if foreign {
            node.flags |= SHARED_BLOCK;
        }
        if node.has(PACED) {
            node.gap += options.gap_weight * (gap - node.gap);
        } else {
            node.gap = gap;
            node.flags |= PACED;
        }
        let shared = node.has(SHARED_BLOCK);
        let mut own_type = node.cell.pair() / 4;
        if shared && !node.has(LABELLED) {
            own_type = SYSTEM;
        }
        let lone_tail = node.has(PARTIAL) && !shared;
        let transition = match (foreign || lone_tail, options.session_state) {
            (true, _) => SHARED,
            (false, true) => visit.turn.transition,
            (false, false) => CONTINUED,
        };
        let pair = own_type * 4 + transition;
        let own_gap = |node: &Node| if options.gap { gap_level(node.gap) } else { 0 };
        let cell = if shared {
            let level = if options.score { count_level(node.count) } else { 0 };
            Cell::new(pair, level, own_gap(node))
        } else if options.session_state {
            visit.private(pair)
        } else {
            Cell::new(pair, visit.turn.score, own_gap(node))
        };
        node.last = visit.now;
        node.session = visit.turn.session;
        node.rend = visit.request.blocks.len() as u32;
        node.request = stamp;
        node.cell = cell;
        node.count = node.count.saturating_add(1);
        if options.guard && !node.has(RECENT) {
            node.flags |= RECENT;
            self.guard.admitted();
        }
        let sentinel = node.sentinel;
        self.chain.refresh(slot);
        if sentinel != Sentinels::NONE {
            let mut books = Books { table: &mut self.table, scores: &mut self.scores };
            let scored = !shared && !lone_tail;
            let life = Life { from: visit.now, cell, features: visit.turn.features, scored };
            self.sentinels.reused(sentinel, &mut books, life);
        }
    }

    /// Sets sentinels on a run of new blocks.
    fn observe(&mut self, visit: &Visit<'_>, run: Option<Run>) {
        let Some(run) = run else { return };
        for _ in 0..1 + run.len / SENTINEL_RUN {
            let slot = self.path[run.first + self.rng.below(run.len)];
            let node = self.chain.node(slot);
            if node.sentinel != Sentinels::NONE {
                continue;
            }
            let scored = !node.has(PARTIAL);
            let (from, features) = (visit.now, visit.turn.features);
            let life = Life { from, cell: node.cell, features, scored };
            node.sentinel = self.sentinels.start(slot, life);
        }
    }

    /// Marks what the session did not come back to, from the end of its last request up.
    pub(super) fn leave_behind(&mut self, visit: &Visit<'_>, end: u32) {
        let mut slot = end;
        while slot != NONE {
            let node = self.chain.nodes[slot as usize];
            let on_path = visit.request.blocks.get(node.depth as usize) == Some(&node.key);
            let own = node.session == visit.turn.session && !node.has(SHARED_BLOCK);
            if on_path || !own || node.cell.pair() % 4 == LEFT_BEHIND {
                return;
            }
            let cell = node.cell.with_pair(node.cell.pair() / 4 * 4 + LEFT_BEHIND);
            self.chain.node(slot).cell = cell;
            self.chain.refresh(slot);
            if node.sentinel != Sentinels::NONE {
                let mut books = Books { table: &mut self.table, scores: &mut self.scores };
                self.sentinels.moved(node.sentinel, &mut books, visit.now, cell);
            }
            slot = node.parent;
        }
    }
}
