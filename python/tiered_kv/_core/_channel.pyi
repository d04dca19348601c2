"""Calls in progress, and where their results come."""

from collections.abc import Sequence
from typing import Any, TypeAlias, final

from typing_extensions import Buffer

from tiered_kv._core._handles import Hold, Namespace, PutOptions, Request
from tiered_kv._core._store import Store

_Blocks: TypeAlias = Buffer | Sequence[Buffer]

@final
class CompletionQueue:
    """The results of one event loop's calls."""

    def __new__(cls) -> CompletionQueue: ...
    def fileno(self) -> int:
        """The descriptor that becomes readable when there are results."""
    def drain(self) -> list[tuple[int, Any]]:
        """Takes all results, each with its call's token."""
    def close(self) -> None:
        """Drops what is there and all that is still to come."""

@final
class Call:
    """A call in progress, whose result comes through its queue under `token`."""

    @property
    def token(self) -> int: ...
    def cancel(self) -> None:
        """Asks the core to end the call; its result still comes, when its buffers are free."""

@final
class Channel:
    """Calls without an event loop; see `tiered_kv.Channel`."""

    def __new__(cls, store: Store, capacity: int) -> Channel: ...
    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def submit_exists(self, ns: Namespace, keys: Buffer) -> int: ...
    def submit_get_into(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: _Blocks,
        timeout: float | None = None,
        req: Request | None = None,
        hold: Hold | None = None,
    ) -> int: ...
    def submit_put(
        self, ns: Namespace, keys: Buffer, buffers: _Blocks, options: PutOptions
    ) -> int: ...
    def submit_delete(self, ns: Namespace, keys: Buffer, timeout: float | None = None) -> int: ...
    def drain(self) -> list[tuple[int, bool, bytes, int, float]]: ...
    def pending(self) -> int: ...
    def quiesce(self, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...
