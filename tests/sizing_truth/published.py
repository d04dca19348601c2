"""The models of the catalogue, built at their real size on the device that holds no data."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sizing_truth import build
from sizing_truth import measure as tiny
from tiered_kv.sizing import catalogue

CONTEXTS = (9,)
"""Short: what differs with the context is compared with the tiny models."""


SAME = {"kimi_k2": "deepseek_v3"}
"""Architectures under a name that transformers does not build, and the same under another."""


def names() -> list[str]:
    """Models of the catalogue."""
    return list(catalogue.entries())


def runner(name: str) -> build.Runner:
    """A model of the catalogue, without data."""
    config = dict(catalogue.entries()[name].config)
    model_type = config.pop("model_type")
    if "decoder_attention_heads" in config:
        # The catalogue has no fields of encoders; without them this one is of another size.
        config.setdefault("encoder_attention_heads", config["decoder_attention_heads"])
    made = CONFIG_MAPPING[SAME.get(model_type, model_type)](**config)
    part = made if made.is_encoder_decoder else made.get_text_config(decoder=True)
    found = build.runner_of(dict(catalogue.entries()[name].config), part, "meta")
    for module in found.model.modules():
        # Which expert a token goes to is data; that a cache holds nothing of it is not.
        if type(module).__name__.endswith("Experts"):
            module.forward = _unchanged
    return found


def _unchanged(hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return hidden_states


def measure(name: str) -> tiny.Measured:
    """A model's caches, compared."""
    return tiny.compare(name, runner(name), CONTEXTS)
