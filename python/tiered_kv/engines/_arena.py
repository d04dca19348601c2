"""Memory for the cache of one sequence, reused from request to request."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tiered_kv.engines._kv_layout import KvGeometry

_HUGE_PAGE_BYTES = 2 << 20
_GROWTH_TOKENS = 256


class KvArena:
    """Keys and values of one sequence: `[layers, 2, kv_heads, capacity, head_dim]`.

    Fresh memory costs more in page faults than the restore itself, so one arena serves all requests
    of an engine. It grows, losing its contents, when a sequence is longer than any before.

    Args:
        geometry: The shape of the model's cache.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        self.geometry = geometry
        self.capacity_tokens = 0
        self._memory = torch.empty(0, dtype=geometry.dtype)

    def reserve(self, tokens: int) -> bool:
        """Makes room for `tokens` tokens and touches it.

        Returns:
            Whether the memory is new: contents are lost then.
        """
        if tokens <= self.capacity_tokens:
            return False
        shape = self.geometry
        tokens = -(-tokens // _GROWTH_TOKENS) * _GROWTH_TOKENS
        self.capacity_tokens = 0
        self._memory = torch.empty(0, dtype=shape.dtype)  # freed before the larger one is made
        sizes = (shape.layers, 2, shape.kv_heads, tokens, shape.head_dim)
        self._memory = _fresh(shape.block_bytes(tokens), shape).view(sizes)
        self.capacity_tokens = tokens
        return True

    def blocks(self, first: int, count: int, tokens_per_block: int) -> torch.Tensor:
        """Blocks `first` to `first + count`, as a view `[count, rows, tokens, head_dim]`."""
        shape = self.geometry
        start = first * tokens_per_block
        rows = self._memory.view(shape.rows, self.capacity_tokens, shape.head_dim)
        span = rows[:, start : start + count * tokens_per_block]
        return span.view(shape.rows, count, tokens_per_block, shape.head_dim).transpose(0, 1)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each `[1, kv_heads, capacity, head_dim]`."""
        return self._memory[index, 0].unsqueeze(0), self._memory[index, 1].unsqueeze(0)


def _fresh(size: int, shape: KvGeometry) -> torch.Tensor:
    """`size` bytes of touched memory, in huge pages where the system gives them."""
    if shape.device.type != "cpu":
        return torch.zeros(size // shape.dtype.itemsize, dtype=shape.dtype, device=shape.device)
    pages = mmap.mmap(-1, size + _HUGE_PAGE_BYTES)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8, count=size)
    return memory.zero_().view(shape.dtype)


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


class ArenaCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` over an arena, holding its first `tokens` tokens.

    Args:
        arena: Memory with room for all tokens that will be appended.
        tokens: Tokens that it holds already.
    """

    def __init__(self, arena: KvArena, tokens: int) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.layers = [
            _ArenaLayer(*arena.layer(index), tokens) for index in range(arena.geometry.layers)
        ]
