//! Regions: an engine's own memory, registered once and then named by the numbers of its slots.

use crate::args;
use crate::buffers::{self, Held, Wanted};
use crate::errors::{OrRaise, invalid};
use crate::store::StoreRef;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::ptr::NonNull;
use std::sync::Arc;
use tiered_kv::{
    BlockKey, BlockSource, GetOptions, IntoReport, MissReason, OnStall, OpId, RegionMemory, Tier,
};

/// A buffer that stays exported while a region lives on it.
struct Exported(Held);

// SAFETY: an exported buffer is neither moved nor freed, and `register` has asked for a writable
// one. Its owner touches a slot in use at its own risk, as with `readinto`.
unsafe impl RegionMemory for Exported {
    fn range(&mut self) -> (NonNull<u8>, usize) {
        self.0.range()
    }
}

/// Registered memory, cut into slots.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Region {
    inner: Arc<tiered_kv::Region>,
    store: u64,
}

impl Region {
    pub(crate) fn register(
        py: Python<'_>,
        store: &StoreRef,
        memory: &Bound<'_, PyAny>,
        slot_bytes: &Bound<'_, PyAny>,
        stride: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let bytes = |field, value| args::within("register", field, value, 1..=usize::MAX / 2);
        let slot_bytes = bytes("slot_bytes", slot_bytes)?;
        let stride = stride.map(|stride| bytes("stride", stride)).transpose()?;
        store.store.check_open("register").or_raise(py)?;
        let memory = Exported(Held::one("register", "memory", memory, true)?);
        let stride = stride.unwrap_or(slot_bytes);
        // Locking the pages of a large region takes a while.
        let inner = py.detach(|| store.store.register_strided(memory, slot_bytes, stride));
        Ok(Self { inner: inner.or_raise(py)?, store: store.number })
    }

    /// The number of a slot.
    fn number(&self, field: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
        args::within("region", field, value, 0..=self.inner.slots() - 1)
    }
}

#[pymethods]
impl Region {
    fn __len__(&self) -> usize {
        self.inner.slots()
    }

    #[getter]
    fn slot_bytes(&self) -> usize {
        self.inner.slot_bytes()
    }

    /// Slots that calls use now.
    #[getter]
    fn slots_used(&self) -> usize {
        self.inner.slots_used()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Slots by number, to be given to a call in place of buffers; nothing is claimed yet.
    fn slots(&self, numbers: &Bound<'_, PyAny>) -> PyResult<Slots> {
        let items = numbers.try_iter().map_err(|_| {
            invalid(numbers.py(), "region", "`numbers` is no sequence: give one slot a key")
        })?;
        let slot = |item: PyResult<_>| Ok((self.inner.clone(), self.number("numbers", &item?)?));
        let slots: PyResult<Vec<_>> = items.map(slot).collect();
        Ok(Slots { slots: slots?, store: self.store })
    }

    /// A copy of a slot that no call uses.
    fn read<'py>(
        &self,
        py: Python<'py>,
        slot: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let slot = self.number("slot", slot)?;
        self.inner.read(slot, |bytes| PyBytes::new(py, bytes)).or_raise(py)
    }

    /// Fills a slot that no call uses.
    fn write(
        &self,
        py: Python<'_>,
        slot: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let slot = self.number("slot", slot)?;
        let data = Held::one("region", "data", data, false)?;
        let (bytes, len) = (data.bytes(), self.inner.slot_bytes());
        if bytes.len() != len {
            let context = format!("`data` holds {} bytes: give {len}, a slot's", bytes.len());
            return Err(invalid(py, "region", context));
        }
        self.inner.write(slot, |to| to.copy_from_slice(bytes)).or_raise(py)
    }

    /// Takes no more calls; the memory stays exported until those in progress have ended.
    fn close(&self) {
        self.inner.close();
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.close();
    }

    fn __repr__(&self) -> String {
        let (slots, bytes) = (self.inner.slots(), self.inner.slot_bytes());
        format!("<Region: {slots} slots of {bytes} bytes>")
    }
}

/// Slots of a region, in the order of a call's keys.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Slots {
    slots: Vec<(Arc<tiered_kv::Region>, usize)>,
    store: u64,
}

impl Slots {
    /// Buffers anywhere, each a slot of a region of its own. The kernel is told nothing of them:
    /// to register memory for one call costs more than it saves.
    pub(crate) fn lend(store: &StoreRef, buffers: &Bound<'_, PyAny>) -> PyResult<Self> {
        const OP: &str = "lend";
        store.store.check_open(OP).or_raise(buffers.py())?;
        let items = buffers.try_iter().map_err(|_| {
            invalid(buffers.py(), OP, "`buffers` is no sequence of buffers: give one a key")
        })?;
        let lent = |(index, item): (usize, PyResult<Bound<'_, PyAny>>)| {
            let memory = Held::one(OP, &format!("buffers[{index}]"), &item?, true)?;
            let (at, bytes) = memory.range();
            let region = tiered_kv::Region::new(Exported(memory), bytes, bytes);
            Ok(((at, bytes), (region.or_raise(buffers.py())?, 0)))
        };
        let lent: PyResult<Vec<_>> = items.enumerate().map(lent).collect();
        let (ranges, slots): (Vec<_>, Vec<_>) = lent?.into_iter().unzip();
        buffers::check_disjoint(buffers.py(), OP, &ranges)?;
        Ok(Self { slots, store: store.number })
    }

