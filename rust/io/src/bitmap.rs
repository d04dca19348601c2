//! Which pages of an arena are owned: the fact on which the safety of its slots rests.

use crate::sync::atomic::{AtomicU64, Ordering};

/// One bit a page. A page whose bit is set belongs to exactly one slot.
pub(crate) struct PageBitmap {
    words: Box<[AtomicU64]>,
    pages: u64,
    taken: AtomicU64,
}

impl PageBitmap {
    pub(crate) fn new(pages: u64) -> Self {
        let words = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, pages, taken: AtomicU64::new(0) }
    }

    pub(crate) fn taken_pages(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Takes all pages of the range, or none. May refuse a range that another thread is just
    /// trying.
    pub(crate) fn try_take(&self, first: u64, count: u64) -> bool {
        if count == 0 || first.checked_add(count).is_none_or(|end| end > self.pages) {
            return false;
        }
        for (done, (word, mask)) in masks(first, count).enumerate() {
            // Acquire pairs with the release in `clear`: what the last owner did has happened.
            let took =
                self.words[word].fetch_update(Ordering::Acquire, Ordering::Relaxed, |bits| {
                    (bits & mask == 0).then_some(bits | mask)
                });
            if took.is_err() {
                masks(first, count).take(done).for_each(|(word, mask)| self.clear(word, mask));
                return false;
            }
        }
        self.taken.fetch_add(count, Ordering::Relaxed);
        true
    }

    /// Gives back a range that was taken.
    pub(crate) fn release(&self, first: u64, count: u64) {
        self.taken.fetch_sub(count, Ordering::Relaxed);
        masks(first, count).for_each(|(word, mask)| self.clear(word, mask));
    }

    fn clear(&self, word: usize, mask: u64) {
        // Release: the owner's accesses come before the next owner's.
        let before = self.words[word].fetch_and(!mask, Ordering::Release);
        assert_eq!(before & mask, mask, "a page was given back that nobody owned");
    }
}

/// The words that a range of pages touches, with the bits in each.
fn masks(first: u64, count: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = first + count;
    (first / 64..end.div_ceil(64)).map(move |word| {
        let from = first.max(word * 64) - word * 64;
        let to = end.min(word * 64 + 64) - word * 64;
        let ones = if to - from == 64 { u64::MAX } else { (1 << (to - from)) - 1 };
        (word as usize, ones << from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_refused_range_leaves_nothing_taken() {
        let map = PageBitmap::new(256);
        assert!(map.try_take(200, 1));
        assert!(!map.try_take(10, 240));
        assert_eq!(map.taken_pages(), 1);
        assert!(map.try_take(0, 200));
        assert!(map.try_take(201, 55));
        assert_eq!(map.taken_pages(), 256);
    }

    #[test]
    fn ranges_outside_are_refused() {
        let map = PageBitmap::new(100);
        for (first, count) in [(0, 0), (0, 101), (100, 1), (99, 2), (u64::MAX, 2)] {
            assert!(!map.try_take(first, count), "{first} {count}");
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_of_pages(
            steps in prop::collection::vec((0..300_u64, 1..200_u64, any::<bool>()), 1..60)
        ) {
            let map = PageBitmap::new(300);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (first, count, give_back) in steps {
                if give_back && !held.is_empty() {
                    let (first, count) = held.swap_remove(first as usize % held.len());
                    map.release(first, count);
                } else {
                    let free = first + count <= 300
                        && held.iter().all(|&(f, c)| first + count <= f || f + c <= first);
                    prop_assert_eq!(map.try_take(first, count), free);
                    if free {
                        held.push((first, count));
                    }
                }
                let sum: u64 = held.iter().map(|&(_, count)| count).sum();
                prop_assert_eq!(map.taken_pages(), sum);
            }
        }
    }
}
