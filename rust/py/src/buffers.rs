//! Callers' buffers: checked, held while the core uses them, and given back with the GIL held.

use crate::errors::invalid;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::ptr::NonNull;
use std::sync::Arc;
use tiered_kv::BlockSource;

/// Buffers whose exports are held. While one lives, its exporter may neither free nor move its
/// memory.
///
/// The last owner is whoever takes a call's result, which holds the GIL. Where a loop was closed
/// before its result came, it is a core thread, which then waits for the GIL without holding any
/// lock.
pub(crate) struct Held {
    buffers: Vec<PyUntypedBuffer>,
    /// Keep the memory of slots.
    _regions: Vec<Arc<tiered_kv::Region>>,
}

/// What the buffers of a call have to be.
pub(crate) struct Wanted<'a> {
    pub(crate) op: &'static str,
    pub(crate) block_bytes: usize,
    pub(crate) kv_dtype: &'a str,
    pub(crate) writable: bool,
    /// Number of the store.
    pub(crate) store: u64,
}

/// A range of a held buffer that the core reads.
struct ReadPart {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the range belongs to a buffer that `Parts::held` keeps exported; reading it needs no GIL.
unsafe impl Send for ReadPart {}
// SAFETY: as above; readers do not conflict.
unsafe impl Sync for ReadPart {}

/// The blocks of a put in the caller's buffers.
pub(crate) struct Parts {
    parts: Vec<ReadPart>,
    held: Arc<Held>,
}

/// A range of a held buffer that the core fills.
pub(crate) struct WritePart {
    at: NonNull<u8>,
    len: usize,
    /// Keeps the memory where it is even if the core outlives its own promise.
    _held: Arc<Held>,
}

// SAFETY: the range is writable, overlaps no other part of its call (checked), and stays exported
// while `_held` lives; filling it needs no GIL.
unsafe impl Send for WritePart {}

impl AsMut<[u8]> for WritePart {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: see `Send` above: writable, exported and disjoint. A caller that touches the
        // memory during the call races with the core as it would with `readinto`; the contract
        // forbids it.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl BlockSource for Parts {
    fn blocks(&self) -> usize {
        self.parts.len()
    }

    fn block(&self, index: usize) -> &[u8] {
        let part = &self.parts[index];
        // SAFETY: `held` keeps the buffer exported, so that the range is readable. A caller that
        // writes to it during the call races; the contract of `put` forbids it.
        unsafe { std::slice::from_raw_parts(part.at.as_ptr(), part.len) }
    }
}

impl Held {
    /// One contiguous buffer, named `field` in errors.
    pub(crate) fn one(
        op: &'static str,
        field: &str,
        value: &Bound<'_, PyAny>,
        writable: bool,
    ) -> PyResult<Self> {
        Ok(Self::new(vec![export(op, field, value, writable)?]))
    }

    fn new(buffers: Vec<PyUntypedBuffer>) -> Self {
        Self { buffers, _regions: Vec::new() }
    }

    /// No buffers, but regions.
    pub(crate) fn regions(regions: Vec<Arc<tiered_kv::Region>>) -> Self {
        Self { buffers: Vec::new(), _regions: regions }
    }

    /// Address and length of the first buffer.
    pub(crate) fn range(&self) -> (NonNull<u8>, usize) {
        range(&self.buffers[0])
    }

    /// The bytes of the first buffer.
    pub(crate) fn bytes(&self) -> &[u8] {
        let (at, len) = range(&self.buffers[0]);
        // SAFETY: the buffer is C-contiguous and stays exported while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), len) }
    }
}

/// Address and length of one part.
pub(crate) type Range = (NonNull<u8>, usize);

fn range(buffer: &PyUntypedBuffer) -> Range {
    // An empty buffer may have no address.
    let at = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
    (at, buffer.len_bytes())
}

fn export(
    op: &'static str,
    field: &str,
    value: &Bound<'_, PyAny>,
    writable: bool,
) -> PyResult<PyUntypedBuffer> {
    let py = value.py();
    let buffer = PyUntypedBuffer::get(value).map_err(|_| {
        let name = value.get_type().name().map_or_else(|_| "object".into(), |n| n.to_string());
        let remedy = "pass bytes, a bytearray, a memoryview or a numpy array; for a torch tensor \
                      its .view(torch.uint8).numpy()";
        invalid(py, op, format!("`{field}`: a {name} exports no buffer: {remedy}"))
    })?;
    if !buffer.is_c_contiguous() {
        let remedy = "pass a contiguous copy of it";
        return Err(invalid(py, op, format!("`{field}` is not C-contiguous: {remedy}")));
    }
    if writable && buffer.readonly() {
        let remedy = "pass a writable one, such as a bytearray";
        return Err(invalid(py, op, format!("`{field}` is read-only: {remedy}")));
    }
    if buffer.format().to_bytes().contains(&b'O') {
        let remedy = "pass the numbers themselves";
        return Err(invalid(py, op, format!("`{field}` holds references to objects: {remedy}")));
    }
    Ok(buffer)
}

/// The format of a floating-point element of this dtype; `None` for a dtype that buffers cannot
/// name.
fn float_format(kv_dtype: &str) -> Option<&'static [u8]> {
    match kv_dtype.strip_prefix("torch.").unwrap_or(kv_dtype) {
        "float16" | "half" => Some(b"e"),
        "float32" | "float" => Some(b"f"),
        "float64" | "double" => Some(b"d"),
        "bfloat16" => Some(b""),
        name if name.starts_with("float8") => Some(b""),
        _ => None,
    }
}

