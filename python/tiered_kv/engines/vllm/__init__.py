"""vLLM on tiered-kv: `--kv-transfer-config` names this module and what of it is to be used.

`tiered-kv engines` prints the flags; `docs/vllm.md` is their page. Importing this package imports
neither vLLM nor torch; asking it for one of its classes does.
"""

from __future__ import annotations

from tiered_kv.engines._lazy import load

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
    return load(__name__, _MODULES, name)
