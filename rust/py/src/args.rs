//! Arguments that several calls take.

use crate::buffers::Held;
use crate::errors::invalid;
use crate::request::Request;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyIndexError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use tiered_kv::{BlockKey, BlockType, ComputedBy, KEY_BYTES, LookupMode, PutOptions};

/// Most elements that memory is taken for before they have been seen.
const MAX_HINT: usize = 64 << 10;

/// What a subscript names, and of what it is one.
pub(crate) type Part = (&'static str, &'static str);
pub(crate) const BLOCK: Part = ("block", "batch");
pub(crate) const SLAB: Part = ("slab", "block");

/// Packed keys, n x 32 bytes.
pub(crate) fn keys(op: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Vec<BlockKey>> {
    unpacked(op, "keys", value)
}

/// The same for a call that shares them.
pub(crate) fn shared_keys(op: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Arc<[BlockKey]>> {
    unpacked(op, "keys", value)
}

/// Packed keys, n x 32 bytes, which errors call `field`.
pub(crate) fn keys_of(
    op: &'static str,
    field: &str,
    value: &Bound<'_, PyAny>,
) -> PyResult<Vec<BlockKey>> {
    unpacked(op, field, value)
}

fn unpacked<K: FromIterator<BlockKey>>(
    op: &'static str,
    field: &str,
    value: &Bound<'_, PyAny>,
) -> PyResult<K> {
    let unpack = |packed: &[u8]| {
        let (keys, rest) = packed.as_chunks::<KEY_BYTES>();
        if !rest.is_empty() {
            let len = packed.len();
            let remedy = "pass packed keys as keys_from_tokens or keys_from_opaque return them";
            let context = format!("`{field}` holds {len} bytes, no multiple of {KEY_BYTES}");
            return Err(invalid(value.py(), op, format!("{context}: {remedy}")));
        }
        Ok(keys.iter().map(|key| BlockKey(*key)).collect())
    };
    match value.cast::<PyBytes>() {
        Ok(bytes) => unpack(bytes.as_bytes()),
        Err(_) => unpack(Held::one(op, field, value, false)?.bytes()),
    }
}

/// One key of 32 bytes.
pub(crate) fn key(
    op: &'static str,
    field: &str,
    value: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<BlockKey>> {
    let Some(value) = value else { return Ok(None) };
    if let Ok(bytes) = value.cast::<PyBytes>()
        && let Ok(bytes) = bytes.as_bytes().try_into()
    {
        return Ok(Some(BlockKey(bytes)));
    }
    let held = Held::one(op, field, value, false)?;
    match <[u8; KEY_BYTES]>::try_from(held.bytes()) {
        Ok(bytes) => Ok(Some(BlockKey(bytes))),
        Err(_) => {
            let len = held.bytes().len();
            let context = format!("`{field}` holds {len} bytes: pass one key of {KEY_BYTES}");
            Err(invalid(value.py(), op, context))
        }
    }
}

/// A value as errors show it.
fn shown(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "out of range".into(), |text| text.to_string())
}

/// How a lookup walks the keys.
pub(crate) fn mode(py: Python<'_>, mode: &str) -> PyResult<LookupMode> {
    match mode {
        "prefix" => Ok(LookupMode::Prefix),
        "each" => Ok(LookupMode::Each),
        other => {
            let context = format!("`mode` is {other:?}: give prefix or each");
            Err(invalid(py, "lookup", context))
        }
    }
}

/// Seconds to wait; `None` stands for the configuration's own.
pub(crate) fn timeout(
    op: &'static str,
    seconds: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<Duration>> {
    seconds.map(|value| duration(op, "timeout", value)).transpose()
}

/// Seconds in which the caller computes a block; `None` stands for the configuration's own.
pub(crate) fn recompute(
    op: &'static str,
    seconds: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<Duration>> {
    seconds.map(|value| duration(op, "recompute_s", value)).transpose()
}

/// Seconds as a duration; more than one can hold are the longest there is.
pub(crate) fn duration(
    op: &'static str,
    field: &str,
    value: &Bound<'_, PyAny>,
) -> PyResult<Duration> {
    match value.extract::<f64>() {
        Ok(seconds) if seconds >= 0.0 => {
            Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
        }
        _ => {
            let context = format!("`{field}` is {}: give seconds, 0 or more", shown(value));
            Err(invalid(value.py(), op, context))
        }
    }
}

/// An integer that fits `T`.
pub(crate) fn whole<T: TryFrom<u64>>(
    op: &'static str,
    field: &str,
    value: &Bound<'_, PyAny>,
) -> PyResult<T> {
    let number = value.extract::<u64>().ok().and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| {
        let (shown, bits) = (shown(value), 8 * size_of::<T>());
        let context = format!("`{field}` is {shown}: give an integer from 0 to 2^{bits} - 1");
        invalid(value.py(), op, context)
    })
}

/// An integer of a range.
pub(crate) fn within(
    op: &'static str,
    field: &str,
    value: &Bound<'_, PyAny>,
    range: RangeInclusive<usize>,
) -> PyResult<usize> {
    let number = value.extract::<usize>().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| {
        let (shown, first, last) = (shown(value), range.start(), range.end());
        let context = format!("`{field}` is {shown}: give an integer from {first} to {last}");
        invalid(value.py(), op, context)
    })
}

/// The place that a subscript names, negative ones from the end; like a list's, it is an
/// `IndexError` where there is none.
pub(crate) fn place(index: &Bound<'_, PyAny>, len: usize, (part, whole): Part) -> PyResult<usize> {
    let at = match index.extract::<isize>() {
        Ok(at) if at < 0 => at.checked_add_unsigned(len),
        Ok(at) => Some(at),
        Err(error) if error.is_instance_of::<PyOverflowError>(index.py()) => None,
        Err(error) => return Err(error),
    };
    let at = at.and_then(|at| usize::try_from(at).ok()).filter(|at| *at < len);
    at.ok_or_else(|| {
        PyIndexError::new_err(format!("{part} {} of a {whole} of {len}", shown(index)))
    })
}

fn depth(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    whole("put", "depth", value)
}

/// Token ids: a buffer of integers, or any sequence of them.
pub(crate) fn tokens(op: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let py = value.py();
    if let Ok(buffer) = PyUntypedBuffer::get(value) {
        return tokens_of_buffer(py, op, &buffer);
    }
    if value.is_instance_of::<PyString>() {
        return Err(invalid(py, op, "`tokens` is text: pass token ids, not what they stand for"));
    }
    let items = value
        .try_iter()
        .map_err(|_| invalid(py, op, "`tokens` is not a sequence: pass token ids"))?;
    // What a foreign object says of its length is only a hint.
    let mut tokens = Vec::with_capacity(value.len().unwrap_or(0).min(MAX_HINT));
    for (index, item) in items.enumerate() {
        let item = item?;
        tokens.push(item.extract().map_err(|_| {
            let shown = item.repr().map_or_else(|_| "that".into(), |text| text.to_string());
            bad_token(py, op, index, &shown)
        })?);
    }
    Ok(tokens)
}

fn bad_token(py: Python<'_>, op: &'static str, index: usize, shown: &str) -> PyErr {
    let context =
        format!("`tokens[{index}]` is {shown}: a token id is an integer from 0 to 2^32 - 1");
    invalid(py, op, context)
}

fn tokens_of_buffer(
    py: Python<'_>,
    op: &'static str,
    buffer: &PyUntypedBuffer,
) -> PyResult<Vec<u32>> {
    let format = buffer.format().to_bytes();
    let native = if cfg!(target_endian = "little") { b"<" } else { b">" };
    let code = format.strip_prefix(b"@").or(format.strip_prefix(native)).unwrap_or(format);
    let signed = match code {
        b"b" | b"h" | b"i" | b"l" | b"q" | b"n" => true,
        b"B" | b"H" | b"I" | b"L" | b"Q" | b"N" => false,
        _ => {
            let shown = String::from_utf8_lossy(format);
            let remedy = "pass integers in native byte order";
            return Err(invalid(py, op, format!("`tokens` has format {shown:?}: {remedy}")));
        }
    };
    if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
        let remedy = "pass one contiguous row of token ids";
        return Err(invalid(py, op, format!("`tokens` is not one contiguous row: {remedy}")));
    }
    let width = buffer.item_size();
    let bytes: &[u8] = if buffer.len_bytes() == 0 {
        &[]
    } else {
        // SAFETY: contiguous, exported while `buffer` lives, and nobody can write: the GIL is held.
        unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) }
    };
    let mut tokens = Vec::with_capacity(buffer.item_count());
    for (index, item) in bytes.chunks_exact(width.max(1)).enumerate() {
        let value = integer(item, signed);
        let bad = |_| bad_token(py, op, index, &value.to_string());
        tokens.push(u32::try_from(value).map_err(bad)?);
    }
    Ok(tokens)
}

