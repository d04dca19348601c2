//! What operators do with a store. Every call waits without the GIL.

use crate::args;
use crate::errors::{OrRaise, invalid};
use crate::namespace::SpecArgs;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use tiered_kv::{
    AttachOptions, BlockFilter, BlockRow, BlockType, ClosedDrive, Explained, Explanation,
    NamespaceId, NamespaceRow, Residency, SurveyRow, TenantId, Verified, key,
};

const OP: &str = "operator";

/// A store as operators see it.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Operator {
    pub(crate) inner: tiered_kv::Operator,
}

fn digest(value: &Bound<'_, PyAny>, field: &str) -> PyResult<[u8; 32]> {
    Ok(args::key(OP, field, Some(value))?.expect("given").0)
}

fn namespace_of(value: &Bound<'_, PyAny>) -> PyResult<NamespaceId> {
    digest(value, "namespace").map(NamespaceId)
}

fn bytes<'py>(py: Python<'py>, bytes: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, bytes)
}

fn tenant<'py>(py: Python<'py>, digest: &[u8; 16]) -> Option<Bound<'py, PyBytes>> {
    (*digest != TenantId::NONE.0).then(|| bytes(py, digest))
}

/// A namespace's row; `fields` only where they are wanted.
pub(crate) fn namespace_row<'py>(
    py: Python<'py>,
    found: &NamespaceRow,
    fields: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("namespace", bytes(py, &found.namespace))?;
    if fields {
        row.set_item("fields", found.fields.clone())?;
    }
    row.set_item("dram_blocks", found.usage.dram_blocks)?;
    row.set_item("dram_bytes", found.usage.dram_bytes)?;
    row.set_item("nvme_blocks", found.usage.nvme_blocks)?;
    row.set_item("nvme_bytes", found.usage.nvme_bytes)?;
    row.set_item("dram_quota_bytes", found.quota.dram_bytes)?;
    row.set_item("nvme_quota_bytes", found.quota.nvme_bytes)?;
    Ok(row)
}

fn survey_row<'py>(py: Python<'py>, found: &SurveyRow) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("namespace", bytes(py, &found.namespace))?;
    row.set_item("blocks", found.blocks)?;
    row.set_item("bytes", found.bytes)?;
    row.set_item("oldest_unix_ns", found.oldest_unix_ns)?;
    row.set_item("newest_unix_ns", found.newest_unix_ns)?;
    let tenants: Vec<_> = found.tenants.iter().map(|one| tenant(py, one)).collect();
    row.set_item("tenants", tenants)?;
    Ok(row)
}

fn block_row<'py>(py: Python<'py>, found: &BlockRow) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("namespace", bytes(py, &found.namespace))?;
    row.set_item("key", bytes(py, &found.key))?;
    row.set_item("parent", found.parent.map(|key| bytes(py, &key)))?;
    row.set_item("tenant", tenant(py, &found.tenant))?;
    row.set_item("depth", found.depth)?;
    row.set_item("tokens", found.tokens)?;
    row.set_item("chunk_end", found.flags & 1 != 0)?;
    row.set_item("computed", if found.flags & 2 != 0 { "decode" } else { "prefill" })?;
    row.set_item(
        "block_type",
        match BlockType::from_u8(found.block_type) {
            BlockType::Unknown => None,
            BlockType::System => Some("system"),
            BlockType::Tool => Some("tool"),
            BlockType::User => Some("user"),
            BlockType::Reasoning => Some("reasoning"),
        },
    )?;
    row.set_item("bytes", found.bytes)?;
    row.set_item("in_dram", found.in_dram)?;
    row.set_item("nvme", found.nvme.name())?;
    row.set_item("drive", found.drive)?;
    row.set_item("holds", found.holds)?;
    row.set_item("orphan", found.orphan)?;
    row.set_item("generation", found.generation)?;
    row.set_item("put_id", found.put_id)?;
    row.set_item("stored_unix_ns", found.stored_unix_ns)?;
    let slabs = PyList::empty(py);
    for slab in &found.slabs {
        let one = PyDict::new(py);
        one.set_item("bytes", slab.bytes)?;
        one.set_item("crc32c", slab.crc32c)?;
        one.set_item("segment", slab.place.map(|(segment, _)| segment))?;
        one.set_item("slot", slab.place.map(|(_, slot)| slot))?;
        slabs.append(one)?;
    }
    row.set_item("slabs", slabs)?;
    Ok(row)
}

