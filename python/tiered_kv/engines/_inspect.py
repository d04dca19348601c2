"""Which models the engine takes: what the configuration says, checked against the model's cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from tiered_kv import InvalidArgumentError, UnsupportedError
from tiered_kv.engines._kv_layout import GroupShape, KvGeometry
from tiered_kv.sizing import EVERY_TOKEN, Kind, KvSpec, LayerGroup, dtype_named, last, read_config

_PROBE_TOKENS = 2
_SERVED_TYPES = ("full_attention", "sliding_attention")
_SERVED_KINDS = (Kind.FULL, Kind.SLIDING, Kind.MLA)


@dataclass(frozen=True)
class ForwardStyle:
    """How this model's `forward` wants to be called.

    Attributes:
        cache_argument: Name of the argument that takes the cache.
        keeps_logits: Whether `logits_to_keep` is understood.
    """

    cache_argument: str
    keeps_logits: bool


def inspect_model(model: Any) -> tuple[KvGeometry, ForwardStyle]:
    """Checks that the engine can serve `model`, and finds the shape of its cache.

    The configuration is read first, since it gives the clearest message and says what each layer
    keeps; a forward pass over two tokens then shows the cache that the model really makes, which
    must be the same.

    Args:
        model: A `transformers` causal language model in evaluation mode.

    Returns:
        The shape of the cache and the calling convention.

    Raises:
        InvalidArgumentError: The model is in training mode.
        UnsupportedError: Its cache is not one of full or windowed attention, or not what its
            configuration says; or it spans devices.
    """
    if model.training:
        raise InvalidArgumentError("model: in training mode; call model.eval() first")
    _check_config(model.config)
    _check_generation_config(getattr(model, "generation_config", None))
    device = _single_device(model)
    style = _forward_style(model)
    spec = _read(model)
    groups = tuple(_shape(spec, group) for group in spec.groups if group.kind is not Kind.SHARED)
    cache = _probe(model, device)
    dtype = _check_cache(type(model).__name__, cache, groups)
    spec = spec.with_kv_dtype(dtype_named(str(dtype)))
    return KvGeometry(spec, groups, len(cache.layers), dtype, device), style


def _check_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            "config.is_encoder_decoder: True; the engine serves decoders, whose cache depends on "
            "the prompt alone: use a decoder-only model"
        )
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    odd = sorted({kind for kind in kinds or () if kind not in _SERVED_TYPES})
    if odd:
        raise UnsupportedError(
            f"config.layer_types: has {', '.join(odd)}; the engine restores full and "
            f"sliding-window attention only: use a model whose layers are {_names(_SERVED_TYPES)}"
        )
    chunk = getattr(text, "attention_chunk_size", None)
    if kinds is None and chunk is not None:
        raise UnsupportedError(
            f"config.attention_chunk_size: {chunk}; the engine restores full and sliding-window "
            "attention only: load the model with attention_chunk_size=None where no sequence is "
            f"longer than {chunk} tokens, or use another model"
        )


def _names(words: tuple[str, ...]) -> str:
    return " or ".join(words)


def _check_generation_config(config: Any) -> None:
    kind = getattr(config, "cache_implementation", None)
    if kind not in (None, "dynamic", "dynamic_full"):
        raise UnsupportedError(
            f"generation_config.cache_implementation: {kind!r}; blocks are stored as the model "
            "computed them, not from a quantised, static or offloaded cache: set it to None"
        )


def _single_device(model: Any) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise UnsupportedError(
            f"model: its parameters are on several devices ({names}); load it without device_map, "
            "on one device"
        )
    device = devices.pop()
    if device.type == "meta":
        raise UnsupportedError("model: its parameters are on the meta device; load its weights")
    return device


def _forward_style(model: Any) -> ForwardStyle:
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return ForwardStyle(name, "logits_to_keep" in parameters)
    raise UnsupportedError(
        f"model: {type(model).__name__}.forward takes no KV cache; use a causal language model"
    )


def _read(model: Any) -> KvSpec:
    try:
        spec = read_config(model.config.to_dict(), name=type(model).__name__)
    except InvalidArgumentError as error:
        raise UnsupportedError(
            f"config: what the layers of {type(model).__name__} cache cannot be told from it: "
            f"{error}"
        ) from error
    if all(group.kind is Kind.SHARED for group in spec.groups):
        raise UnsupportedError(f"config: {spec.name} caches nothing: there is nothing to restore")
    return spec


def _shape(spec: KvSpec, group: LayerGroup) -> GroupShape:
    """What a group of the specification looks like in a cache.

    Raises:
        UnsupportedError: It holds something else than keys and values of all tokens or a window.
    """
    where = f"config.layer_types: layers {_numbers(group.layers)} of {spec.name}"
    if group.kind not in _SERVED_KINDS:
        raise UnsupportedError(
            f"{where} keep {group.kind.value.replace('_', ' ')}; the engine restores full, "
            "sliding-window and latent attention only: use a model whose layers are all of these"
        )
    spans = {part.span for part in group.parts}
    window = group.window
    if len(group.parts) != 2 or spans != {last(window) if window else EVERY_TOKEN}:
        names = ", ".join(part.name for part in group.parts)
        raise UnsupportedError(
            f"{where} keep {names}; the engine restores pairs of keys and values, of every token "
            "or of a window: use another model"
        )
    if window == 1:
        raise UnsupportedError(
            "config.sliding_window: 1, which attends to nothing before; give 2 or more"
        )
    keys, values = ((part.heads, part.dim) for part in group.parts)
    return GroupShape(group.layers, keys, values, window)


def _numbers(layers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, layers[:4]))
    return f"{shown} and {len(layers) - 4} more" if len(layers) > 4 else shown


def _probe(model: Any, device: torch.device) -> DynamicCache:
    name = type(model).__name__
    ids = torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0)
    try:
        with torch.inference_mode():
            output = model(ids, use_cache=True)
    except Exception as error:
        raise UnsupportedError(
            f"model: {name} cannot run a forward pass over {_PROBE_TOKENS} tokens ({error}); the "
            "engine serves causal language models that take token ids alone"
        ) from error
    cache = getattr(output, "cache", None)
    if cache is None:
        cache = getattr(output, "past_key_values", None)
    if not isinstance(cache, DynamicCache):
        made = type(cache).__name__ if cache is not None else "no cache"
        raise UnsupportedError(
            f"model: {name} makes {made}, not a DynamicCache; use a decoder-only model"
        )
    return cache


def _check_cache(name: str, cache: DynamicCache, groups: tuple[GroupShape, ...]) -> torch.dtype:
    """Holds what a forward pass left in a cache against what the configuration says.

    Returns:
        The type of its elements. The configuration's is that of the files: a model may have been
        converted since.
    """
    expected = dict.fromkeys(range(len(cache.layers)), "nothing")
    for group in groups:
        expected.update(dict.fromkeys(group.layers, _expected(group)))
    dtypes: set[torch.dtype] = set()
    for index, wanted in expected.items():
        layer = cache.layers[index] if index < len(cache.layers) else DummyLayer()
        found = _found(layer)
        if found != wanted:
            raise UnsupportedError(
                f"config: says that layer {index} of {name} caches {wanted}, but after "
                f"{_PROBE_TOKENS} tokens its cache has {found}; use a model whose cache is what "
                "its configuration says"
            )
        dtypes |= {part.dtype for part in (layer.keys, layer.values) if part is not None}
    if len(dtypes) != 1:
        shown = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedError(
            f"model: the cache of {name} has elements of several types ({shown}); convert the "
            "model to one type"
        )
    return dtypes.pop()


def _expected(group: GroupShape) -> str:
    """What a layer of a group has in a cache after the probe, as `_found` says it."""
    tokens = min(_PROBE_TOKENS, group.window - 1) if group.window else _PROBE_TOKENS
    window = f", window {group.window}" if group.window else ""
    shapes = ([1, heads, tokens, dim] for heads, dim in (group.keys, group.values))
    return _pair(*shapes) + window


def _found(layer: Any) -> str:
    if type(layer) is DynamicSlidingWindowLayer:
        window = f", window {layer.sliding_window}"
    elif type(layer) is DynamicLayer:
        window = ""
    else:
        return "nothing" if type(layer) is DummyLayer else f"a {type(layer).__name__}"
    if layer.keys is None or layer.values is None:
        return "nothing"
    return _pair(list(layer.keys.shape), list(layer.values.shape)) + window


def _pair(keys: list[int], values: list[int]) -> str:
    return f"keys {keys} and values {values}"