/// An integer of 1 to 8 bytes in native order.
fn integer(item: &[u8], signed: bool) -> i128 {
    let negative = signed && {
        let top = if cfg!(target_endian = "little") { item.last() } else { item.first() };
        top.is_some_and(|byte| byte & 0x80 != 0)
    };
    let mut wide = [if negative { 0xff } else { 0 }; 16];
    if cfg!(target_endian = "little") {
        wide[..item.len()].copy_from_slice(item);
    } else {
        wide[16 - item.len()..].copy_from_slice(item);
    }
    i128::from_ne_bytes(wide)
}

/// For each block, whether a chunk ended with it.
fn truths(value: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    let py = value.py();
    let wrong = |what: String| invalid(py, "put", format!("{what}: give True or False a block"));
    let items = value.try_iter().map_err(|_| wrong("`chunk_ends` is not a sequence".into()))?;
    let mut truths = Vec::new();
    for (index, item) in items.enumerate() {
        let truth = item?.extract();
        truths.push(truth.map_err(|_| wrong(format!("`chunk_ends[{index}]` is no truth value")))?);
    }
    Ok(truths)
}

/// A block type by its name.
pub(crate) fn block_type(
    py: Python<'_>,
    op: &'static str,
    name: Option<&str>,
) -> PyResult<BlockType> {
    match name {
        None | Some("unknown" | "") => Ok(BlockType::Unknown),
        Some("system") => Ok(BlockType::System),
        Some("tool") => Ok(BlockType::Tool),
        Some("user") => Ok(BlockType::User),
        Some("reasoning") => Ok(BlockType::Reasoning),
        Some(other) => Err(invalid(
            py,
            op,
            format!("`block_type` is {other:?}: give system, tool, user, reasoning or None"),
        )),
    }
}

