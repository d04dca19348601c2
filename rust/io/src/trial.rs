//! Which of two ways to read is the faster one here and now, found by going both.
//!
//! A read that passes through a buffer is the faster one by a quarter where the copy that a virtual
//! disk makes and the store's threads have one cache in common, and the slower one by a third where
//! they have not. Which of both it is changes as the host moves its threads.

use std::time::Duration;

use parking_lot::Mutex;

/// Reads that go each way at the beginning of a period.
const TRIED: u32 = 6;
/// Reads of a period; all but those that are tried go the faster way.
const PERIOD: u32 = 192;
/// What the last read counts for.
const WEIGHT: f64 = 0.25;
/// What a buffer has to save, since it costs a copy.
const WORTH: f64 = 0.95;
/// Reads of a size are compared with each other: one class for each power of two.
const CLASSES: usize = 8;

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
    begun: u32,
    /// Mean nanoseconds a byte, once there is one.
    direct: Option<f64>,
    staged: Option<f64>,
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
        match (at / TRIED, class.direct, class.staged) {
            (1, ..) => Way::Staged,
            (2.., Some(direct), Some(staged)) if staged < WORTH * direct => Way::Staged,
            _ => Way::Direct,
        }
    }

    /// A read took so long.
    pub(crate) fn took(&self, way: Way, bytes: usize, time: Duration) {
        let nanos = time.as_nanos() as f64 / bytes.max(1) as f64;
        let mut class = self.class(bytes).lock();
        let mean = match way {
            Way::Direct => &mut class.direct,
            Way::Staged => &mut class.staged,
        };
        *mean = Some(mean.map_or(nanos, |mean| mean + WEIGHT * (nanos - mean)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 20;

    /// The ways of a whole period, where a read takes as long as said.
    fn period(trial: &Trial, bytes: usize, direct: u64, staged: u64) -> Vec<Way> {
        let read = |_| {
            let way = trial.choose(bytes);
            let nanos = if way == Way::Direct { direct } else { staged };
            trial.took(way, bytes, Duration::from_nanos(nanos));
            way
        };
        (0..PERIOD).map(read).collect()
    }

    fn staged(ways: &[Way]) -> u32 {
        ways.iter().filter(|way| **way == Way::Staged).count() as u32
    }

    #[test]
    fn the_faster_way_is_gone_and_the_other_one_is_tried_again() {
        let trial = Trial::new(64 << 10);
        assert_eq!(staged(&period(&trial, BYTES, 400, 300)), PERIOD - TRIED);
        // The host has moved a thread.
        assert_eq!(staged(&period(&trial, BYTES, 400, 600)), TRIED);
        assert_eq!(staged(&period(&trial, BYTES, 400, 300)), PERIOD - TRIED);
    }

    #[test]
    fn a_buffer_that_saves_nothing_is_left_alone() {
        let trial = Trial::new(64 << 10);
        assert_eq!(staged(&period(&trial, BYTES, 400, 395)), TRIED);
    }

    #[test]
    fn small_reads_say_nothing_of_large_ones() {
        let trial = Trial::new(64 << 10);
        period(&trial, 64 << 10, 100, 300);
        assert_eq!(staged(&period(&trial, BYTES, 400, 300)), PERIOD - TRIED);
        assert_eq!(staged(&period(&trial, 64 << 10, 100, 300)), TRIED);
        assert_eq!(trial.choose(usize::MAX), Way::Direct, "the last class is open");
    }
}
