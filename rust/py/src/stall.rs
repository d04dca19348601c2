//! A drive that stalls on demand, for tests. Release builds lack it.

use crate::store::Store;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::io;
use std::sync::Arc;
use tiered_kv::Seams;
use tiered_kv::io_seams::{Alignment, Disk, FileId, PosixDisk};

#[derive(Default)]
struct State {
    shut: bool,
    waiting: usize,
}

/// Where reads wait while it is shut.
#[derive(Default)]
struct Gate {
    /// Guards whether it is shut and how many reads wait.
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.shut {
            self.changed.wait(&mut state);
        }
        state.waiting -= 1;
    }
}

/// Stalls every read of data that a store made with `open_store` does, until it is opened.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct StallGate {
    gate: Arc<Gate>,
}

#[pymethods]
impl StallGate {
    #[new]
    fn new() -> Self {
        Self { gate: Arc::default() }
    }

    /// Opens a store with drives behind this gate, on the blocking backend.
    fn open_store(&self, py: Python<'_>, fields: &Bound<'_, PyDict>) -> PyResult<Store> {
        let gate = self.gate.clone();
        let open_disk = move |dir: &std::path::Path| {
            let disk = StallingDisk { inner: PosixDisk::open(dir)?, gate: gate.clone() };
            Ok(Arc::new(disk) as Arc<dyn Disk>)
        };
        let seams = Seams { open_disk: Arc::new(open_disk), ..Seams::default() };
        Store::open_with(py, fields, &seams)
    }

    /// Reads wait from now on.
    fn shut(&self) {
        self.gate.state.lock().shut = true;
    }

    /// Reads go on.
    fn open(&self) {
        self.gate.state.lock().shut = false;
        self.gate.changed.notify_all();
    }

    /// Reads that wait.
    #[getter]
    fn waiting(&self) -> usize {
        self.gate.state.lock().waiting
    }
}

struct StallingDisk {
    inner: PosixDisk,
    gate: Arc<Gate>,
}

impl Disk for StallingDisk {
    fn name(&self) -> &'static str {
        "stalling"
    }

    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }

    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }

    fn direct_reason(&self) -> String {
        self.inner.direct_reason()
    }

    fn list(&self) -> tiered_kv::Result<Vec<(String, u64)>> {
        self.inner.list()
    }

    fn read_file(&self, name: &str, max_bytes: u64) -> tiered_kv::Result<Option<Vec<u8>>> {
        self.inner.read_file(name, max_bytes)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> tiered_kv::Result<()> {
        self.inner.write_file(name, bytes)
    }

    fn remove(&self, name: &str) -> tiered_kv::Result<()> {
        self.inner.remove(name)
    }

    fn create(&self, name: &str, bytes: u64) -> tiered_kv::Result<FileId> {
        self.inner.create(name, bytes)
    }

    fn open(&self, name: &str) -> tiered_kv::Result<(FileId, u64)> {
        self.inner.open(name)
    }

    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.gate.pass();
        self.inner.read_at(file, offset, buf)
    }

    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.inner.write_at(file, offset, buf)
    }

    fn sync(&self, file: FileId) -> io::Result<()> {
        self.inner.sync(file)
    }
}
