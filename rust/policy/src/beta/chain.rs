//! Blocks that are resident or remembered, their chains, and which of them may leave.

use super::hazard::Cell;
use super::slots::Slots;
use hashbrown::HashTable;
use std::collections::VecDeque;

/// No slot, no place, no session.
pub(crate) const NONE: u32 = u32::MAX;

pub(crate) const RESIDENT: u8 = 1;
/// Two sessions touched it.
pub(crate) const SHARED: u8 = 2;
/// The last block of a prompt that did not fill it.
pub(crate) const PARTIAL: u8 = 4;
/// Its type is the caller's: it stays as it is.
pub(crate) const LABELLED: u8 = 8;
/// Its own gap average has been set.
pub(crate) const PACED: u8 = 16;
/// A store's block that no request has named yet: it is in no chain.
pub(crate) const UNCLAIMED: u8 = 32;

/// A cache by recency of the same capacity would hold it.
pub(crate) const RECENT: u8 = 64;

/// What is kept of a block while it is resident, and for a while after.
///
/// Tables of these begin 16 bytes into a line of the processor's cache: what is looked at most is
/// in the first 48 bytes, so that one line has it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Node {
    pub(crate) key: u64,
    /// When it was last accessed, in seconds.
    pub(crate) last: f64,
    pub(crate) parent: u32,
    pub(crate) depth: u32,
    /// Resident blocks right behind it.
    pub(crate) children: u32,
    /// The first of the known blocks behind it; others are found through the map.
    next: u32,
    /// Where it is among the candidates or in the ring of ghosts.
    place: u32,
    pub(crate) sentinel: u32,
    /// The request that touched it last.
    pub(crate) request: u32,
    pub(crate) cell: Cell,
    pub(crate) flags: u8,
    pub(crate) count: u8,
    /// The session that touched it last.
    pub(crate) session: u32,
    /// Length in blocks of the last request that touched it.
    pub(crate) rend: u32,
    /// Moving average of log2 of its own gaps in seconds, once it is `PACED`.
    pub(crate) gap: f32,
    /// Its number in a store, where one has it.
    pub(crate) block: u32,
}

const _: () = assert!(size_of::<Node>() <= 64, "what a block costs is promised");

impl Node {
    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// A resident block at `depth` behind `parent`, of which nothing else is known yet.
    pub(crate) fn new(key: u64, parent: u32, depth: u32) -> Self {
        Self {
            key,
            last: 0.0,
            parent,
            depth,
            children: 0,
            session: NONE,
            rend: 0,
            gap: 0.0,
            sentinel: NONE,
            next: NONE,
            place: NONE,
            request: 0,
            block: NONE,
            cell: Cell::default(),
            flags: RESIDENT,
            count: 0,
        }
    }
}

/// What a draw of candidates looks at, side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) last: f64,
    pub(crate) slot: u32,
    /// What it was worth when it was last looked at, and the age up to which it is worth that.
    pub(crate) worth: f32,
    pub(crate) until: f32,
    pub(crate) cell: Cell,
}

impl Candidate {
    fn of(node: &Node, slot: u32) -> Self {
        Self { last: node.last, slot, worth: 0.0, until: UNKNOWN, cell: node.cell }
    }
}

/// An age that no block has: nothing is known of what it is worth.
const UNKNOWN: f32 = f32::NEG_INFINITY;

/// The chain index.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) nodes: Vec<Node>,
    free: Slots,
    /// Roots, and blocks whose parent has another `next`. With leaves first a parent is known as
    /// long as its children are, so that a chain is found by following it; else all are in here.
    map: HashTable<u32>,
    candidates: Vec<Candidate>,
    /// Blocks that are remembered, in the order in which they left; `NONE` where one came back.
    ring: VecDeque<u32>,
    /// The place of the first of them.
    ring_start: u32,
    ghosts: usize,
    residents: usize,
    /// Without it any resident may leave, and children are not counted.
    leaf_first: bool,
    /// A store keeps lists of its own: there are no candidates here.
    in_store: bool,
    /// Nodes that there may be.
    most: usize,
    /// Blocks of a store of which a draw would see something else than before.
    pub(crate) moved: Vec<u32>,
}

