//! How results get back: at once, to a waiting thread, or through an event loop's queue.
//!
//! A call that ends before its submission returns never touches the queue. All others leave their
//! result in the queue of the loop that asked, whose eventfd is written only when the queue goes
//! from empty to not empty: one wake for a batch.

use crate::buffers::Held;
use crate::leases::Leases;
use crate::reports::{DeleteReport, FlushReport, IntoReport, PutReport};
use crate::store::{Shared, StoreRef};
use parking_lot::{Condvar, Mutex};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyList;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tiered_kv::{MissReason, OpId, Tier};

/// How often a waiting thread looks for a signal, such as Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// The result of a call, and the buffers that it no longer needs.
pub(crate) enum Done {
    Get(tiered_kv::Leases),
    Into(Vec<Result<Tier, MissReason>>, Arc<Held>),
    Put(tiered_kv::PutReport, Arc<Held>),
    Flush(tiered_kv::FlushReport),
    Delete(tiered_kv::DeleteReport),
}

impl Done {
    /// The Python object; held buffers are released here, with the GIL held.
    fn into_py(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Get(leases) => Leases::new(leases).into_py_any(py),
            Self::Into(items, held) => {
                drop(held);
                IntoReport::new(items).into_py_any(py)
            }
            Self::Put(report, held) => {
                drop(held);
                PutReport::from(report).into_py_any(py)
            }
            Self::Flush(report) => FlushReport::from(report).into_py_any(py),
            Self::Delete(report) => DeleteReport::from(report).into_py_any(py),
        }
    }
}

struct Entries {
    done: Vec<(u64, Done)>,
    next: u64,
    /// Calls that will still push: room for them is kept, so that completing never allocates.
    expected: usize,
    closed: bool,
}

/// What the core's threads see of a queue.
pub(crate) struct Queue {
    wake: OwnedFd,
    /// Guards the results until the loop takes them.
    entries: Mutex<Entries>,
}

impl Queue {
    fn reserve(&self) -> u64 {
        let mut entries = self.entries.lock();
        entries.next += 1;
        entries.expected += 1;
        let room = entries.expected;
        entries.done.reserve(room);
        entries.next
    }

    /// The call ended without the queue.
    fn unreserve(&self) {
        self.entries.lock().expected -= 1;
    }

    fn push(&self, token: u64, done: Done) {
        let mut entries = self.entries.lock();
        entries.expected -= 1;
        if entries.closed {
            // Its leases and buffers are freed after the lock is let go: that may wait for the GIL.
            drop(entries);
            drop(done);
            return;
        }
        let was_empty = entries.done.is_empty();
        entries.done.push((token, done));
        if was_empty {
            // Fails only where the counter is full, and then the loop wakes all the same.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    fn take(&self) -> Vec<(u64, Done)> {
        let mut entries = self.entries.lock();
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        std::mem::take(&mut entries.done)
    }

    fn close(&self) -> Vec<(u64, Done)> {
        let mut entries = self.entries.lock();
        entries.closed = true;
        std::mem::take(&mut entries.done)
    }
}

/// The results of one event loop's calls.
///
/// Once closed, it drops results and frees their leases and buffers.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct CompletionQueue {
    pub(crate) queue: Arc<Queue>,
}

#[pymethods]
impl CompletionQueue {
    #[new]
    fn new() -> PyResult<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(std::io::Error::from)?;
        let entries = Entries { done: Vec::new(), next: 0, expected: 0, closed: false };
        Ok(Self { queue: Arc::new(Queue { wake, entries: Mutex::new(entries) }) })
    }

    /// The descriptor that becomes readable when there are results.
    fn fileno(&self) -> i32 {
        self.queue.wake.as_raw_fd()
    }

    /// Takes all results: a list of (token, result).
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let results = PyList::empty(py);
        for (token, done) in self.queue.take() {
            results.append((token, done.into_py(py)?))?;
        }
        Ok(results)
    }

    /// Drops what is there and all that is still to come.
    fn close(&self) {
        drop(self.queue.close());
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        drop(self.queue.close());
    }
}

