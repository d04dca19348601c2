"""The paged cache of an engine as blocks of bytes: one block, all layers of the rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        self._places: dict[str, int] = {}
        shared: set[int] = set()
        seen: dict[int, int] = {}
        at = 0
        for name, cache in caches.items():
            if not isinstance(cache, torch.Tensor) or cache.dim() < 2 or cache.shape[0] % blocks:
                message = (
                    f"vllm: the cache of layer {name} is not one tensor, blocks first: this "
                    "model's state cannot be stored yet"
                )
                raise UnsupportedError(message, op="engines")
            if cache.data_ptr() in seen:
                # The layer uses another one's cache.
                self._places[name] = seen[cache.data_ptr()]
                shared.add(seen[cache.data_ptr()])
                continue
            self._places[name] = seen[cache.data_ptr()] = len(self._layers)
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
        self._own = {name: at for name, at in self._places.items() if at not in shared}

    @property
    def layers(self) -> int:
        """Number of caches, each of a layer or of several that share it."""
        return len(self._layers)

    def layer(self, name: str) -> int | None:
        """Place of a layer's cache among them; None for a layer that has none here."""
        return self._places.get(name)

    def own_layer(self, name: str) -> int | None:
        """The same, of a layer that shares its cache with no other."""
        return self._own.get(name)

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

    def read(
        self, block_ids: Sequence[int], buffers: Sequence[Any], layer: int | None = None
    ) -> None:
        """Copies blocks of the engine into writable buffers of a block each.

        Args:
            block_ids: Which blocks.
            buffers: A buffer for each.
            layer: The only layer to be copied, by its place; None for all. On an accelerator such a
                copy may be in progress when this returns, on the stream that is the current one.
        """
        chosen = self._chosen(layer)
        for block, buffer in zip(block_ids, buffers, strict=True):
            whole = torch.frombuffer(buffer, dtype=torch.uint8)
            for gap in self._gaps:
                whole[gap] = 0
            for cache, part in chosen:
                _typed(whole[part], cache).copy_(cache[block], non_blocking=layer is not None)

    def write(
        self, block_ids: Sequence[int], buffers: Sequence[Any], layer: int | None = None
    ) -> None:
        """Copies buffers of a block each into blocks of the engine.

        It returns when the copies are in place, on an accelerator too: those of one layer alone are
        waited for on the stream that is the current one, others on all.

        Args:
            block_ids: Which blocks.
            buffers: A buffer for each.
            layer: The only layer to be copied, by its place; None for all.
        """
        chosen = self._chosen(layer)
        # Where vLLM has made its cache of inference tensors, nobody may change it elsewhere.
        with torch.inference_mode():
            for block, buffer in zip(block_ids, buffers, strict=True):
                whole = view(buffer, torch.uint8, (self.block_bytes,))
                for cache, part in chosen:
                    cache[block].copy_(_typed(whole[part], cache))
        if self.device.type != "cpu":
            if layer is None:
                torch.accelerator.synchronize(self.device)
            else:
                torch.accelerator.current_stream(self.device).synchronize()

    def _chosen(self, layer: int | None) -> list[tuple[torch.Tensor, slice]]:
        if layer is None:
            return list(zip(self._layers, self._parts, strict=True))
        return [(self._layers[layer], self._parts[layer])]


class SideStream:
    """A stream for copies beside the computation; on CPUs copies have ended when they return.

    Args:
        device: Where the engine's cache is; None for no stream of its own.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        apart = device is not None and device.type != "cpu"
        self._stream = torch.Stream(device) if apart else None

    def follow(self) -> None:
        """Has later copies wait for what the calling thread's stream has been given to do."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Puts the copies of its block on this stream."""
        if self._stream is None:
            yield
        else:
            with self._stream:
                yield

    def wait(self) -> None:
        """Waits until all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()


def _typed(raw: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    """Bytes as the tensor of one block of a layer."""
    return raw.view(layer.dtype).view(layer.shape[1:])
