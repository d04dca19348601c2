"""Layers whose cache has a constant size: state spaces, linear attention, convolutions, RWKV."""

from __future__ import annotations

import math
from collections.abc import Callable

from tiered_kv.sizing.checks import count, fault
from tiered_kv.sizing.dtypes import FP32, INT64, DType, dtype_named
from tiered_kv.sizing.families.arch import Layer, head_dim, query_heads
from tiered_kv.sizing.families.dims import by_window
from tiered_kv.sizing.fields import Fields
from tiered_kv.sizing.layers import Keep, conv_state, state
from tiered_kv.sizing.spec import Kind

State = Callable[[Layer], list[Keep]]


def _ssm_dtype(fields: Fields, default: DType = FP32) -> DType:
    """Type of a state: its own field where there is one, else fp32 in most implementations."""
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        named = fields.text(name)
        if named is not None and named != "auto":
            return dtype_named(named, fields.prefix + name)
    return default


def mamba1(layer: Layer) -> list[Keep]:
    """Mamba: a convolution over the inner channels and a state of each channel."""
    fields = layer.fields
    size = fields.integer("mamba_d_state", "state_size")
    taps = fields.integer("mamba_d_conv", "conv_kernel")
    inner = _inner(fields)
    parts = (
        conv_state("conv state", inner, 1, taps, layer.dtype),
        state("recurrent state", inner, (size,), _ssm_dtype(fields)),
    )
    return [Keep(Kind.RECURRENT, parts)]


def _inner(fields: Fields) -> int:
    """Inner channels of a Mamba layer."""
    known = fields.maybe("mamba_d_ssm", least=1)
    if known is not None:
        return known
    names = ("mamba_expand", "expand")
    for name in names:
        if fields.has(name):
            inner = fields.number(name) * fields.integer("hidden_size")
            return count(f"{fields.prefix}{name} x hidden_size", int(inner), least=1)
    raise fields.missing(*names)


def mamba2(layer: Layer) -> list[Keep]:
    """Mamba 2: a convolution over the channels and the groups, and a state of each head."""
    fields = layer.fields
    heads = fields.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    groups = fields.integer("mamba_n_groups", "mamba_ngroups", "n_groups")
    size = fields.integer("mamba_d_state", "ssm_state_size", "state_size")
    taps = fields.integer("mamba_d_conv", "conv_kernel")
    dim = fields.maybe("mamba_head_dim", least=1)
    if dim is None:
        inner = _inner(fields)
        if inner % heads:
            raise fault(
                f"`{fields.prefix}mamba_expand` x `hidden_size` = {inner} does not divide by the "
                f"{heads} Mamba heads: one of them is wrong"
            )
        dim = inner // heads
    parts = (
        conv_state("conv state", heads, dim, taps, layer.dtype),
        conv_state("conv state of groups", groups, 2 * size, taps, layer.dtype),
        state("recurrent state", heads, (dim, size), _ssm_dtype(fields)),
    )
    return [Keep(Kind.RECURRENT, parts)]


