//! Leases: read-only views of resident blocks, through the buffer protocol and DLPack.

use crate::args;
use crate::dlpack;
use crate::errors::invalid;
use crate::reports::reasons;
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView};
use std::ffi::c_int;
use std::sync::Arc;
use tiered_kv::{Found, LeaseBatch, MissReason, Tier};

/// A block of the batch.
enum Item {
    /// Its own lease, until the first view of it is made.
    Own(tiered_kv::Lease),
    /// A lease shared with the views.
    Shared(Arc<tiered_kv::Lease>),
    /// The flags of a block whose lease was released.
    Released(u8),
    Miss(MissReason),
}

impl Item {
    /// Flags of the block, or why it was missed.
    fn outcome(&self) -> Result<u8, MissReason> {
        match self {
            Self::Own(lease) => Ok(lease.info().flags()),
            Self::Shared(lease) => Ok(lease.info().flags()),
            Self::Released(flags) => Ok(*flags),
            Self::Miss(reason) => Err(*reason),
        }
    }
}

/// The blocks, in the form that they were last asked for.
enum Blocks {
    /// As a whole. Nothing is made of a block before somebody asks for it: most batches are used
    /// and released without.
    Whole(LeaseBatch),
    /// One by one, with the tier that each came from.
    Each(Vec<Item>, Vec<Tier>),
}

impl Blocks {
    fn each(leases: tiered_kv::Leases) -> Self {
        let item = |item| match item {
            Ok(lease) => Item::Own(lease),
            Err(reason) => Item::Miss(reason),
        };
        Self::Each(leases.items.into_iter().map(item).collect(), leases.sources)
    }

    fn outcomes(&self) -> Vec<Result<u8, MissReason>> {
        match self {
            Self::Whole(batch) => (0..batch.len()).map(|at| batch.outcome(at)).collect(),
            Self::Each(items, _) => items.iter().map(Item::outcome).collect(),
        }
    }

    /// The blocks one by one; `None` where they were released as a whole.
    fn items(&mut self) -> Option<&mut Vec<Item>> {
        if let Self::Whole(batch) = self {
            if batch.is_released() {
                return None;
            }
            let nothing = Self::Each(Vec::new(), Vec::new());
            let Self::Whole(batch) = std::mem::replace(self, nothing) else {
                unreachable!("it was whole")
            };
            *self = Self::each(batch.into_leases());
        }
        match self {
            Self::Each(items, _) => Some(items),
            Self::Whole(_) => unreachable!("it was taken apart"),
        }
    }

    /// Unpins the blocks, whose flags are kept where somebody may still ask for them.
    fn release(&mut self, keep_flags: bool) {
        let items = match self {
            Self::Whole(batch) => return batch.release(),
            Self::Each(items, _) => items,
        };
        let owned = items.iter_mut().filter_map(|item| {
            if let Item::Miss(_) | Item::Released(_) = item {
                return None;
            }
            let flags = if keep_flags { item.outcome().unwrap_or(0) } else { 0 };
            match std::mem::replace(item, Item::Released(flags)) {
                Item::Own(lease) => Some(lease),
                _ => None,
            }
        });
        tiered_kv::Lease::release_all(owned);
    }
}

/// What a `get` found. Dropping it, or `release`, unpins every block without a view alive.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Leases {
    /// Guards the leases against a release from another thread.
    blocks: Mutex<Blocks>,
    keys: usize,
    #[pyo3(get)]
    hits: usize,
}

impl Leases {
    pub(crate) fn new(found: Found) -> Self {
        let (keys, hits, blocks) = match found {
            Found::Whole(batch) => (batch.len(), batch.hits(), Blocks::Whole(batch)),
            Found::Each(leases) => (leases.items.len(), leases.hits(), Blocks::each(leases)),
        };
        Self { blocks: Mutex::new(blocks), keys, hits }
    }

    fn share(&self, index: &Bound<'_, PyAny>) -> PyResult<Option<Arc<tiered_kv::Lease>>> {
        let at = args::place(index, self.keys, args::BLOCK)?;
        let mut blocks = self.blocks.lock();
        let released = || PyBufferError::new_err("the leases were released");
        let Some(items) = blocks.items() else {
            return if at < self.hits { Err(released()) } else { Ok(None) };
        };
        let item = &mut items[at];
        let lease = match std::mem::replace(item, Item::Released(0)) {
            Item::Own(lease) => Arc::new(lease),
            Item::Shared(lease) => lease,
            other => {
                let missed = matches!(other, Item::Miss(_));
                *item = other;
                return if missed { Ok(None) } else { Err(released()) };
            }
        };
        *item = Item::Shared(lease.clone());
        Ok(Some(lease))
    }
}

#[pymethods]
impl Leases {
    fn __len__(&self) -> usize {
        self.keys
    }

