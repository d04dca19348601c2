"""Memory for the cache of one sequence, reused from request to request."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from tiered_kv.engines._kv_layout import GroupShape, KvGeometry, Plane

_HUGE_PAGE_BYTES = 2 << 20
_GROWTH_TOKENS = 256


class KvArena:
    """Keys and values of one sequence: for each plane of each group `[rows, capacity, dim]`.

    Fresh memory costs more in page faults than the restore itself, so one arena serves all requests
    of an engine. It grows, losing its contents, when a sequence is longer than any before. Layers
    with a window have room for all tokens too: what has left the window is still to be stored.

    Args:
        geometry: The shape of the model's cache.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        self.geometry = geometry
        self.capacity_tokens = 0
        self._planes: list[list[torch.Tensor]] = []

    def reserve(self, tokens: int) -> bool:
        """Makes room for `tokens` tokens and touches it.

        Returns:
            Whether the memory is new: contents are lost then.
        """
        if tokens <= self.capacity_tokens:
            return False
        tokens = -(-tokens // _GROWTH_TOKENS) * _GROWTH_TOKENS
        self.capacity_tokens = 0
        self._planes = []  # freed before the larger ones are made
        self._planes = [
            [_fresh(plane, tokens, self.geometry) for plane in group.planes]
            for group in self.geometry.groups
        ]
        self.capacity_tokens = tokens
        return True

    def slabs(
        self, group: int, first: int, count: int, tokens_per_block: int
    ) -> list[torch.Tensor]:
        """The planes of a group in some blocks, as views `[count, rows, tokens, dim]`."""
        start, stop = first * tokens_per_block, (first + count) * tokens_per_block
        return [
            plane[:, start:stop].unflatten(1, (count, tokens_per_block)).transpose(0, 1)
            for plane in self._planes[group]
        ]

    def layer(self, group: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the layer at a place of a group, each `[1, heads, capacity, dim]`."""
        planes, layers = self._planes[group], len(self.geometry.groups[group].layers)
        if len(planes) == 1:
            pair = planes[0].unflatten(0, (layers, 2, -1))[place]
            return pair[0].unsqueeze(0), pair[1].unsqueeze(0)
        keys, values = (plane.unflatten(0, (layers, -1))[place] for plane in planes)
        return keys.unsqueeze(0), values.unsqueeze(0)


def _fresh(plane: Plane, tokens: int, shape: KvGeometry) -> torch.Tensor:
    """Touched memory of a plane, in huge pages where the system gives them."""
    sizes = (plane.rows, tokens, plane.dim)
    if shape.device.type != "cpu":
        return torch.zeros(sizes, dtype=shape.dtype, device=shape.device)
    size = plane.elements(tokens) * shape.dtype.itemsize
    pages = mmap.mmap(-1, size + _HUGE_PAGE_BYTES)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8, count=size)
    return memory.zero_().view(shape.dtype).view(sizes)


class _ArenaLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of full attention that appends in place instead of concatenating."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        super().__init__()
        self._all_keys = keys
        self._all_values = values
        self.device = keys.device
        self.dtype = keys.dtype
        self.is_initialized = True
        self._show(tokens)

    def _show(self, tokens: int) -> None:
        self._tokens = tokens
        self.keys = self._all_keys[:, :, :tokens]
        self.values = self._all_values[:, :, :tokens]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends and returns all keys and values so far."""
        start = self._tokens
        end = start + key_states.shape[-2]
        # A slice beyond the end would be cut silently; the copy then fails on its shape.
        self._all_keys[:, :, start:end] = key_states
        self._all_values[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens in the layer."""
        return self._tokens


class _ArenaWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer with a sliding window of W tokens, which shows the last W - 1 of what it holds.

    What lies before them stays in the arena: it may be garbage where the layer was restored.
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, tokens: int, shape: GroupShape
    ) -> None:
        super().__init__(shape.window)
        self._all_keys = keys
        self._all_values = values
        self._shape = shape
        self.lazy_initialization(keys, values)
        self._show(tokens)

    def _show(self, tokens: int) -> None:
        self.cumulative_length = tokens
        start = self._shape.first_token(tokens)
        self.keys = self._all_keys[:, :, start:tokens]
        self.values = self._all_values[:, :, start:tokens]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends; returns the new keys and values and those that their first token attends to."""
        before = self.cumulative_length
        start, end = self._shape.first_token(before), before + key_states.shape[-2]
        # As in a layer of full attention, a slice beyond the end would fail on its shape.
        self._all_keys[:, :, before:end] = key_states
        self._all_values[:, :, before:end] = value_states
        self._show(end)
        return self._all_keys[:, :, start:end], self._all_values[:, :, start:end]


class ArenaCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` over an arena, holding its first `tokens` tokens.

    Args:
        arena: Memory with room for all tokens that will be appended.
        tokens: Tokens that it holds already.
    """

    def __init__(self, arena: KvArena, tokens: int) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.layers = [DummyLayer() for _ in range(arena.geometry.cache_layers)]
        for number, group in enumerate(arena.geometry.groups):
            for place, index in enumerate(group.layers):
                keys, values = arena.layer(number, place)
                self.layers[index] = (
                    _ArenaWindowLayer(keys, values, tokens, group)
                    if group.window
                    else _ArenaLayer(keys, values, tokens)
                )
