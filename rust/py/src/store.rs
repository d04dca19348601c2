//! The store's calls.

use crate::args::{self, PyPutOptions};
use crate::buffers::Wanted;
use crate::channel::{Channel, submit};
use crate::completion::{About, Done};
use crate::errors::{OrRaise, invalid};
use crate::hold::{self, Hold};
use crate::leases::Leases;
use crate::namespace::{Namespace, SpecArgs};
use crate::operator::Operator;
use crate::region::{self, Region, Target};
use crate::reports::{CloseReport, Lookup, PutReport};
use crate::request::{ContextArgs, Request};
use crate::reserve::Reservation;
use crate::{config, info};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use tiered_kv::{Delete, Found, GetOptions, Quota, Seams};

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

/// An open store. Its calls take a channel for their results, or wait without the GIL.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Store {
    pub(crate) shared: StoreRef,
}

impl Store {
    /// Opens a store on seams; waits without the GIL.
    pub(crate) fn open_with(
        py: Python<'_>,
        fields: &Bound<'_, PyDict>,
        seams: &Seams,
    ) -> PyResult<Self> {
        let config = config::read(fields, Default::default())?;
        let store = py.detach(|| tiered_kv::Store::open_with(&config, seams)).or_raise(py)?;
        let number = store.core_number();
        Ok(Self { shared: Arc::new(Shared { store: ManuallyDrop::new(store), number }) })
    }

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
        timeout: Option<&Bound<'_, PyAny>>,
        channel: Option<&Channel>,
    ) -> PyResult<Py<PyAny>> {
        let timeout = args::timeout("delete", timeout)?;
        let keys = if let Delete::Keys(keys) = what { keys.len() } else { 0 };
        submit(py, &self.shared, channel, About::keys(keys), |sink| {
            let done = |report| sink.complete(Done::Delete(report));
            self.shared.store.delete_with(&ns.inner, what, timeout, done).map(Some)
        })
    }

    fn get_options(
        &self,
        py: Python<'_>,
        op: &'static str,
        timeout: Option<&Bound<'_, PyAny>>,
        req: Option<&Request>,
        hold: Option<&Hold>,
    ) -> PyResult<GetOptions> {
        self.check_request(py, op, req)?;
        let hold = Hold::id_in(py, op, hold, self.shared.number)?;
        let (timeout, in_request) = (args::timeout(op, timeout)?, req.is_some());
        Ok(GetOptions { timeout, hold, in_request, ..GetOptions::default() })
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
        Self::open_with(py, fields, &Seams::default())
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

    /// Which keys are in any tier; an index in memory answers at once.
    fn exists(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        channel: &Channel,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "exists", ns)?;
        let keys = args::keys("exists", keys)?;
        submit(py, &self.shared, Some(channel), About::keys(keys.len()), |sink| {
            let there = |key| self.shared.store.contains(&ns.inner, key);
            sink.complete(Done::Exists(keys.iter().map(there).collect()));
            Ok(None)
        })
    }

    /// Opens a channel for calls of this store.
    fn channel(&self, py: Python<'_>, capacity: &Bound<'_, PyAny>) -> PyResult<Channel> {
        self.check_open(py, "channel")?;
        Channel::open(capacity)
    }

    /// Holds blocks on whatever tier they are, for at most `ttl` seconds.
    fn hold(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        ttl: &Bound<'_, PyAny>,
    ) -> PyResult<Hold> {
        self.check_ns(py, "hold", ns)?;
        let keys = args::keys("hold", keys)?;
        let ttl = args::duration("hold", "ttl", ttl)?;
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

    #[pyo3(signature = (
        ns, keys, timeout=None, req=None, hold=None, channel=None, recompute_s=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "Python's own signature")]
    fn get(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        timeout: Option<&Bound<'_, PyAny>>,
        req: Option<&Request>,
        hold: Option<&Hold>,
        channel: Option<&Channel>,
        recompute_s: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "get", ns)?;
        let options = self.get_options(py, "get", timeout, req, hold)?;
        let recompute = args::recompute("get", recompute_s)?;
        let options = GetOptions { recompute, ..options };
        let keys = args::shared_keys("get", keys)?;
        if let Some(found) = self.shared.store.get_now(&ns.inner, &keys, &options).or_raise(py)? {
            return Leases::new(found).into_py_any(py);
        }
        submit(py, &self.shared, channel, About::keys(keys.len()), |sink| {
            let done = |leases| sink.complete(Done::Get(Found::Each(leases)));
            self.shared.store.get_with(&ns.inner, &keys, &options, done)
        })
    }

    #[pyo3(signature = (
        ns, keys, buffers, timeout=None, req=None, hold=None, channel=None, on_stall="wait",
        recompute_s=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "Python's own signature")]
    fn get_into(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        timeout: Option<&Bound<'_, PyAny>>,
        req: Option<&Request>,
        hold: Option<&Hold>,
        channel: Option<&Channel>,
        on_stall: &str,
        recompute_s: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "get_into", ns)?;
        let options = self.get_options(py, "get_into", timeout, req, hold)?;
        let keys = args::keys("get_into", keys)?;
        let on_stall = region::on_stall(py, "get_into", on_stall)?;
        let recompute = args::recompute("get_into", recompute_s)?;
        let options = GetOptions { on_stall, recompute, ..options };
        let target = Target::new(buffers, keys.len(), &wanted("get_into", ns, true))?;
        submit(py, &self.shared, channel, ns.about(keys.len()), |sink| {
            let done = |items, held| sink.complete(Done::Into(items, held));
            target.fill(&self.shared.store, &ns.inner, &keys, &options, done).map(Some)
        })
    }

    #[pyo3(signature = (ns, keys, buffers, options, channel=None))]
    fn put(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        options: &PyPutOptions,
        channel: Option<&Channel>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "put", ns)?;
        let options = options.of(py, "put", self.shared.number)?;
        let keys = args::keys("put", keys)?;
        let (source, held) = region::source(buffers, keys.len(), &wanted("put", ns, false))?;
        submit(py, &self.shared, channel, ns.about(keys.len()), |sink| {
            let done = |report| sink.complete(Done::Put(report, held));
            self.shared.store.put_with(&ns.inner, &keys, source, options, done).map(Some)
        })
    }

    /// Registers memory of the caller's, cut into slots.
    #[pyo3(signature = (memory, slot_bytes, stride=None))]
    fn register(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        slot_bytes: &Bound<'_, PyAny>,
        stride: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Region> {
        self.check_open(py, "register")?;
        Region::register(py, &self.shared, memory, slot_bytes, stride)
    }

    /// Buffers of the caller's anywhere, as slots for one call.
    fn lend(&self, py: Python<'_>, buffers: &Bound<'_, PyAny>) -> PyResult<region::Slots> {
        self.check_open(py, "lend")?;
        region::Slots::lend(&self.shared, buffers)
    }

    #[pyo3(signature = (timeout=None, channel=None))]
    fn flush(
        &self,
        py: Python<'_>,
        timeout: Option<&Bound<'_, PyAny>>,
        channel: Option<&Channel>,
    ) -> PyResult<Py<PyAny>> {
        let timeout = args::timeout("flush", timeout)?;
        submit(py, &self.shared, channel, About::keys(0), |sink| {
            let done = |report| sink.complete(Done::Flush(report));
            self.shared.store.flush_with(timeout, done).map(Some)
        })
    }

    #[pyo3(signature = (timeout=None, channel=None))]
    fn scrub(
        &self,
        py: Python<'_>,
        timeout: Option<&Bound<'_, PyAny>>,
        channel: Option<&Channel>,
    ) -> PyResult<Py<PyAny>> {
        let timeout = args::timeout("scrub", timeout)?;
        submit(py, &self.shared, channel, About::keys(0), |sink| {
            let done = |report| sink.complete(Done::Scrub(report));
            self.shared.store.scrub_with(timeout, done).map(Some)
        })
    }

    #[pyo3(signature = (ns, keys, timeout=None, channel=None))]
    fn delete(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        timeout: Option<&Bound<'_, PyAny>>,
        channel: Option<&Channel>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "delete", ns)?;
        let keys = args::keys("delete", keys)?;
        self.begin_delete(py, ns, &Delete::Keys(keys), timeout, channel)
    }

    /// Deletes what was stored longer ago than `seconds`, or everything without them.
    #[pyo3(signature = (ns, seconds=None, timeout=None, channel=None))]
    fn delete_all(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        seconds: Option<&Bound<'_, PyAny>>,
        timeout: Option<&Bound<'_, PyAny>>,
        channel: Option<&Channel>,
    ) -> PyResult<Py<PyAny>> {
        self.check_ns(py, "delete", ns)?;
        let what = match seconds {
            Some(seconds) => Delete::OlderThan(args::duration("delete", "seconds", seconds)?),
            None => Delete::All,
        };
        self.begin_delete(py, ns, &what, timeout, channel)
    }

    fn reserve(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        options: &PyPutOptions,
    ) -> PyResult<Reservation> {
        self.check_ns(py, "reserve", ns)?;
        let options = options.of(py, "reserve", self.shared.number)?;
        let keys = args::keys("reserve", keys)?;
        let inner = self.shared.store.reserve(&ns.inner, &keys, options).or_raise(py)?;
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

    /// What the predictor learned; `None` where the store runs on another policy.
    fn predictor<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.check_process(py, "predictor")?;
        let learned = py.detach(|| self.shared.store.predictor()).or_raise(py)?;
        learned.map(|learned| info::learned(py, &learned)).transpose()
    }

    fn health<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check_process(py, "health")?;
        info::health(py, &py.detach(|| self.shared.store.health()))
    }

    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check_process(py, "audit")?;
        info::audit(py, &py.detach(|| self.shared.store.audit()))
    }

    #[pyo3(signature = (since=None))]
    fn events<'py>(
        &self,
        py: Python<'py>,
        since: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        self.check_process(py, "events")?;
        let since = since.map_or(Ok(0), |since| args::whole("events", "since", since))?;
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

    /// The store as operators see it.
    fn operator(&self, py: Python<'_>) -> PyResult<Operator> {
        self.check_process(py, "operator")?;
        Ok(Operator { inner: self.shared.store.operator() })
    }

    /// Limits what a namespace may use; returns whether it is within that now.
    #[pyo3(signature = (ns, dram_bytes=None, nvme_bytes=None))]
    fn set_quota(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        dram_bytes: Option<&Bound<'_, PyAny>>,
        nvme_bytes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        self.check_ns(py, "set_quota", ns)?;
        let bytes = |field, value: Option<&Bound<'_, PyAny>>| {
            value.map(|value| args::whole("set_quota", field, value)).transpose()
        };
        let quota = Quota {
            dram_bytes: bytes("dram_bytes", dram_bytes)?,
            nvme_bytes: bytes("nvme_bytes", nvme_bytes)?,
        };
        py.detach(|| self.shared.store.set_quota(&ns.inner, quota)).or_raise(py)
    }

    /// Closes the store; waits without the GIL until everything has drained.
    fn close(&self, py: Python<'_>) -> CloseReport {
        let report = py.detach(|| self.shared.store.close());
        CloseReport { dropped: report.dropped }
    }
}

pub(crate) fn wanted<'a>(op: &'static str, ns: &'a Namespace, writable: bool) -> Wanted<'a> {
    Wanted { op, block_bytes: ns.block_len(), kv_dtype: &ns.kv_dtype, writable, store: ns.store }
}
