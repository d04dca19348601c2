"""vLLM on tiered-kv: `--kv-transfer-config` names this module and what of it is to be used.

`tiered-kv engines` prints the flags; `docs/vllm.md` is their page. Importing this package imports
neither vLLM nor torch; asking it for one of its classes does.
"""

from __future__ import annotations

import importlib

CONNECTOR = "TieredKVConnector"
TIER = "TieredKV"
CPU_SPEC = "CpuTieringSpec"
POLICY = "TieredKVPolicy"

__all__ = ["CONNECTOR", "CPU_SPEC", "POLICY", "TIER"]

_MODULES = {
    CONNECTOR: "connector",
    TIER: "tier",
    CPU_SPEC: "cpu_offload",
    POLICY: "cache_policy",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        return getattr(module, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name)
