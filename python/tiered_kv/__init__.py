"""A tiered KV-cache store for LLM serving: host memory and NVMe, verified and durable.

```python
async with TieredStore.open(dram_capacity="512MiB") as store:
    ns = store.namespace(NamespaceSpec("model", "weights", "float32", KvLayout(32, 4096)))
    keys = ns.keys_from_tokens(range(64))
    await store.put(ns, keys, [bytes(4096)] * 2)
    with await store.get(ns, keys) as leases:
        assert leases.hits == 2
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered_kv._core import (
        FORMAT_VERSION,
        KEY_BYTES,
        AttachedHold,
        CloseReport,
        DeleteReport,
        FlushReport,
        Hold,
        IntoReport,
        Lease,
        Leases,
        Lookup,
        Namespace,
        PutReport,
        Region,
        Request,
        Reservation,
        ScrubReport,
        Slots,
        __version__,
    )
    from tiered_kv.attached import AttachedStore
    from tiered_kv.channel import Channel, Completion
    from tiered_kv.config import StoreConfig
    from tiered_kv.errors import (
        CancelledCallError,
        ClosedError,
        ConfigError,
        FormatMismatchError,
        InternalError,
        InUseError,
        InvalidArgumentError,
        IoFaultError,
        NoSpaceError,
        NotFoundError,
        StorePermissionError,
        TieredKvError,
        UnsupportedError,
    )
    from tiered_kv.predictor import PairPosterior, Predictor
    from tiered_kv.spec import KvLayout, NamespaceSpec, RequestContext
    from tiered_kv.store import TieredStore

__all__ = [
    "FORMAT_VERSION",
    "KEY_BYTES",
    "AttachedHold",
    "AttachedStore",
    "CancelledCallError",
    "Channel",
    "CloseReport",
    "ClosedError",
    "Completion",
    "ConfigError",
    "DeleteReport",
    "FlushReport",
    "FormatMismatchError",
    "Hold",
    "InUseError",
    "InternalError",
    "IntoReport",
    "InvalidArgumentError",
    "IoFaultError",
    "KvLayout",
    "Lease",
    "Leases",
    "Lookup",
    "Namespace",
    "NamespaceSpec",
    "NoSpaceError",
    "NotFoundError",
    "PairPosterior",
    "Predictor",
    "PutReport",
    "Region",
    "Request",
    "RequestContext",
    "Reservation",
    "ScrubReport",
    "Slots",
    "StoreConfig",
    "StorePermissionError",
    "TieredKvError",
    "TieredStore",
    "UnsupportedError",
    "__version__",
]

# A name is imported when it is first asked for: a command that sizes a model needs neither the core
# nor asyncio, and would wait longer for them than for its answer.
_HOMES = {
    "AttachedStore": "attached",
    "Channel": "channel",
    "Completion": "channel",
    "StoreConfig": "config",
    "CancelledCallError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "FormatMismatchError": "errors",
    "InternalError": "errors",
    "InUseError": "errors",
    "InvalidArgumentError": "errors",
    "IoFaultError": "errors",
    "NoSpaceError": "errors",
    "NotFoundError": "errors",
    "StorePermissionError": "errors",
    "TieredKvError": "errors",
    "UnsupportedError": "errors",
    "PairPosterior": "predictor",
    "Predictor": "predictor",
    "KvLayout": "spec",
    "NamespaceSpec": "spec",
    "RequestContext": "spec",
    "TieredStore": "store",
}
"""The module of each public name; the others are the core's."""

# Not for a type checker, to which every name would then be one of this module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name)
        home = importlib.import_module(f"{__name__}.{_HOMES.get(name, '_core')}")
        return globals().setdefault(name, getattr(home, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
