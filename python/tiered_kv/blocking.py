"""The store without asyncio: the same calls, which wait without the GIL.

Ctrl-C ends a wait with KeyboardInterrupt, once the core no longer touches the caller's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tiered_kv import _core
from tiered_kv._base import StoreBase
from tiered_kv.attached import BlockingAttachedStore, Path
from tiered_kv.config import StoreConfig, resolve

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered_kv._base import Buffers, OnStall

__all__ = ["BlockingAttachedStore", "BlockingStore", "TieredStore"]


class BlockingStore(StoreBase):
    """A store of KV blocks over memory and NVMe, for threads. Make one with `open`."""

    @classmethod
    def open(cls, config: StoreConfig | None = None, **fields: Any) -> Self:
        """Opens a store, finding again what its directory holds.

        Args:
            config: The configuration. None: the keyword arguments, or the environment's.
            **fields: Fields of `StoreConfig` instead of one.

        Returns:
            The store; `with` closes it at the end.

        Raises:
            TieredKvError: As `tiered_kv.TieredStore.open`.
        """
        return cls(_core.Store.open(resolve(config, fields)))

    @staticmethod
    def attach(path: Path, timeout: float | None = None) -> BlockingAttachedStore:
        """Attaches to a store that another process has open.

        Args:
            path: The first directory of the store's `nvme_paths`.
            timeout: Seconds that a call waits for the owner; 0.3 by default.

        Returns:
            The attached store; `with` ends the connection at the end.

        Raises:
            TieredKvError: As `tiered_kv.TieredStore.attach`.
        """
        return BlockingAttachedStore(_core.Attached.open(path, timeout))

    def get(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        timeout: float | None = None,
        req: _core.Request | None = None,
        hold: _core.Hold | None = None,
        recompute_s: float | None = None,
    ) -> _core.Leases:
        """Leases blocks; see `tiered_kv.TieredStore.get`."""
        return self._core.get(ns, keys, timeout, req, hold, None, recompute_s)

    def get_into(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        buffers: Buffers,
        timeout: float | None = None,
        req: _core.Request | None = None,
        hold: _core.Hold | None = None,
        on_stall: OnStall = "wait",
        recompute_s: float | None = None,
    ) -> _core.IntoReport:
        """Brings blocks into the caller's memory; see `tiered_kv.TieredStore.get_into`."""
        return self._core.get_into(
            ns, keys, buffers, timeout, req, hold, None, on_stall, recompute_s
        )

    def put(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        buffers: Buffers,
        *,
        parent: Buffer | None = None,
        depth: int = 0,
        chain: bool = True,
        tokens: Sequence[int] | None = None,
        chunk_ends: Sequence[bool] | None = None,
        computed: Literal["prefill", "decode"] = "prefill",
        block_type: str | None = None,
        wait: float | None = None,
        timeout: float | None = None,
        req: _core.Request | None = None,
    ) -> _core.PutReport:
        """Stores blocks; see `tiered_kv.TieredStore.put`."""
        options = _core.PutOptions(
            parent=parent,
            depth=depth,
            chain=chain,
            tokens=tokens,
            chunk_ends=chunk_ends,
            computed=computed,
            block_type=block_type,
            wait=wait,
            timeout=timeout,
            req=req,
        )
        return self._core.put(ns, keys, buffers, options)

    def publish(self, reservation: _core.Reservation) -> _core.PutReport:
        """Makes a reservation's blocks visible; see `tiered_kv.TieredStore.publish`."""
        return self._core.publish(reservation)

    def flush(self, timeout: float | None = None) -> _core.FlushReport:
        """Waits until everything stored is durable; see `tiered_kv.TieredStore.flush`."""
        return self._core.flush(timeout)

    def scrub(self, timeout: float | None = None) -> _core.ScrubReport:
        """Reads back everything durable; see `tiered_kv.TieredStore.scrub`."""
        return self._core.scrub(timeout)

    def delete(
        self, ns: _core.Namespace, keys: Buffer, timeout: float | None = None
    ) -> _core.DeleteReport:
        """Deletes blocks from every tier; see `tiered_kv.TieredStore.delete`."""
        return self._core.delete(ns, keys, timeout)

    def delete_namespace(
        self, ns: _core.Namespace, timeout: float | None = None
    ) -> _core.DeleteReport:
        """Deletes a whole namespace; see `tiered_kv.TieredStore.delete_namespace`."""
        return self._core.delete_all(ns, None, timeout)

    def delete_older_than(
        self, ns: _core.Namespace, seconds: float, timeout: float | None = None
    ) -> _core.DeleteReport:
        """Deletes what is old; see `tiered_kv.TieredStore.delete_older_than`."""
        return self._core.delete_all(ns, seconds, timeout)

    def new_epoch(self, ns: _core.Namespace, timeout: float | None = None) -> _core.DeleteReport:
        """Begins a new epoch; see `tiered_kv.TieredStore.new_epoch`."""
        return self._core.delete_all(ns, None, timeout)

    def close(self) -> _core.CloseReport:
        """Closes the store; see `tiered_kv.TieredStore.close`."""
        return self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


TieredStore = BlockingStore
