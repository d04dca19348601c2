"""The shape of a model's KV cache, and the slabs of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tiered_kv import KvLayout
from tiered_kv.sizing import KvSpec

if TYPE_CHECKING:
    from tiered_kv._base import GroupRule


@dataclass(frozen=True)
class Plane:
    """A tensor `[rows, tokens, dim]` of a group of layers.

    Attributes:
        rows: Vectors of a token.
        dim: Elements of a vector.
    """

    rows: int
    dim: int

    def elements(self, tokens: int) -> int:
        """Elements of `tokens` tokens."""
        return self.rows * tokens * self.dim


@dataclass(frozen=True)
class GroupShape:
    """Layers that cache keys and values of the same shapes: one row of a block's grid.

    Attributes:
        layers: Their indices in the cache.
        keys: Heads of a layer's keys, and the dimension of one.
        values: The same of its values.
        window: Tokens of the sliding window, the current one among them; 0 for full attention.
    """

    layers: tuple[int, ...]
    keys: tuple[int, int]
    values: tuple[int, int]
    window: int = 0

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The slab's tensors, one behind the other.

        One `[layers, 2, heads, tokens, dim]` (0 keys, 1 values) where keys and values have one
        shape, else `[layers, heads, tokens, dim]` for the keys and another for the values.
        """
        count = len(self.layers)
        if self.keys == self.values:
            heads, dim = self.keys
            return (Plane(count * 2 * heads, dim),)
        return tuple(Plane(count * heads, dim) for heads, dim in (self.keys, self.values))

    def elements(self, tokens: int) -> int:
        """Elements of `tokens` tokens."""
        return sum(plane.elements(tokens) for plane in self.planes)

    def first_token(self, position: int) -> int:
        """The first token that the token at `position` attends to."""
        return max(0, position - self.window + 1) if self.window else 0

    def first_block(self, blocks: int, tokens_per_block: int) -> int:
        """The first block that the token after `blocks` blocks attends to."""
        return self.first_token(blocks * tokens_per_block) // tokens_per_block

    def rule(self, tokens_per_block: int) -> GroupRule:
        """Which blocks the token after a block attends to."""
        if not self.window:
            return "all"
        return "window", -(-(self.window - 1) // tokens_per_block)


@dataclass(frozen=True)
class KvGeometry:
    """The shape of a model's KV cache.

    Attributes:
        spec: What the configuration says that the cache holds, in the type that it has.
        groups: Its groups of layers that hold something, in the order of `spec`.
        cache_layers: Layers of the cache, those among them that hold nothing.
        dtype: Element type of the cache.
        device: Where the model's cache lives.
    """

    spec: KvSpec
    groups: tuple[GroupShape, ...]
    cache_layers: int
    dtype: torch.dtype
    device: torch.device

    def layout(self, tokens_per_block: int) -> KvLayout:
        """The grid of a block: a slab for each group."""
        return self.spec.to_layout(tokens_per_block)

    @property
    def dtype_name(self) -> str:
        """The dtype as in `NamespaceSpec.kv_dtype`, such as `float32`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def windowed(self) -> bool:
        """Whether all layers have a window: a prefix needs no block that lies before it."""
        return all(group.window for group in self.groups)

    def first_block(self, blocks: int, tokens_per_block: int) -> int:
        """The first block that any layer needs after `blocks` blocks."""
        return min(group.first_block(blocks, tokens_per_block) for group in self.groups)

    def rules(self, tokens_per_block: int) -> list[GroupRule]:
        """The different rules of its groups."""
        return list(dict.fromkeys(group.rule(tokens_per_block) for group in self.groups))
