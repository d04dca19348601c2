//! Results of calls: what they carry, how Python sees them, and how a thread waits for one.

use crate::buffers::Held;
use crate::leases::Leases;
use crate::reports::{DeleteReport, FlushReport, IntoReport, PutReport, ScrubReport};
use crate::store::StoreRef;
use parking_lot::{Condvar, Mutex};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;
use tiered_kv::{Found, MissReason, OpId, PutStatus, Tier};

/// How often a waiting thread looks for a signal, such as Ctrl-C.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// The result of a call, and the buffers that it no longer needs.
pub(crate) enum Done {
    Exists(Vec<bool>),
    Get(Found),
    Into(Vec<Result<Tier, MissReason>>, Arc<Held>),
    Put(tiered_kv::PutReport, Arc<Held>),
    Flush(tiered_kv::FlushReport),
    Delete(tiered_kv::DeleteReport),
    Scrub(tiered_kv::ScrubReport),
    /// The channel had no room for the call.
    Refused,
}

/// What a call was about, for its summary.
#[derive(Clone, Copy)]
pub(crate) struct About {
    pub(crate) keys: usize,
    pub(crate) block_bytes: u64,
}

impl About {
    /// A call that moves no bytes.
    pub(crate) const fn keys(keys: usize) -> Self {
        Self { keys, block_bytes: 0 }
    }
}

/// How a call ended, in the terms of an engine.
pub(crate) struct Summary {
    pub(crate) ok: bool,
    /// By key, whether it was done.
    pub(crate) keys: Vec<bool>,
    /// Bytes that were moved.
    pub(crate) bytes: u64,
}

impl Done {
    /// The Python object; held buffers are released here, with the GIL held.
    pub(crate) fn into_py(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Exists(keys) => keys.into_py_any(py),
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
            Self::Scrub(report) => ScrubReport::from(report).into_py_any(py),
            Self::Delete(report) => DeleteReport::from(report).into_py_any(py),
            Self::Refused => Ok(py.None()),
        }
    }

    /// What a drain tells of it. A miss is no failure, a call that ended early is one.
    pub(crate) fn summary(&self, about: About) -> Summary {
        let early = |reason| {
            matches!(reason, MissReason::Deadline | MissReason::Cancelled | MissReason::Closed)
        };
        let there = |status| matches!(status, PutStatus::Stored | PutStatus::Exists);
        let (ok, keys, blocks) = match self {
            Self::Exists(keys) => (true, keys.clone(), 0),
            Self::Get(Found::Each(found)) => (
                !found.items.iter().any(|item| item.as_ref().is_err_and(|why| early(*why))),
                found.items.iter().map(Result::is_ok).collect(),
                0,
            ),
            Self::Get(Found::Whole(found)) => {
                (true, (0..found.len()).map(|at| found.outcome(at).is_ok()).collect(), 0)
            }
            Self::Into(items, _) => (
                !items.iter().any(|item| item.is_err_and(early)),
                items.iter().map(Result::is_ok).collect(),
                items.iter().filter(|item| item.is_ok()).count(),
            ),
            Self::Put(report, _) => {
                let keys: Vec<bool> = report.statuses.iter().map(|status| there(*status)).collect();
                (keys.iter().all(|key| *key), keys, report.stored())
            }
            Self::Flush(report) => (report.all_durable(), vec![true; about.keys], 0),
            Self::Scrub(report) => (report.complete, vec![true; about.keys], 0),
            // Every key is gone, whether it was there or not.
            Self::Delete(report) => (report.durable, vec![true; about.keys], 0),
            Self::Refused => (false, vec![false; about.keys], 0),
        };
        Summary { ok, keys, bytes: about.block_bytes * blocks as u64 }
    }
}

/// A thread that waits for the result of one call.
#[derive(Default)]
pub(crate) struct Waiter {
    /// Guards the result until the thread takes it.
    done: Mutex<Option<Done>>,
    ended: Condvar,
}

impl Waiter {
    pub(crate) fn complete(&self, done: Done) {
        *self.done.lock() = Some(done);
        self.ended.notify_all();
    }

    fn take_within(&self, limit: Duration) -> Option<Done> {
        let mut done = self.done.lock();
        if done.is_none() {
            self.ended.wait_for(&mut done, limit);
        }
        done.take()
    }

    /// Waits without the GIL. A signal cancels the call, but only its end gives the buffers back.
    pub(crate) fn wait(
        &self,
        py: Python<'_>,
        store: &StoreRef,
        op: Option<OpId>,
    ) -> PyResult<Py<PyAny>> {
        if let Some(done) = self.done.lock().take() {
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
