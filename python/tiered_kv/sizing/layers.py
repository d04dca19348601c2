"""Constructors of layer groups: the one place that knows what each kind keeps."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.sizing.checks import count
from tiered_kv.sizing.dtypes import DType
from tiered_kv.sizing.parts import ENCODER, EVERY_TOKEN, STATE, Part, Span, last
from tiered_kv.sizing.spec import Kind, LayerGroup, Role


def _pair(heads: int, key_dim: int, value_dim: int, dtype: DType, span: Span) -> tuple[Part, ...]:
    """Keys and values; a `value_dim` of 0 stands for values that are the keys."""
    keys = Part("keys", heads, key_dim, dtype, span)
    if value_dim == 0:
        return (keys,)
    return keys, Part("values", heads, value_dim, dtype, span)


def full(
    layers: Iterable[int],
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: DType,
    *,
    role: Role = Role.MODEL,
    note: str = "",
) -> LayerGroup:
    """Layers that keep keys and values of every token."""
    parts = _pair(heads, key_dim, value_dim, dtype, EVERY_TOKEN)
    return LayerGroup(Kind.FULL, tuple(layers), parts, role, note=note)


def sliding(
    layers: Iterable[int],
    window: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: DType,
    *,
    kind: Kind = Kind.SLIDING,
    role: Role = Role.MODEL,
    note: str = "",
) -> LayerGroup:
    """Layers that keep keys and values of a window, or chunk, of tokens."""
    count("sliding_window", window, least=1)
    parts = _pair(heads, key_dim, value_dim, dtype, last(window))
    return LayerGroup(kind, tuple(layers), parts, role, window, note)


def mla(
    layers: Iterable[int],
    latent: int,
    rope: int,
    dtype: DType,
    *,
    role: Role = Role.MODEL,
    note: str = "",
) -> LayerGroup:
    """Layers that keep a latent and, where `rope` is not 0, a rotary key for all heads."""
    parts = [Part("latent", 1, latent, dtype)]
    if rope:
        parts.append(Part("rotary key", 1, rope, dtype))
    return LayerGroup(Kind.MLA, tuple(layers), tuple(parts), role, note=note)


def index_keys(
    layers: Iterable[int],
    dim: int,
    dtype: DType,
    *,
    heads: int = 1,
    span: Span = EVERY_TOKEN,
    role: Role = Role.MODEL,
    note: str = "",
) -> LayerGroup:
    """Layers that keep the keys by which sparse attention chooses its tokens."""
    part = Part("index keys", heads, dim, dtype, span)
    return LayerGroup(Kind.INDEX, tuple(layers), (part,), role, note=note)


def cross(
    layers: Iterable[int], heads: int, key_dim: int, value_dim: int, dtype: DType, note: str = ""
) -> LayerGroup:
    """Layers that keep keys and values of the encoder's tokens."""
    parts = _pair(heads, key_dim, value_dim, dtype, ENCODER)
    return LayerGroup(Kind.CROSS, tuple(layers), parts, note=note)


def shared(layers: Iterable[int], note: str = "") -> LayerGroup:
    """Layers that read what others keep."""
    return LayerGroup(Kind.SHARED, tuple(layers), note=note)


def state(name: str, heads: int, shape: tuple[int, ...], dtype: DType) -> Part:
    """A state of constant size: `heads` times the product of `shape`, in a type of its own."""
    dim = 1
    for size in shape:
        dim *= size
    return Part(name, heads, dim, dtype, STATE, fixed=True, shape=(heads, *shape))
