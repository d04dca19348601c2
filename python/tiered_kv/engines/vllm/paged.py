"""The paged cache of an engine as blocks of bytes: one block, all layers of the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiered_kv import UnsupportedError
from tiered_kv._core import blake3
from tiered_kv.torch import view


class PagedCache:
    """Copies whole blocks between an engine's cache and buffers.

    In a buffer the layers of a block lie one behind the other, each as vLLM's logical tensor of the
    block, contiguous, and where its elements may begin. What a kernel packs into its elements stays
    as it is: such a block fits only a cache of the same kernel, which is why `describe` is part of
    the namespace.

    Args:
        caches: The cache of each layer, blocks first; layers may share one.
        blocks: Number of the engine's blocks.

    Raises:
        UnsupportedError: A layer's cache is not blocks first.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        self._layers: list[torch.Tensor] = []
        self._parts: list[slice] = []
        self._gaps: list[slice] = []
        seen = set()
        at = 0
        for name, cache in caches.items():
            if not isinstance(cache, torch.Tensor) or cache.dim() < 2 or cache.shape[0] % blocks:
                message = (
                    f"vllm: the cache of layer {name} is not one tensor, blocks first: this "
                    "model's state cannot be stored yet"
                )
                raise UnsupportedError(message, op="engines")
            if cache.data_ptr() in seen:
                continue  # the layer uses another one's cache
            seen.add(cache.data_ptr())
            # An attention kernel may take a block in several parts.
            layer = cache.unflatten(0, (blocks, -1))
            size = layer[0].numel() * layer.element_size()
            begin = -(-at // layer.element_size()) * layer.element_size()
            if begin > at:
                self._gaps.append(slice(at, begin))
            at = begin
            self._layers.append(layer)
            self._parts.append(slice(at, at + size))
            at += size
        self.block_bytes = at

    @property
    def dtype_name(self) -> str:
        """The types of the stored elements."""
        return ",".join(sorted({str(one.dtype).removeprefix("torch.") for one in self._layers}))

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self._layers[0].device if self._layers else torch.device("cpu")

    def use_device(self) -> None:
        """Makes the cache's device the calling thread's own: a new thread begins with the first."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def describe(self) -> str:
        """Type, shape and order in memory of each layer's block, with a digest of all."""
        shapes = [
            f"{one.dtype}{tuple(one.shape[1:])}/{tuple(one.stride()[1:])}" for one in self._layers
        ]
        order = blake3(";".join(shapes).encode())
        return f"{len(shapes)} layers {' '.join(sorted(set(shapes)))} {order[:32]}"

    def read(self, block_ids: Sequence[int], buffers: Sequence[Any]) -> None:
        """Copies blocks of the engine into writable buffers of a block each."""
        for block, buffer in zip(block_ids, buffers, strict=True):
            whole = torch.frombuffer(buffer, dtype=torch.uint8)
            for gap in self._gaps:
                whole[gap] = 0
            for layer, part in zip(self._layers, self._parts, strict=True):
                _typed(whole[part], layer).copy_(layer[block])

    def write(self, block_ids: Sequence[int], buffers: Sequence[Any]) -> None:
        """Copies buffers of a block each into blocks of the engine.

        It returns when the copies are in place, on an accelerator too.
        """
        # Where vLLM has made its cache of inference tensors, nobody may change it elsewhere.
        with torch.inference_mode():
            for block, buffer in zip(block_ids, buffers, strict=True):
                whole = view(buffer, torch.uint8, (self.block_bytes,))
                for layer, part in zip(self._layers, self._parts, strict=True):
                    layer[block].copy_(_typed(whole[part], layer))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _typed(raw: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    """Bytes as the tensor of one block of a layer."""
    return raw.view(layer.dtype).view(layer.shape[1:])
