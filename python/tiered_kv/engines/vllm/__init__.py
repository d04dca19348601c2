"""vLLM on tiered-kv: `--kv-transfer-config` names this module and `TieredKVConnector`.

`tiered-kv engines` prints the flag; `docs/vllm.md` is its page. Importing this package imports
neither vLLM nor torch; asking it for the connector does.
"""

from __future__ import annotations

import importlib

CONNECTOR = "TieredKVConnector"

__all__ = ["CONNECTOR"]


def __getattr__(name: str) -> object:
    if name == CONNECTOR:
        module = importlib.import_module(f"{__name__}.connector")
        return getattr(module, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name)
