//! The Python extension module `tiered_kv._core`.

use pyo3::prelude::*;

/// The compiled core.
#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))
}