    /// Claims the slots for one call.
    fn claim(
        &self,
        py: Python<'_>,
        keys: usize,
        wanted: &Wanted<'_>,
    ) -> PyResult<Vec<tiered_kv::RegionSlot>> {
        if self.store != wanted.store {
            let context = "`buffers` are slots of another store's region: register it in this one";
            return Err(invalid(py, wanted.op, context));
        }
        let n = self.slots.len();
        if n != keys {
            let context = format!("`buffers` has {n} slots for {keys} keys: give one a key");
            return Err(invalid(py, wanted.op, context));
        }
        let block = wanted.block_bytes;
        let sizes = self.slots.iter().map(|(region, _)| region.slot_bytes());
        if let Some(slot) = sizes.into_iter().find(|slot| *slot != block) {
            let context = format!(
                "`buffers`: a slot of the region has {slot} bytes, but a block of the namespace's \
                 layout {block}: register it with slot_bytes={block}"
            );
            return Err(invalid(py, wanted.op, context));
        }
        let claimed: tiered_kv::Result<Vec<_>> =
            self.slots.iter().map(|(region, slot)| region.claim(*slot)).collect();
        claimed.or_raise(py)
    }

    /// Other owners of the regions, so that the core's never is the last.
    fn held(&self) -> Arc<Held> {
        Arc::new(Held::regions(self.slots.iter().map(|(region, _)| region.clone()).collect()))
    }
}

#[pymethods]
impl Slots {
    fn __len__(&self) -> usize {
        self.slots.len()
    }

    #[getter]
    fn numbers(&self) -> Vec<usize> {
        self.slots.iter().map(|(_, number)| *number).collect()
    }
}

/// What a `get_into` fills.
pub(crate) enum Target {
    Buffers(Vec<buffers::WritePart>, Arc<Held>),
    Slots(Vec<tiered_kv::RegionSlot>, Arc<Held>),
}

impl Target {
    pub(crate) fn new(
        value: &Bound<'_, PyAny>,
        keys: usize,
        wanted: &Wanted<'_>,
    ) -> PyResult<Self> {
        if let Ok(slots) = value.cast::<Slots>() {
            let slots = slots.get();
            return Ok(Self::Slots(slots.claim(value.py(), keys, wanted)?, slots.held()));
        }
        let (parts, held) = buffers::write_parts(value, keys, wanted)?;
        Ok(Self::Buffers(parts, held))
    }

    /// Begins the call; `done` also gets what keeps the memory, to be dropped with the GIL held.
    pub(crate) fn fill(
        self,
        store: &tiered_kv::Store,
        ns: &tiered_kv::Namespace,
        keys: &[BlockKey],
        options: &GetOptions,
        done: impl FnOnce(Vec<Result<Tier, MissReason>>, Arc<Held>) + Send + 'static,
    ) -> tiered_kv::Result<OpId> {
        // The parts and the slots go first, so that `held` is the last owner of the memory.
        match self {
            Self::Buffers(parts, held) => {
                let done = move |IntoReport { items, buffers }: IntoReport<buffers::WritePart>| {
                    drop(buffers);
                    done(items, held);
                };
                store.get_into_with(ns, keys, parts, options, done)
            }
            Self::Slots(slots, held) => {
                let done = move |IntoReport { items, buffers }: IntoReport<_>| {
                    drop::<Vec<tiered_kv::RegionSlot>>(buffers);
                    done(items, held);
                };
                store.get_into_with(ns, keys, slots, options, done)
            }
        }
    }
}

/// The blocks of a put, and what keeps their memory.
pub(crate) fn source(
    value: &Bound<'_, PyAny>,
    keys: usize,
    wanted: &Wanted<'_>,
) -> PyResult<(Arc<dyn BlockSource>, Arc<Held>)> {
    if let Ok(slots) = value.cast::<Slots>() {
        let slots = slots.get();
        return Ok((Arc::new(slots.claim(value.py(), keys, wanted)?), slots.held()));
    }
    let parts = buffers::read_parts(value, keys, wanted)?;
    let held = parts.held();
    Ok((parts, held))
}

/// What a `get_into` of slots does when a device stalls.
pub(crate) fn on_stall(py: Python<'_>, op: &'static str, name: &str) -> PyResult<OnStall> {
    match name {
        "wait" => Ok(OnStall::Wait),
        "bounce" => Ok(OnStall::Bounce),
        other => {
            let context = format!("`on_stall` is {other:?}: give wait or bounce");
            Err(invalid(py, op, context))
        }
    }
}
