"""LMCache on tiered-kv: `--l2-adapter` names this module and one of its classes.

`tiered-kv engines` prints the flags; `docs/lmcache.md` is their page. Importing this package
imports neither LMCache nor torch, nor does `TieredKVNativePlugin`, the thinnest of the adapters;
asking it for one of the others does.
"""

from __future__ import annotations

import importlib

from tiered_kv.engines.lmcache.native import TieredKVNativePlugin

NATIVE_PLUGIN = "TieredKVNativePlugin"
L2_ADAPTER = "TieredKVL2Adapter"
CONNECTOR_ADAPTER = "TieredKVConnectorAdapter"

_MODULES = {L2_ADAPTER: "l2_adapter", CONNECTOR_ADAPTER: "connector"}

__all__ = ["CONNECTOR_ADAPTER", "L2_ADAPTER", "NATIVE_PLUGIN", "TieredKVNativePlugin"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        return getattr(module, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name)
