//! Sentinels: the few blocks whose lives are counted.

use super::chain::NONE;
use super::hazard::{Cell, Table};
use super::score::{Features, Scores};

/// One sentinel of so many, by the place of its block, is looked at for the calibration: all would
/// cost some nanoseconds a block access.
const CALIBRATED: u32 = 4;

/// A block under observation since its last access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sentinel {
    /// When its block was last accessed, in seconds: the block itself need not be looked at.
    last: f64,
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
#[derive(Debug)]
pub(crate) struct Sentinels {
    all: Vec<Sentinel>,
    /// How many there may be.
    most: usize,
    /// Where the sweep goes on.
    next: usize,
}

/// A life under observation as it begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    /// When, in seconds.
    pub(crate) from: f64,
    pub(crate) cell: Cell,
    pub(crate) features: Features,
    /// Whether its fate teaches the request score.
    pub(crate) scored: bool,
}

impl Life {
    fn observed_at(self, slot: u32) -> Sentinel {
        let Self { from, cell, features, scored } = self;
        Sentinel { last: from, slot, features, credited: 0.0, cell, bucket: 0, scored }
    }
}

/// Where counts go.
pub(crate) struct Books<'a> {
    pub(crate) table: &'a mut Table,
    pub(crate) scores: &'a mut Scores,
}

impl Sentinel {
    /// Credits the buckets that the block has outlived, and the part of the running one.
    fn survive(&mut self, books: &mut Books<'_>, now: f64) {
        let (bucket, part) = books.table.place(self.cell, (now - self.last).max(0.0));
        let mut exposure = self.pass(books, bucket);
        if part > self.credited && usize::from(self.bucket) == bucket {
            exposure += self.credit(books, part, false);
        }
        self.score(books, exposure, false);
    }

    /// Credits the buckets before `bucket` in full: how many reuses were expected.
    fn pass(&mut self, books: &mut Books<'_>, bucket: usize) -> f32 {
        let mut exposure = 0.0;
        while usize::from(self.bucket) < bucket {
            exposure += self.credit(books, 1.0, false);
            self.bucket += 1;
            self.credited = 0.0;
        }
        exposure
    }

    /// Credits the running bucket up to `part`: how many reuses were expected.
    fn credit(&mut self, books: &mut Books<'_>, part: f32, reused: bool) -> f32 {
        let bucket = usize::from(self.bucket);
        let trials = part - self.credited;
        if self.slot.is_multiple_of(CALIBRATED) {
            books.table.calibrate(self.cell, bucket, trials, reused);
        }
        books.table.add(self.cell, bucket, trials, reused);
        self.credited = part;
        trials * books.table.global[bucket] as f32
    }

    fn score(&self, books: &mut Books<'_>, exposure: f32, reused: bool) {
        if self.scored && (reused || exposure > 0.0) {
            books.scores.add(self.features, exposure, reused);
        }
    }
}

impl Sentinels {
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    #[cfg(test)]
    pub(crate) fn slot(&self, number: u32) -> u32 {
        self.all[number as usize].slot
    }

    /// Bytes of memory that they have.
    pub(crate) fn bytes(&self) -> usize {
        self.all.capacity() * size_of::<Sentinel>()
    }

    /// None yet, and never more than `most`.
    pub(crate) fn new(most: usize) -> Self {
        Self { all: Vec::new(), most, next: 0 }
    }

    /// Sets a new sentinel on a block; its number, which is that of none where there are enough.
    pub(crate) fn start(&mut self, slot: u32, life: Life) -> u32 {
        if self.all.len() >= self.most {
            return Self::NONE;
        }
        self.all.push(life.observed_at(slot));
        (self.all.len() - 1) as u32
    }

    /// Counts a reuse, and begins with another life.
    pub(crate) fn reused(&mut self, number: u32, books: &mut Books<'_>, life: Life) {
        let sentinel = &mut self.all[number as usize];
        let age = (life.from - sentinel.last).max(0.0);
        let (bucket, _) = books.table.place(sentinel.cell, age);
        // Clocks that step back leave the bucket ahead of the age: the reuse counts where it is.
        let exposure = sentinel.pass(books, bucket) + sentinel.credit(books, 1.0, true);
        sentinel.score(books, exposure, true);
        *sentinel = life.observed_at(sentinel.slot);
    }

    /// Its block is of another cell from now on, at the same age.
    pub(crate) fn moved(&mut self, number: u32, books: &mut Books<'_>, now: f64, cell: Cell) {
        let sentinel = &mut self.all[number as usize];
        sentinel.survive(books, now);
        sentinel.cell = cell;
        sentinel.scored = false;
    }

    /// Credits what it outlived and drops it. The slot whose sentinel has this number from now on,
    /// if there is one.
    pub(crate) fn end(&mut self, number: u32, books: &mut Books<'_>, now: f64) -> Option<u32> {
        self.all[number as usize].survive(books, now);
        self.all.swap_remove(number as usize);
        self.all.get(number as usize).map(|moved| moved.slot)
    }

    /// Credits the next few sentinels in turn with what they outlived: without it, lives that do
    /// not end would not be seen, and every long age would look better than it is.
    pub(crate) fn sweep(&mut self, books: &mut Books<'_>, now: f64) {
        let count = 32.max(self.all.len() / 512).min(self.all.len());
        for _ in 0..count {
            if self.next >= self.all.len() {
                self.next = 0;
            }
            self.all[self.next].survive(books, now);
            self.next += 1;
        }
    }

    /// The number of no sentinel.
    pub(crate) const NONE: u32 = NONE;
}
