"""The store's own calls."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final, overload

from typing_extensions import Buffer

from tiered_kv._core._channel import Channel
from tiered_kv._core._handles import Hold, Namespace, PutOptions, Request
from tiered_kv._core._memory import Leases, Region, Reservation, Slots
from tiered_kv._core._operator import Operator
from tiered_kv._core._results import (
    CloseReport,
    DeleteReport,
    FlushReport,
    IntoReport,
    Lookup,
    PutReport,
    ScrubReport,
)
from tiered_kv.spec import NamespaceSpec, RequestContext

_Blocks: TypeAlias = Buffer | Sequence[Buffer] | Slots
_OnStall: TypeAlias = Literal["wait", "bounce"]
_Rule: TypeAlias = Literal["all", "last"] | tuple[Literal["window"], int]
_Seconds: TypeAlias = float | None

@final
class Store:
    """An open store.

    Without a channel a call waits for its result. With one it returns the call's number, under
    which the result comes through the channel; with an event loop's, the result where nothing has
    to be waited for.
    """

    @staticmethod
    def open(fields: dict[str, Any]) -> Store: ...
    def namespace(self, spec: NamespaceSpec) -> Namespace: ...
    def lookup(self, ns: Namespace, keys: Buffer, mode: str = "prefix") -> Lookup: ...
    def contains(self, ns: Namespace, key: Buffer) -> bool: ...
    def lookup_hybrid(self, ns: Namespace, groups: Sequence[tuple[Buffer, _Rule]]) -> int: ...
    def exists(self, ns: Namespace, keys: Buffer, channel: Channel) -> int: ...
    def channel(self, capacity: int) -> Channel: ...
    def hold(self, ns: Namespace, keys: Buffer, ttl: float) -> Hold: ...
    def register(self, memory: Buffer, slot_bytes: int, stride: int | None = None) -> Region: ...
    def lend(self, buffers: Sequence[Buffer]) -> Slots: ...
    def prefetch(self, ns: Namespace, keys: Buffer) -> None: ...
    @overload
    def get(
        self,
        ns: Namespace,
        keys: Buffer,
        timeout: float | None = None,
        req: Request | None = None,
        hold: Hold | None = None,
        channel: None = None,
        recompute_s: float | None = None,
    ) -> Leases: ...
    @overload
    def get(
        self,
        ns: Namespace,
        keys: Buffer,
        timeout: float | None,
        req: Request | None,
        hold: Hold | None,
        channel: Channel,
        recompute_s: float | None = None,
    ) -> Leases | int: ...
    @overload
    def get_into(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: _Blocks,
        timeout: float | None = None,
        req: Request | None = None,
        hold: Hold | None = None,
        channel: None = None,
        on_stall: _OnStall = "wait",
        recompute_s: float | None = None,
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
        channel: Channel,
        on_stall: _OnStall = "wait",
        recompute_s: float | None = None,
    ) -> IntoReport | int: ...
    @overload
    def put(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: _Blocks,
        options: PutOptions,
        channel: None = None,
    ) -> PutReport: ...
    @overload
    def put(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: _Blocks,
        options: PutOptions,
        channel: Channel,
    ) -> PutReport | int: ...
    @overload
    def flush(self, timeout: float | None = None, channel: None = None) -> FlushReport: ...
    @overload
    def flush(self, timeout: float | None, channel: Channel) -> FlushReport | int: ...
    @overload
    def scrub(self, timeout: float | None = None, channel: None = None) -> ScrubReport: ...
    @overload
    def scrub(self, timeout: float | None, channel: Channel) -> ScrubReport | int: ...
    @overload
    def delete(
        self, ns: Namespace, keys: Buffer, timeout: float | None = None, channel: None = None
    ) -> DeleteReport: ...
    @overload
    def delete(
        self, ns: Namespace, keys: Buffer, timeout: float | None, channel: Channel
    ) -> DeleteReport | int: ...
    @overload
    def delete_all(
        self,
        ns: Namespace,
        seconds: _Seconds = None,
        timeout: _Seconds = None,
        channel: None = None,
    ) -> DeleteReport: ...
    @overload
    def delete_all(
        self, ns: Namespace, seconds: float | None, timeout: float | None, channel: Channel
    ) -> DeleteReport | int: ...
    def reserve(self, ns: Namespace, keys: Buffer, options: PutOptions) -> Reservation: ...
    def publish(self, reservation: Reservation) -> PutReport: ...
    def begin_request(self, context: RequestContext) -> Request: ...
    def operator(self) -> Operator: ...
    def set_quota(
        self, ns: Namespace, dram_bytes: int | None = None, nvme_bytes: int | None = None
    ) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def predictor(self) -> dict[str, Any] | None: ...
    def health(self) -> dict[str, Any]: ...
    def audit(self) -> dict[str, Any]: ...
    def events(self, since: int | None = None) -> list[dict[str, Any]]: ...
    @property
    def open_times(self) -> dict[str, float]: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> CloseReport: ...

@final
class StallGate:
    """Stalls the reads of a store's drives, for tests. Release builds lack it."""

    def __new__(cls) -> StallGate: ...
    def open_store(self, fields: dict[str, Any]) -> Store: ...
    def shut(self) -> None: ...
    def open(self) -> None: ...
    @property
    def waiting(self) -> int:
        """Reads that wait."""