enum Phase {
    /// Nobody else knows of the call yet; a result is left here.
    Open(Option<Done>),
    /// The submission has returned: a result goes to the queue.
    Armed,
}

/// Where the result of one call goes.
pub(crate) struct Ticket {
    queue: Option<Arc<Queue>>,
    token: u64,
    /// Guards the hand-over between the submitting thread and the completing one.
    phase: Mutex<Phase>,
    ended: Condvar,
}

impl Ticket {
    pub(crate) fn new(queue: Option<&CompletionQueue>) -> Arc<Self> {
        let queue = queue.map(|q| q.queue.clone());
        let token = queue.as_ref().map_or(0, |q| q.reserve());
        let phase = Mutex::new(Phase::Open(None));
        Arc::new(Self { queue, token, phase, ended: Condvar::new() })
    }

    /// Takes the call's result, on whatever thread it ended.
    pub(crate) fn complete(&self, done: Done) {
        let mut phase = self.phase.lock();
        if let Phase::Open(slot) = &mut *phase {
            *slot = Some(done);
            drop(phase);
            self.ended.notify_all();
            return;
        }
        drop(phase);
        if let Some(queue) = &self.queue {
            queue.push(self.token, done);
        }
    }

    /// The submission failed: nothing will come.
    pub(crate) fn abandon(&self) {
        if let Some(queue) = &self.queue {
            queue.unreserve();
        }
    }

    /// What the caller gets: the result where it is there, else a handle of the call; without a
    /// queue, the result, waited for.
    pub(crate) fn settle(
        &self,
        py: Python<'_>,
        store: &StoreRef,
        op: Option<OpId>,
    ) -> PyResult<Py<PyAny>> {
        let Some(queue) = &self.queue else { return self.wait(py, store, op) };
        let mut phase = self.phase.lock();
        if let Phase::Open(slot) = &mut *phase
            && let Some(done) = slot.take()
        {
            drop(phase);
            queue.unreserve();
            return done.into_py(py);
        }
        *phase = Phase::Armed;
        drop(phase);
        Call { store: Arc::downgrade(store), op, token: self.token }.into_py_any(py)
    }

    fn take(&self) -> Option<Done> {
        match &mut *self.phase.lock() {
            Phase::Open(slot) => slot.take(),
            Phase::Armed => None,
        }
    }

    fn take_within(&self, limit: Duration) -> Option<Done> {
        let mut phase = self.phase.lock();
        if let Phase::Open(None) = &*phase {
            self.ended.wait_for(&mut phase, limit);
        }
        match &mut *phase {
            Phase::Open(slot) => slot.take(),
            Phase::Armed => None,
        }
    }

    /// Waits without the GIL. A signal cancels the call, but only its end gives the buffers back.
    fn wait(&self, py: Python<'_>, store: &StoreRef, op: Option<OpId>) -> PyResult<Py<PyAny>> {
        if let Some(done) = self.take() {
            return done.into_py(py);
        }
        let mut interrupted = None;
        loop {
            if let Some(done) = py.detach(|| self.take_within(SIGNAL_INTERVAL)) {
                return match interrupted {
                    None => done.into_py(py),
                    Some(signal) => {
                        drop(done);
                        Err(signal)
                    }
                };
            }
            if interrupted.is_none()
                && let Err(signal) = py.check_signals()
            {
                interrupted = Some(signal);
                if let Some(op) = op {
                    py.detach(|| store.store.cancel(op));
                }
            }
        }
    }
}

/// A call in progress, whose result comes through its queue under `token`.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Call {
    store: Weak<Shared>,
    op: Option<OpId>,
    #[pyo3(get)]
    token: u64,
}

#[pymethods]
impl Call {
    /// Asks the core to end the call. Its result still comes through the queue, when the core no
    /// longer touches the call's buffers.
    fn cancel(&self, py: Python<'_>) {
        if let (Some(store), Some(op)) = (self.store.upgrade(), self.op) {
            py.detach(|| store.store.cancel(op));
        }
    }
}
