//! Channels: calls for engines without an event loop, which poll a descriptor.
//!
//! A call is submitted and its end drained, by whatever thread. Nothing here waits except `quiesce`
//! and `close`, which let the GIL go.

use crate::args::{self, PyPutOptions};
use crate::buffers::Held;
use crate::errors::{invalid, to_py};
use crate::hold::Hold;
use crate::namespace::Namespace;
use crate::region::{self, Target};
use crate::request::Request;
use crate::store::{Shared, Store, wanted};
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tiered_kv::{
    Delete, DeleteReport, Error, ErrorKind, GetOptions, MissReason, OpId, PutReport, PutStatus,
    Result, Tier,
};

/// How often a waiting thread looks for a signal, such as Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// Most calls that a channel may be made for.
const MAX_CAPACITY: usize = 1 << 20;

/// How a call ended.
struct End {
    ok: bool,
    /// By key, whether it was done.
    keys: Vec<bool>,
    /// Bytes that were moved.
    bytes: u64,
}

/// A call that has ended and waits to be drained, with the buffers that are released then.
struct Completion {
    id: u64,
    end: End,
    seconds: f64,
    held: Option<Arc<Held>>,
}

struct Entries {
    next: u64,
    /// Calls in progress; a number as soon as the submission has returned.
    running: HashMap<u64, Option<OpId>>,
    done: Vec<Completion>,
    closed: bool,
}

/// What the core's threads see of a channel.
struct Ends {
    wake: OwnedFd,
    capacity: usize,
    /// Guards the calls in progress and the completions.
    entries: Mutex<Entries>,
    /// Told when no call is in progress any more.
    idle: Condvar,
}

impl Ends {
    /// Wakes the pollers; fails only where the counter is full, and then they wake all the same.
    fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn push(&self, entries: &mut Entries, completion: Completion) {
        let was_empty = entries.done.is_empty();
        entries.done.push(completion);
        if was_empty {
            self.ring();
        }
    }

    /// Takes up a call: its number, and whether there is room for it. One without room has ended.
    fn begin(&self, keys: usize) -> Result<(u64, bool)> {
        let mut entries = self.entries.lock();
        if entries.closed {
            return Err(closed());
        }
        entries.next += 1;
        let id = entries.next;
        let room = entries.running.len() + entries.done.len() < self.capacity;
        if room {
            entries.running.insert(id, None);
        } else {
            let end = End { ok: false, keys: vec![false; keys], bytes: 0 };
            self.push(&mut entries, Completion { id, end, seconds: 0.0, held: None });
        }
        Ok((id, room))
    }

    /// The core no longer touches the call's memory. Buffers are kept until somebody with the GIL
    /// takes the completion.
    fn end(&self, id: u64, end: End, begun: Instant, held: Option<Arc<Held>>) {
        let seconds = begun.elapsed().as_secs_f64();
        let mut entries = self.entries.lock();
        entries.running.remove(&id);
        self.push(&mut entries, Completion { id, end, seconds, held });
        if entries.running.is_empty() {
            self.idle.notify_all();
        }
    }

    /// The submission was refused: nothing will come.
    fn abandon(&self, id: u64) {
        let mut entries = self.entries.lock();
        entries.running.remove(&id);
        if entries.running.is_empty() {
            self.idle.notify_all();
        }
    }

    /// Notes the core's number of a call; true where the channel was closed meanwhile, so that the
    /// call has to be cancelled.
    fn started(&self, id: u64, op: OpId) -> bool {
        let mut entries = self.entries.lock();
        let closed = entries.closed;
        match entries.running.get_mut(&id) {
            Some(slot) => {
                *slot = Some(op);
                closed
            }
            None => false,
        }
    }

