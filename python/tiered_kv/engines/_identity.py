"""The namespace of a model's blocks: everything that makes their bytes what they are."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from tiered_kv import NamespaceSpec
from tiered_kv.engines._fingerprint import config_fingerprint
from tiered_kv.engines._kv_layout import KvGeometry

# Of each slab; which layers it has, the model's configuration says.
_BLOCK_LAYOUT = "layers,2,kv_heads,tokens,head_dim/1"


def namespace_spec(
    model: Any,
    geometry: KvGeometry,
    tokens_per_block: int,
    *,
    weights: str,
    lora: str,
    salt: str,
    numerics: str | None,
) -> NamespaceSpec:
    """The specification of the namespace that an engine reads and writes.

    Args:
        model: The model.
        geometry: The shape of its cache.
        tokens_per_block: Tokens of a block.
        weights: Fingerprint of the weights.
        lora: Name of the adapter.
        salt: The tenant's salt.
        numerics: `numerics(...)` where blocks must be equal to the bit, else None.
    """
    return NamespaceSpec(
        model=f"{type(model).__name__}/{config_fingerprint(model.config)[:32]}",
        weights=weights,
        kv_dtype=geometry.dtype_name,
        layout=geometry.layout(tokens_per_block),
        rope=rope_parameters(model.config),
        lora=lora,
        salt=salt,
        parallel=_BLOCK_LAYOUT,
        engine="transformers" if numerics is None else f"transformers exact {numerics}",
    )


def numerics(model: Any, device: torch.device) -> str:
    """Whatever changes the last bits of a computation from the same tokens and weights.

    It can change while a process runs (`torch.set_num_threads`), so it is asked for each request.
    """
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    parts = {
        "attention": getattr(model.config, "_attn_implementation", None),
        "device": f"{device.type} {machine}",
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return " ".join(f"{name}={value}" for name, value in parts.items())


def rope_parameters(config: Any) -> dict[str, str | int | float | bool]:
    """Rope parameters as named scalars; those of nested groups get dotted names."""
    text = config.get_text_config(decoder=True)
    flat: dict[str, str | int | float | bool] = {}
    for field in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        _flatten(field, getattr(text, field, None), flat)
    return flat


def _flatten(name: str, value: Any, into: dict[str, str | int | float | bool]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, into)
    elif isinstance(value, str | int | float | bool):
        into[name] = value
    elif value is not None:
        into[name] = json.dumps(value, default=str)
