//! Threads that take work from a queue and sleep when there is none.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};

use parking_lot::{Condvar, Mutex};
use tiered_kv_types::{Error, ErrorKind, Result};

use crate::clock::Threads;

pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A first-in, first-out queue of jobs and the threads that run them.
///
/// Dropping the pool closes it.
pub struct WorkerPool {
    workers: Workers<Job>,
}

impl WorkerPool {
    /// A pool of `n` threads called `name-0` and so on.
    ///
    /// # Errors
    /// `InvalidArgument` for `n` of zero; the refusal of `threads`.
    pub fn new(name: &str, n: usize, threads: &dyn Threads) -> Result<Self> {
        let workers = Workers::new(name, n, threads, Arc::new(|job: Job| job()))?;
        Ok(Self { workers })
    }

    /// Queues a job and returns. After `close` the caller's thread runs it, so that no job is lost.
    /// A job that panics is logged and ends alone.
    pub fn run(&self, job: Job) {
        if let Err(jobs) = self.workers.submit(std::iter::once(job)) {
            jobs.for_each(contained);
        }
    }

    /// Waits until all queued jobs have run and the threads have ended. Called from one of the
    /// pool's own jobs it cannot wait: the threads then end by themselves.
    pub fn close(&self) {
        self.workers.start_closing();
        if !self.workers.owns_this_thread() {
            self.workers.wait_closed();
        }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.close();
    }
}

/// Says whether a queued item is taken together with those that a thread has taken.
pub(crate) type Joins<T> = Box<dyn Fn(&[T], &T) -> bool + Send + Sync>;

/// Threads that hand the items of one queue to one handler.
pub(crate) struct Workers<T> {
    shared: Arc<Shared<T>>,
    /// The threads not yet joined.
    handles: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    joins: Joins<T>,
    /// Signalled when the queue has grown or was closed.
    work: Condvar,
    /// Signalled when a thread has ended.
    ended: Condvar,
}

struct State<T> {
    /// What goes before the queue.
    urgent: VecDeque<T>,
    queue: VecDeque<T>,
    closed: bool,
    alive: usize,
    threads: Vec<ThreadId>,
}

