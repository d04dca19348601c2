//! Which engine reads and writes a drive here, and why.

use std::sync::Arc;

use tiered_kv_types::{Error, ErrorKind, IoBackend, Result};

use crate::arena::Arena;
use crate::clock::Threads;
use crate::disk::Disk;
use crate::engine::{BlockingEngine, IoEngine, OnDone};
use crate::uring::{UringConfig, UringEngine, probe_io_uring};

/// What engine is wanted, and its sizes whichever it becomes.
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// The backend, or that it be found out.
    pub backend: IoBackend,
    /// Of the blocking engine: threads for loads.
    pub load_threads: usize,
    /// Of the blocking engine: threads for stores.
    pub store_threads: usize,
    /// Of the io_uring engine.
    pub uring: UringConfig,
}

/// Makes the engine for a disk and says, in the words of [`IoEngine::describe`], why it is that
/// one.
///
/// # Errors
/// `Unsupported`, naming `io_backend`, where io_uring is demanded and cannot be had;
/// `InvalidArgument` for sizes out of their bounds; the refusal of `threads`.
pub fn choose_engine(
    config: &EngineConfig,
    disk: Arc<dyn Disk>,
    arena: &Arc<Arena>,
    threads: &dyn Threads,
    on_done: OnDone,
) -> Result<(Box<dyn IoEngine>, String)> {
    let uring = || {
        probe_io_uring().map_err(unsupported)?;
        UringEngine::new(disk.clone(), arena, threads, config.uring, on_done.clone())
    };
    let reason = match config.backend {
        IoBackend::Blocking => "io_backend = \"blocking\"".to_owned(),
        demanded => match uring() {
            Ok(engine) => return Ok(described(engine)),
            Err(err) if err.kind() != ErrorKind::Unsupported => return Err(err),
            Err(err) if demanded == IoBackend::IoUring => return Err(refused(&err)),
            Err(err) => err.context().to_owned(),
        },
    };
    let (loads, stores) = (config.load_threads, config.store_threads);
    let engine = BlockingEngine::new(disk, threads, loads, stores, on_done)?;
    Ok(described(engine.because(&reason)))
}

fn described(engine: impl IoEngine) -> (Box<dyn IoEngine>, String) {
    let reason = engine.describe();
    (Box::new(engine), reason)
}

fn unsupported(reason: String) -> Error {
    Error::new(ErrorKind::Unsupported, "choose I/O engine", reason)
}

fn refused(err: &Error) -> Error {
    let why = err.context();
    unsupported(format!(
        "`io_backend` = \"io_uring\" cannot be had: {why}; allow io_uring, or set io_backend to \
         \"auto\" or \"blocking\""
    ))
}
