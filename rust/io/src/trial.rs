//! Which of two ways to read is the faster one here and now, found by going both.
//!
//! A read that passes through a buffer is the faster one by a quarter where the copy that a virtual
//! disk makes and the store's threads have one cache in common, and the slower one by a third where
//! they have not. Which of both it is changes as the host moves its threads.

use std::time::Duration;

use parking_lot::Mutex;

/// Reads that go one way before as many go the other: under way at a time, they are of one way.
const IN_A_ROW: u32 = 4;
/// Reads of a period that are tried, the half of them each way.
const TRIED: u32 = 4 * IN_A_ROW;
/// Reads of a period; all but those that are tried go the faster way.
const PERIOD: u32 = 192;
/// What a buffer has to save, so that a little less on one side does not decide.
const WORTH: f64 = 0.9;
/// Reads of a size are compared with each other: one class for each power of two.
const CLASSES: usize = 6;

/// How a read goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To where the bytes belong.
    Direct,
    /// Through a buffer.
    Staged,
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
    pub(crate) fn choose(&self, bytes: usize) -> Way {
        let mut class = self.class(bytes).lock();
        let at = class.begun;
        class.begun = (at + 1) % PERIOD;
        if at == TRIED {
            class.decide();
        }
        let staged = if at < TRIED { at / IN_A_ROW % 2 == 1 } else { class.staging };
        if staged { Way::Staged } else { Way::Direct }
    }

    /// A read took so long.
    pub(crate) fn took(&self, way: Way, bytes: usize, time: Duration) {
        let mut class = self.class(bytes).lock();
        if class.begun <= TRIED {
            let seen = if way == Way::Direct { &mut class.direct } else { &mut class.staged };
            seen.push(time.as_nanos() as f64 / bytes.max(1) as f64);
        }
    }
}

impl Class {
    /// By the medians, which a read that was interrupted does not move; without one of both, as
    /// before.
    fn decide(&mut self) {
        if let (Some(direct), Some(staged)) = (median(&mut self.direct), median(&mut self.staged)) {
            self.staging = staged < WORTH * direct;
        }
        self.direct.clear();
        self.staged.clear();
    }
}

fn median(seen: &mut [f64]) -> Option<f64> {
    seen.sort_unstable_by(f64::total_cmp);
    seen.get(seen.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 20;

    /// How many reads of a whole period pass through a buffer, where one takes as long as said.
    fn staged(trial: &Trial, bytes: usize, time: impl Fn(Way, u32) -> u64) -> u32 {
        let read = |at| {
            let way = trial.choose(bytes);
            trial.took(way, bytes, Duration::from_nanos(time(way, at)));
            u32::from(way == Way::Staged)
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
        assert_eq!(trial.choose(usize::MAX), Way::Direct, "the last class is open");
    }

    #[test]
    fn where_no_buffer_was_to_be_had_nothing_changes() {
        let trial = Trial::new(64 << 10);
        for _ in 0..=TRIED {
            trial.choose(BYTES);
            trial.took(Way::Direct, BYTES, Duration::from_nanos(400));
        }
        assert_eq!(trial.choose(BYTES), Way::Direct);
    }
}
