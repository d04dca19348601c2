//! Which blocks of a tier may leave it, side by side as a draw looks at them.

use crate::beta::chain::NONE;
use crate::beta::hazard::Cell;
use crate::{BlockId, Standing};
use std::collections::BTreeMap;

/// What a draw looks at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) last: f64,
    pub(super) block: BlockId,
    pub(super) cell: Cell,
}

/// What is kept of a block for each tier that has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Entry {
    /// Its place in the list, `NONE` where it may not leave.
    place: u32,
    /// Number of the list, above two bits of standing; `NONE` where the tier has not got it.
    list: u32,
}

impl Entry {
    const ABSENT: Self = Self { place: NONE, list: NONE };

    fn new(list: usize, standing: Standing) -> Self {
        Self { place: NONE, list: (list as u32) << 2 | standing as u32 }
    }

    fn list(self) -> usize {
        (self.list >> 2) as usize
    }

    /// Whether it may leave, in the list of this number.
    pub(super) fn is_listed(self, list: usize) -> bool {
        self.place != NONE && self.list() == list
    }

    pub(super) fn standing(self) -> Standing {
        match self.list & 3 {
            0 => Standing::Orphan,
            1 => Standing::Candidate,
            _ => Standing::Kept,
        }
    }
}

/// The blocks that make room for each other: orphans, which go first, and candidates.
pub(super) type List = [Vec<Candidate>; 2];

/// The lists of one tier.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// By block number: these are small and dense.
    entries: Vec<Entry>,
    pub(super) lists: Vec<List>,
    by_shape: BTreeMap<u32, usize>,
    pub(super) count: usize,
}

impl Lists {
    /// The block's entry, where the tier has it.
    pub(super) fn entry(&self, block: BlockId) -> Option<Entry> {
        self.entries.get(block as usize).copied().filter(|entry| entry.list != NONE)
    }

    /// What a draw sees of a block that may leave.
    pub(super) fn seen(&self, block: BlockId) -> Option<(f64, Cell)> {
        let entry = self.entry(block).filter(|entry| entry.place != NONE)?;
        let list = &self.lists[entry.list()][entry.standing() as usize];
        let candidate = &list[entry.place as usize];
        Some((candidate.last, candidate.cell))
    }

    /// The number of a shape's list, where any block was of that shape.
    pub(super) fn number(&self, shape: u32) -> Option<usize> {
        self.by_shape.get(&shape).copied()
    }

    fn list_of(&mut self, shape: u32) -> usize {
        let next = self.lists.len();
        let number = *self.by_shape.entry(shape).or_insert(next);
        if number == next {
            self.lists.push(List::default());
        }
        number
    }

    /// Makes room for so many blocks more.
    pub(super) fn reserve(&mut self, blocks: usize) {
        self.entries.reserve(blocks);
    }

    /// The tier has the block from now on; it may not leave yet.
    pub(super) fn enter(&mut self, block: BlockId, shape: u32) {
        self.unlist(block);
        if self.entries.len() <= block as usize {
            self.entries.resize(block as usize + 1, Entry::ABSENT);
        }
        self.entries[block as usize] = Entry::new(self.list_of(shape), Standing::Kept);
    }

    /// The tier has it no more; whether it had.
    pub(super) fn leave(&mut self, block: BlockId) -> bool {
        let had = self.entry(block).is_some();
        if had {
            self.unlist(block);
            self.entries[block as usize] = Entry::ABSENT;
        }
        had
    }

    /// Whether it may leave; `seen` is what a draw will see of it.
    pub(super) fn set(&mut self, block: BlockId, standing: Standing, seen: (f64, Cell)) {
        let Some(entry) = self.entry(block) else { return };
        if entry.standing() != standing {
            self.unlist(block);
            self.entries[block as usize] = Entry::new(entry.list(), standing);
            self.list(block, seen);
        }
    }

    pub(super) fn reshape(&mut self, block: BlockId, shape: u32, seen: (f64, Cell)) {
        let Some(entry) = self.entry(block) else { return };
        self.unlist(block);
        self.entries[block as usize] = Entry::new(self.list_of(shape), entry.standing());
        self.list(block, seen);
    }

    /// Brings what a draw sees of a block in step with the block.
    pub(super) fn refresh(&mut self, block: BlockId, (last, cell): (f64, Cell)) {
        let Some(entry) = self.entry(block).filter(|entry| entry.place != NONE) else { return };
        let list = &mut self.lists[entry.list()][entry.standing() as usize];
        list[entry.place as usize] = Candidate { last, block, cell };
    }

    fn list(&mut self, block: BlockId, (last, cell): (f64, Cell)) {
        let entry = &mut self.entries[block as usize];
        let standing = entry.standing();
        if standing == Standing::Kept {
            return;
        }
        let list = &mut self.lists[entry.list()][standing as usize];
        entry.place = list.len() as u32;
        list.push(Candidate { last, block, cell });
        self.count += 1;
    }

    fn unlist(&mut self, block: BlockId) {
        let Some(entry) = self.entry(block).filter(|entry| entry.place != NONE) else { return };
        let list = &mut self.lists[entry.list()][entry.standing() as usize];
        list.swap_remove(entry.place as usize);
        if let Some(moved) = list.get(entry.place as usize) {
            self.entries[moved.block as usize].place = entry.place;
        }
        self.entries[block as usize].place = NONE;
        self.count -= 1;
    }

    /// Bytes of memory that the lists have.
    pub(super) fn bytes(&self) -> usize {
        let of = |list: &List| list.iter().map(Vec::capacity).sum::<usize>();
        self.entries.capacity() * size_of::<Entry>()
            + self.lists.iter().map(of).sum::<usize>() * size_of::<Candidate>()
            + self.lists.capacity() * 2 * size_of::<List>()
    }
}
