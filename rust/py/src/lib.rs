//! The Python extension module `tiered_kv._core`.
//!
//! The boundary between the interpreter and the core. Three rules hold everywhere:
//!
//! - A thread that holds the GIL may wait for the core's locks, since a core thread never waits for
//!   the GIL while it holds one of them.
//! - Copies, checksums and waits happen without the GIL; calls that only look something up keep it.
//! - A caller's buffer stays exported (`Py_buffer`) until the core has told that it is done.

mod args;
mod attached;
mod buffers;
mod channel;
mod completion;
mod config;
mod digest;
mod dlpack;
mod errors;
mod evictor;
mod hold;
mod info;
mod leases;
mod namespace;
mod operator;
mod probe;
mod queue;
mod region;
mod reports;
mod request;
mod reserve;
#[cfg(debug_assertions)]
mod stall;
mod store;
mod trace;

use pyo3::prelude::*;

/// The compiled core.
#[pymodule(gil_used = true)]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("FORMAT_VERSION", tiered_kv::FORMAT_VERSION)?;
    m.add("IS_RELEASE", !cfg!(debug_assertions))?;
    m.add("KEY_BYTES", tiered_kv::KEY_BYTES)?;
    m.add_function(wrap_pyfunction!(config::default_config, m)?)?;
    m.add_function(wrap_pyfunction!(config::parse_config, m)?)?;
    m.add_function(wrap_pyfunction!(digest::blake3, m)?)?;
    m.add_function(wrap_pyfunction!(digest::blake3_file, m)?)?;
    m.add_function(wrap_pyfunction!(operator::describe_spec, m)?)?;
    m.add_function(wrap_pyfunction!(operator::resize, m)?)?;
    m.add_function(wrap_pyfunction!(operator::tenant_digest, m)?)?;
    m.add_function(wrap_pyfunction!(operator::token_keys, m)?)?;
    m.add_function(wrap_pyfunction!(trace::replay_policies, m)?)?;
    m.add_function(wrap_pyfunction!(trace::trace_kinds, m)?)?;
    m.add_function(wrap_pyfunction!(probe::probe_directory, m)?)?;
    m.add_function(wrap_pyfunction!(probe::probe_io_uring, m)?)?;
    m.add_function(wrap_pyfunction!(probe::probe_memory, m)?)?;
    m.add_class::<args::PyPutOptions>()?;
    m.add_class::<attached::Attached>()?;
    m.add_class::<attached::AttachedHold>()?;
    m.add_class::<channel::Channel>()?;
    m.add_class::<evictor::Evictor>()?;
    m.add_class::<evictor::CountedRequest>()?;
    m.add_class::<hold::Hold>()?;
    m.add_class::<leases::Lease>()?;
    m.add_class::<leases::Leases>()?;
    m.add_class::<namespace::Namespace>()?;
    m.add_class::<region::Region>()?;
    m.add_class::<region::Slots>()?;
    m.add_class::<operator::Operator>()?;
    m.add_class::<operator::Verify>()?;
    m.add_class::<reports::CloseReport>()?;
    m.add_class::<reports::DeleteReport>()?;
    m.add_class::<reports::FlushReport>()?;
    m.add_class::<reports::ScrubReport>()?;
    m.add_class::<reports::IntoReport>()?;
    m.add_class::<reports::Lookup>()?;
    m.add_class::<reports::PutReport>()?;
    m.add_class::<request::Request>()?;
    m.add_class::<reserve::Reservation>()?;
    #[cfg(debug_assertions)]
    m.add_class::<stall::StallGate>()?;
    m.add_class::<trace::Trace>()?;
    m.add_class::<store::Store>()
}