    fn take(&self) -> Vec<Completion> {
        let mut entries = self.entries.lock();
        // Pollers stay awake once it is closed, so that each of them sees that it is.
        if !entries.closed {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        std::mem::take(&mut entries.done)
    }

    /// Refuses new calls and wakes the pollers; the calls that are to be cancelled.
    fn close(&self) -> Vec<OpId> {
        let mut entries = self.entries.lock();
        entries.closed = true;
        self.ring();
        entries.running.values().filter_map(|op| *op).collect()
    }

    /// Waits until no call is in progress; false where `until` comes first.
    fn wait_idle(&self, until: Option<Instant>) -> bool {
        let mut entries = self.entries.lock();
        while !entries.running.is_empty() {
            match until {
                None => self.idle.wait(&mut entries),
                Some(until) => {
                    if self.idle.wait_until(&mut entries, until).timed_out() {
                        return entries.running.is_empty();
                    }
                }
            }
        }
        true
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "channel", "the channel is closed: make another one")
}

fn got(items: &[std::result::Result<Tier, MissReason>], block_bytes: u64) -> End {
    let early = |reason| {
        matches!(reason, MissReason::Deadline | MissReason::Cancelled | MissReason::Closed)
    };
    let keys: Vec<bool> = items.iter().map(|item| item.is_ok()).collect();
    let bytes = block_bytes * keys.iter().filter(|hit| **hit).count() as u64;
    End { ok: !items.iter().any(|item| item.is_err_and(early)), keys, bytes }
}

fn stored(report: &PutReport, block_bytes: u64) -> End {
    let there = |status| matches!(status, PutStatus::Stored | PutStatus::Exists);
    let keys: Vec<bool> = report.statuses.iter().map(|status| there(*status)).collect();
    End { ok: keys.iter().all(|key| *key), keys, bytes: block_bytes * report.stored() as u64 }
}

/// Bit `i % 8`, the lowest first, of byte `i / 8` is that of key `i`.
fn bitmap(keys: &[bool]) -> Vec<u8> {
    let byte = |part: &[bool]| part.iter().rev().fold(0, |all, bit| all << 1 | u8::from(*bit));
    keys.chunks(8).map(byte).collect()
}

/// Calls without an event loop on one store; any thread may submit and drain.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Channel {
    store: Weak<Shared>,
    number: u64,
    ends: Arc<Ends>,
}

impl Channel {
    /// The store of a call on `ns`; it keeps the core alive while the call is submitted.
    fn open_store(
        &self,
        py: Python<'_>,
        op: &'static str,
        ns: &Namespace,
    ) -> PyResult<Arc<Shared>> {
        if ns.store != self.number {
            let remedy = "open it in the channel's with store.namespace(spec)";
            return Err(invalid(py, op, format!("`ns` belongs to another store: {remedy}")));
        }
        match self.store.upgrade() {
            Some(store) if !store.store.is_closed() => Ok(store),
            _ => {
                let remedy = "the store is closed: open it again";
                Err(to_py(py, &Error::new(ErrorKind::Closed, op, remedy)))
            }
        }
    }

    /// Submits a call of `keys` keys, or lets it end at once where the queue is full.
    fn submit(
        &self,
        py: Python<'_>,
        store: &Shared,
        keys: usize,
        call: impl FnOnce(u64, Arc<Ends>, Instant) -> Result<OpId>,
    ) -> PyResult<u64> {
        let (id, room) = self.ends.begin(keys).map_err(|error| to_py(py, &error))?;
        if !room {
            return Ok(id);
        }
        match call(id, self.ends.clone(), Instant::now()) {
            Ok(op) => {
                if self.ends.started(id, op) {
                    store.store.cancel(op);
                }
                Ok(id)
            }
            Err(error) => {
                self.ends.abandon(id);
                Err(to_py(py, &error))
            }
        }
    }

