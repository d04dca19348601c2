//! Statistics, health, events and audits as dictionaries.

use crate::operator;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use tiered_kv::{
    Attachable, Audit, DriveHealth, Health, LATENCY_BOUNDS_NS, Latency, Learned, LogEntry, LogKind,
    OpenTimes, ReuseStats, Stats, TierStats, pair_names,
};

fn tier<'py>(py: Python<'py>, stats: &TierStats) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("capacity_bytes", stats.capacity_bytes)?;
    row.set_item("used_bytes", stats.used_bytes)?;
    row.set_item("blocks", stats.blocks)?;
    row.set_item("hits", stats.hits)?;
    row.set_item("hit_bytes", stats.hit_bytes)?;
    Ok(row)
}

fn counts<'py>(py: Python<'py>, rows: &[(&'static str, u64)]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, count) in rows {
        dict.set_item(name, count)?;
    }
    Ok(dict)
}

pub(crate) fn stats<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("dram", tier(py, &stats.dram)?)?;
    all.set_item("nvme", tier(py, &stats.nvme)?)?;
    all.set_item("requested", stats.requested)?;
    all.set_item("misses", counts(py, &stats.misses)?)?;
    all.set_item("counters", counts(py, &stats.counters)?)?;
    all.set_item("leased_bytes", stats.leased_bytes)?;
    all.set_item("dirty_bytes", stats.dirty_bytes)?;
    all.set_item("loading_bytes", stats.loading_bytes)?;
    all.set_item("metadata_bytes", stats.metadata_bytes)?;
    all.set_item("holds", stats.holds)?;
    all.set_item("held_bytes", stats.held_bytes)?;
    all.set_item("staging_bytes", stats.staging_bytes)?;
    all.set_item("staging_used_bytes", stats.staging_used_bytes)?;
    all.set_item("orphans", stats.orphans)?;
    all.set_item("blocks", stats.blocks)?;
    all.set_item("calls", stats.calls)?;
    let row = |one| operator::namespace_row(py, one, false);
    let namespaces: PyResult<Vec<_>> = stats.namespaces.iter().map(row).collect();
    all.set_item("namespaces", namespaces?)?;
    let latencies = PyDict::new(py);
    for (name, one) in [("load", &stats.latencies.load), ("commit", &stats.latencies.commit)] {
        latencies.set_item(name, latency(py, one)?)?;
    }
    all.set_item("latencies", latencies)?;
    all.set_item("reuses_by_pair", reuses_by_pair(py, &stats.reuses_by_pair)?)?;
    all.set_item("reuses_by_chance", reuses_by_chance(py, &stats.reuses_by_chance)?)?;
    Ok(all)
}

fn latency<'py>(py: Python<'py>, latency: &Latency) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    let bounds = LATENCY_BOUNDS_NS.map(|bound| bound as f64 * 1e-9);
    row.set_item("bounds_s", PyTuple::new(py, bounds)?)?;
    row.set_item("counts", PyTuple::new(py, latency.counts)?)?;
    row.set_item("sum_s", latency.sum_ns as f64 * 1e-9)?;
    Ok(row)
}

fn reuses<'py>(py: Python<'py>, one: &ReuseStats) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("predicted", one.predicted)?;
    row.set_item("reuses", one.reuses)?;
    Ok(row)
}

fn reuses_by_pair<'py>(py: Python<'py>, rows: &[ReuseStats]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for (pair, one) in rows.iter().enumerate() {
        let row = reuses(py, one)?;
        let (block_type, transition) = pair_names(pair);
        row.set_item("block_type", block_type)?;
        row.set_item("transition", transition)?;
        list.append(row)?;
    }
    Ok(list)
}

fn reuses_by_chance<'py>(py: Python<'py>, rows: &[ReuseStats]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for (class, one) in rows.iter().enumerate() {
        let row = reuses(py, one)?;
        // The last class is of all smaller chances.
        let least = if class + 1 == rows.len() { 0.0 } else { 0.5f64.powf(class as f64 + 1.0) };
        row.set_item("chance_at_least", least)?;
        list.append(row)?;
    }
    Ok(list)
}

