//! Reservations: the store's own memory, filled in place through writable views.

use crate::args;
use crate::errors::invalid;
use crate::reports::status_name;
use crate::store::StoreRef;
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView};
use std::ffi::c_int;
use std::sync::Arc;

struct Slots {
    /// Gone once it is published or abandoned.
    reservation: Option<tiered_kv::Reservation>,
    /// Writable views alive. While there are some, `reservation` stays.
    exports: usize,
    /// Dropped with the last view.
    abandoned: bool,
}

struct State {
    /// Guards the slots against a publish or an abandon while a view is made.
    slots: Mutex<Slots>,
    /// Number of the store that it was made in.
    store: u64,
    statuses: Vec<Option<&'static str>>,
    slabs: usize,
}

/// Slots reserved for a batch of blocks. Dropping it without `publish` gives them back.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Reservation {
    state: Arc<State>,
}

impl Reservation {
    pub(crate) fn new(inner: tiered_kv::Reservation, store: &StoreRef, slabs: usize) -> Self {
        let refused = |index| inner.refused(index).map(status_name);
        let statuses = (0..inner.len()).map(refused).collect();
        let slots = Slots { reservation: Some(inner), exports: 0, abandoned: false };
        let state = State { slots: Mutex::new(slots), store: store.number, statuses, slabs };
        Self { state: Arc::new(state) }
    }

    /// Takes the slots for `publish`, unless somebody can still write to them.
    pub(crate) fn take(
        &self,
        py: Python<'_>,
        store: &StoreRef,
    ) -> PyResult<tiered_kv::Reservation> {
        let fail = |context: String| Err(invalid(py, "publish", context));
        if self.state.store != store.number {
            return fail("`reservation` belongs to another store: publish it there".into());
        }
        let mut slots = self.state.slots.lock();
        if slots.exports > 0 {
            return fail(format!(
                "`reservation` has {} writable views alive: release them (memoryview.release, or \
                 drop the arrays made from them)",
                slots.exports
            ));
        }
        match slots.reservation.take() {
            Some(reservation) => Ok(reservation),
            None => fail("`reservation` was published or abandoned: reserve anew".into()),
        }
    }

    fn view<'py>(
        &self,
        py: Python<'py>,
        index: &Bound<'py, PyAny>,
        slab: usize,
    ) -> PyResult<Option<Bound<'py, PyMemoryView>>> {
        let index = args::place(index, self.state.statuses.len(), args::BLOCK)?;
        if self.state.statuses[index].is_some() {
            return Ok(None);
        }
        let slot = ReservedSlab { state: self.state.clone(), index, slab };
        PyMemoryView::from(Bound::new(py, slot)?.as_any()).map(Some)
    }
}

#[pymethods]
impl Reservation {
    fn __len__(&self) -> usize {
        self.state.statuses.len()
    }

    /// A writable view of block `index`, or `None` where it has no slots.
    fn __getitem__<'py>(
        &self,
        py: Python<'py>,
        index: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyMemoryView>>> {
        if self.state.slabs != 1 {
            let slabs = self.state.slabs;
            let remedy = "use reservation.slab(index, slab)";
            let context = format!("a block has {slabs} slabs, not one range of bytes: {remedy}");
            return Err(invalid(py, "reserve", context));
        }
        self.view(py, index, 0)
    }

    /// A writable view of slab `slab` of block `index`, or `None` where it has no slots.
    fn slab<'py>(
        &self,
        py: Python<'py>,
        index: &Bound<'py, PyAny>,
        slab: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyMemoryView>>> {
        self.view(py, index, args::place(slab, self.state.slabs, args::SLAB)?)
    }

    /// Why each block has no slots: "exists" or "throttled"; `None` where it has.
    #[getter]
    fn statuses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.state.statuses)
    }

    /// Gives the slots back: now, or with the last writable view.
    fn abandon(&self) {
        let mut slots = self.state.slots.lock();
        slots.abandoned = true;
        if slots.exports == 0 {
            slots.reservation = None;
        }
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
        self.abandon();
    }
}

/// Exports one writable slab and counts its views.
#[pyclass(frozen, module = "tiered_kv._core")]
struct ReservedSlab {
    state: Arc<State>,
    index: usize,
    slab: usize,
}

#[pymethods]
impl ReservedSlab {
    /// # Safety
    /// `buffer` is the interpreter's, as in every `bf_getbuffer`.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let mut slots = this.state.slots.lock();
        let abandoned = slots.abandoned;
        let bytes = slots.reservation.as_mut().and_then(|r| r.slab_mut(this.index, this.slab));
        let Some(bytes) = bytes.filter(|_| !abandoned) else {
            return Err(PyBufferError::new_err("the reservation was published or abandoned"));
        };
        let len = ffi::Py_ssize_t::try_from(bytes.len()).expect("a slab is at most 4 GiB");
        // SAFETY: the slot is this reservation's alone and stays so while `exports` is not 0;
        // nothing in Rust reads or writes it meanwhile. The view holds `slf`, and that the state.
        let rc = unsafe {
            let at = bytes.as_mut_ptr().cast();
            ffi::PyBuffer_FillInfo(buffer, slf.as_ptr(), at, len, 0, flags)
        };
        if rc != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        slots.exports += 1;
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter once for each buffer that `__getbuffer__` filled in.
    unsafe fn __releasebuffer__(&self, _buffer: *mut ffi::Py_buffer) {
        let mut slots = self.state.slots.lock();
        slots.exports -= 1;
        if slots.exports == 0 && slots.abandoned {
            slots.reservation = None;
        }
    }
}
