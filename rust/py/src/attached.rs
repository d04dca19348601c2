//! Stores of other processes. Every call waits for the owner without the GIL, within its deadline.

use crate::args;
use crate::errors::OrRaise;
use crate::hold;
use crate::info;
use crate::namespace::{Namespace, SpecArgs};
use crate::reports::Lookup;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use tiered_kv::AttachOptions;

/// A store of another process, attached to.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Attached {
    inner: tiered_kv::Attached,
}

impl Attached {
    fn check_open(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        self.inner.check_open(op).or_raise(py)
    }
}

#[pymethods]
impl Attached {
    /// Attaches to the store that listens in a directory.
    #[staticmethod]
    #[pyo3(signature = (path, timeout=None))]
    fn open(py: Python<'_>, path: PathBuf, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let mut options = AttachOptions::default();
        if let Some(timeout) = args::timeout("attach", timeout)? {
            options.timeout = timeout;
        }
        let inner = py.detach(|| tiered_kv::Attached::open(&path, options)).or_raise(py)?;
        Ok(Self { inner })
    }

    fn namespace(&self, py: Python<'_>, spec: SpecArgs) -> PyResult<Namespace> {
        // Its number is no store's: it is good for attached stores only.
        Namespace::with(py, spec, 0, |spec| self.inner.namespace(spec))
    }

    #[pyo3(signature = (ns, keys, mode="prefix"))]
    fn lookup(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        mode: &str,
    ) -> PyResult<Lookup> {
        self.check_open(py, "lookup")?;
        let (mode, keys) = (args::mode(py, mode)?, args::keys("lookup", keys)?);
        let found = py.detach(|| self.inner.lookup(&ns.inner, &keys, mode));
        Ok(Lookup::new(&found, keys.len()))
    }

    fn contains(&self, py: Python<'_>, ns: &Namespace, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.check_open(py, "contains")?;
        let key = args::key("contains", "key", Some(key))?;
        Ok(py.detach(|| key.is_some_and(|key| self.inner.contains(&ns.inner, &key))))
    }

    fn lookup_hybrid(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        groups: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        self.check_open(py, "lookup_hybrid")?;
        let groups = hold::groups("lookup_hybrid", groups)?;
        let groups: Vec<_> = groups.iter().map(|(keys, rule)| (&keys[..], *rule)).collect();
        py.detach(|| self.inner.lookup_hybrid(&ns.inner, &groups)).or_raise(py)
    }

    fn hold(
        &self,
        py: Python<'_>,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        ttl: &Bound<'_, PyAny>,
    ) -> PyResult<AttachedHold> {
        let keys = args::keys("hold", keys)?;
        let ttl = args::duration("hold", "ttl", ttl)?;
        let inner = py.detach(|| self.inner.hold(&ns.inner, &keys, ttl)).or_raise(py)?;
        let (hits, held) = (inner.hits(), inner.held().to_vec());
        Ok(AttachedHold { inner: Mutex::new(Some(inner)), hits, held })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::stats(py, &py.detach(|| self.inner.stats()).or_raise(py)?)
    }

    fn health<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::health(py, &py.detach(|| self.inner.health()).or_raise(py)?)
    }

    /// What has become of the calls.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.inner.counters();
        let all = PyDict::new(py);
        all.set_item("unanswered", counters.unanswered)?;
        all.set_item("connects", counters.connects)?;
        Ok(all)
    }

    /// Whether the owner was there a moment ago.
    #[getter]
    fn alive(&self) -> bool {
        self.inner.is_alive()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.inner.path().to_path_buf()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

/// Keeps blocks of an attached store in some tier until it is released, or its connection ends.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct AttachedHold {
    /// Guards the hold against a release from another thread; gone once released.
    inner: Mutex<Option<tiered_kv::AttachedHold>>,
    #[pyo3(get)]
    hits: usize,
    #[pyo3(get)]
    held: Vec<bool>,
}

#[pymethods]
impl AttachedHold {
    /// Ends the hold; does nothing where it has ended.
    fn release(&self, py: Python<'_>) {
        let inner = self.inner.lock().take();
        py.detach(|| drop(inner));
    }

    /// Whether the connection that it belongs to is still in use.
    #[getter]
    fn in_force(&self) -> bool {
        self.inner.lock().as_ref().is_some_and(tiered_kv::AttachedHold::is_in_force)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.release(py);
    }

    fn __repr__(&self) -> String {
        format!("<AttachedHold: {} leading hits of {} keys>", self.hits, self.held.len())
    }
}

impl Drop for AttachedHold {
    fn drop(&mut self) {
        // Releasing waits for the owner. At the end of the process the connection's end does it.
        let mut inner = self.inner.get_mut().take();
        if inner.is_some() && Python::try_attach(|py| py.detach(|| drop(inner.take()))).is_none() {
            std::mem::forget(inner);
        }
    }
}
