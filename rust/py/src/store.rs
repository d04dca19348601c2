//! The store's calls.

use crate::args::{self, PyPutOptions};
use crate::buffers::{self, Wanted};
use crate::completion::{CompletionQueue, Done, Ticket};
use crate::errors::{OrRaise, invalid, to_py};
use crate::hold::{self, Hold};
use crate::namespace::{Namespace, SpecArgs};
use crate::reports::{CloseReport, Lookup, PutReport};
use crate::request::{ContextArgs, Request};
use crate::reserve::Reservation;
use crate::{config, info};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use tiered_kv::{Delete, Error, GetOptions};

/// A handle on a core, and the core's number in this process, by which namespaces, holds and
/// requests tell where they belong.
pub(crate) struct Shared {
    pub(crate) store: ManuallyDrop<Arc<tiered_kv::Store>>,
    pub(crate) number: u64,
}

pub(crate) type StoreRef = Arc<Shared>;

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: `store` is not used after this.
        let store = unsafe { ManuallyDrop::take(&mut self.store) };
        // Dropping it closes it, which waits for threads that may want the GIL. At the end of the
        // process there is none to be had: the operating system then frees what the core holds.
        let mut store = Some(store);
        if Python::try_attach(|py| py.detach(|| drop(store.take()))).is_none() {
            std::mem::forget(store);
        }
    }
}

/// An open store. Its calls take a completion queue, or wait without the GIL where there is none.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Store {
    pub(crate) shared: StoreRef,
}

impl Store {
    pub(crate) fn check_open(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        self.shared.store.check_open(op).or_raise(py)
    }

    /// A closed store may still be looked into; in a forked child nothing may be.
    fn check_process(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        if self.shared.store.is_forked() { self.check_open(py, op) } else { Ok(()) }
    }

    fn check_ns(&self, py: Python<'_>, op: &'static str, ns: &Namespace) -> PyResult<()> {
        if ns.store != self.shared.number {
            let remedy = "open it in this one with store.namespace(spec)";
            return Err(invalid(py, op, format!("`ns` belongs to another store: {remedy}")));
        }
        self.check_open(py, op)
    }

    fn begin_delete(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        what: &Delete,
        timeout: Option<f64>,
        queue: Option<&CompletionQueue>,
    ) -> PyResult<Py<PyAny>> {
        let timeout = args::timeout(py, "delete", timeout)?;
        let ticket = Ticket::new(queue);
        let end = ticket.clone();
        let done = move |report| end.complete(Done::Delete(report));
        match self.shared.store.delete_with(&ns.inner, what, timeout, done) {
            Ok(op) => ticket.settle(py, &self.shared, Some(op)),
            Err(error) => Err(refused(py, &ticket, &error)),
        }
    }

    fn check_request(
        &self,
        py: Python<'_>,
        op: &'static str,
        req: Option<&Request>,
    ) -> PyResult<()> {
        if req.is_some_and(|req| req.store != self.shared.number) {
            let remedy = "begin it in this one";
            return Err(invalid(py, op, format!("`req` belongs to another store: {remedy}")));
        }
        Ok(())
    }
}

#[pymethods]
impl Store {
    /// Opens a store from the fields of a configuration; waits without the GIL.
    #[staticmethod]
    fn open(py: Python<'_>, fields: &Bound<'_, PyDict>) -> PyResult<Self> {
        let config = config::read(fields, Default::default())?;
        let store = py.detach(|| tiered_kv::Store::open(&config)).or_raise(py)?;
        let number = store.core_number();
        Ok(Self { shared: Arc::new(Shared { store: ManuallyDrop::new(store), number }) })
    }

    fn namespace(&self, py: Python<'_>, spec: SpecArgs) -> PyResult<Namespace> {
        Namespace::open(py, &self.shared, spec)
    }

    #[pyo3(signature = (ns, keys, mode="prefix"))]
    fn lookup(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        mode: &str,
    ) -> PyResult<Lookup> {
        self.check_ns(py, "lookup", ns)?;
        let mode = args::mode(py, mode)?;
        let keys = args::keys("lookup", keys)?;
        Ok(Lookup::new(&self.shared.store.lookup(&ns.inner, &keys, mode), keys.len()))
    }