#[inline]
fn hash(key: u64) -> u64 {
    let mixed = u128::from(key ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
    (mixed as u64) ^ (mixed >> 64) as u64
}

impl Chain {
    /// An index that remembers `ghosts` blocks after they left.
    pub(crate) fn new(ghosts: usize, leaf_first: bool) -> Self {
        Self {
            nodes: Vec::new(),
            free: Slots::default(),
            map: HashTable::new(),
            candidates: Vec::new(),
            ring: VecDeque::new(),
            ring_start: 0,
            ghosts,
            residents: 0,
            leaf_first,
            in_store: false,
            most: usize::MAX,
            moved: Vec::new(),
        }
    }

    /// An index of at most `most` blocks, whose residents a store decides about.
    pub(crate) fn of_store(most: usize) -> Self {
        Self { in_store: true, most, ..Self::new(0, true) }
    }

    #[inline]
    pub(crate) fn residents(&self) -> usize {
        self.residents
    }

    #[cfg(test)]
    pub(crate) fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The candidates, and all nodes.
    #[inline]
    pub(crate) fn drawing(&mut self) -> (&mut [Candidate], &[Node]) {
        (&mut self.candidates, &self.nodes)
    }

    /// Candidates are worth something else from now on.
    pub(crate) fn revalue(&mut self) {
        self.candidates.iter_mut().for_each(|candidate| candidate.until = UNKNOWN);
    }

    /// The known block with this key behind `parent`; a chain's first block is behind `NONE`.
    #[inline]
    pub(crate) fn child(&self, parent: u32, key: u64) -> Option<u32> {
        let nodes = &self.nodes;
        if self.leaf_first && parent != NONE {
            let next = nodes[parent as usize].next;
            if next != NONE && nodes[next as usize].key == key {
                return Some(next);
            }
        }
        let found = self.map.find(hash(key), |slot| {
            let node = &nodes[*slot as usize];
            node.key == key && (node.parent == parent || !self.leaf_first)
        });
        found.copied()
    }

    /// [`Self::child`], tried first at a guessed slot: neighbours in a chain mostly got slots side
    /// by side, and a guess need not wait for the parent to come from memory.
    #[inline]
    pub(crate) fn child_near(&self, parent: u32, key: u64, guess: u32) -> Option<u32> {
        match self.nodes.get(guess as usize) {
            Some(node) if node.key == key && node.parent == parent && node.count != 0 => {
                Some(guess)
            }
            _ => self.child(parent, key),
        }
    }

    #[inline]
    pub(crate) fn node(&mut self, slot: u32) -> &mut Node {
        &mut self.nodes[slot as usize]
    }

    /// Adds a resident block.
    pub(crate) fn insert(&mut self, node: Node) -> u32 {
        let (key, parent) = (node.key, node.parent);
        let slot = self.hold(node);
        if self.leaf_first && parent != NONE && self.nodes[parent as usize].next == NONE {
            self.node(parent).next = slot;
        } else {
            let nodes = &self.nodes;
            self.map.insert_unique(hash(key), slot, |slot| hash(nodes[*slot as usize].key));
        }
        self.residents += 1;
        self.settle_in(slot, parent);
        slot
    }

    /// Makes room for so many blocks more, as far as there may be.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        self.nodes.reserve_exact(blocks.min(self.room()));
    }

    /// Keeps a node that is in no chain; its slot.
    pub(crate) fn hold(&mut self, node: Node) -> u32 {
        let slots = self.nodes.len();
        if let Some(slot) = self.free.take(if slots < self.most { slots } else { 0 }) {
            self.nodes[slot as usize] = node;
            return slot;
        }
        if self.in_store && slots == self.nodes.capacity() {
            // Memory is bounded there: what is reserved stays near to what is used.
            let more = 1024.max(slots / 8).min(self.most.saturating_sub(slots));
            self.nodes.reserve_exact(more.max(1));
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    /// Frees a node that is in no chain.
    pub(crate) fn let_go(&mut self, slot: u32) {
        self.nodes[slot as usize] = Node { flags: 0, ..Node::new(0, NONE, 0) };
        self.free.give(slot);
    }

    /// Makes a block that is remembered resident again, behind `parent`.
    pub(crate) fn readmit(&mut self, slot: u32, parent: u32) {
        let node = self.node(slot);
        debug_assert!(!node.has(RESIDENT), "only a ghost comes back");
        node.flags |= RESIDENT;
        let place = std::mem::replace(&mut node.place, NONE);
        node.parent = parent;
        if place != NONE {
            self.ring[place.wrapping_sub(self.ring_start) as usize] = NONE;
        }
        self.residents += 1;
        self.settle_in(slot, parent);
    }

    fn settle_in(&mut self, slot: u32, parent: u32) {
        if !self.leaf_first {
            self.list(slot);
        } else if parent != NONE {
            self.node(parent).children += 1;
            self.unlist(parent);
        }
    }

    /// Takes one child from `parent`; whether that made it a resident leaf.
    fn orphaned(&mut self, parent: u32) -> bool {
        let node = self.node(parent);
        debug_assert!(node.children > 0, "a resident child was counted");
        node.children -= 1;
        node.children == 0 && node.has(RESIDENT)
    }

    /// Makes a resident block a candidate, if it is a leaf and none yet.
    pub(crate) fn list(&mut self, slot: u32) {
        if self.in_store {
            return;
        }
        let place = self.candidates.len() as u32;
        let node = self.node(slot);
        if node.place != NONE || node.children != 0 {
            return;
        }
        node.place = place;
        let candidate = Candidate::of(node, slot);
        self.candidates.push(candidate);
    }

    fn unlist(&mut self, slot: u32) {
        let place = std::mem::replace(&mut self.node(slot).place, NONE);
        if place == NONE {
            return;
        }
        self.candidates.swap_remove(place as usize);
        if let Some(moved) = self.candidates.get(place as usize) {
            self.nodes[moved.slot as usize].place = place;
        }
    }

    /// Brings what a draw sees of a block in step with the block.
    #[inline]
    pub(crate) fn refresh(&mut self, slot: u32) {
        let node = &self.nodes[slot as usize];
        if node.block != NONE {
            self.moved.push(slot);
        } else if node.has(RESIDENT) && node.place != NONE {
            self.candidates[node.place as usize] = Candidate::of(node, slot);
        }
    }

    /// Lets a resident leaf go: its parent, if that is a leaf now and not listed yet, and the block
    /// that had to be forgotten for it.
    pub(crate) fn evict(&mut self, slot: u32) -> (Option<u32>, Option<u32>) {
        self.unlist(slot);
        let node = self.node(slot);
        debug_assert!(node.has(RESIDENT) && node.children == 0, "a leaf");
        node.flags &= !RESIDENT;
        let parent = node.parent;
        self.residents -= 1;
        let leaf = self.leaf_first && parent != NONE && self.orphaned(parent);
        (leaf.then_some(parent), self.remember(slot))
    }

    fn remember(&mut self, slot: u32) -> Option<u32> {
        if self.ghosts == 0 {
            return Some(slot);
        }
        let mut place = self.ring_start.wrapping_add(self.ring.len() as u32);
        if place == NONE {
            // No place has this number.
            self.ring.push_back(NONE);
            place = 0;
        }
        self.node(slot).place = place;
        self.ring.push_back(slot);
        if self.ring.len() <= self.ghosts {
            return None;
        }
        self.oldest().filter(|oldest| *oldest != NONE)
    }

    /// Takes the first place of the ring.
    fn oldest(&mut self) -> Option<u32> {
        let oldest = self.ring.pop_front()?;
        self.ring_start = self.ring_start.wrapping_add(1);
        Some(oldest)
    }

    /// How many blocks are remembered after they left, at most.
    pub(crate) fn limit_ghosts(&mut self, most: usize) {
        self.ghosts = most;
    }

    /// The block that has to be forgotten next, while more than `places` are taken.
    pub(crate) fn surplus(&mut self, places: usize) -> Option<u32> {
        while self.ring.len() > places {
            if let Some(oldest) = self.oldest().filter(|oldest| *oldest != NONE) {
                return Some(oldest);
            }
        }
        None
    }

    /// Nodes that there may still be.
    pub(crate) fn room(&self) -> usize {
        self.most.saturating_sub(self.used())
    }

    /// Nodes in use.
    pub(crate) fn used(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// Places of the ring that are taken.
    pub(crate) fn places(&self) -> usize {
        self.ring.len()
    }

    /// Bytes of memory that the index has.
    pub(crate) fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
            + self.free.bytes()
            + self.map.allocation_size()
            + (self.ring.capacity() + self.moved.capacity()) * size_of::<u32>()
            + self.candidates.capacity() * size_of::<Candidate>()
    }

    /// Frees a block that is not resident.
    pub(crate) fn forget(&mut self, slot: u32) {
        let node = &mut self.nodes[slot as usize];
        debug_assert!(!node.has(RESIDENT), "a resident is not forgotten");
        let Node { key, parent, .. } = *node;
        *node = Node { flags: 0, ..Node::new(0, NONE, 0) };
        if parent != NONE && self.leaf_first && self.nodes[parent as usize].next == slot {
            self.node(parent).next = NONE;
        } else if let Ok(entry) = self.map.find_entry(hash(key), |other| *other == slot) {
            entry.remove();
        }
        self.free.give(slot);
    }
}
