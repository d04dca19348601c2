"""What a cache of transformers holds: its tensors, found wherever they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

CACHE_FIELDS = ("cache", "cache_params", "state", "past_key_values", "mems", "past_buckets_states")
"""Fields of a model's output under which a cache is returned, newest name first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Bytes that the tensors of a cache hold.

    Attributes:
        bytes: Of all elements that some tensor shows: numel x itemsize, what several tensors show
            counted once.
        counters: Of single integers kept as tensors: lengths of what is held.
        spare: Of the storages, beyond what any tensor shows.
        classes: Names of the classes of the cache and of its layers.
    """

    bytes: int
    counters: int
    spare: int
    classes: frozenset[str]


def held(cache: Any) -> Held:
    """Counts what a cache holds.

    Args:
        cache: A cache, or any nest of lists, tuples, mappings and objects with tensors.
    """
    tensors: list[torch.Tensor] = []
    classes: set[str] = set()
    _walk(cache, tensors, classes, set())
    counting = [tensor for tensor in tensors if _counts(tensor)]
    counters = sum(tensor.element_size() for tensor in counting)
    stores: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not _counts(tensor):
            stores.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    total = spare = 0
    for views in stores.values():
        masks = [_mask(view) for view in views]
        union = torch.stack(masks).any(dim=0).sum()
        # What one tensor shows several times, by `expand`, counts as often as it shows it.
        aliases = sum(mask.sum() for mask in masks) - union
        total += sum(view.numel() * view.element_size() for view in views) - int(aliases)
        spare += views[0].untyped_storage().nbytes() - int(union)
    return Held(total, counters, spare, frozenset(classes))


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dim() < 2 and not tensor.is_floating_point()


def _mask(view: torch.Tensor) -> torch.Tensor:
    """Which bytes of its storage a tensor shows."""
    size = view.element_size()
    seen = torch.zeros(view.untyped_storage().nbytes(), dtype=torch.bool)
    shape = (*view.shape, size)
    strides = (*(stride * size for stride in view.stride()), 1)
    seen.as_strided(shape, strides, view.storage_offset() * size).fill_(True)
    return seen


def _walk(value: Any, tensors: list[torch.Tensor], classes: set[str], visited: set[int]) -> None:
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return
    for part in _parts(value, classes):
        _walk(part, tensors, classes, visited)


def _parts(value: Any, classes: set[str]) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif dataclasses.is_dataclass(value):
        yield from vars(value).values()
    elif _is_of_a_cache(type(value)):
        classes.add(type(value).__name__)
        yield from vars(value).values()


def _is_of_a_cache(kind: type) -> bool:
    return kind.__module__.startswith("transformers.") and "Config" not in kind.__name__