    fn contains(&self, py: Python<'_>, ns: &Namespace, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.check_ns(py, "contains", ns)?;
        let key = args::key("contains", "key", Some(key))?;
        Ok(key.is_some_and(|key| self.shared.store.contains(&ns.inner, &key)))
    }

    /// Holds blocks on whatever tier they are, for at most `ttl` seconds.
    fn hold(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        ttl: f64,
    ) -> PyResult<Hold> {
        self.check_ns(py, "hold", ns)?;
        let keys = args::keys("hold", keys)?;
        let ttl = args::duration(py, "hold", "ttl", ttl)?;
        let inner = self.shared.store.hold(&ns.inner, &keys, ttl).or_raise(py)?;
        Ok(Hold::new(inner, self.shared.number))
    }

    /// Begins to load blocks into memory, without waiting.
    fn prefetch(&self, py: Python<'_>, ns: &Namespace, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_ns(py, "prefetch", ns)?;
        let keys = args::keys("prefetch", keys)?;
        self.shared.store.prefetch(&ns.inner, &keys).or_raise(py)
    }

    /// The largest position, in blocks, at which every group has what its rule asks for.
    fn lookup_hybrid(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        groups: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        self.check_ns(py, "lookup_hybrid", ns)?;
        let groups = hold::groups("lookup_hybrid", groups)?;
        let groups: Vec<_> = groups.iter().map(|(keys, rule)| (&keys[..], *rule)).collect();
        self.shared.store.lookup_hybrid(&ns.inner, &groups).or_raise(py)
    }

