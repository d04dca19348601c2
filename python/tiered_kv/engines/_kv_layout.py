"""Which models the engine takes, and the shape of their KV cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tiered_kv import InvalidArgumentError, UnsupportedError

_PROBE_TOKENS = 2


@dataclass(frozen=True)
class KvGeometry:
    """The shape of a model's KV cache.

    A stored block is the contiguous tensor `[layers, 2, kv_heads, tokens_per_block, head_dim]`;
    index 0 of the second dimension holds keys, index 1 values.

    Attributes:
        layers: Layers with a cache of their own.
        kv_heads: Key and value heads of a layer.
        head_dim: Elements of one head's key, and of its value.
        dtype: Element type of the cache.
        device: Where the model's cache lives.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def rows(self) -> int:
        """Rows of `tokens x head_dim` in a block: one for each layer, key or value, and head."""
        return self.layers * 2 * self.kv_heads

    def block_bytes(self, tokens: int) -> int:
        """Bytes of a block of `tokens` tokens."""
        element_bytes: int = self.dtype.itemsize
        return self.rows * tokens * self.head_dim * element_bytes

    @property
    def dtype_name(self) -> str:
        """The dtype as in `NamespaceSpec.kv_dtype`, such as `float32`."""
        return str(self.dtype).removeprefix("torch.")


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

    The config is checked first, since it gives the clearest message; a forward pass over two tokens
    then shows the cache that the model really makes.

    Args:
        model: A `transformers` causal language model in evaluation mode.

    Returns:
        The shape of the cache and the calling convention.

    Raises:
        InvalidArgumentError: The model is in training mode.
        UnsupportedError: Its cache is not one of full attention, or it spans devices.
    """
    if model.training:
        raise InvalidArgumentError("model: in training mode; call model.eval() first")
    _check_config(model.config)
    _check_generation_config(getattr(model, "generation_config", None))
    device = _single_device(model)
    style = _forward_style(model)
    return _probe(model, device), style


def _check_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            "config.is_encoder_decoder: True; the engine serves decoders, whose cache depends on "
            "the prompt alone: use a decoder-only model"
        )
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    odd = sorted({kind for kind in kinds or () if kind != "full_attention"})
    if odd:
        raise UnsupportedError(
            f"config.layer_types: has {', '.join(odd)}; the engine restores full-attention caches "
            "only: use a model whose layers are all full_attention"
        )
    for field in ("sliding_window", "attention_chunk_size"):
        size = getattr(text, field, None)
        if kinds is None and size is not None:
            raise UnsupportedError(
                f"config.{field}: {size}; the engine restores full-attention caches only: load the "
                f"model with {field}=None where no sequence is longer than {size} tokens, or use a "
                "model with full attention"
            )


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


def _probe(model: Any, device: torch.device) -> KvGeometry:
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
            f"model: {name} makes {made}, not a DynamicCache; use a decoder with full attention"
        )
    kinds = {type(layer) for layer in cache.layers}
    if kinds != {DynamicLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
        raise UnsupportedError(
            f"config.layer_types: {name} makes cache layers of type {names}; the engine restores "
            "full-attention caches only"
        )
    return _geometry(name, cache, device)


def _geometry(name: str, cache: DynamicCache, device: torch.device) -> KvGeometry:
    tensors = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    shapes = {None if part is None else tuple(part.shape) for part in tensors}
    dtypes = {part.dtype for part in tensors if part is not None}
    shape = next(iter(shapes))
    if len(shapes) != 1 or len(dtypes) != 1 or shape is None:
        raise UnsupportedError(
            f"config: the cache of {name} has keys and values of several shapes or types "
            f"({sorted(map(str, shapes))}), as latent attention has; use a model whose layers "
            "cache keys and values of one shape"
        )
    if len(shape) != 4 or shape[0] != 1 or shape[2] != _PROBE_TOKENS:
        raise UnsupportedError(
            f"config: the cache of {name} has shape {shape} for {_PROBE_TOKENS} tokens; the engine "
            "needs [1, kv_heads, tokens, head_dim]"
        )
    return KvGeometry(len(cache.layers), shape[1], shape[3], dtypes.pop(), device)
