"""How a configuration becomes layer groups: a type for each layer, and what each type keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tiered_kv.sizing.checks import bad, fault
from tiered_kv.sizing.dtypes import DType
from tiered_kv.sizing.fields import MOST_LAYERS, Fields
from tiered_kv.sizing.layers import Keep, cross, full, index_keys, shared, sliding
from tiered_kv.sizing.spec import Kind

LEGACY_TYPES = {
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
    "recurrent": "linear_attention",
    "sliding_window_attention": "sliding_attention",
    "local_attention": "sliding_attention",
    "global_attention": "full_attention",
}
"""Names of layer types that older configurations use."""

Dims = tuple[int, int, int]
"""Key-value heads, key dimension, value dimension; a value dimension of 0: values are keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a configuration.

    Attributes:
        fields: Its fields, what is particular to the layer in place of the model's.
        index: Its number.
        type: Its layer type, such as `"full_attention"`.
        dtype: Type of keys and values.
        types: The types of all layers.
    """

    fields: Fields
    index: int
    type: str
    dtype: DType
    types: tuple[str, ...] = ()

    @property
    def is_sliding(self) -> bool:
        """Whether its attention has a window."""
        return self.type in ("sliding_attention", "hybrid_sliding")


def heads(layer: Layer) -> Dims:
    """The usual dimensions: `num_key_value_heads` of `head_dim`, keys and values alike."""
    fields = layer.fields
    kv_heads = fields.maybe("num_key_value_heads", least=1) or query_heads(fields)
    dim = head_dim(fields)
    return kv_heads, dim, fields.maybe("v_head_dim", least=1) or dim


def query_heads(fields: Fields) -> int:
    """Query heads of a layer."""
    return fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")


def head_dim(fields: Fields) -> int:
    """Dimension of a head: its field, else the hidden size over the heads.

    Raises:
        InvalidArgumentError: Neither is there, or the heads do not divide the hidden size.
    """
    dim = fields.maybe("head_dim", least=1)
    if dim is not None:
        return dim
    hidden = fields.maybe("hidden_size", "n_embd", "d_model", least=1)
    if hidden is None:
        raise fields.missing("head_dim", "hidden_size")
    queries = query_heads(fields)
    if hidden % queries:
        raise fault(
            f"`{fields.prefix}hidden_size` = {hidden} does not divide by `num_attention_heads` = "
            f"{queries}: give `head_dim`"
        )
    return hidden // queries


def check_heads(fields: Fields, kv_heads: int) -> None:
    """Raises where the key-value heads contradict the query heads."""
    queries = query_heads(fields)
    if queries % kv_heads:
        raise fault(
            f"`{fields.prefix}num_key_value_heads` = {kv_heads} does not divide "
            f"`num_attention_heads` = {queries}: one of them is wrong"
        )


def softmax(layer: Layer, dims: Dims) -> Keep:
    """Keys and values of every token, of a window or of a chunk, by the layer's type."""
    if layer.is_sliding:
        window = layer.fields.integer("sliding_window")
        return sliding(window, *dims, layer.dtype)
    if layer.type == "chunked_attention":
        chunk = layer.fields.integer("attention_chunk_size")
        return sliding(chunk, *dims, layer.dtype, Kind.CHUNKED)
    return full(*dims, layer.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Arch:
    """How an architecture's layers are read; the defaults read most decoders.

    Attributes:
        types: The type of each layer where the configuration has no `layer_types`.
        dims: Dimensions of a layer's attention.
        attention: What a layer's attention keeps; None for keys and values by `dims`.
        state: What a layer of linear attention, of a convolution or of a hybrid keeps beside.
        index: What a layer of indexed attention keeps beside.
        reuses: The layer that each layer reads the keys and values of; None for its own.
        special: What layers of further types keep, by type.
        cross: Whether each layer keeps keys and values of an encoder as well.
        last_full: Whether the last layer attends to all, whatever the configuration says.
        renamed: Layer types under another name than the configuration's.
        window: The window, where it is not `sliding_window`.
        layers: The number of caches, where it is not `num_hidden_layers`.
        caches_per_layer: Caches of one layer.
        again: Layers that a pass runs once more, each time with a cache of its own.
        mtp: Fields with the number of layers that predict several tokens.
        note: What a reader of the figures should know.
    """

    types: Callable[[Fields], list[str]] | None = None
    dims: Callable[[Layer], Dims] = heads
    attention: Callable[[Layer], Keep] | None = None
    state: Callable[[Layer], list[Keep]] | None = None
    index: Callable[[Layer], list[Keep]] | None = None
    reuses: Callable[[Fields, Sequence[str]], list[int | None]] | None = None
    special: Callable[[Layer], list[Keep] | None] | None = None
    cross: bool = False
    last_full: bool = False
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    window: Callable[[Fields], int | None] | None = None
    layers: Callable[[Fields], int] | None = None
    caches_per_layer: int = 1
    again: Callable[[Fields], Sequence[int]] | None = None
    mtp: tuple[str, ...] = (
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_modules",
        "num_mtp_layers",
    )
    note: str = ""

    def keeps(self, layer: Layer) -> list[Keep]:
        """What a layer keeps.

        Raises:
            InvalidArgumentError: Its type is not known, or a field is missing or wrong.
        """
        found = self.special(layer) if self.special is not None else None
        if found is not None:
            return found
        if self.cross:
            return [self.attends(layer), cross(*self.dims(layer), layer.dtype)]
        kind = layer.type
        if kind in ("moe", "mlp"):
            return []
        if kind in ("full_attention", "sliding_attention", "chunked_attention"):
            return [self.attends(layer)]
        if kind == "indexed_attention":
            return [self.attends(layer), *(self.index or indexer)(layer)]
        if self.state is not None:
            if kind in ("linear_attention", "conv"):
                return self.state(layer)
            if kind in ("hybrid", "hybrid_sliding"):
                return [self.attends(layer), *self.state(layer)]
        name = f"{layer.fields.prefix}layer_types[{layer.index}]"
        raise bad(name, kind, "a layer type that this architecture has")

    def attends(self, layer: Layer) -> Keep:
        """What the attention of a layer keeps."""
        if self.attention is not None:
            return self.attention(layer)
        return softmax(layer, self.dims(layer))


def indexer(layer: Layer) -> list[Keep]:
    """The index keys of a layer: one head of `index_head_dim`; none where it shares another's."""
    modes = layer.fields.words("indexer_types")
    if modes is not None and layer.index < len(modes) and modes[layer.index] == "shared":
        return []
    return [index_keys(layer.fields.integer("index_head_dim"), layer.dtype)]


def layer_types(fields: Fields, arch: Arch, layers: int) -> list[str]:
    """The type of each layer, in today's names, and of those listed behind them.

    Raises:
        InvalidArgumentError: There are fewer types than layers.
    """
    found = fields.words("layer_types") or fields.words("layers_block_type")
    if found is None and arch.types is not None:
        found = arch.types(fields)
    if found is None:
        found = [_uniform(fields.at_layer(index)) for index in range(layers)]
    # Some configurations list the layers for several-token prediction behind their own.
    if not layers <= len(found) <= MOST_LAYERS:
        raise fault(
            f"`{fields.prefix}layer_types` has {len(found)} entries for `num_hidden_layers` = "
            f"{layers}: give one a layer"
        )
    found = [LEGACY_TYPES.get(kind, kind) for kind in found]
    found = [arch.renamed.get(kind, kind) for kind in found]
    if arch.last_full:
        found[layers - 1] = "full_attention"
    return found


def _uniform(fields: Fields) -> str:
    """The type of a layer that the configuration does not name."""
    if fields.flag("use_sliding_window", True) and fields.maybe("sliding_window"):
        return "sliding_attention"
    if fields.maybe("attention_chunk_size"):
        return "chunked_attention"
    return "full_attention"


def skipped(fields: Fields) -> bool:
    """Whether a layer of an optimised model has no attention."""
    found = fields.sequence("skip") or ()
    return any(str(name) in ("attention", "self_attn") for name in found)


def read_shared(source: int) -> Keep:
    """What a layer keeps that reads layer `source`: nothing."""
    del source
    return shared("they read the keys and values of an earlier layer of their type")