    #[pyo3(signature = (ns, keys, timeout=None, req=None, hold=None, queue=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's own signature")]
    fn get(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        req: Option<&Request>,
        hold: Option<&Hold>,
        queue: Option<&CompletionQueue>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "get", ns)?;
        self.check_request(py, "get", req)?;
        let hold = Hold::id_in(py, "get", hold, self.shared.number)?;
        let keys = args::keys("get", keys)?;
        let timeout = args::timeout(py, "get", timeout)?;
        let options = GetOptions { timeout, hold, in_request: req.is_some() };
        let ticket = Ticket::new(queue);
        let end = ticket.clone();
        let done = move |leases| end.complete(Done::Get(leases));
        match self.shared.store.get_with(&ns.inner, &keys, &options, done) {
            Ok(op) => ticket.settle(py, &self.shared, op),
            Err(error) => Err(refused(py, &ticket, &error)),
        }
    }

    #[pyo3(signature = (ns, keys, buffers, timeout=None, req=None, hold=None, queue=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's own signature")]
    fn get_into(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        req: Option<&Request>,
        hold: Option<&Hold>,
        queue: Option<&CompletionQueue>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "get_into", ns)?;
        self.check_request(py, "get_into", req)?;
        let hold = Hold::id_in(py, "get_into", hold, self.shared.number)?;
        let keys = args::keys("get_into", keys)?;
        let timeout = args::timeout(py, "get_into", timeout)?;
        let wanted = wanted("get_into", ns, true);
        let (parts, held) = buffers::write_parts(buffers, keys.len(), &wanted)?;
        let options = GetOptions { timeout, hold, in_request: req.is_some() };
        let ticket = Ticket::new(queue);
        let end = ticket.clone();
        let done = move |report: tiered_kv::IntoReport<_>| {
            let tiered_kv::IntoReport { items, buffers } = report;
            // The parts go first, so that `held` is the last owner of the exports.
            drop(buffers);
            end.complete(Done::Into(items, held));
        };
        match self.shared.store.get_into_with(&ns.inner, &keys, parts, &options, done) {
            Ok(op) => ticket.settle(py, &self.shared, Some(op)),
            Err(error) => Err(refused(py, &ticket, &error)),
        }
    }

    #[pyo3(signature = (ns, keys, buffers, options, queue=None))]
    fn put(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        options: &PyPutOptions,
        queue: Option<&CompletionQueue>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "put", ns)?;
        let keys = args::keys("put", keys)?;
        let source = buffers::read_parts(buffers, keys.len(), &wanted("put", ns, false))?;
        let held = source.held();
        let ticket = Ticket::new(queue);
        let end = ticket.clone();
        let done = move |report| end.complete(Done::Put(report, held));
        match self.shared.store.put_with(&ns.inner, &keys, source, &options.inner, done) {
            Ok(op) => ticket.settle(py, &self.shared, Some(op)),
            Err(error) => Err(refused(py, &ticket, &error)),
        }
    }

    #[pyo3(signature = (timeout=None, queue=None))]
    fn flush(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        queue: Option<&CompletionQueue>,
    ) -> PyResult<Py<PyAny>> {
        let timeout = args::timeout(py, "flush", timeout)?;
        let ticket = Ticket::new(queue);
        let end = ticket.clone();
        let done = move |report| end.complete(Done::Flush(report));
        match self.shared.store.flush_with(timeout, done) {
            Ok(op) => ticket.settle(py, &self.shared, Some(op)),
            Err(error) => Err(refused(py, &ticket, &error)),
        }
    }

    #[pyo3(signature = (ns, keys, timeout=None, queue=None))]
    fn delete(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        queue: Option<&CompletionQueue>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "delete", ns)?;
        let keys = args::keys("delete", keys)?;
        self.begin_delete(py, ns, &Delete::Keys(keys), timeout, queue)
    }

    /// Deletes what was stored longer ago than `seconds`, or everything without them.
    #[pyo3(signature = (ns, seconds=None, timeout=None, queue=None))]
    fn delete_all(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        seconds: Option<f64>,
        timeout: Option<f64>,
        queue: Option<&CompletionQueue>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "delete", ns)?;
        let what = match seconds {
            Some(seconds) => Delete::OlderThan(args::age(py, "delete", seconds)?),
            None => Delete::All,
        };
        self.begin_delete(py, ns, &what, timeout, queue)
    }

    fn reserve(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        options: &PyPutOptions,
    ) -> PyResult<Reservation> {
        self.check_ns(py, "reserve", ns)?;
        let keys = args::keys("reserve", keys)?;
        let inner = self.shared.store.reserve(&ns.inner, &keys, &options.inner).or_raise(py)?;
        Ok(Reservation::new(inner, &self.shared, ns.inner.layout().slabs()))
    }

    /// Makes a reservation's blocks visible; checksums are computed on this thread, without the
    /// GIL.
    fn publish(&self, py: Python<'_>, reservation: &Reservation) -> PyResult<PutReport> {
        self.check_open(py, "publish")?;
        let taken = reservation.take(py, &self.shared)?;
        let report = py.detach(|| self.shared.store.publish(taken)).or_raise(py)?;
        Ok(report.into())
    }

    fn begin_request(&self, py: Python<'_>, context: ContextArgs) -> PyResult<Request> {
        self.check_open(py, "begin_request")?;
        let inner = self.shared.store.begin_request(context.context(py)?);
        Ok(Request { inner, store: self.shared.number })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check_process(py, "stats")?;
        info::stats(py, &py.detach(|| self.shared.store.stats()))
    }

    fn health<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check_process(py, "health")?;
        info::health(py, &py.detach(|| self.shared.store.health()))
    }

    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check_process(py, "audit")?;
        info::audit(py, &py.detach(|| self.shared.store.audit()))
    }

    #[pyo3(signature = (since=0))]
    fn events<'py>(&self, py: Python<'py>, since: u64) -> PyResult<Bound<'py, PyList>> {
        self.check_process(py, "events")?;
        info::events(py, &py.detach(|| self.shared.store.events(since)))
    }

    #[getter]
    fn open_times<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::open_times(py, &self.shared.store.open_times())
    }

    #[getter]
    fn closed(&self) -> bool {
        self.shared.store.is_closed()
    }

    /// Closes the store; waits without the GIL until everything has drained.
    fn close(&self, py: Python<'_>) -> CloseReport {
        let report = py.detach(|| self.shared.store.close());
        CloseReport { dropped: report.dropped }
    }
}

pub(crate) fn wanted<'a>(op: &'static str, ns: &'a Namespace, writable: bool) -> Wanted<'a> {
    Wanted { op, block_bytes: ns.block_len(), kv_dtype: &ns.kv_dtype, writable }
}

fn refused(py: Python<'_>, ticket: &Ticket, error: &Error) -> PyErr {
    ticket.abandon();
    to_py(py, error)
}
