//! Errors of the core as Python exceptions.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tiered_kv::{Error, ErrorKind, Retry};

static FROM_CORE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The exception of `tiered_kv.errors` for an error of the core.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let from_core = FROM_CORE.get_or_try_init(py, || {
            Ok::<_, PyErr>(py.import("tiered_kv.errors")?.getattr("from_core")?.unbind())
        })?;
        let again = error.retry() == Retry::Later;
        let args = (error.kind().name(), error.to_string(), error.op(), again);
        Ok(PyErr::from_value(from_core.bind(py).call1(args)?))
    };
    make().unwrap_or_else(|failed| failed)
}

/// An `InvalidArgumentError`; `context` names the argument and the remedy.
pub(crate) fn invalid(py: Python<'_>, op: &'static str, context: impl Into<String>) -> PyErr {
    to_py(py, &Error::new(ErrorKind::InvalidArgument, op, context))
}

/// Turns the core's results into Python's.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for tiered_kv::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_py(py, &error))
    }
}
