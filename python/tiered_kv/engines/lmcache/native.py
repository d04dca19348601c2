"""The native plugin of `lmcache server` and `lmcache bench l2`: keys as text, bytes, nothing else.

`{"type": "native_plugin", "module_path": "tiered_kv.engines.lmcache", "class_name":
"TieredKVNativePlugin", "adapter_params": {...}}`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiered_kv.engines.lmcache.objects import Objects
from tiered_kv.engines.lmcache.options import Options

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TieredKVNativePlugin:
    """The store behind LMCache's interface for connectors written in C++.

    Buffers are LMCache's, and nobody touches them once their batch has ended. No `submit_*` waits
    or raises.

    Args:
        **params: `adapter_params` of the flag; see `tiered_kv.engines.lmcache.options.Options`.

    Raises:
        ConfigError: One is missing, unknown or wrong; the message names it.
        IoFaultError: What was written did not come back as it was.
        TieredKvError: The store cannot be opened.
    """

    def __init__(self, **params: Any) -> None:
        self._objects = Objects(Options.parse(params))

    def event_fd(self) -> int:
        """The descriptor that is readable while there is something to drain; do not read it."""
        return self._objects.fileno()

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> int:
        """Reads objects into buffers of their own length; returns the batch's number."""
        return self._objects.get(keys, buffers)

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> int:
        """Stores objects; returns the batch's number."""
        return self._objects.set(keys, buffers)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Asks which objects are there; returns the batch's number."""
        self._objects.asked(keys)
        return self._objects.exists(keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Deletes objects; returns the batch's number."""
        return self._objects.delete(keys)

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        """Takes what has ended: number, whether all was done, what was not, and each key's part.

        A miss is no failure. Of a batch of which a part was not stored, none counts as stored.
        """
        ends = self._objects.drain()
        return [(end.number, end.ok, end.error, end.done) for end in ends]

    def status(self) -> dict[str, Any]:
        """State of the store."""
        return self._objects.status()

    def close(self) -> None:
        """Ends what is under way, and returns when no buffer is touched any more."""
        self._objects.close()
