//! Results of calls as Python objects.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use tiered_kv::{MissReason, PutStatus, Residency, Tier};

/// Codes of [`Lookup::tiers`] beside the tiers' own numbers.
const ABSENT: u8 = 0;
const SHUT: u8 = 253;
const LOADING: u8 = 254;
const WRITING: u8 = 255;

/// The name of each reason, `None` for a hit.
pub(crate) fn reasons<'py, 'a, T: 'a>(
    py: Python<'py>,
    items: impl Iterator<Item = &'a Result<T, MissReason>>,
) -> PyResult<Bound<'py, PyList>> {
    let names = PyList::empty(py);
    for item in items {
        names.append(item.as_ref().err().map(|reason| reason.name()))?;
    }
    Ok(names)
}

/// What a lookup found.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Lookup {
    #[pyo3(get)]
    hits: usize,
    flags: Vec<u8>,
    tiers: Vec<u8>,
}

impl Lookup {
    pub(crate) fn new(found: &tiered_kv::Lookup, keys: usize) -> Self {
        let tier = |state: &Residency| match state {
            Residency::Absent => ABSENT,
            Residency::Loading => LOADING,
            Residency::Shut => SHUT,
            Residency::Writing => WRITING,
            Residency::In(tier) => *tier as u8,
        };
        let mut tiers: Vec<u8> = found.states.iter().map(tier).collect();
        let mut flags: Vec<u8> = found.infos.iter().map(tiered_kv::BlockInfo::flags).collect();
        tiers.resize(keys, ABSENT);
        flags.resize(keys, 0);
        Self { hits: found.hits, flags, tiers }
    }
}

#[pymethods]
impl Lookup {
    #[getter]
    fn flags<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.flags)
    }

    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.tiers)
    }

    fn __repr__(&self) -> String {
        format!("<Lookup: {} leading hits of {} keys>", self.hits, self.tiers.len())
    }
}

/// How a put ended.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct PutReport {
    inner: tiered_kv::PutReport,
}

impl From<tiered_kv::PutReport> for PutReport {
    fn from(inner: tiered_kv::PutReport) -> Self {
        Self { inner }
    }
}

pub(crate) fn status_name(status: PutStatus) -> &'static str {
    match status {
        PutStatus::Stored => "stored",
        PutStatus::Exists => "exists",
        PutStatus::Throttled => "throttled",
        PutStatus::Ended => "ended",
        PutStatus::Failed => "failed",
    }
}

#[pymethods]
impl PutReport {
    #[getter]
    fn stored(&self) -> usize {
        self.inner.stored()
    }

    #[getter]
    fn exists(&self) -> usize {
        self.inner.exists()
    }

    #[getter]
    fn throttled(&self) -> usize {
        self.inner.throttled()
    }

    #[getter]
    fn statuses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.inner.statuses.iter().map(|status| status_name(*status)))
    }

    fn __repr__(&self) -> String {
        let (stored, exists, throttled) = (self.stored(), self.exists(), self.throttled());
        format!("<PutReport: {stored} stored, {exists} exist, {throttled} throttled>")
    }
}

/// How a `get_into` ended.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct IntoReport {
    items: Vec<Result<Tier, MissReason>>,
}

impl IntoReport {
    pub(crate) fn new(items: Vec<Result<Tier, MissReason>>) -> Self {
        Self { items }
    }
}

#[pymethods]
impl IntoReport {
    #[getter]
    fn hits(&self) -> usize {
        self.items.iter().take_while(|item| item.is_ok()).count()
    }

    #[getter]
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        reasons(py, self.items.iter())
    }

    #[getter]
    fn sources<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let code = |item: &Result<Tier, MissReason>| item.map_or(ABSENT, |tier| tier as u8);
        PyBytes::new(py, &self.items.iter().map(code).collect::<Vec<_>>())
    }

    fn __repr__(&self) -> String {
        format!("<IntoReport: {} leading hits of {}>", self.hits(), self.items.len())
    }
}

/// What a flush achieved.
#[pyclass(frozen, get_all, module = "tiered_kv._core")]
pub(crate) struct FlushReport {
    pending: u64,
    failed: u64,
    no_durable_tier: bool,
    all_durable: bool,
}

impl From<tiered_kv::FlushReport> for FlushReport {
    fn from(report: tiered_kv::FlushReport) -> Self {
        let all_durable = report.all_durable();
        let tiered_kv::FlushReport { pending, failed, no_durable_tier } = report;
        Self { pending, failed, no_durable_tier, all_durable }
    }
}

#[pymethods]
impl FlushReport {
    fn __repr__(&self) -> String {
        let tier = if self.no_durable_tier { ", no durable tier" } else { "" };
        format!("<FlushReport: {} pending, {} failed{tier}>", self.pending, self.failed)
    }
}

/// How a delete ended.
#[pyclass(frozen, get_all, module = "tiered_kv._core")]
pub(crate) struct DeleteReport {
    removed: u64,
    durable: bool,
}

impl From<tiered_kv::DeleteReport> for DeleteReport {
    fn from(report: tiered_kv::DeleteReport) -> Self {
        Self { removed: report.removed, durable: report.durable }
    }
}

#[pymethods]
impl DeleteReport {
    fn __repr__(&self) -> String {
        let durable = if self.durable { "durable" } else { "not durable" };
        format!("<DeleteReport: {} removed, {durable}>", self.removed)
    }
}

/// What a scrub found.
#[pyclass(frozen, get_all, module = "tiered_kv._core")]
pub(crate) struct ScrubReport {
    blocks: u64,
    bytes: u64,
    corrupt: u64,
    unreadable: u64,
    skipped: u64,
    complete: bool,
}

impl From<tiered_kv::ScrubReport> for ScrubReport {
    fn from(report: tiered_kv::ScrubReport) -> Self {
        let tiered_kv::ScrubReport { blocks, bytes, corrupt, unreadable, skipped, complete } =
            report;
        Self { blocks, bytes, corrupt, unreadable, skipped, complete }
    }
}

#[pymethods]
impl ScrubReport {
    fn __repr__(&self) -> String {
        let end = if self.complete { "" } else { ", not complete" };
        let (whole, bad) = (self.blocks, self.corrupt + self.unreadable);
        format!("<ScrubReport: {whole} whole, {bad} bad, {} skipped{end}>", self.skipped)
    }
}

/// How a close ended.
#[pyclass(frozen, get_all, module = "tiered_kv._core")]
pub(crate) struct CloseReport {
    pub(crate) dropped: u64,
}

#[pymethods]
impl CloseReport {
    fn __repr__(&self) -> String {
        format!("<CloseReport: {} dropped>", self.dropped)
    }
}
