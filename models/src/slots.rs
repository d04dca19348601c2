//! The bitmap of owned pages.

use crate::bitmap::PageBitmap;
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;

struct Pages {
    owned: PageBitmap,
    cells: Vec<UnsafeCell<u64>>,
}

// SAFETY: loom's cells check what the bitmap promises.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(pages: u64) -> Arc<Self> {
        let cells = (0..pages).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Self { owned: PageBitmap::new(pages), cells })
    }

    /// Uses a range where it can be had, as its owner may; whether it could.
    fn use_range(&self, first: u64, count: u64) -> bool {
        let taken = self.owned.try_take(first, count);
        if taken {
            for page in first..first + count {
                // SAFETY: loom fails where another thread's access is not over.
                self.cells[page as usize].with_mut(|value| unsafe { *value += 1 });
            }
            self.owned.release(first, count);
        }
        taken
    }

    fn uses(&self, page: u64) -> u64 {
        // SAFETY: the other threads have ended.
        self.cells[page as usize].with(|value| unsafe { *value })
    }
}

pub(crate) fn one_owner() {
    let pages = Pages::new(1);
    let other = pages.clone();
    let thread = thread::spawn(move || u64::from(other.use_range(0, 1)));
    let used = u64::from(pages.use_range(0, 1)) + u64::from(pages.use_range(0, 1));
    let used = used + thread.join().expect("no panic");
    assert_eq!(pages.uses(0), used);
    assert_eq!(pages.owned.taken_pages(), 0);
}

/// Ranges over the border of two words, which are two atomics.
pub(crate) fn whole_ranges() {
    let pages = Pages::new(66);
    let other = pages.clone();
    let thread = thread::spawn(move || u64::from(other.use_range(63, 2)));
    let used = u64::from(pages.use_range(62, 3));
    let used = used + thread.join().expect("no panic");
    assert_eq!((pages.uses(63), pages.uses(64)), (used, used));
    assert_eq!(pages.owned.taken_pages(), 0);
    assert!(pages.use_range(62, 4), "all of it is free again");
}

/// A refused range leaves its neighbours to others.
pub(crate) fn neighbours() {
    let pages = Pages::new(66);
    assert!(pages.owned.try_take(64, 1));
    let other = pages.clone();
    let thread = thread::spawn(move || assert!(!other.use_range(63, 2), "one page is not free"));
    // May be refused while the other thread tries, and never later.
    pages.use_range(63, 1);
    thread.join().expect("no panic");
    assert!(pages.use_range(63, 1));
    pages.owned.release(64, 1);
    assert_eq!(pages.owned.taken_pages(), 0);
}
