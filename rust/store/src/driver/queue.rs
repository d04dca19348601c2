//! What requests told, on its way to the policy: bounded in requests and in keys.

use crate::machine::Access;
use crossbeam_queue::ArrayQueue;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Requests whose accesses wait to be taken in; beyond it they are dropped and counted. Few enough
/// that their keys stay in the cache until then.
pub(crate) const ACCESS_QUEUE: usize = 512;
/// Keys of all of these, 8 MiB: a request with more is taken where it is the only one.
const MOST_KEYS: usize = 256 << 10;

pub(crate) struct AccessQueue {
    queue: ArrayQueue<Access>,
    /// Keys of the queue, and of what is being put in or taken out.
    keys: AtomicUsize,
}

impl AccessQueue {
    pub(crate) fn new() -> Self {
        Self { queue: ArrayQueue::new(ACCESS_QUEUE), keys: AtomicUsize::new(0) }
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether there was room for it.
    pub(crate) fn push(&self, access: Access) -> bool {
        let n = access.keys.len();
        let before = self.keys.fetch_add(n, Ordering::Relaxed);
        let fits = before == 0 || before + n <= MOST_KEYS;
        let pushed = fits && self.queue.push(access).is_ok();
        if !pushed {
            self.keys.fetch_sub(n, Ordering::Relaxed);
        }
        pushed
    }

    /// The next ones, up to `left` of them, that cost no more than `most` together; one alone may
    /// cost more. What was taken and did not fit is `held` for the next time.
    pub(crate) fn next(
        &self,
        most: usize,
        left: &mut usize,
        held: &mut Option<Access>,
        cost: impl Fn(&Access) -> usize,
    ) -> Vec<Access> {
        let (mut some, mut sum) = (Vec::new(), 0);
        while let Some(access) = held.take().or_else(|| self.pop(left)) {
            sum += cost(&access);
            if sum > most && !some.is_empty() {
                *held = Some(access);
                break;
            }
            self.keys.fetch_sub(access.keys.len(), Ordering::Relaxed);
            some.push(access);
        }
        some
    }

    /// Drops all of them.
    pub(crate) fn clear(&self) {
        while let Some(access) = self.queue.pop() {
            self.keys.fetch_sub(access.keys.len(), Ordering::Relaxed);
        }
    }

    fn pop(&self, left: &mut usize) -> Option<Access> {
        *left = left.checked_sub(1)?;
        self.queue.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Told;
    use tiered_kv_types::BlockKey;

    fn of_keys(n: usize) -> Access {
        Access { ns: 0, keys: vec![BlockKey([0; 32]); n].into(), now: 0, told: Told::BARE }
    }

    fn lens(some: &[Access]) -> Vec<usize> {
        some.iter().map(|access| access.keys.len()).collect()
    }

    #[test]
    fn keys_are_bounded_and_one_request_alone_is_not() {
        let queue = AccessQueue::new();
        assert!(queue.push(of_keys(MOST_KEYS + 5)), "alone");
        assert!(!queue.push(of_keys(1)));
        let (mut left, mut held) = (1, None);
        assert_eq!(queue.next(10, &mut left, &mut held, |_| 1).len(), 1);
        assert!(queue.push(of_keys(MOST_KEYS - 1)) && !queue.push(of_keys(2)));
        assert!(queue.push(of_keys(1)), "what found no room takes none");
        (0..ACCESS_QUEUE - 2).for_each(|_| assert!(queue.push(of_keys(0))));
        assert!(!queue.push(of_keys(0)));
    }

    #[test]
    fn what_is_taken_at_once_is_bounded_before_it_is_taken() {
        let queue = AccessQueue::new();
        for n in [3, 4, 6, 100, 1, 2] {
            assert!(queue.push(of_keys(n)));
        }
        let (mut left, mut held) = (5, None);
        let mut next = || {
            // Each has five blocks before it.
            let some = queue.next(20, &mut left, &mut held, |access| access.keys.len() + 5);
            lens(&some)
        };
        assert_eq!([next(), next(), next(), next()], [vec![3, 4], vec![6], vec![100], vec![1]]);
        assert_eq!(next(), Vec::<usize>::new(), "the last came later");
    }
}