fn explained<'py>(py: Python<'py>, found: &Explained) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item(
        "residency",
        match found.residency {
            Residency::Absent => "absent",
            Residency::Shut => "circuit_open",
            Residency::Writing => "writing",
            Residency::Loading => "loading",
            Residency::In(tier) => tier.name(),
        },
    )?;
    row.set_item("cause", found.cause.name())?;
    let events = PyList::empty(py);
    for happened in &found.events {
        let event = PyDict::new(py);
        event.set_item("unix_ns", happened.unix_ns)?;
        event.set_item("kind", &happened.kind)?;
        event.set_item("reason", &happened.reason)?;
        event.set_item("tier", &happened.tier)?;
        events.append(event)?;
    }
    row.set_item("events", events)?;
    Ok(row)
}

pub(crate) fn explanation<'py>(
    py: Python<'py>,
    found: &Explanation,
) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    let keys: PyResult<Vec<_>> = found.keys.iter().map(|one| explained(py, one)).collect();
    all.set_item("keys", keys?)?;
    all.set_item("since_unix_ns", found.since_unix_ns)?;
    all.set_item("complete", found.complete)?;
    Ok(all)
}

fn drive_row<'py>(py: Python<'py>, drive: &ClosedDrive) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("path", drive.path.to_string_lossy())?;
    row.set_item("store_id", &drive.store_id)?;
    row.set_item("number", drive.number)?;
    row.set_item("segment_bytes", drive.segment_bytes)?;
    row.set_item("segments", drive.segments)?;
    row.set_item("misfits", &drive.misfits)?;
    row.set_item("checkpoint", drive.checkpoint.name())?;
    row.set_item("tombstones", drive.tombstones)?;
    row.set_item("damaged_headers", drive.damaged_headers)?;
    Ok(row)
}

/// Rows as dictionaries, and where the next page begins.
type Rows<'py> = (Vec<Bound<'py, PyDict>>, Option<u32>);

#[pymethods]
impl Operator {
    /// Attaches to the store that another process has open.
    #[staticmethod]
    #[pyo3(signature = (path, timeout=None))]
    fn attach(py: Python<'_>, path: PathBuf, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let mut options = AttachOptions::default();
        if let Some(timeout) = args::timeout("attach", timeout)? {
            options.timeout = timeout;
        }
        let inner = py.detach(|| tiered_kv::Operator::attach(&path, options)).or_raise(py)?;
        Ok(Self { inner })
    }

    /// Reads a closed store and changes nothing.
    #[staticmethod]
    fn read(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Self> {
        let inner = py.detach(|| tiered_kv::Operator::read(&paths)).or_raise(py)?;
        Ok(Self { inner })
    }

    /// Opens a closed store to delete from it.
    #[staticmethod]
    fn open(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Self> {
        let inner = py.detach(|| tiered_kv::Operator::open(&paths)).or_raise(py)?;
        Ok(Self { inner })
    }

    fn namespaces<'py>(&self, py: Python<'py>, start: u32) -> PyResult<Rows<'py>> {
        let page = py.detach(|| self.inner.namespaces(start)).or_raise(py)?;
        let rows: PyResult<Vec<_>> =
            page.rows.iter().map(|row| namespace_row(py, row, true)).collect();
        Ok((rows?, page.next))
    }

