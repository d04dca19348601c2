//! How the result of a call gets back to whoever waits for it.

use crate::sync::{Arc, Condvar, Mutex};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

#[derive(Debug)]
struct Pending<T> {
    value: Option<T>,
    taken: bool,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Promise<T> {
    /// Guards the value until the waiter takes it.
    pending: Mutex<Pending<T>>,
    ready: Condvar,
}

/// A call in progress: await it on any runtime, or [`Op::wait`] for it on a thread.
///
/// Dropping it does not end the call; what the core holds for it is freed when it ends.
#[derive(Debug)]
#[must_use = "the result says what was stored or found; await it or call wait()"]
pub struct Op<T> {
    promise: Arc<Promise<T>>,
}

impl<T: Send + 'static> Op<T> {
    /// An operation and the function that completes it.
    pub(crate) fn new() -> (Self, impl FnOnce(T) + Send + 'static) {
        let pending = Pending { value: None, taken: false, waker: None };
        let promise = Arc::new(Promise { pending: Mutex::new(pending), ready: Condvar::new() });
        let done = promise.clone();
        let complete = move |value| {
            let mut pending = done.pending.lock();
            pending.value = Some(value);
            let waker = pending.waker.take();
            drop(pending);
            done.ready.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        };
        (Self { promise }, complete)
    }

    /// Blocks the thread until the call has ended.
    pub fn wait(self) -> T {
        let mut pending = self.promise.pending.lock();
        loop {
            if let Some(value) = pending.value.take() {
                return value;
            }
            self.promise.ready.wait(&mut pending);
        }
    }

    /// Blocks the thread for at most `limit`; gives the operation back if it has not ended by then.
    ///
    /// # Errors
    /// The operation itself, still in progress.
    pub fn wait_for(self, limit: Duration) -> Result<T, Self> {
        // A limit beyond what the clock can tell is none.
        let Some(until) = std::time::Instant::now().checked_add(limit) else {
            return Ok(self.wait());
        };
        let mut pending = self.promise.pending.lock();
        loop {
            if let Some(value) = pending.value.take() {
                return Ok(value);
            }
            if self.promise.ready.wait_until(&mut pending, until).timed_out() {
                break;
            }
        }
        drop(pending);
        Err(self)
    }
}

impl<T> Future for Op<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut pending = self.promise.pending.lock();
        match pending.value.take() {
            Some(value) => {
                pending.taken = true;
                Poll::Ready(value)
            }
            None => {
                assert!(!pending.taken, "an operation is not polled after it has ended");
                pending.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_beyond_the_clock_is_none() {
        let (op, done) = Op::new();
        done(7);
        assert_eq!(op.wait_for(Duration::MAX).expect("it has ended"), 7);
    }

    /// A runtime of the test's own: it counts how often it was woken.
    struct Counting(std::sync::atomic::AtomicUsize);

    impl std::task::Wake for Counting {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn an_operation_can_be_awaited_on_any_runtime() {
        let (mut op, done) = Op::new();
        let counting = Arc::new(Counting(0.into()));
        let waker = Waker::from(counting.clone());
        let mut context = Context::from_waker(&waker);
        assert_eq!(Pin::new(&mut op).poll(&mut context), Poll::Pending);
        done(7);
        assert_eq!(counting.0.load(std::sync::atomic::Ordering::SeqCst), 1, "woken once");
        assert_eq!(Pin::new(&mut op).poll(&mut context), Poll::Ready(7));
    }
}
