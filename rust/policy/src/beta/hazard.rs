//! Hazards of reuse by cell and age, with Beta posteriors, and the index made of them.

use super::age::{Ages, BUCKETS, bucket};
use super::calibration::Calibrations;
use super::index::gittins;

/// Pairs of a block type and a transition type.
pub const PAIRS: usize = 16;
/// Levels of gap within a score, and of scores within a pair.
pub(crate) const GAPS: usize = 8;
pub(crate) const SCORES: usize = 8;
const LEVELS: usize = GAPS * SCORES;
/// Cells of the table: pair, score and gap.
pub(crate) const CELLS: usize = PAIRS * LEVELS;

/// Strength of the prior of the global hazard.
const GLOBAL_STRENGTH: f64 = 30.0;
/// What the hazard of one bucket says of the next, before there is evidence.
const CARRY: f64 = 0.7;
const START: f64 = 0.1;
/// How much of the evidence of one bucket counts for the ratio to the parent in the next.
const FADE: f64 = 0.8;

/// How fast a block ages, in half doublings: from 2^-8 times as slow as the clock up.
pub(crate) type Scale = u16;
const SCALES: usize = 32;
/// The scale on which a second is a second.
pub(crate) const UNSCALED: Scale = 16;

/// Number of a cell, and the scale of ages in it, which has the upper bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Cell(u16);

impl Cell {
    pub(crate) fn new(pair: usize, score: usize, gap: usize) -> Self {
        debug_assert!(pair < PAIRS && score < SCORES && gap < GAPS, "a cell that exists");
        Self((pair * LEVELS + score * GAPS + gap) as u16).scaled(UNSCALED)
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0) % CELLS
    }

    /// The same cell on another scale of ages.
    pub(crate) fn scaled(self, scale: Scale) -> Self {
        debug_assert!(usize::from(scale) < SCALES, "a scale that exists");
        Self(self.index() as u16 + scale * CELLS as u16)
    }

    fn scale(self) -> usize {
        usize::from(self.0) / CELLS
    }

    pub(crate) fn pair(self) -> usize {
        self.index() / LEVELS
    }

    /// The same level under another pair.
    pub(crate) fn with_pair(self, pair: usize) -> Self {
        let moved = Self((pair * LEVELS + self.index() % LEVELS) as u16);
        moved.scaled(self.scale() as Scale)
    }
}

/// Reuses, and reuses and survivals, of one bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Count {
    pub(crate) reuses: f32,
    pub(crate) trials: f32,
}

type Counts = [Count; BUCKETS];
type Curve = [f64; BUCKETS];

fn add(into: &mut Counts, counts: &Counts) {
    for (sum, count) in into.iter_mut().zip(counts) {
        sum.reuses += count.reuses;
        sum.trials += count.trials;
    }
}

/// What was counted, and the index as of the last rebuild.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) ages: Ages,
    counts: Vec<Counts>,
    /// Whether a cell has any count.
    used: [bool; CELLS],
    /// Index of each cell and bucket: hits a second.
    index: Vec<[f32; BUCKETS]>,
    /// Hazard of each cell and bucket, from which the index was made.
    hazard: Vec<[f32; BUCKETS]>,
    /// How these compare with what came.
    pub(crate) calibrations: Calibrations,
    /// The hazard over all cells as of the last rebuild.
    pub(crate) global: Curve,
    /// Without it, an index is the chance that a block of the pair is ever reused.
    by_age: bool,
    /// Strength of the prior that a node takes from its parent, in observations.
    strength: f64,
    /// Units of age a second, by scale.
    rates: [f32; SCALES],
}

impl Table {
    pub(crate) fn new(by_age: bool, strength: f64) -> Self {
        let mut table = Self {
            ages: Ages::new(),
            counts: vec![[Count::default(); BUCKETS]; CELLS],
            used: [false; CELLS],
            index: vec![[0.0; BUCKETS]; CELLS],
            hazard: vec![[0.0; BUCKETS]; CELLS],
            calibrations: Calibrations::default(),
            global: [0.0; BUCKETS],
            by_age,
            strength,
            rates: std::array::from_fn(|s| 2f32.powf((f32::from(UNSCALED) - s as f32) / 2.0)),
        };
        table.rebuild(1.0);
        table
    }

    /// The index of a block of `cell` at an age in seconds.
    #[inline]
    pub(crate) fn value(&self, cell: Cell, age: f64) -> f32 {
        let rate = self.rates[cell.scale()];
        self.index[cell.index()][bucket(age * f64::from(rate))] * rate
    }