def zamba1(layer: Layer) -> list[Keep]:
    """Zamba: a Mamba layer whose state is split over heads."""
    fields = layer.fields
    inner = _inner(fields)
    heads = fields.integer("n_mamba_heads")
    taps = fields.integer("mamba_d_conv")
    parts = (
        conv_state("conv state", inner, 1, taps, layer.dtype),
        state(
            "recurrent state",
            heads,
            (inner // heads, fields.integer("mamba_d_state")),
            _ssm_dtype(fields),
        ),
    )
    return [Keep(Kind.RECURRENT, parts)]


def gated_delta(layer: Layer) -> list[Keep]:
    """Gated delta nets: a convolution over queries, keys and values, and a state of each head."""
    fields = layer.fields
    key_heads = fields.maybe("linear_num_key_heads", least=1) or query_heads(fields)
    value_heads = fields.maybe("linear_num_value_heads", least=1) or query_heads(fields)
    key_dim, value_dim = linear_dims(fields)
    taps = fields.integer("linear_conv_kernel_dim")
    parts = (
        conv_state("conv state of keys", key_heads, 2 * key_dim, taps, layer.dtype),
        conv_state("conv state of values", value_heads, value_dim, taps, layer.dtype),
        state("recurrent state", value_heads, (key_dim, value_dim), _ssm_dtype(fields)),
    )
    return [Keep(Kind.LINEAR, parts)]


def linear_dims(fields: Fields) -> tuple[int, int]:
    """Key and value dimensions of a gated delta net."""
    return fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")


def kimi_delta(layer: Layer) -> list[Keep]:
    """Kimi delta attention: as gated delta nets, with alike heads; `linear_attn_config` rules."""
    fields = layer.fields
    own = fields.nested("linear_attn_config")
    heads = own.maybe("num_heads", least=1) or fields.integer("linear_num_heads")
    dim = own.maybe("head_dim", least=1) or fields.integer("linear_head_dim")
    taps = own.maybe("short_conv_kernel_size", least=1) or fields.integer("linear_conv_kernel_dim")
    parts = (
        conv_state("conv state", heads, 3 * dim, taps, layer.dtype),
        state("recurrent state", heads, (dim, dim), FP32),
    )
    return [Keep(Kind.LINEAR, parts)]


def bailing_delta(layer: Layer) -> list[Keep]:
    """Bailing hybrids: Kimi delta attention with the attention's own heads."""
    fields = layer.fields
    heads = fields.maybe("linear_num_heads", least=1) or query_heads(fields)
    dim = fields.maybe("linear_head_dim", least=1) or head_dim(fields)
    taps = fields.integer("short_conv_kernel_size")
    parts = (
        conv_state("conv state", heads, 3 * dim, taps, layer.dtype),
        state("recurrent state", heads, (dim, dim), FP32),
    )
    return [Keep(Kind.LINEAR, parts)]


def lightning(layer: Layer) -> list[Keep]:
    """MiniMax's lightning attention: the running key-value product of each query head."""
    heads, dim = query_heads(layer.fields), head_dim(layer.fields)
    return [Keep(Kind.LINEAR, (state("recurrent state", heads, (dim, dim), layer.dtype),))]


def short_conv(layer: Layer) -> list[Keep]:
    """LFM2's short convolution over the hidden size."""
    fields = layer.fields
    taps = fields.integer("conv_L_cache", "conv_kernel_size")
    hidden = fields.integer("hidden_size")
    return [Keep(Kind.CONV, (conv_state("conv state", hidden, 1, taps, layer.dtype),))]


def rg_lru(layer: Layer) -> list[Keep]:
    """RecurrentGemma's linear recurrent unit."""
    fields = layer.fields
    width = fields.maybe("lru_width", least=1) or fields.integer("hidden_size")
    taps = fields.integer("conv1d_width")
    parts = (
        # Every implementation keeps exactly the inputs that the next token needs.
        state("conv state", width, (taps - 1,), layer.dtype),
        state("recurrent state", width, (1,), FP32),
    )
    return [Keep(Kind.RECURRENT, parts)]


def rwkv4(layer: Layer) -> list[Keep]:
    """RWKV 4: the last inputs of both mixers, and a numerator, a denominator and a maximum."""
    fields = layer.fields
    hidden = fields.integer("hidden_size")
    inner = fields.maybe("attention_hidden_size", least=1) or hidden
    parts = (
        state("last inputs", 1, (2, hidden), layer.dtype),
        state("recurrent state", 1, (3, inner), FP32),
    )
    return [Keep(Kind.RECURRENT, parts)]


def xlstm(layer: Layer) -> list[Keep]:
    """The matrix memory, normaliser and stabiliser of each head of an xLSTM."""
    fields = layer.fields
    heads = fields.integer("num_heads")
    inner = fields.integer("hidden_size")
    key = _rounded(fields, "qk_dim_factor", inner) // heads
    value = _rounded(fields, "v_dim_factor", inner) // heads
    parts = (
        state("memory", heads, (key, value), layer.dtype),
        state("normaliser", heads, (key,), layer.dtype),
        state("stabiliser", heads, (1,), layer.dtype),
    )
    return [Keep(Kind.RECURRENT, parts)]


def _rounded(fields: Fields, factor: str, size: int) -> int:
    """A share of a size, up to the next multiple of 64."""
    return math.ceil(fields.number(factor) * size / 64) * 64


def qwen4(layer: Layer) -> list[Keep]:
    """Qwen 4: a gated delta net, and in some layers the inputs of a dilated convolution.

    Those are the layers of `ple_layer_ids`, which count from 1; they keep the last token ids too.
    """
    fields = layer.fields
    keeps = gated_delta(layer)
    if layer.index + 1 not in (fields.integers("ple_layer_ids") or ()):
        return keeps
    width = fields.integer("hc_count") * fields.integer("hidden_size")
    size = fields.integer("ngram_size", least=2)
    inputs = (fields.integer("ple_conv_kernel_size", least=2) - 1) * size
    parts = (
        state("n-gram conv state", width, (inputs,), layer.dtype),
        state("token ids", 1, (size - 1,), INT64),
    )
    return [*keeps, Keep(Kind.CONV, parts)]


def zaya(layer: Layer) -> list[Keep]:
    """ZAYA: the inputs of two stacked convolutions, and the last value before its delay."""
    fields = layer.fields
    dim = head_dim(fields)
    kv_heads = fields.integer("num_key_value_heads")
    taps = fields.integer("cca_time0") + fields.integer("cca_time1") - 2
    channels = (query_heads(fields) + kv_heads) * dim
    parts = (
        state("conv state", 1, (channels, taps), layer.dtype),
        state("delayed value", 1, (kv_heads * dim // 2,), layer.dtype),
    )
    return [Keep(Kind.CONV, parts)]


def inkling(layer: Layer) -> list[Keep]:
    """Inkling: four short convolutions in fp32, over keys, values and twice the hidden size."""
    fields = layer.fields
    taps = fields.integer("conv_kernel_size")
    kv_heads, dim, _ = by_window(layer)
    parts = (
        conv_state("conv state of keys", kv_heads, dim, taps, FP32),
        conv_state("conv state of values", kv_heads, dim, taps, FP32),
        conv_state("conv state of outputs", fields.integer("hidden_size"), 2, taps, FP32),
    )
    return [Keep(Kind.CONV, parts)]