impl<T: Send + 'static> Workers<T> {
    pub(crate) fn new(
        name: &str,
        n: usize,
        threads: &dyn Threads,
        handler: Arc<dyn Fn(T) + Send + Sync>,
    ) -> Result<Self> {
        let each = move |items: Vec<T>| items.into_iter().for_each(|item| handler(item));
        Self::joining(name, n, threads, Box::new(|_, _| false), Arc::new(each))
    }

    /// Threads that take items together, where `joins` says so, and no more than a thread's share
    /// of those that wait.
    pub(crate) fn joining(
        name: &str,
        n: usize,
        threads: &dyn Threads,
        joins: Joins<T>,
        handler: Arc<dyn Fn(Vec<T>) + Send + Sync>,
    ) -> Result<Self> {
        if n == 0 {
            let context = format!("threads of {name}: give at least one");
            return Err(Error::new(ErrorKind::InvalidArgument, "start threads", context));
        }
        let (urgent, queue) = (VecDeque::new(), VecDeque::new());
        let state = State { urgent, queue, closed: false, alive: 0, threads: Vec::new() };
        let (work, ended) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { state: Mutex::new(state), joins, work, ended });
        let workers = Self { shared, handles: Mutex::default() };
        for index in 0..n {
            let (alive, handler) = (Alive::new(&workers.shared), Arc::clone(&handler));
            let body = Box::new(move || {
                work_until_closed(&alive.shared, &*handler);
                // The handler may hold the last reference to this pool's owner, which then closes
                // it: while this thread still counts as alive.
                drop(handler);
                drop(alive);
            });
            match threads.spawn(format!("{name}-{index}"), body) {
                Ok(handle) => workers.handles.lock().push(handle),
                Err(err) => {
                    workers.start_closing();
                    workers.wait_closed();
                    return Err(err);
                }
            }
        }
        Ok(workers)
    }

    /// Queues the items, or returns them where the queue is closed.
    pub(crate) fn submit<I: Iterator<Item = T>>(&self, items: I) -> std::result::Result<(), I> {
        let mut state = self.shared.state.lock();
        if state.closed {
            return Err(items);
        }
        let before = state.queue.len();
        state.queue.extend(items);
        let added = state.queue.len() - before;
        drop(state);
        self.wake(added);
        Ok(())
    }

    /// Queues the items, some of them before all that wait, or returns them where the queue is
    /// closed.
    pub(crate) fn submit_with(
        &self,
        urgent: Vec<T>,
        mut items: Vec<T>,
    ) -> std::result::Result<(), Vec<T>> {
        let mut state = self.shared.state.lock();
        if state.closed {
            items.extend(urgent);
            return Err(items);
        }
        let added = urgent.len() + items.len();
        state.urgent.extend(urgent);
        state.queue.extend(items);
        drop(state);
        self.wake(added);
        Ok(())
    }

    fn wake(&self, added: usize) {
        match added {
            0 => {}
            1 => _ = self.shared.work.notify_one(),
            _ => _ = self.shared.work.notify_all(),
        }
    }

    /// Lets the threads end when the queue is empty.
    pub(crate) fn start_closing(&self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
    }

    /// Waits for all that is queued, and for the threads. Not to be called from one of them.
    pub(crate) fn end(&self) {
        self.start_closing();
        self.wait_closed();
    }

    pub(crate) fn owns_this_thread(&self) -> bool {
        self.shared.state.lock().threads.contains(&std::thread::current().id())
    }

    /// Waits for all threads to end. Not to be called from one of them.
    pub(crate) fn wait_closed(&self) {
        let mut state = self.shared.state.lock();
        while state.alive > 0 {
            self.shared.ended.wait(&mut state);
        }
        drop(state);
        // They have ended but for their last instructions. Whoever comes second finds none.
        let handles = std::mem::take(&mut *self.handles.lock());
        for handle in handles {
            if handle.join().is_err() {
                tracing::error!("a worker thread has panicked");
            }
        }
    }
}

impl<T> State<T> {
    /// The next item, with those behind it that join it.
    fn take(&mut self, joins: &Joins<T>) -> Vec<T> {
        if let Some(item) = self.urgent.pop_front() {
            return vec![item];
        }
        let share = self.queue.len().div_ceil(self.alive.max(1));
        let mut items: Vec<T> = self.queue.pop_front().into_iter().collect();
        while items.len() < share && self.queue.front().is_some_and(|next| joins(&items, next)) {
            items.extend(self.queue.pop_front());
        }
        items
    }
}

fn work_until_closed<T>(shared: &Shared<T>, handler: &(dyn Fn(Vec<T>) + Send + Sync)) {
    let mut state = shared.state.lock();
    state.threads.push(std::thread::current().id());
    loop {
        let items = state.take(&shared.joins);
        if !items.is_empty() {
            drop(state);
            contained(|| handler(items));
            state = shared.state.lock();
        } else if state.closed {
            return;
        } else {
            shared.work.wait(&mut state);
        }
    }
}

/// Runs foreign code; its panic is logged and goes no further.
pub(crate) fn contained(body: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
        tracing::error!(panic = panic_text(&*panic), "a worker's job has panicked");
    }
}

/// What a panic has said.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Counts a thread from before its start until its end, also where it never starts.
struct Alive<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Alive<T> {
    fn new(shared: &Arc<Shared<T>>) -> Self {
        shared.state.lock().alive += 1;
        Self { shared: Arc::clone(shared) }
    }
}

impl<T> Drop for Alive<T> {
    fn drop(&mut self) {
        self.shared.state.lock().alive -= 1;
        self.shared.ended.notify_all();
    }
}
