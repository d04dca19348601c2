"""Layers that read the keys and values of others, and layers that run more than once."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.sizing.checks import bad, count, fault
from tiered_kv.sizing.fields import MOST_LAYERS, Fields

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


def dory_loops(fields: Fields) -> list[int]:
    """Dory: the middle layers of each loop but the first, unless all loops share a cache."""
    layers = fields.layers()
    first = fields.integer("n_input_layers", least=0)
    end = layers - fields.integer("n_output_layers", least=0)
    if fields.text("recurrent_kv_cache_mode") == "last_loop":
        return []
    return _again(fields, first, end, fields.integer("n_recurrent_loops"))


def inkling_loops(fields: Fields) -> list[int]:
    """Inkling 2: the looped layers of each pass but the first."""
    own = fields.nested("loop_config")
    first = own.maybe("core_start") or fields.integer("loop_layer_index_start", least=0)
    end = own.maybe("core_end") or fields.integer("loop_layer_index_end")
    return _again(fields, first, end, own.maybe("num_passes") or fields.integer("loop_num_passes"))


def _again(fields: Fields, first: int, end: int, passes: int) -> list[int]:
    if not first <= end <= fields.layers():
        raise fault(f"the looped layers {first} to {end} are not within `{fields.prefix}layers`")
    count("loops", passes, least=1, most=MOST_LAYERS)
    again = [*range(first, end)]
    if len(again) * passes > MOST_LAYERS:
        raise fault(f"{passes} loops of {len(again)} layers are more than {MOST_LAYERS} caches")
    return again * (passes - 1)