pub(crate) fn learned<'py>(py: Python<'py>, learned: &Learned) -> PyResult<Bound<'py, PyDict>> {
    let pairs = PyList::empty(py);
    for pair in &learned.pairs {
        let row = PyDict::new(py);
        row.set_item("block_type", pair.block_type)?;
        row.set_item("transition", pair.transition)?;
        row.set_item("mean", pair.mean)?;
        row.set_item("interval", pair.interval)?;
        row.set_item("lives", pair.lives)?;
        row.set_item("reuses", pair.reuses)?;
        row.set_item("hazard", PyTuple::new(py, pair.hazard)?)?;
        pairs.append(row)?;
    }
    let all = PyDict::new(py);
    all.set_item("policy", learned.policy)?;
    all.set_item("requests", learned.requests)?;
    all.set_item("ghosts", learned.ghosts)?;
    all.set_item("ages", PyTuple::new(py, &learned.ages)?)?;
    all.set_item("pairs", pairs)?;
    Ok(all)
}

pub(crate) fn health<'py>(py: Python<'py>, health: &Health) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("open", health.open)?;
    all.set_item("backend", &health.backend)?;
    all.set_item("backend_reason", &health.backend_reason)?;
    all.set_item("direct", health.direct)?;
    all.set_item("direct_reason", &health.direct_reason)?;
    all.set_item("drive_paused", health.drive_paused)?;
    let drives: PyResult<Vec<_>> = health.drives.iter().map(|one| drive(py, one)).collect();
    all.set_item("drives", drives?)?;
    all.set_item("warnings", &health.warnings)?;
    all.set_item("store_id", &health.store_id)?;
    all.set_item("huge_bytes", health.huge_bytes)?;
    all.set_item("regions", health.regions)?;
    all.set_item("regions_plain", health.regions_plain)?;
    all.set_item("region_reason", &health.region_reason)?;
    all.set_item("attach", attachable(py, &health.attach)?)?;
    Ok(all)
}

fn attachable<'py>(py: Python<'py>, attach: &Attachable) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("listening", attach.listening)?;
    row.set_item("reason", &attach.reason)?;
    row.set_item("connections", attach.connections)?;
    row.set_item("accepted", attach.accepted)?;
    row.set_item("refused", attach.refused)?;
    row.set_item("dropped", attach.dropped)?;
    Ok(row)
}

fn drive<'py>(py: Python<'py>, drive: &DriveHealth) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("path", drive.path.to_string_lossy())?;
    row.set_item("state", drive.state.name())?;
    row.set_item("backend", &drive.backend)?;
    row.set_item("reason", &drive.reason)?;
    row.set_item("fault", &drive.fault)?;
    row.set_item("store_id", &drive.store_id)?;
    row.set_item("load_bytes_per_s", drive.load_bytes_per_s)?;
    Ok(row)
}

pub(crate) fn audit<'py>(py: Python<'py>, audit: &Audit) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("dram_block_bytes", audit.dram_block_bytes)?;
    all.set_item("dram_used_bytes", audit.dram_used_bytes)?;
    all.set_item("dram_owned_bytes", audit.dram_owned_bytes)?;
    all.set_item("nvme_block_bytes", audit.nvme_block_bytes)?;
    all.set_item("nvme_used_bytes", audit.nvme_used_bytes)?;
    all.set_item("drives_idle", audit.drives_idle)?;
    all.set_item("faults", &audit.faults)?;
    Ok(all)
}

pub(crate) fn events<'py>(py: Python<'py>, entries: &[LogEntry]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for entry in entries {
        let row = PyDict::new(py);
        row.set_item("seq", entry.seq)?;
        row.set_item("unix_ns", entry.unix_ns)?;
        row.set_item("kind", entry.kind.name())?;
        let reason = match entry.kind {
            LogKind::Fault(reason) => Some(reason.name()),
            _ => None,
        };
        row.set_item("reason", reason)?;
        row.set_item("ns", entry.ns)?;
        row.set_item("key", PyBytes::new(py, &entry.key.0))?;
        row.set_item("tier", entry.tier.map(|tier| tier.name()))?;
        list.append(row)?;
    }
    Ok(list)
}

pub(crate) fn open_times<'py>(py: Python<'py>, times: &OpenTimes) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("total_s", times.total_s)?;
    all.set_item("populate_s", times.populate_s)?;
    all.set_item("recover_s", times.recover_s)?;
    Ok(all)
}
