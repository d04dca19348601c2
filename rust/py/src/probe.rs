//! What this machine and a directory offer, tried and not guessed.

use crate::errors::OrRaise;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use tiered_kv::io_seams::{self, Arena, ArenaConfig, Disk, PosixDisk};

/// Enough for two huge pages of 2 MiB, wherever the mapping begins.
const HUGE_PROBE_BYTES: u64 = 8 << 20;

/// Whether this thread can have an io_uring that does all that the store needs, and what it is, or
/// why not.
#[pyfunction]
pub(crate) fn probe_io_uring(py: Python<'_>) -> (bool, String) {
    match py.detach(io_seams::probe_io_uring) {
        Ok(features) => {
            let flags = features.flags.join(", ");
            (true, format!("kernel {}, flags: {flags}", features.kernel))
        }
        Err(reason) => (false, reason),
    }
}

/// How a store would open files in a directory, which is made where it is absent.
#[pyfunction]
pub(crate) fn probe_directory<'py>(py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
    let disk = py.detach(|| PosixDisk::open(&path)).or_raise(py)?;
    let found = PyDict::new(py);
    found.set_item("direct", disk.is_direct())?;
    found.set_item("reason", disk.direct_reason())?;
    found.set_item("memory_alignment", disk.alignment().memory)?;
    found.set_item("offset_alignment", disk.alignment().offset)?;
    Ok(found)
}

/// Bytes on huge pages of a small arena, and bytes of memory that this process may use: the limit
/// of its cgroup or of the machine, and what of it is free. `None` where it cannot be told.
#[pyfunction]
pub(crate) fn probe_memory(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let arena = py.detach(|| {
        let mut config = ArenaConfig::new(HUGE_PROBE_BYTES);
        config.huge_pages = true;
        Arena::new(config)
    });
    let found = PyDict::new(py);
    found.set_item("tried_bytes", HUGE_PROBE_BYTES)?;
    found.set_item("huge_bytes", arena.or_raise(py)?.report().huge_bytes)?;
    found.set_item("limit_bytes", io_seams::memory_limit_bytes())?;
    found.set_item("available_bytes", io_seams::available_memory_bytes())?;
    Ok(found)
}