    fn survey<'py>(&self, py: Python<'py>, start: u32) -> PyResult<Rows<'py>> {
        let page = py.detach(|| self.inner.survey(start)).or_raise(py)?;
        let rows: PyResult<Vec<_>> = page.rows.iter().map(|row| survey_row(py, row)).collect();
        Ok((rows?, page.next))
    }

    #[pyo3(signature = (start, namespace=None, tenant=None, stored_before_unix_ns=None))]
    fn blocks<'py>(
        &self,
        py: Python<'py>,
        start: u32,
        namespace: Option<&Bound<'py, PyAny>>,
        tenant: Option<[u8; 16]>,
        stored_before_unix_ns: Option<u64>,
    ) -> PyResult<Rows<'py>> {
        let namespace = namespace.map(|id| digest(id, "namespace")).transpose()?;
        let filter = BlockFilter { namespace, tenant, stored_before_unix_ns };
        let page = py.detach(|| self.inner.blocks(start, filter)).or_raise(py)?;
        let rows: PyResult<Vec<_>> = page.rows.iter().map(|row| block_row(py, row)).collect();
        Ok((rows?, page.next))
    }

    #[pyo3(signature = (key, namespace=None))]
    fn inspect<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        namespace: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let key = args::key(OP, "key", Some(key))?.expect("given");
        let namespace = namespace.map(namespace_of).transpose()?;
        let rows = py.detach(|| self.inner.inspect(namespace, key)).or_raise(py)?;
        rows.iter().map(|row| block_row(py, row)).collect()
    }

    fn explain<'py>(
        &self,
        py: Python<'py>,
        namespace: &Bound<'py, PyAny>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (namespace, keys) = (namespace_of(namespace)?, args::keys("explain", keys)?);
        let found = py.detach(|| self.inner.explain(namespace, &keys)).or_raise(py)?;
        explanation(py, &found)
    }

    /// Deletes keys of a namespace; returns how many were there, and whether that is durable.
    fn delete_keys(
        &self,
        py: Python<'_>,
        namespace: &Bound<'_, PyAny>,
        keys: &Bound<'_, PyAny>,
        timeout: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, bool)> {
        let (namespace, keys) = (namespace_of(namespace)?, args::keys("delete", keys)?);
        let timeout = args::duration("delete", "timeout", timeout)?.min(MAX_WAIT);
        let deleted = py.detach(|| self.inner.delete_keys(namespace, &keys, timeout));
        deleted.map(|report| (report.removed, report.durable)).or_raise(py)
    }

    /// Deletes what was stored in a namespace before a time, or everything.
    fn delete_before(
        &self,
        py: Python<'_>,
        namespace: &Bound<'_, PyAny>,
        unix_ns: Option<u64>,
        timeout: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, bool)> {
        let namespace = namespace_of(namespace)?;
        let timeout = args::duration("delete", "timeout", timeout)?.min(MAX_WAIT);
        let deleted = py.detach(|| self.inner.delete_before(namespace, unix_ns, timeout));
        deleted.map(|report| (report.removed, report.durable)).or_raise(py)
    }

    /// What is known of the directories of a closed store that is read, and the identities of those
    /// that were not named.
    fn drives<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Bound<'py, PyDict>>, Vec<String>)> {
        let Some(closed) = self.inner.closed() else { return Ok((Vec::new(), Vec::new())) };
        let rows: PyResult<Vec<_>> = closed.drives.iter().map(|one| drive_row(py, one)).collect();
        Ok((rows?, closed.missing.clone()))
    }

    /// Begins to check every payload of a closed store that is read.
    fn verify(&self, py: Python<'_>) -> PyResult<Verify> {
        let inner = py.detach(|| self.inner.verify()).or_raise(py)?;
        Ok(Verify { total: inner.total(), inner: Mutex::new(inner) })
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);

