"""What tells the namespaces of vLLM's models apart."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig

from tiered_kv import NamespaceSpec
from tiered_kv.engines.vllm.identity import Place, base_spec
from tiered_kv.engines.vllm.paged import PagedCache

TOKENS = 16


def _identity(**changes: Any) -> NamespaceSpec:
    """The namespace of a model that is configured in some way."""
    model = {
        "architectures": ["M"],
        "dtype": torch.float32,
        "hf_config": PretrainedConfig(),
        "max_model_len": 4096,
        "quantization": None,
        "quantization_config": None,
    }
    load: dict[str, Any] = {"load_format": "auto", "model_loader_extra_config": {}}
    cache = {"cache_dtype": "auto", "mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto"}
    cache |= {name: changes.pop(name) for name in list(changes) if name in cache}
    for name, value in changes.items():
        (load if name in load else model)[name] = value
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**cache),
        compilation_config=SimpleNamespace(static_forward_context={}),
        load_config=SimpleNamespace(**load),
        model_config=SimpleNamespace(**model),
    )
    paged = PagedCache({"a": torch.zeros(2, 4, 4)}, 2)
    return base_spec(config, paged, TOKENS, Place(0, 0, 1, "tp=0/1 pp=0/1", 1), "w")


def check_what_changes_the_weights_or_rope_changes_the_namespace() -> None:
    plain = _identity()
    assert plain == _identity()
    changes: list[dict[str, Any]] = [
        {"max_model_len": 131072},
        {"dtype": torch.bfloat16},
        {"cache_dtype": "fp8_e5m2"},
        {"quantization_config": {"linear": {"weight": "fp8_per_channel_static"}}},
        {"load_format": "runai_streamer"},
        {"model_loader_extra_config": {"qlora_adapter_name_or_path": "a"}},
        {"mamba_cache_dtype": "float16"},
        {"mamba_ssm_cache_dtype": "float32"},
    ]
    for change in changes:
        assert _identity(**change) != plain, change


def check_what_becomes_of_an_image_changes_the_namespace() -> None:
    with tempfile.TemporaryDirectory() as made:
        images = Path(made, "preprocessor_config.json")

        def media(normalized: bool, **fields: Any) -> NamespaceSpec:
            images.write_text(json.dumps({"do_normalize": normalized}))
            config = SimpleNamespace(**{"mm_processor_kwargs": None, **fields})
            return _identity(multimodal_config=config, model=made, revision=None)

        plain = media(True)
        assert plain == media(True)
        assert media(False) != plain
        assert media(True, mm_processor_kwargs={"num_crops": 4}) != plain