    /// Waits without the GIL until no call is in progress; a signal ends the wait.
    fn wait(&self, py: Python<'_>, until: Option<Instant>) -> PyResult<bool> {
        loop {
            let look = Instant::now() + SIGNAL_INTERVAL;
            let step = until.map_or(look, |until| until.min(look));
            if py.detach(|| self.ends.wait_idle(Some(step))) {
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
    #[new]
    fn new(py: Python<'_>, store: &Store, capacity: usize) -> PyResult<Self> {
        store.check_open(py, "channel")?;
        if !(1..=MAX_CAPACITY).contains(&capacity) {
            let context = format!("`capacity` is {capacity}: give 1 to {MAX_CAPACITY} calls");
            return Err(invalid(py, "channel", context));
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(std::io::Error::from)?;
        let entries = Entries { next: 0, running: HashMap::new(), done: Vec::new(), closed: false };
        let ends = Ends { wake, capacity, entries: Mutex::new(entries), idle: Condvar::new() };
        let shared = &store.shared;
        Ok(Self { store: Arc::downgrade(shared), number: shared.number, ends: Arc::new(ends) })
    }

    fn fileno(&self) -> i32 {
        self.ends.wake.as_raw_fd()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.ends.entries.lock().closed
    }

    fn submit_exists(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let store = self.open_store(py, "submit_exists", ns)?;
        let keys = args::keys("submit_exists", keys)?;
        let begun = Instant::now();
        let (id, room) = self.ends.begin(keys.len()).map_err(|error| to_py(py, &error))?;
        if room {
            // An index in memory answers at once.
            let keys = keys.iter().map(|key| store.store.contains(&ns.inner, key)).collect();
            self.ends.end(id, End { ok: true, keys, bytes: 0 }, begun, None);
        }
        Ok(id)
    }

    #[pyo3(signature = (ns, keys, buffers, timeout=None, req=None, hold=None, on_stall="wait"))]
    #[allow(clippy::too_many_arguments, reason = "Python's own signature")]
    fn submit_get_into(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        req: Option<&Request>,
        hold: Option<&Hold>,
        on_stall: &str,
    ) -> PyResult<u64> {
        const OP: &str = "submit_get_into";
        let store = self.open_store(py, OP, ns)?;
        if req.is_some_and(|req| req.store != self.number) {
            return Err(invalid(py, OP, "`req` belongs to another store: begin it in this one"));
        }
        let hold = Hold::id_in(py, OP, hold, self.number)?;
        let keys = args::keys(OP, keys)?;
        let timeout = args::timeout(py, OP, timeout)?;
        let on_stall = region::on_stall(py, OP, on_stall)?;
        let target = Target::new(buffers, keys.len(), &wanted(OP, ns, true))?;
        let options = GetOptions { timeout, hold, in_request: req.is_some(), on_stall };
        let block_bytes = ns.inner.layout().block_bytes();
        self.submit(py, &store, keys.len(), |id, ends, begun| {
            let done = move |items: Vec<_>, held| {
                ends.end(id, got(&items, block_bytes), begun, Some(held));
            };
            target.fill(&store.store, &ns.inner, &keys, &options, done)
        })
    }

    fn submit_put(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        options: &PyPutOptions,
    ) -> PyResult<u64> {
        const OP: &str = "submit_put";
        let store = self.open_store(py, OP, ns)?;
        let keys = args::keys(OP, keys)?;
        let (source, held) = region::source(buffers, keys.len(), &wanted(OP, ns, false))?;
        let block_bytes = ns.inner.layout().block_bytes();
        self.submit(py, &store, keys.len(), |id, ends, begun| {
            let done = move |report: PutReport| {
                ends.end(id, stored(&report, block_bytes), begun, Some(held));
            };
            store.store.put_with(&ns.inner, &keys, source, &options.inner, done)
        })
    }

    #[pyo3(signature = (ns, keys, timeout=None))]
    fn submit_delete(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        const OP: &str = "submit_delete";
        let store = self.open_store(py, OP, ns)?;
        let keys = args::keys(OP, keys)?;
        let timeout = args::timeout(py, OP, timeout)?;
        let count = keys.len();
        self.submit(py, &store, count, |id, ends, begun| {
            let done = move |report: DeleteReport| {
                // Every key is gone, whether it was there or not.
                let end = End { ok: report.durable, keys: vec![true; count], bytes: 0 };
                ends.end(id, end, begun, None);
            };
            store.store.delete_with(&ns.inner, &Delete::Keys(keys), timeout, done)
        })
    }

    /// Takes all completions: a list of (id, ok, bitmap, bytes, seconds).
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let results = PyList::empty(py);
        for Completion { id, end, seconds, held } in self.ends.take() {
            drop(held);
            let bitmap = PyBytes::new(py, &bitmap(&end.keys));
            results.append((id, end.ok, bitmap, end.bytes, seconds))?;
        }
        Ok(results)
    }

    /// Calls in progress.
    fn pending(&self) -> usize {
        self.ends.entries.lock().running.len()
    }

    /// Waits without the GIL until no call is in progress; false where the time is over first.
    #[pyo3(signature = (timeout=None))]
    fn quiesce(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = args::timeout(py, "quiesce", timeout)?;
        self.wait(py, limit.and_then(|limit| Instant::now().checked_add(limit)))
    }

    /// Cancels what is in progress, waits without the GIL until the core touches no buffer of it,
    /// and drops all completions.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let calls = self.ends.close();
        if let Some(store) = self.store.upgrade() {
            py.detach(|| calls.into_iter().for_each(|op| store.store.cancel(op)));
        }
        self.wait(py, None)?;
        drop(self.ends.take());
        Ok(())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let calls = self.ends.close();
        if let Some(store) = self.store.upgrade() {
            calls.into_iter().for_each(|op| store.store.cancel(op));
        }
        drop(self.ends.take());
    }
}
