//! Whether something waits to be taken in: who brings it wakes who takes it once for each time.

use crate::sync::atomic::{AtomicU8, Ordering};

const SOME: u8 = 1;
const MANY: u8 = 2;

/// What waits, as far as its taker has been told.
///
/// Both sides change it in one atomic operation: what is brought before [`Due::tell`] says that it
/// need not wake is seen by whoever counts after the next [`Due::take`].
#[derive(Debug, Default)]
pub(crate) struct Due(AtomicU8);

impl Due {
    /// Something was brought, and `many` wait. Whether the taker has to be woken: once for some,
    /// and once more for many.
    pub(crate) fn tell(&self, many: bool) -> bool {
        let news = if many { SOME | MANY } else { SOME };
        self.0.fetch_or(news, Ordering::AcqRel) & news != news
    }

    /// What was brought up to now is about to be counted.
    pub(crate) fn take(&self) {
        self.0.swap(0, Ordering::AcqRel);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_wake_though_some_have() {
        let due = Due::default();
        assert!(due.tell(false) && !due.tell(false));
        // Two callers may step over the number at which many begin.
        assert!(due.tell(true) && !due.tell(true) && !due.tell(false));
        due.take();
        assert!(!due.is_set());
        assert!(due.tell(true), "once for both");
        assert!(!due.tell(false) && due.is_set());
    }
}
