"""The store's own calls."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final, overload

from typing_extensions import Buffer

from tiered_kv._core._channel import Call, CompletionQueue
from tiered_kv._core._handles import Hold, Namespace, PutOptions, Request
from tiered_kv._core._memory import Leases, Reservation
from tiered_kv._core._results import (
    CloseReport,
    DeleteReport,
    FlushReport,
    IntoReport,
    Lookup,
    PutReport,
)
from tiered_kv.spec import NamespaceSpec, RequestContext

_Blocks: TypeAlias = Buffer | Sequence[Buffer]
_Rule: TypeAlias = Literal["all", "last"] | tuple[Literal["window"], int]
_Seconds: TypeAlias = float | None

@final
class Store:
    """An open store.

    Without a completion queue a call waits for its result. With one it returns the result where
    nothing has to be waited for, else a `Call`, whose result comes through the queue.
    """

    @staticmethod
    def open(fields: dict[str, Any]) -> Store: ...
    def namespace(self, spec: NamespaceSpec) -> Namespace: ...
    def lookup(self, ns: Namespace, keys: Buffer, mode: str = "prefix") -> Lookup: ...
    def contains(self, ns: Namespace, key: Buffer) -> bool: ...
    def lookup_hybrid(self, ns: Namespace, groups: Sequence[tuple[Buffer, _Rule]]) -> int: ...
    def hold(self, ns: Namespace, keys: Buffer, ttl: float) -> Hold: ...
    def prefetch(self, ns: Namespace, keys: Buffer) -> None: ...
    @overload
    def get(
        self,
        ns: Namespace,
        keys: Buffer,
        timeout: float | None = None,
        req: Request | None = None,
        hold: Hold | None = None,
        queue: None = None,
    ) -> Leases: ...
    @overload
    def get(
        self,
        ns: Namespace,
        keys: Buffer,
        timeout: float | None,
        req: Request | None,
        hold: Hold | None,
        queue: CompletionQueue,
    ) -> Leases | Call: ...
    @overload
    def get_into(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: _Blocks,
        timeout: float | None = None,
        req: Request | None = None,
        hold: Hold | None = None,
        queue: None = None,
    ) -> IntoReport: ...
    @overload
    def get_into(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: _Blocks,
        timeout: float | None,
        req: Request | None,
        hold: Hold | None,
        queue: CompletionQueue,
    ) -> IntoReport | Call: ...
    @overload
    def put(
        self, ns: Namespace, keys: Buffer, buffers: _Blocks, options: PutOptions, queue: None = None
    ) -> PutReport: ...
    @overload
    def put(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: _Blocks,
        options: PutOptions,
        queue: CompletionQueue,
    ) -> PutReport | Call: ...
    @overload
    def flush(self, timeout: float | None = None, queue: None = None) -> FlushReport: ...
    @overload
    def flush(self, timeout: float | None, queue: CompletionQueue) -> FlushReport | Call: ...
    @overload
    def delete(
        self, ns: Namespace, keys: Buffer, timeout: float | None = None, queue: None = None
    ) -> DeleteReport: ...
    @overload
    def delete(
        self, ns: Namespace, keys: Buffer, timeout: float | None, queue: CompletionQueue
    ) -> DeleteReport | Call: ...
    @overload
    def delete_all(
        self, ns: Namespace, seconds: _Seconds = None, timeout: _Seconds = None, queue: None = None
    ) -> DeleteReport: ...
    @overload
    def delete_all(
        self, ns: Namespace, seconds: float | None, timeout: float | None, queue: CompletionQueue
    ) -> DeleteReport | Call: ...
    def reserve(self, ns: Namespace, keys: Buffer, options: PutOptions) -> Reservation: ...
    def publish(self, reservation: Reservation) -> PutReport: ...
    def begin_request(self, context: RequestContext) -> Request: ...
    def stats(self) -> dict[str, Any]: ...
    def health(self) -> dict[str, Any]: ...
    def audit(self) -> dict[str, Any]: ...
    def events(self, since: int = 0) -> list[dict[str, Any]]: ...
    @property
    def open_times(self) -> dict[str, float]: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> CloseReport: ...
