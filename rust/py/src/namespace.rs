//! Namespace handles.

use crate::args;
use crate::buffers::{self, Held};
use crate::completion::About;
use crate::errors::{OrRaise, invalid};
use crate::store::StoreRef;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use std::collections::BTreeMap;
use tiered_kv::key::{self, MAX_OPAQUE_KEY_BYTES};
use tiered_kv::{BlockKey, KvLayout, NamespaceSpec};

/// Beyond so many tokens the GIL is let go while they are hashed.
const HASH_WITH_GIL_TOKENS: usize = 16 << 10;

/// A namespace opened in a store.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Namespace {
    pub(crate) inner: tiered_kv::Namespace,
    pub(crate) kv_dtype: String,
    /// Number of the store that it was opened in.
    pub(crate) store: u64,
}

/// The specification as the Python dataclasses hand it over.
#[derive(FromPyObject)]
pub(crate) struct SpecArgs {
    model: String,
    weights: String,
    kv_dtype: String,
    layout: LayoutArgs,
    rope: BTreeMap<String, String>,
    lora: String,
    salt: String,
    parallel: String,
    engine: String,
}

#[derive(FromPyObject)]
struct LayoutArgs {
    tokens_per_block: u32,
    layer_groups: u16,
    head_groups: u16,
    slab_bytes: Vec<u64>,
}

impl SpecArgs {
    pub(crate) fn spec(self, py: Python<'_>) -> PyResult<NamespaceSpec> {
        let LayoutArgs { tokens_per_block, layer_groups, head_groups, slab_bytes } = self.layout;
        let layout = KvLayout::grid(tokens_per_block, layer_groups, head_groups, slab_bytes);
        Ok(NamespaceSpec {
            model: self.model,
            weights: self.weights,
            kv_dtype: self.kv_dtype,
            layout: layout.or_raise(py)?,
            rope: self.rope,
            lora: self.lora,
            salt: self.salt,
            parallel: self.parallel,
            engine: self.engine,
        })
    }
}

impl Namespace {
    pub(crate) fn open(py: Python<'_>, store: &StoreRef, spec: SpecArgs) -> PyResult<Self> {
        Self::with(py, spec, store.number, |spec| store.store.namespace(spec))
    }

    /// A namespace that `open` opens, in the store of number `store`.
    pub(crate) fn with(
        py: Python<'_>,
        spec: SpecArgs,
        store: u64,
        open: impl FnOnce(&NamespaceSpec) -> tiered_kv::Result<tiered_kv::Namespace>,
    ) -> PyResult<Self> {
        let spec = spec.spec(py)?;
        let kv_dtype = spec.kv_dtype.clone();
        let inner = open(&spec).or_raise(py)?;
        Ok(Self { inner, kv_dtype, store })
    }

    /// What a call on blocks is about.
    pub(crate) fn about(&self, keys: usize) -> About {
        About { keys, block_bytes: self.block_bytes() }
    }

    /// Bytes of a block as a length of memory.
    pub(crate) fn block_len(&self) -> usize {
        usize::try_from(self.inner.layout().block_bytes()).expect("a block is at most 4 GiB")
    }
}

fn pack<'py>(py: Python<'py>, keys: &[BlockKey]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &BlockKey::pack(keys))
}

#[pymethods]
impl Namespace {
    /// Digest of everything that the namespace stands for, in hexadecimal.
    #[getter]
    fn id(&self) -> String {
        self.inner.id().0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[getter]
    fn tokens_per_block(&self) -> u32 {
        self.inner.layout().tokens_per_block()
    }

    #[getter]
    fn block_bytes(&self) -> u64 {
        self.inner.layout().block_bytes()
    }

    /// Bytes of each slab of a block, row-major.
    #[getter]
    fn slab_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.inner.layout().slab_bytes())
    }

    /// Packed keys of the blocks of a token sequence.
    #[pyo3(signature = (tokens, parent=None, tail=false))]
    fn keys_from_tokens<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        parent: Option<&Bound<'py, PyAny>>,
        tail: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        const OP: &str = "keys_from_tokens";
        let tokens = args::tokens(OP, tokens)?;
        let parent = args::key(OP, "parent", parent)?;
        let hash = || match tail {
            true => self.inner.keys_with_tail(&tokens, parent),
            false => self.inner.keys_from_tokens(&tokens, parent),
        };
        let long = tokens.len() > HASH_WITH_GIL_TOKENS;
        let keys = if long { py.detach(hash) } else { hash() };
        Ok(pack(py, &keys))
    }

    /// Packed keys of an engine's own hashes: packed ones of `width` bytes, or a sequence of any
    /// widths.
    #[pyo3(signature = (packed, width=None))]
    fn keys_from_opaque<'py>(
        &self,
        py: Python<'py>,
        packed: &Bound<'py, PyAny>,
        width: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        const OP: &str = "keys_from_opaque";
        let width = width.map(|width| args::within(OP, "width", width, 1..=MAX_OPAQUE_KEY_BYTES));
        let width = width.transpose()?;
        if buffers::is_buffer(packed) {
            let held = Held::one(OP, "packed", packed, false)?;
            let Some(width) = width else {
                let remedy = "give the bytes of one hash, or pass a sequence of hashes";
                return Err(invalid(py, OP, format!("`width` is missing: {remedy}")));
            };
            return Ok(pack(py, &self.inner.keys_from_opaque(held.bytes(), width).or_raise(py)?));
        }
        let items = packed.try_iter().map_err(|_| {
            invalid(py, OP, "`packed` is neither a buffer nor a sequence of them: pass hashes")
        })?;
        let mut keys = Vec::new();
        for (index, item) in items.enumerate() {
            let held = Held::one(OP, &format!("packed[{index}]"), &item?, false)?;
            if width.is_some_and(|width| width != held.bytes().len()) {
                let (len, width) = (held.bytes().len(), width.unwrap_or_default());
                let context = format!("`packed[{index}]` holds {len} bytes, not `width` = {width}");
                return Err(invalid(py, OP, format!("{context}: leave `width` out")));
            }
            keys.push(key::key_from_opaque(&self.inner.id(), held.bytes()).or_raise(py)?);
        }
        Ok(pack(py, &keys))
    }

    fn __repr__(&self) -> String {
        let layout = self.inner.layout();
        let (tokens, bytes) = (layout.tokens_per_block(), layout.block_bytes());
        format!("<Namespace {} of {tokens} tokens, {bytes} bytes a block>", &self.id()[..16])
    }
}
