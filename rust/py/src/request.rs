//! Requests: what an engine tells of its use of blocks.

use crate::args;
use crate::errors::{OrRaise as _, invalid};
use crate::namespace::Namespace;
use pyo3::prelude::*;

/// Beyond so many keys the GIL is let go while they are noted.
const OBSERVE_WITH_GIL_KEYS: usize = 16;

/// A request in progress.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Request {
    pub(crate) inner: tiered_kv::Request,
    /// Number of the store that it was begun in.
    pub(crate) store: u64,
}

/// The context as the Python dataclass hands it over.
#[derive(FromPyObject)]
pub(crate) struct ContextArgs {
    session: String,
    turn: Py<PyAny>,
    tenant: String,
    kind: String,
    block_type: Option<String>,
}

impl ContextArgs {
    pub(crate) fn context(self, py: Python<'_>) -> PyResult<tiered_kv::RequestContext> {
        Ok(tiered_kv::RequestContext {
            block_type: args::block_type(py, "begin_request", self.block_type.as_deref())?,
            session: self.session,
            turn: args::whole("begin_request", "turn", self.turn.bind(py))?,
            tenant: self.tenant,
            kind: self.kind,
        })
    }
}

fn position_of(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    args::whole("observe", "position", value)
}

fn output_tokens_of(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    args::whole("finish", "output_tokens", value)
}

fn engine_hit_tokens_of(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    args::whole("finish", "engine_hit_tokens", value)
}

#[pymethods]
impl Request {
    /// The request uses these blocks; `position` is the first one's place in the sequence, in
    /// blocks.
    #[pyo3(signature = (ns, keys, position=0))]
    fn observe(
        &self,
        ns: &Namespace,
        keys: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = position_of)] position: u64,
    ) -> PyResult<()> {
        if ns.store != self.store {
            let remedy = "open it in the store of the request";
            let context = format!("`ns` belongs to another store: {remedy}");
            return Err(invalid(keys.py(), "observe", context));
        }
        self.inner.check_process("observe").or_raise(keys.py())?;
        let py = keys.py();
        let keys = args::keys("observe", keys)?;
        if keys.len() > OBSERVE_WITH_GIL_KEYS {
            py.detach(|| self.inner.observe(&ns.inner, &keys, position));
        } else {
            self.inner.observe(&ns.inner, &keys, position);
        }
        Ok(())
    }

    /// Counts one access for each block observed. A second finish counts nothing.
    #[pyo3(signature = (output_tokens=0, engine_hit_tokens=0))]
    fn finish(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = output_tokens_of)] output_tokens: u64,
        #[pyo3(from_py_with = engine_hit_tokens_of)] engine_hit_tokens: u64,
    ) -> PyResult<()> {
        self.inner.check_process("finish").or_raise(py)?;
        self.inner.finish(output_tokens, engine_hit_tokens);
        Ok(())
    }
}
