//! Channels: one completion queue as a Python object, for event loops and for engines that poll.
//!
//! The store's calls take one, and their ends are drained, by whatever thread. Nothing here waits
//! except `quiesce` and `close`, which let the GIL go.

use crate::args;
use crate::completion::{About, Done, SIGNAL_INTERVAL, Waiter};
use crate::errors::{OrRaise, to_py};
use crate::queue::{Begun, Cancel, Completion, Queue};
use crate::store::StoreRef;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;
use tiered_kv::{Error, ErrorKind, OpId};

/// Most calls that a channel may be made for, and those of an event loop.
const MAX_CAPACITY: usize = 1 << 20;

/// Where the result of one call goes.
pub(crate) enum Sink {
    Waiter(Arc<Waiter>),
    Queue(Arc<Queue>, u64),
}

impl Sink {
    /// Takes the call's result, on whatever thread it ended.
    pub(crate) fn complete(self, done: Done) {
        match self {
            Self::Waiter(waiter) => waiter.complete(done),
            Self::Queue(queue, id) => queue.end(id, done),
        }
    }
}

/// Submits a call, which tells its result to the sink that it is given.
///
/// Without a channel the result is waited for. With one it is returned where the channel says so
/// and it is there already; else the call's number is.
pub(crate) fn submit(
    py: Python<'_>,
    store: &StoreRef,
    channel: Option<&Channel>,
    about: About,
    call: impl FnOnce(Sink) -> tiered_kv::Result<Option<OpId>> + Send,
) -> PyResult<Py<PyAny>> {
    let Some(channel) = channel else {
        let waiter = Arc::new(Waiter::default());
        let op = call(Sink::Waiter(waiter.clone())).or_raise(py)?;
        return waiter.wait(py, store, op);
    };
    let queue = &channel.queue;
    let id = match queue.begin(about).or_raise(py)? {
        Begun::Running(id) => id,
        Begun::Refused(id) => return id.into_py_any(py),
    };
    let sink = Sink::Queue(queue.clone(), id);
    // An engine's threads go on while one of them waits for the core's locks. An event loop has one
    // thread, which would only wait for the GIL besides.
    let called = if queue.is_inline() { call(sink) } else { py.detach(|| call(sink)) };
    match called {
        Ok(op) => match queue.settle(id, store, op) {
            Some(done) => done.into_py(py),
            None => id.into_py_any(py),
        },
        Err(error) => {
            queue.withdraw(id);
            Err(to_py(py, &error))
        }
    }
}

/// Bit `i % 8`, the lowest first, of byte `i / 8` is that of key `i`.
fn bitmap(keys: &[bool]) -> Vec<u8> {
    let byte = |part: &[bool]| part.iter().rev().fold(0, |all, bit| all << 1 | u8::from(*bit));
    keys.chunks(8).map(byte).collect()
}

/// A completion queue; any thread may submit to it and drain it.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Channel {
    queue: Arc<Queue>,
}

impl Channel {
    /// A channel through which every result comes.
    pub(crate) fn open(capacity: &Bound<'_, PyAny>) -> PyResult<Self> {
        let capacity = args::within("channel", "capacity", capacity, 1..=MAX_CAPACITY)?;
        Ok(Self { queue: Arc::new(Queue::new(capacity, false)?) })
    }

    /// In a forked child the queue's lock may be held for ever.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.queue.is_forked() {
            let context = "this process was forked while the channel was open: make one here";
            return Err(to_py(py, &Error::new(ErrorKind::Closed, "channel", context)));
        }
        Ok(())
    }

    /// Waits without the GIL until no call is in progress; a signal ends the wait.
    fn wait(&self, py: Python<'_>, until: Option<Instant>) -> PyResult<bool> {
        loop {
            let look = Instant::now() + SIGNAL_INTERVAL;
            let step = until.map_or(look, |until| until.min(look));
            if py.detach(|| self.queue.wait_idle(step)) {
                return Ok(true);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }
}

#[pymethods]
impl Channel {
    /// The channel of an event loop: a result that is there when a call returns is returned.
    #[staticmethod]
    fn for_loop() -> PyResult<Self> {
        Ok(Self { queue: Arc::new(Queue::new(MAX_CAPACITY, true)?) })
    }

    /// The descriptor that is readable while there are results.
    fn fileno(&self) -> i32 {
        self.queue.wake().as_raw_fd()
    }

    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        self.check_process(py)?;
        Ok(self.queue.is_closed())
    }

    /// Seconds since the descriptor last became readable: how long a poller took to wake.
    #[getter]
    fn rung_ago(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        self.check_process(py)?;
        Ok(self.queue.rung_ago().map(|ago| ago.as_secs_f64()))
    }

    /// Takes all results as summaries: a list of (id, ok, bitmap, bytes, seconds).
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.check_process(py)?;
        let results = PyList::empty(py);
        for Completion { id, done, about, seconds } in self.queue.take() {
            let summary = done.summary(about);
            drop(done);
            let bitmap = PyBytes::new(py, &bitmap(&summary.keys));
            results.append((id, summary.ok, bitmap, summary.bytes, seconds))?;
        }
        Ok(results)
    }

    /// Takes all results as they are: a list of (id, result).
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.check_process(py)?;
        let results = PyList::empty(py);
        for Completion { id, done, .. } in self.queue.take() {
            results.append((id, done.into_py(py)?))?;
        }
        Ok(results)
    }

    /// Calls in progress.
    fn pending(&self, py: Python<'_>) -> PyResult<usize> {
        self.check_process(py)?;
        Ok(self.queue.pending())
    }

    /// Asks the core to end a call; its result still comes, when its buffers are free.
    fn cancel(&self, py: Python<'_>, number: u64) {
        if let Some(cancel) = self.queue.cancel(number) {
            py.detach(|| cancel.run());
        }
    }

    /// Waits without the GIL until no call is in progress; false where the time is over first.
    #[pyo3(signature = (timeout=None))]
    fn quiesce(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        self.check_process(py)?;
        let limit = args::timeout("quiesce", timeout)?;
        self.wait(py, limit.and_then(|limit| Instant::now().checked_add(limit)))
    }

    /// Cancels what is in progress, waits without the GIL until the core touches no buffer of it,
    /// and drops all results. Does nothing in a forked child.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.queue.is_forked() {
            return Ok(());
        }
        let cancels = self.queue.close();
        py.detach(|| cancels.into_iter().for_each(Cancel::run));
        self.wait(py, None)?;
        drop(self.queue.take());
        Ok(())
    }

    /// Cancels what is in progress and drops all results, those to come as well. Waits for nothing.
    fn abandon(&self) {
        if self.queue.is_forked() {
            return;
        }
        let (results, cancels) = self.queue.abandon();
        drop(results);
        cancels.into_iter().for_each(Cancel::run);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.abandon();
    }
}
