//! Which of two ways to read is the faster one here and now, found by going both.
//!
//! A read that passes through a buffer is the faster one by a quarter where the copy that a virtual
//! disk makes and the store's threads have one cache in common, and the slower one by a third where
//! they have not. Which of both it is changes as the host moves its threads.

use std::time::Duration;

use parking_lot::Mutex;

/// Reads that go one way before as many go the other, so that those under way at a time are mostly
/// of one way.
const IN_A_ROW: u32 = 4;
/// Reads of a period that are tried, the half of them each way.
const TRIED: u32 = 4 * IN_A_ROW;
/// Reads of a period; all but those that are tried go the faster way.
const PERIOD: u32 = 192;
/// What a buffer has to save, so that a little less on one side does not decide.
const WORTH: f64 = 0.9;
/// Reads of a size are compared with each other: one class for each power of two.
const CLASSES: usize = 6;
/// Reads of each way that decide.
const ENOUGH: usize = 4;

/// How a read goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To where the bytes belong.
    Direct,
    /// Through a buffer.
    Staged,
}

/// A read that goes some way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Try {
    pub(crate) way: Way,
    bytes: usize,
    /// It is of those that are tried, not of the others.
    counts: bool,
}

/// What was seen of both ways, for reads from `least` bytes on.
pub(crate) struct Trial {
    least: usize,
    classes: [Mutex<Class>; CLASSES],
}

#[derive(Default)]
struct Class {
    /// Reads begun in this period.
    begun: u32,
    /// Nanoseconds a byte of those that are tried.
    direct: Vec<f64>,
    staged: Vec<f64>,
    /// What came out of the trial.
    staging: bool,
}

impl Trial {
    pub(crate) fn new(least: usize) -> Self {
        Self { least, classes: Default::default() }
    }

    fn class(&self, bytes: usize) -> &Mutex<Class> {
        let class = (bytes / self.least).max(1).ilog2() as usize;
        &self.classes[class.min(CLASSES - 1)]
    }

    /// How the next read of so many bytes is to go.
    pub(crate) fn choose(&self, bytes: usize) -> Try {
        let mut class = self.class(bytes).lock();
        let at = class.begun;
        class.begun = (at + 1) % PERIOD;
        let counts = at < TRIED;
        let staged = if counts { at / IN_A_ROW % 2 == 1 } else { class.staging };
        Try { way: if staged { Way::Staged } else { Way::Direct }, bytes, counts }
    }

    /// A read has ended that went `way`, whatever was chosen for it.
    pub(crate) fn took(&self, read: Try, way: Way, time: Duration) {
        if read.counts {
            let nanos = time.as_nanos() as f64 / read.bytes.max(1) as f64;
            self.class(read.bytes).lock().count(way, nanos);
        }
    }
}

impl Class {
    /// What was tried decides once enough of both ways has ended, whatever was begun meanwhile: by
    /// the medians, which a read that was interrupted does not move.
    fn count(&mut self, way: Way, nanos: f64) {
        let seen = if way == Way::Direct { &mut self.direct } else { &mut self.staged };
        seen.push(nanos);
        if self.direct.len() >= ENOUGH && self.staged.len() >= ENOUGH {
            self.staging = median(&mut self.staged) < WORTH * median(&mut self.direct);
        }
        if self.direct.len() + self.staged.len() >= TRIED as usize {
            self.direct.clear();
            self.staged.clear();
        }
    }
}

/// Of what is not empty.
fn median(seen: &mut [f64]) -> f64 {
    seen.sort_unstable_by(f64::total_cmp);
    seen[seen.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 20;

    /// How many reads of a whole period pass through a buffer, where one takes as long as said.
    fn staged(trial: &Trial, bytes: usize, time: impl Fn(Way, u32) -> u64) -> u32 {
        let read = |at| {
            let read = trial.choose(bytes);
            trial.took(read, read.way, Duration::from_nanos(time(read.way, at)));
            u32::from(read.way == Way::Staged)
        };
        (0..PERIOD).map(read).sum()
    }

    fn takes(direct: u64, staged: u64) -> impl Fn(Way, u32) -> u64 {
        move |way, _| if way == Way::Direct { direct } else { staged }
    }

    #[test]
    fn the_faster_way_is_gone_and_the_other_one_is_tried_again() {
        let trial = Trial::new(64 << 10);
        assert_eq!(staged(&trial, BYTES, takes(400, 300)), PERIOD - TRIED / 2);
        // The host has moved a thread.
        assert_eq!(staged(&trial, BYTES, takes(400, 600)), TRIED / 2);
        assert_eq!(staged(&trial, BYTES, takes(400, 300)), PERIOD - TRIED / 2);
    }

    #[test]
    fn a_buffer_that_saves_next_to_nothing_is_left_alone() {
        let trial = Trial::new(64 << 10);
        assert_eq!(staged(&trial, BYTES, takes(400, 380)), TRIED / 2);
    }

    #[test]
    fn reads_that_were_interrupted_decide_nothing() {
        let trial = Trial::new(64 << 10);
        let interrupted = |way, at| match (way, at) {
            (Way::Direct, 0..3) => 100_000,
            (Way::Direct, _) => 400,
            (Way::Staged, _) => 500,
        };
        assert_eq!(staged(&trial, BYTES, interrupted), TRIED / 2);
    }

    #[test]
    fn small_reads_say_nothing_of_large_ones() {
        let trial = Trial::new(64 << 10);
        staged(&trial, 64 << 10, takes(100, 300));
        assert_eq!(staged(&trial, BYTES, takes(400, 300)), PERIOD - TRIED / 2);
        assert_eq!(staged(&trial, 64 << 10, takes(100, 300)), TRIED / 2);
        assert_eq!(trial.choose(usize::MAX).way, Way::Direct, "the last class is open");
    }

    #[test]
    fn where_no_buffer_was_to_be_had_nothing_changes() {
        let trial = Trial::new(64 << 10);
        for _ in 0..=TRIED {
            let read = trial.choose(BYTES);
            trial.took(read, Way::Direct, Duration::from_nanos(400));
        }
        assert_eq!(trial.choose(BYTES).way, Way::Direct);
    }

    #[test]
    fn reads_that_end_late_decide_as_well() {
        let trial = Trial::new(64 << 10);
        let under_way: Vec<Try> = (0..PERIOD).map(|_| trial.choose(BYTES)).collect();
        for read in under_way {
            trial.took(read, read.way, Duration::from_nanos(takes(400, 300)(read.way, 0)));
        }
        assert_eq!(staged(&trial, BYTES, takes(400, 300)), PERIOD - TRIED / 2);
    }
}
