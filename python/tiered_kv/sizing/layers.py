"""What a layer keeps: the one place that knows the parts of each kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from tiered_kv.sizing.checks import count
from tiered_kv.sizing.dtypes import DType
from tiered_kv.sizing.parts import ENCODER, EVERY_TOKEN, STATE, Part, Span, last
from tiered_kv.sizing.spec import Kind, LayerGroup, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """One kind of thing that a layer keeps; layers that keep equal things become a group.

    Attributes:
        kind: What it is.
        parts: Its parts; empty for `SHARED`.
        window: Tokens of the window or chunk, 0 where there is none.
        note: What is particular about it.
    """

    kind: Kind
    parts: tuple[Part, ...] = ()
    window: int = 0
    note: str = ""


def grouped(
    kept: Iterable[tuple[int, Sequence[Keep]]], role: Role = Role.MODEL
) -> tuple[LayerGroup, ...]:
    """The groups of layers that keep equal things, in the order of their first layers.

    Args:
        kept: Cache index of each layer, and what it keeps.
        role: The model that they belong to.
    """
    found: dict[Keep, list[int]] = {}
    for layer, keeps in kept:
        for keep in keeps:
            found.setdefault(keep, []).append(layer)
    return tuple(
        LayerGroup(keep.kind, tuple(layers), keep.parts, role, keep.window, keep.note)
        for keep, layers in found.items()
    )


def _pair(heads: int, key_dim: int, value_dim: int, dtype: DType, span: Span) -> tuple[Part, ...]:
    """Keys and values; a `value_dim` of 0 stands for values that are the keys."""
    keys = Part("keys", heads, key_dim, dtype, span)
    if value_dim == 0:
        return (keys,)
    return keys, Part("values", heads, value_dim, dtype, span)


def full(heads: int, key_dim: int, value_dim: int, dtype: DType) -> Keep:
    """Keys and values of every token."""
    return Keep(Kind.FULL, _pair(heads, key_dim, value_dim, dtype, EVERY_TOKEN))


def sliding(
    window: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: DType,
    kind: Kind = Kind.SLIDING,
) -> Keep:
    """Keys and values of a window, or chunk, of tokens."""
    count("sliding_window", window, least=1)
    return Keep(kind, _pair(heads, key_dim, value_dim, dtype, last(window)), window)


def mla(latent: int, rope: int, dtype: DType, window: int = 0) -> Keep:
    """A latent and, where `rope` is not 0, a rotary key for all heads; of a window or of all."""
    span = last(window) if window else EVERY_TOKEN
    parts = [Part("latent", 1, latent, dtype, span)]
    if rope:
        parts.append(Part("rotary key", 1, rope, dtype, span))
    return Keep(Kind.MLA, tuple(parts), window)


def index_keys(dim: int, dtype: DType, heads: int = 1) -> Keep:
    """The keys by which sparse attention chooses its tokens."""
    return Keep(Kind.INDEX, (Part("index keys", heads, dim, dtype),))


def cross(heads: int, key_dim: int, value_dim: int, dtype: DType) -> Keep:
    """Keys and values of the encoder's tokens."""
    return Keep(Kind.CROSS, _pair(heads, key_dim, value_dim, dtype, ENCODER))


def shared(note: str = "") -> Keep:
    """Nothing: what others keep is read."""
    return Keep(Kind.SHARED, note=note)


def state(name: str, heads: int, shape: tuple[int, ...], dtype: DType) -> Part:
    """A state of constant size: `heads` times the product of `shape`, in a type of its own."""
    dim = math.prod(shape)
    return Part(name, heads, dim, dtype, STATE, fixed=True, shape=(heads, *shape))


def conv_state(name: str, heads: int, channels: int, taps: int, dtype: DType) -> Part:
    """The last `taps` - 1 inputs of a causal convolution over heads x channels channels."""
    count("conv_kernel", taps, least=2)
    shape = (channels, taps - 1)
    return dataclasses.replace(state(name, heads, shape, dtype), taps=taps)