/// What a put or a reservation tells of its blocks.
#[pyclass(frozen, module = "tiered_kv._core", name = "PutOptions")]
pub(crate) struct PyPutOptions {
    inner: PutOptions,
    /// Number of the store of the request that the blocks belong to.
    request: Option<u64>,
}

impl PyPutOptions {
    /// The options of a call on the store of number `store`.
    pub(crate) fn of(&self, py: Python<'_>, op: &'static str, store: u64) -> PyResult<&PutOptions> {
        if self.request.is_some_and(|request| request != store) {
            return Err(invalid(py, op, "`req` belongs to another store: begin it in this one"));
        }
        Ok(&self.inner)
    }
}

#[pymethods]
impl PyPutOptions {
    #[new]
    #[pyo3(signature = (
        *, parent=None, depth=0, chain=true, tokens=None, chunk_ends=None, computed="prefill",
        block_type=None, wait=None, timeout=None, req=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "all of them are keywords in Python")]
    fn new(
        py: Python<'_>,
        parent: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = depth)] depth: u32,
        chain: bool,
        tokens: Option<&Bound<'_, PyAny>>,
        chunk_ends: Option<&Bound<'_, PyAny>>,
        computed: &str,
        block_type: Option<&str>,
        wait: Option<&Bound<'_, PyAny>>,
        timeout: Option<&Bound<'_, PyAny>>,
        req: Option<&Request>,
    ) -> PyResult<Self> {
        let computed = match computed {
            "prefill" => ComputedBy::Prefill,
            "decode" => ComputedBy::Decode,
            other => {
                let context = format!("`computed` is {other:?}: give prefill or decode");
                return Err(invalid(py, "put", context));
            }
        };
        let counts = tokens.map(|value| self::tokens("put", value)).transpose()?;
        let inner = PutOptions {
            chain,
            parent: key("put", "parent", parent)?,
            depth,
            tokens: counts.unwrap_or_default(),
            chunk_ends: chunk_ends.map(truths).transpose()?.unwrap_or_default(),
            computed,
            tenant: req.map(|req| req.inner.context().tenant.clone()).unwrap_or_default(),
            block_type: match (block_type, req) {
                (None, Some(req)) => req.inner.context().block_type,
                (name, _) => self::block_type(py, "put", name)?,
            },
            wait: wait.map(|value| duration("put", "wait", value)).transpose()?,
            timeout: self::timeout("put", timeout)?,
        };
        Ok(Self { inner, request: req.map(|req| req.store) })
    }
}