    /// [`Self::value`], and an age up to which it stays that until the next rebuild: a little less
    /// than where the bucket ends, so that rounding does not matter.
    #[inline]
    pub(crate) fn value_until(&self, cell: Cell, age: f64) -> (f32, f32) {
        let rate = self.rates[cell.scale()];
        let bucket = bucket(age * f64::from(rate));
        let end = self.ages.end(bucket) / f64::from(rate) * (1.0 - 1e-6);
        (self.index[cell.index()][bucket] * rate, end as f32)
    }

    /// The bucket of an age, and which part of it has passed, in the units of the cell.
    pub(crate) fn place(&self, cell: Cell, age: f64) -> (usize, f32) {
        self.ages.place(age * f64::from(self.rates[cell.scale()]))
    }

    #[cfg(test)]
    pub(crate) fn count(&self, cell: Cell, bucket: usize) -> Count {
        self.counts[cell.index()][bucket]
    }

    /// The counts of a cell by its number, if it has any.
    pub(crate) fn counts(&self, cell: usize) -> Option<&[Count; BUCKETS]> {
        self.used[cell].then(|| &self.counts[cell])
    }

    /// Adds counts to a cell by its number.
    pub(crate) fn add_counts(&mut self, cell: usize, counts: &[Count; BUCKETS]) {
        add(&mut self.counts[cell], counts);
        self.used[cell] = true;
    }

    /// Bytes of memory that it has.
    pub(crate) fn bytes(&self) -> usize {
        CELLS * (size_of::<Counts>() + 2 * size_of::<[f32; BUCKETS]>()) + size_of::<Self>()
    }

    /// Adds `trials` survivals, or parts of one, in a bucket, and a reuse if `reused`.
    #[inline]
    pub(crate) fn add(&mut self, cell: Cell, bucket: usize, trials: f32, reused: bool) {
        let count = &mut self.counts[cell.index()][bucket];
        count.trials += trials;
        if reused {
            count.reuses += 1.0;
        }
        self.used[cell.index()] = true;
    }

    /// Counts what was predicted of trials beside what came of them, before [`Self::add`] does.
    #[inline]
    pub(crate) fn calibrate(&mut self, cell: Cell, bucket: usize, trials: f32, reused: bool) {
        let chance = self.hazard[cell.index()][bucket];
        self.calibrations.count(cell.pair(), chance, trials, reused);
    }

    /// Lets all counts fade by `decay`, then computes hazards and index anew.
    pub(crate) fn rebuild(&mut self, decay: f32) {
        for (counts, _) in self.counts.iter_mut().zip(&self.used).filter(|(_, used)| **used) {
            for count in counts.iter_mut() {
                count.reuses *= decay;
                count.trials *= decay;
            }
        }
        let (global, pairs) = self.pair_hazards();
        self.global = global;
        for (pair, hazard) in pairs.iter().enumerate() {
            self.rebuild_pair(pair, hazard);
        }
        if !self.by_age {
            self.rebuild_by_class();
        }
    }

    /// The hazard over all cells, and the posterior means of each pair's.
    pub(crate) fn pair_hazards(&self) -> (Curve, Vec<Curve>) {
        let mut total = [Count::default(); BUCKETS];
        let mut pairs = vec![[Count::default(); BUCKETS]; PAIRS];
        for (cell, counts) in self.counts.iter().enumerate().filter(|(c, _)| self.used[*c]) {
            add(&mut pairs[cell / LEVELS], counts);
        }
        let mut types = [[Count::default(); BUCKETS]; 4];
        for (pair, counts) in pairs.iter().enumerate() {
            add(&mut types[pair / 4], counts);
            add(&mut total, counts);
        }
        let global = global_hazard(&total);
        let of_types = types.map(|counts| shrink(&counts, &global, self.strength));
        let hazard = |(pair, counts)| shrink(counts, &of_types[pair / 4], self.strength);
        (global, pairs.iter().enumerate().map(hazard).collect())
    }

