"""LMCache on tiered-kv: `--l2-adapter` names this module and one of its classes.

`tiered-kv engines` prints the flags; `docs/lmcache.md` is their page. Importing this package
imports neither LMCache nor torch, nor does `TieredKVNativePlugin`, the thinnest of the adapters;
asking it for one of the others does.
"""

from __future__ import annotations

from tiered_kv.engines._lazy import load
from tiered_kv.engines.lmcache.native import TieredKVNativePlugin

NATIVE_PLUGIN = "TieredKVNativePlugin"
L2_ADAPTER = "TieredKVL2Adapter"
CONNECTOR_ADAPTER = "TieredKVConnectorAdapter"

_MODULES = {L2_ADAPTER: "l2_adapter", CONNECTOR_ADAPTER: "connector"}

__all__ = ["CONNECTOR_ADAPTER", "L2_ADAPTER", "NATIVE_PLUGIN", "TieredKVNativePlugin"]


def __getattr__(name: str) -> object:
    return load(__name__, _MODULES, name)
