//! Sentinels: the few blocks whose lives are counted.

use super::chain::NONE;
use super::hazard::{Cell, Table};
use super::score::{Features, Scores};

/// A block under observation since its last access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sentinel {
    pub(crate) slot: u32,
    features: Features,
    /// Part of `bucket` that has been credited.
    credited: f32,
    cell: Cell,
    bucket: u8,
    /// Whether its fate teaches the request score.
    scored: bool,
}

/// All sentinels, in no order.
#[derive(Debug, Default)]
pub(crate) struct Sentinels {
    all: Vec<Sentinel>,
    /// Where the sweep goes on.
    next: usize,
}

/// Where counts go.
pub(crate) struct Books<'a> {
    pub(crate) table: &'a mut Table,
    pub(crate) scores: &'a mut Scores,
}

impl Books<'_> {
    fn add(&mut self, sentinel: &Sentinel, bucket: usize, trials: f32, reused: bool) {
        self.table.add(sentinel.cell, bucket, trials, reused);
        if sentinel.scored {
            let hazard = self.table.global[bucket] as f32;
            self.scores.add(sentinel.features, trials, hazard, reused);
        }
    }
}

impl Sentinel {
    /// Credits the buckets that the block outlived by `age`, and the part of the running one.
    fn survive(&mut self, books: &mut Books<'_>, age: f64) {
        let (bucket, part) = books.table.ages.place(age);
        self.pass(books, bucket);
        if part > self.credited {
            books.add(self, bucket, part - self.credited, false);
            self.credited = part;
        }
    }

    /// Credits the buckets before `bucket` in full.
    fn pass(&mut self, books: &mut Books<'_>, bucket: usize) {
        while usize::from(self.bucket) < bucket {
            books.add(self, usize::from(self.bucket), 1.0 - self.credited, false);
            self.bucket += 1;
            self.credited = 0.0;
        }
    }
}

impl Sentinels {
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Sets a new sentinel on a block; its number.
    pub(crate) fn start(
        &mut self,
        slot: u32,
        cell: Cell,
        features: Features,
        scored: bool,
    ) -> u32 {
        self.all.push(Sentinel { slot, features, credited: 0.0, cell, bucket: 0, scored });
        (self.all.len() - 1) as u32
    }

    /// Counts a reuse at `age`, and begins again.
    pub(crate) fn reused(
        &mut self,
        number: u32,
        books: &mut Books<'_>,
        age: f64,
        (cell, features, scored): (Cell, Features, bool),
    ) {
        let sentinel = &mut self.all[number as usize];
        let (bucket, _) = books.table.ages.place(age);
        sentinel.pass(books, bucket);
        // Clocks that step back leave the bucket ahead of the age: the reuse counts where it is.
        let bucket = usize::from(sentinel.bucket);
        books.add(sentinel, bucket, 1.0 - sentinel.credited, true);
        *sentinel = Sentinel { cell, features, scored, credited: 0.0, bucket: 0, ..*sentinel };
    }

    /// Its block is of another cell from now on, at the same age.
    pub(crate) fn moved(&mut self, number: u32, books: &mut Books<'_>, age: f64, cell: Cell) {
        let sentinel = &mut self.all[number as usize];
        sentinel.survive(books, age);
        sentinel.cell = cell;
        sentinel.scored = false;
    }

    /// Credits what it outlived and drops it. The slot whose sentinel has this number from now on,
    /// if there is one.
    pub(crate) fn end(&mut self, number: u32, books: &mut Books<'_>, age: f64) -> Option<u32> {
        self.all[number as usize].survive(books, age);
        self.all.swap_remove(number as usize);
        self.all.get(number as usize).map(|moved| moved.slot)
    }

    /// Credits the next few sentinels in turn with what they outlived: without it, lives that do
    /// not end would not be seen, and every long age would look better than it is.
    pub(crate) fn sweep(&mut self, books: &mut Books<'_>, age_of: impl Fn(u32) -> f64) {
        let count = 32.max(self.all.len() / 512).min(self.all.len());
        for _ in 0..count {
            if self.next >= self.all.len() {
                self.next = 0;
            }
            let sentinel = &mut self.all[self.next];
            sentinel.survive(books, age_of(sentinel.slot));
            self.next += 1;
        }
    }

    /// The number of no sentinel.
    pub(crate) const NONE: u32 = NONE;
}