/// A check of a closed store, in steps.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Verify {
    /// Guards the place that has been reached.
    inner: Mutex<tiered_kv::Verify>,
    /// Slabs and bytes to be checked.
    #[pyo3(get)]
    total: (u64, u64),
}

#[pymethods]
impl Verify {
    /// Checks about so many bytes more; `None` when all is checked.
    fn step<'py>(&self, py: Python<'py>, max_bytes: u64) -> PyResult<Option<Bound<'py, PyDict>>> {
        let done = py.detach(|| self.inner.lock().step(max_bytes)).or_raise(py)?;
        done.map(|done| verified(py, &done)).transpose()
    }
}

fn verified<'py>(py: Python<'py>, done: &Verified) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("slabs", done.slabs)?;
    row.set_item("bytes", done.bytes)?;
    row.set_item("damaged_headers", done.damaged_headers)?;
    let bad = PyList::empty(py);
    for slab in &done.bad {
        let one = PyDict::new(py);
        one.set_item("namespace", bytes(py, &slab.namespace))?;
        one.set_item("key", bytes(py, &slab.key))?;
        one.set_item("path", slab.path.to_string_lossy())?;
        one.set_item("segment", slab.segment)?;
        one.set_item("slot", slab.slot)?;
        one.set_item("what", slab.what)?;
        bad.append(one)?;
    }
    row.set_item("bad", bad)?;
    Ok(row)
}

/// Makes the directories of a closed store fit another capacity, one row for each.
#[pyfunction]
#[pyo3(signature = (paths, capacity, dry_run=false))]
pub(crate) fn resize<'py>(
    py: Python<'py>,
    paths: Vec<PathBuf>,
    capacity: u64,
    dry_run: bool,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let done = py.detach(|| tiered_kv::resize(&paths, capacity, dry_run)).or_raise(py)?;
    let row = |one: &tiered_kv::Resized| {
        let row = PyDict::new(py);
        row.set_item("path", one.path.to_string_lossy())?;
        row.set_item("segments", one.segments)?;
        row.set_item("files_before", one.files_before)?;
        row.set_item("files_after", one.files_after)?;
        row.set_item("moved_blocks", one.moved_blocks)?;
        row.set_item("lost_blocks", one.lost_blocks)?;
        row.set_item("lost_bytes", one.lost_bytes)?;
        Ok(row)
    };
    done.iter().map(row).collect()
}

/// The digest of a specification, and its fields by name as a store keeps them.
#[pyfunction]
pub(crate) fn describe_spec<'py>(
    py: Python<'py>,
    spec: SpecArgs,
) -> PyResult<(Bound<'py, PyBytes>, BTreeMap<String, String>)> {
    let spec = spec.spec(py)?;
    let id = spec.id().or_raise(py)?;
    Ok((bytes(py, &id.0), spec.fields()))
}

/// The digest under which records name a tenant, 16 bytes; zeros for none.
#[pyfunction]
pub(crate) fn tenant_digest<'py>(py: Python<'py>, name: &str) -> Bound<'py, PyBytes> {
    bytes(py, &TenantId::of(name).0)
}

/// Packed keys of a token sequence in the namespace of this digest.
#[pyfunction]
pub(crate) fn token_keys<'py>(
    py: Python<'py>,
    namespace: &Bound<'py, PyAny>,
    tokens: &Bound<'py, PyAny>,
    tokens_per_block: u32,
) -> PyResult<Bound<'py, PyBytes>> {
    const OP: &str = "keys_from_tokens";
    let namespace = namespace_of(namespace)?;
    let tokens = args::tokens(OP, tokens)?;
    if tokens_per_block == 0 {
        return Err(invalid(py, OP, "`tokens_per_block` is 0: give 1 or more"));
    }
    let keys = key::keys_from_tokens(&namespace, None, &tokens, tokens_per_block, false);
    Ok(bytes(py, &tiered_kv::BlockKey::pack(&keys)))
}