    fn rebuild_pair(&mut self, pair: usize, hazard: &Curve) {
        let of_pair = (gittins(hazard, &self.ages.widths), hazard.map(|h| h as f32));
        for score in 0..SCORES {
            let first = pair * LEVELS + score * GAPS;
            let cells = first..first + GAPS;
            if !self.used[cells.clone()].contains(&true) {
                self.index[cells.clone()].fill(of_pair.0);
                self.hazard[cells].fill(of_pair.1);
                continue;
            }
            let mut counts = [Count::default(); BUCKETS];
            for cell in cells.clone() {
                add(&mut counts, &self.counts[cell]);
            }
            let of_score = shrink(&counts, hazard, self.strength);
            let unused = (gittins(&of_score, &self.ages.widths), of_score.map(|h| h as f32));
            for cell in cells {
                (self.index[cell], self.hazard[cell]) = if self.used[cell] {
                    let own = shrink(&self.counts[cell], &of_score, self.strength);
                    (gittins(&own, &self.ages.widths), own.map(|h| h as f32))
                } else {
                    unused
                };
            }
        }
    }

    /// Lives of a pair that ended in a reuse, and lives that ended at all: in the last bucket in
    /// which they are seen.
    pub(crate) fn lives(&self, pair: usize) -> (f64, f64) {
        let mut counts = [Count::default(); BUCKETS];
        for cell in pair * LEVELS..(pair + 1) * LEVELS {
            add(&mut counts, &self.counts[cell]);
        }
        let (mut reused, mut lives) = (0f64, 0f64);
        for bucket in 0..BUCKETS {
            let after = counts.get(bucket + 1).map_or(0.0, |count| count.trials);
            let Count { reuses, trials } = counts[bucket];
            reused += f64::from(reuses);
            lives += f64::from(reuses + (trials - reuses - after).max(0.0));
        }
        (reused, lives)
    }

    /// The chance that a life ends in a reuse, by pair: what the ages say is not looked at.
    fn rebuild_by_class(&mut self) {
        for pair in 0..PAIRS {
            let (reuses, lives) = self.lives(pair);
            let chance = ((reuses + 1.0) / (lives + 2.0)) as f32;
            self.index[pair * LEVELS..(pair + 1) * LEVELS].fill([chance; BUCKETS]);
        }
    }
}

fn global_hazard(total: &Counts) -> Curve {
    let mut hazard = [0.0; BUCKETS];
    for bucket in 0..BUCKETS {
        let mean = if bucket <= 1 { START } else { CARRY * hazard[bucket - 1] };
        let Count { reuses, trials } = total[bucket];
        let reused = f64::from(reuses) + GLOBAL_STRENGTH * mean;
        hazard[bucket] = (reused / (f64::from(trials) + GLOBAL_STRENGTH)).min(1.0);
    }
    hazard
}

/// Posterior means under a prior around the parent's curve, scaled by how this node compared with
/// its parent in the buckets before.
fn shrink(counts: &Counts, parent: &Curve, strength: f64) -> Curve {
    let (mut observed, mut expected) = (0f64, 0f64);
    let mut hazard = [0.0; BUCKETS];
    for bucket in 0..BUCKETS {
        let (reuses, trials) = (f64::from(counts[bucket].reuses), f64::from(counts[bucket].trials));
        let prior = ((observed + 2.0) / (expected + 2.0) * parent[bucket]).min(0.95);
        // A reuse early in a bucket is one of a part of a trial.
        hazard[bucket] = ((reuses + strength * prior) / (trials + strength)).min(1.0);
        observed = FADE * observed + reuses;
        expected = FADE * expected + trials * parent[bucket];
    }
    hazard
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_without_evidence_takes_its_parent_s_index() {
        let mut table = Table::new(true, 40.0);
        let seen = Cell::new(5, 2, 3);
        for _ in 0..200 {
            table.add(seen, 10, 1.0, true);
            table.add(Cell::new(5, 2, 4), 10, 1.0, false);
            table.add(Cell::new(9, 0, 0), 10, 1.0, false);
        }
        table.rebuild(1.0);
        let value = |pair, score, gap| {
            table.value(Cell::new(pair, score, gap), crate::beta::age::start(10))
        };
        assert_eq!(value(5, 2, 0), value(5, 2, 7), "both of the score's curve");
        assert_eq!(value(5, 0, 0), value(5, 7, 7), "both of the pair's curve");
        assert!(value(5, 2, 3) > value(5, 2, 0), "between the cells that were seen");
        assert!(value(5, 2, 0) > value(5, 2, 4), "between the cells that were seen");
        assert!(value(5, 0, 0) > value(9, 0, 0), "reused against never reused");
    }

    #[test]
    fn counts_fade_at_a_rebuild() {
        let mut table = Table::new(true, 40.0);
        let cell = Cell::new(0, 0, 0);
        table.add(cell, 3, 1.0, true);
        table.rebuild(0.5);
        assert_eq!(table.count(cell, 3), Count { reuses: 0.5, trials: 0.5 });
    }
}
