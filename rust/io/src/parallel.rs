//! Work that ends before its caller goes on, on as many threads as it is given.

use std::sync::atomic::{AtomicUsize, Ordering};

/// More threads than these wait for memory together.
const MOST_THREADS: usize = 8;

/// How many threads are of use to a recovery on this machine, which fills large tables.
pub fn recovery_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS)
}

/// What `work` makes of every number below `n`, in their order. This thread does `meanwhile` first.
///
/// # Panics
/// Where `work` does.
pub fn in_parallel<T: Send>(
    n: usize,
    threads: usize,
    work: impl Fn(usize) -> T + Sync,
    meanwhile: impl FnOnce(),
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let run = || {
        let numbers = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|at| *at < n);
        std::iter::from_fn(numbers).map(|at| (at, work(at))).collect::<Vec<(usize, T)>>()
    };
    let mut made = std::thread::scope(|scope| {
        let mut helpers = Vec::new();
        for _ in 1..threads.min(n) {
            let thread = std::thread::Builder::new().name("tkv-open".into());
            // Without another thread this one does the work.
            let Ok(helper) = thread.spawn_scoped(scope, run) else { break };
            helpers.push(helper);
        }
        meanwhile();
        let mut made = run();
        for helper in helpers {
            match helper.join() {
                Ok(more) => made.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        made
    });
    made.sort_unstable_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_in_parallel_comes_back_in_order_whatever_the_threads() {
        for threads in [0, 1, 3, 200] {
            let mut done = false;
            let squares = in_parallel(100, threads, |at| at * at, || done = true);
            assert!(squares.into_iter().eq((0..100).map(|at| at * at)), "{threads} threads");
            assert!(done);
        }
        assert!(in_parallel(0, 4, |at| at, || {}).is_empty());
    }
}