    /// A read-only view of block `index`, or `None` for a miss.
    fn __getitem__<'py>(
        slf: &Bound<'py, Self>,
        index: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyMemoryView>>> {
        let lease = slf.get().share(index)?;
        if let Some(lease) = &lease
            && lease.slabs() != 1
        {
            let context = format!(
                "block {index} has {} slabs, not one range of bytes: use leases.slab(index, slab)",
                lease.slabs()
            );
            return Err(invalid(slf.py(), "leases", context));
        }
        lease.map(|lease| view(slf.py(), lease, 0)).transpose()
    }

    /// A read-only view of slab `slab` of block `index`, or `None` for a miss.
    fn slab<'py>(
        &self,
        py: Python<'py>,
        index: &Bound<'py, PyAny>,
        slab: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyMemoryView>>> {
        let Some(lease) = self.share(index)? else { return Ok(None) };
        let slab = args::place(slab, lease.slabs(), args::SLAB)?;
        view(py, lease, slab).map(Some)
    }

    /// The lease of one slab as an object with the buffer protocol and DLPack, or `None` for a
    /// miss.
    #[pyo3(signature = (index, slab=None))]
    fn dlpack(
        &self,
        index: &Bound<'_, PyAny>,
        slab: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Lease>> {
        let Some(lease) = self.share(index)? else { return Ok(None) };
        let slab = slab.map_or(Ok(0), |slab| args::place(slab, lease.slabs(), args::SLAB))?;
        Ok(Some(Lease { lease, slab }))
    }

    /// Why each block was missed, `None` for a hit.
    #[getter]
    fn reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        reasons(py, self.blocks.lock().outcomes().iter())
    }

    /// Number of the tier that each block came from, 0 for a miss.
    #[getter]
    fn sources<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let blocks = self.blocks.lock();
        let code = |(at, outcome): (usize, &Result<u8, MissReason>)| match (&*blocks, outcome) {
            (_, Err(_)) => 0,
            (Blocks::Whole(_), Ok(_)) => Tier::Dram as u8,
            (Blocks::Each(_, sources), Ok(_)) => sources[at] as u8,
        };
        let outcomes = blocks.outcomes();
        PyBytes::new(py, &outcomes.iter().enumerate().map(code).collect::<Vec<_>>())
    }

    /// Flags of each block: bit 0 chunk end, bit 1 computed by decode; 0 for a miss.
    #[getter]
    fn flags<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let flags = |outcome: Result<u8, _>| outcome.unwrap_or(0);
        let flags: Vec<u8> = self.blocks.lock().outcomes().into_iter().map(flags).collect();
        PyBytes::new(py, &flags)
    }

    /// Unpins every block that has no view alive; the others follow with their last view.
    fn release(&self) {
        self.blocks.lock().release(true);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.release();
    }

    fn __repr__(&self) -> String {
        format!("<Leases: {} leading hits of {} keys>", self.hits, self.keys)
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        self.blocks.get_mut().release(false);
    }
}

fn view<'py>(
    py: Python<'py>,
    lease: Arc<tiered_kv::Lease>,
    slab: usize,
) -> PyResult<Bound<'py, PyMemoryView>> {
    PyMemoryView::from(Bound::new(py, Lease { lease, slab })?.as_any())
}

/// The lease of one slab: exports the buffer protocol and DLPack, read-only.
///
/// Every view keeps it, and with it the block, pinned. The memory is mapped read-only: writing to
/// it by whatever means ends the process with SIGSEGV and changes nothing that is served.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Lease {
    pub(crate) lease: Arc<tiered_kv::Lease>,
    pub(crate) slab: usize,
}

#[pymethods]
impl Lease {
    #[getter]
    fn nbytes(&self) -> usize {
        self.lease.slab(self.slab).len()
    }

    /// # Safety
    /// `buffer` is the interpreter's, as in every `bf_getbuffer`.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let bytes = this.lease.slab(this.slab);
        let len = ffi::Py_ssize_t::try_from(bytes.len()).expect("a slab is at most 4 GiB");
        // SAFETY: the memory is pinned by the lease that `slf` holds, and the view holds `slf`. It
        // is filled in as read-only; a request for a writable one is refused by the call itself.
        let rc = unsafe {
            let at = bytes.as_ptr().cast_mut().cast();
            ffi::PyBuffer_FillInfo(buffer, slf.as_ptr(), at, len, 1, flags)
        };
        if rc == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("`stream` is for devices: a lease is host memory"));
        }
        if dl_device.is_some_and(|device| device != dlpack::HOST) {
            return Err(PyBufferError::new_err("`dl_device`: a lease is host memory, (1, 0)"));
        }
        dlpack::capsule(py, self, max_version, copy == Some(true))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::HOST
    }

    fn __repr__(&self) -> String {
        format!("<Lease of {} bytes>", self.nbytes())
    }
}
