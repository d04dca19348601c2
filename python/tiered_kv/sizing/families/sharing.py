"""Layers that read the keys and values of others: which, for each architecture."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.sizing.checks import bad, fault
from tiered_kv.sizing.fields import Fields

Sources = list[int | None]
"""For each layer the one whose keys and values it reads; None for its own."""


def last_layers(fields: Fields, types: Sequence[str]) -> Sources:
    """Gemma: the last `num_kv_shared_layers` read the last layer before them of their type."""
    layers = len(types)
    shared = fields.maybe("num_kv_shared_layers") or 0
    name = f"{fields.prefix}num_kv_shared_layers"
    if shared > layers:
        raise bad(name, shared, f"at most the {layers} layers")
    first = layers - shared
    sources: Sources = [None] * layers
    for layer in range(first, layers):
        own = [at for at in range(first) if types[at] == types[layer]]
        if not own and first:
            raise fault(f"`{name}` = {shared} leaves no layer of type {types[layer]!r} to share")
        # Where all are shared, as in an assistant, they read the layers of the model assisted.
        sources[layer] = own[-1] if own else layer
    return sources


def kv_sources(fields: Fields, types: Sequence[str]) -> Sources:
    """Mistral Large 4: the layer whose latents each layer reads."""
    found = fields.integers("kv_source_layers")
    if found is None:
        return [None] * len(types)
    if len(found) < len(types):
        raise bad(f"{fields.prefix}kv_source_layers", found, "one entry a layer")
    return [None if source == at else source for at, source in enumerate(found[: len(types)])]