/// Floating-point elements of another dtype than the namespace's are a mistake; integers of any
/// width are taken as a view of the bytes.
fn check_dtype(
    py: Python<'_>,
    wanted: &Wanted<'_>,
    field: &str,
    buffer: &PyUntypedBuffer,
) -> PyResult<()> {
    let format = buffer.format().to_bytes();
    let element = format.strip_prefix(b"<").or(format.strip_prefix(b"@")).unwrap_or(format);
    let floating = matches!(element, b"e" | b"f" | b"d" | b"g");
    match float_format(wanted.kv_dtype) {
        Some(own) if floating && element != own => {
            let (got, dtype) = (String::from_utf8_lossy(element).into_owned(), wanted.kv_dtype);
            let remedy = "convert it, or pass a view of its bytes";
            Err(invalid(
                py,
                wanted.op,
                format!(
                    "`{field}` holds elements of format {got:?}, but the namespace's `kv_dtype` is \
                     {dtype}: {remedy}"
                ),
            ))
        }
        _ => Ok(()),
    }
}

/// Whether `value` is to be read as one buffer of all blocks, not as a sequence of buffers.
pub(crate) fn is_buffer(value: &Bound<'_, PyAny>) -> bool {
    // SAFETY: `value` is a live object and the GIL is held.
    unsafe { pyo3::ffi::PyObject_CheckBuffer(value.as_ptr()) == 1 }
}

/// The parts of `value`, one a key: one buffer of all blocks, or a sequence of one a block.
fn parts(
    value: &Bound<'_, PyAny>,
    keys: usize,
    wanted: &Wanted<'_>,
) -> PyResult<(Held, Vec<Range>)> {
    let (py, op, block) = (value.py(), wanted.op, wanted.block_bytes);
    if is_buffer(value) {
        let buffer = export(op, "buffers", value, wanted.writable)?;
        check_dtype(py, wanted, "buffers", &buffer)?;
        let (at, len) = range(&buffer);
        if len != keys * block {
            return Err(invalid(
                py,
                op,
                format!(
                    "`buffers` holds {len} bytes, but {keys} keys of {block} bytes a block need \
                     {}: check dtype, layers, heads and tokens_per_block",
                    keys * block
                ),
            ));
        }
        // SAFETY: the offsets stay within the buffer, whose length was checked.
        let ranges = (0..keys).map(|i| (unsafe { at.add(i * block) }, block)).collect();
        return Ok((Held::new(vec![buffer]), ranges));
    }
    if value.is_instance_of::<PyString>() {
        return Err(invalid(py, op, "`buffers` is text: pass bytes"));
    }
    let items = value.try_iter().map_err(|_| {
        invalid(py, op, "`buffers` is neither a buffer nor a sequence of buffers: pass one a key")
    })?;
    let mut held = Held::new(Vec::with_capacity(keys));
    let mut ranges = Vec::with_capacity(keys);
    for (index, item) in items.enumerate() {
        let field = format!("buffers[{index}]");
        let buffer = export(op, &field, &item?, wanted.writable)?;
        check_dtype(py, wanted, &field, &buffer)?;
        let (at, len) = range(&buffer);
        if len != block {
            return Err(invalid(
                py,
                op,
                format!(
                    "`{field}` holds {len} bytes, but a block of the namespace's layout has \
                     {block}: check dtype, layers, heads and tokens_per_block"
                ),
            ));
        }
        ranges.push((at, len));
        held.buffers.push(buffer);
    }
    if ranges.len() != keys {
        let n = ranges.len();
        let context = format!("`buffers` has {n} buffers for {keys} keys: give one a key");
        return Err(invalid(py, op, context));
    }
    Ok((held, ranges))
}

/// The blocks of a put.
pub(crate) fn read_parts(
    value: &Bound<'_, PyAny>,
    keys: usize,
    wanted: &Wanted<'_>,
) -> PyResult<Arc<Parts>> {
    let (held, ranges) = parts(value, keys, wanted)?;
    let parts = ranges.into_iter().map(|(at, len)| ReadPart { at, len }).collect();
    Ok(Arc::new(Parts { parts, held: Arc::new(held) }))
}

impl Parts {
    /// Another owner of the exports, so that the core's never is the last.
    pub(crate) fn held(&self) -> Arc<Held> {
        self.held.clone()
    }
}

/// Refuses two of the ranges that overlap.
pub(crate) fn check_disjoint(py: Python<'_>, op: &'static str, ranges: &[Range]) -> PyResult<()> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|&i| ranges[i].0);
    for pair in order.windows(2) {
        let (low, high) = (ranges[pair[0]], ranges[pair[1]]);
        if low.0.addr().get() + low.1 > high.0.addr().get() {
            let (a, b) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
            let text =
                format!("`buffers[{a}]` and `buffers[{b}]` overlap: give each key its own memory");
            return Err(invalid(py, op, text));
        }
    }
    Ok(())
}

/// The buffers that a `get_into` fills; no two of them overlap.
pub(crate) fn write_parts(
    value: &Bound<'_, PyAny>,
    keys: usize,
    wanted: &Wanted<'_>,
) -> PyResult<(Vec<WritePart>, Arc<Held>)> {
    let (held, ranges) = parts(value, keys, wanted)?;
    check_disjoint(value.py(), wanted.op, &ranges)?;
    let held = Arc::new(held);
    let part = |(at, len)| WritePart { at, len, _held: held.clone() };
    Ok((ranges.into_iter().map(part).collect(), held))
}
