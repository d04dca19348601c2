"""The store for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tiered_kv import _core
from tiered_kv._base import StoreBase
from tiered_kv._completions import completions, result_of, settled
from tiered_kv.attached import Attaching, Path
from tiered_kv.config import StoreConfig, resolve

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered_kv._base import Buffers, OnStall


class Opening:
    """A store being opened: await it, or enter it with `async with`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._store: TieredStore | None = None

    async def _open(self) -> TieredStore:
        # Populating memory and recovering a directory block, so the loop is kept free of them.
        return TieredStore(await asyncio.to_thread(_core.Store.open, self._fields))

    def __await__(self) -> Generator[Any, None, TieredStore]:
        return self._open().__await__()

    async def __aenter__(self) -> TieredStore:
        self._store = await self._open()
        return self._store

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._store is not None:
            await self._store.close()


class TieredStore(StoreBase):
    """A store of KV blocks over memory and NVMe, for asyncio.

    Several loops and threads may share one store. Make one with `open`.
    """

    @staticmethod
    def open(config: StoreConfig | None = None, **fields: Any) -> Opening:
        """Opens a store, finding again what its directory holds.

        Where this process has the same directories open, however they are spelled, it is one more
        handle on that store, which closes with the last of them. The handle has deadlines of its
        own (`load_timeout_s` and its like); no other field may contradict the open store's.

        Args:
            config: The configuration. None: the keyword arguments, or the environment's.
            **fields: Fields of `StoreConfig` instead of one.

        Returns:
            What to await, or to enter with `async with`, which closes the store at the end.

        Raises:
            ConfigError: A field is wrong, or contradicts the store that is open on the directories;
                and as the others when awaited.
            NotFoundError: A directory's parent is missing.
            StorePermissionError: The directory may not be read or written.
            InUseError: Another process has the directory open, or this one has been opening or
                closing it for longer than `close_timeout_s`.
            FormatMismatchError: The directory is of another format version, or no store.
            NoSpaceError: Memory or disk space could not be had.
        """
        return Opening(resolve(config, fields))

    @staticmethod
    def attach(path: Path, timeout: float | None = None) -> Attaching:
        """Attaches to a store that another process has open: lookups, holds and statistics.

        In the owner's own process the same calls go to the core directly.

        Args:
            path: The first directory of the store's `nvme_paths`.
            timeout: Seconds that a call waits for the owner; 0.3 by default.

        Returns:
            What to await, or to enter with `async with`, which ends the connection at the end.

        Raises:
            NotFoundError: No store listens in the directory; like the others, when awaited.
            IoFaultError: The owner does not answer in time.
            StorePermissionError: The store is another user's.
            InUseError: As many processes as may are attached.
            UnsupportedError: The owner is of another version.
            InvalidArgumentError: `timeout` is 0 or negative.
        """
        return Attaching(path, timeout)

    async def get(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core, for the load
        req: _core.Request | None = None,
        hold: _core.Hold | None = None,
        recompute_s: float | None = None,
    ) -> _core.Leases:
        """Leases blocks, loading what is on the drive. A fault is a miss with a reason.

        What is in memory is leased without suspending. Cancelled, it returns at once and its leases
        are dropped.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            timeout: Seconds to wait for loads; the configuration's by default.
            req: The request that counts the accesses.
            hold: A hold of this store, which ends with this call.
            recompute_s: Seconds in which the caller would compute one block. What a drive would
                bring later than that is a miss, `recompute`, and is not read. The configuration's
                `recompute_tokens_per_s` by default.

        Returns:
            Read-only views of the blocks, pinned until they are released.

        Raises:
            InvalidArgumentError: An argument is wrong, or `hold` is of another store.
            UnsupportedError: `dram_capacity` is 0: leases need memory to live in.
            ClosedError: The store is closed.
        """
        waiting = completions()
        done = self._core.get(ns, keys, timeout, req, hold, waiting.channel, recompute_s)
        if not isinstance(done, int):
            return done
        call = waiting.call(done, _core.Leases)
        # Only the loop may keep the completions alive, or closing it would not drop them.
        del waiting
        return await result_of(call)

    async def get_into(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        buffers: Buffers,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
        req: _core.Request | None = None,
        hold: _core.Hold | None = None,
        on_stall: OnStall = "wait",
        recompute_s: float | None = None,
    ) -> _core.IntoReport:
        """Brings blocks into the caller's memory, verified.

        Buffers are filled by a copy; slots of a region are written by the drive. Cancelled or timed
        out, it returns when neither the core nor the kernel touches the memory.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            buffers: One writable contiguous buffer of all blocks, a sequence of one a block, or
                `region.slots(numbers)`.
            timeout: Seconds to wait for loads; the configuration's by default.
            req: The request that counts the accesses.
            hold: A hold of this store, which ends with this call.
            on_stall: Of slots. "wait": the call ends, by its deadline too, only when the device no
                longer writes. "bounce": blocks are read into memory of the store and copied last,
                so that the deadline is kept where a device stalls. Buffers always bounce.
            recompute_s: As of `get`.

        Returns:
            For each block why it was not filled, or None. Of one that was not, the bytes mean
            nothing.

        Raises:
            InvalidArgumentError: `buffers` is of a wrong count, size or dtype, read-only, not
                contiguous, or overlaps; another call uses a slot; or another argument is wrong.
            ClosedError: The store is closed.
        """
        waiting = completions()
        done = self._core.get_into(
            ns, keys, buffers, timeout, req, hold, waiting.channel, on_stall, recompute_s
        )
        if not isinstance(done, int):
            return done
        call = waiting.kept(done, _core.IntoReport)
        del waiting
        return await settled(call)

    async def put(
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
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
        req: _core.Request | None = None,
    ) -> _core.PutReport:
        """Stores blocks; they become visible together. A key that is stored already is left as is.

        Returns when the bytes are captured; what is durable, `flush` says. The buffers must not be
        written to before that. Cancelled, it returns when the core no longer reads them.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            buffers: One contiguous buffer of all blocks, a sequence of one a block, or
                `region.slots(numbers)`.
            parent: Key of the block before the first.
            depth: Depth of the first block; derived from the parent where that is stored.
            chain: The keys are one chain, each the parent of the next.
            tokens: Tokens in each block; all full by default.
            chunk_ends: For each block, whether a prefill chunk ended at its last token.
            computed: How the blocks were computed.
            block_type: What the blocks hold: system, tool, user, reasoning.
            wait: Seconds, within `timeout`, that throttled blocks wait for room; none by default.
            timeout: Seconds that the call may take; the configuration's by default.
            req: The request that the blocks belong to; its `block_type` holds where none is given.

        Returns:
            What became of each block: stored, exists, throttled (try later), ended. With
            `dram_capacity` 0 a block that is stored is durable, and one that could not be written
            is "failed".

        Raises:
            InvalidArgumentError: `buffers` or an option is of a wrong count, size or dtype, or out
                of range.
            ClosedError: The store is closed.
        """
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
        waiting = completions()
        done = self._core.put(ns, keys, buffers, options, waiting.channel)
        if not isinstance(done, int):
            return done
        call = waiting.kept(done, _core.PutReport)
        del waiting
        return await settled(call)

    async def publish(self, reservation: _core.Reservation) -> _core.PutReport:
        """Makes a reservation's blocks visible.

        Args:
            reservation: One of this store, with no writable view alive.

        Returns:
            What became of each block.

        Raises:
            InvalidArgumentError: A writable view is alive, or the reservation is expired or used.
            ClosedError: The store is closed.
        """
        return await asyncio.to_thread(self._core.publish, reservation)

    async def flush(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
    ) -> _core.FlushReport:
        """Waits until everything stored before this call is durable.

        Args:
            timeout: Seconds to wait; the configuration's `close_timeout_s` by default.

        Returns:
            What is not durable, and why.

        Raises:
            InvalidArgumentError: `timeout` is negative.
            ClosedError: The store is closed.
        """
        waiting = completions()
        done = self._core.flush(timeout, waiting.channel)
        if not isinstance(done, int):
            return done
        call = waiting.call(done, _core.FlushReport)
        del waiting
        return await result_of(call)

    async def scrub(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
    ) -> _core.ScrubReport:
        """Reads back and verifies everything that is durable now, at the least priority.

        What is bad is taken out of use and counted, and written anew where memory still has it.

        Args:
            timeout: Seconds to go on for; a day by default. What was found until then is told.

        Returns:
            What was found.

        Raises:
            InvalidArgumentError: `timeout` is negative.
            ClosedError: The store is closed.
        """
        waiting = completions()
        done = self._core.scrub(timeout, waiting.channel)
        if not isinstance(done, int):
            return done
        call = waiting.call(done, _core.ScrubReport)
        del waiting
        return await result_of(call)

    async def delete(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
    ) -> _core.DeleteReport:
        """Deletes blocks from every tier and every drive.

        They are gone for every caller at once. It returns when nothing of it can come back after a
        crash. Leases stay valid until they are released. Cancelled, it has deleted all the same.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes; one that is not there is no error.
            timeout: Seconds to wait for the drives; the configuration's `put_timeout_s` by default.

        Returns:
            How many blocks were there, and whether the delete is durable.

        Raises:
            InvalidArgumentError: `keys`, `ns` or `timeout` is wrong.
            ClosedError: The store is closed.
        """
        waiting = completions()
        done = self._core.delete(ns, keys, timeout, waiting.channel)
        if not isinstance(done, int):
            return done
        call = waiting.call(done, _core.DeleteReport)
        del waiting
        return await result_of(call)

    async def delete_namespace(
        self,
        ns: _core.Namespace,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
    ) -> _core.DeleteReport:
        """Deletes every block of a namespace; the handle stays good for new ones.

        Args:
            ns: The namespace.
            timeout: As in `delete`.

        Returns:
            How many blocks were there, and whether the delete is durable.

        Raises:
            InvalidArgumentError: `ns` or `timeout` is wrong.
            ClosedError: The store is closed.
        """
        return await self._delete_all(ns, None, timeout)

    async def delete_older_than(
        self,
        ns: _core.Namespace,
        seconds: float,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
    ) -> _core.DeleteReport:
        """Deletes the blocks of a namespace that were stored longer ago than `seconds`.

        Args:
            ns: The namespace.
            seconds: The age, by the system's clock; reads do not make a block younger.
            timeout: As in `delete`.

        Returns:
            How many blocks were there, and whether the delete is durable.

        Raises:
            InvalidArgumentError: `seconds` or `timeout` is negative, or `ns` is of another store.
            ClosedError: The store is closed.
        """
        return await self._delete_all(ns, seconds, timeout)

    async def new_epoch(
        self,
        ns: _core.Namespace,
        timeout: float | None = None,  # noqa: ASYNC109 - a deadline in the core
    ) -> _core.DeleteReport:
        """Begins a new epoch of a namespace, as after its weights were updated in place.

        Nothing stored before is ever served again.

        Args:
            ns: The namespace.
            timeout: As in `delete`.

        Returns:
            How many blocks the old epoch had, and whether its end is durable.

        Raises:
            InvalidArgumentError: `ns` or `timeout` is wrong.
            ClosedError: The store is closed.
        """
        return await self._delete_all(ns, None, timeout)

    async def _delete_all(
        self, ns: _core.Namespace, seconds: float | None, limit: float | None
    ) -> _core.DeleteReport:
        waiting = completions()
        done = self._core.delete_all(ns, seconds, limit, waiting.channel)
        if not isinstance(done, int):
            return done
        call = waiting.call(done, _core.DeleteReport)
        del waiting
        return await result_of(call)

    async def close(self) -> _core.CloseReport:
        """Closes this handle: ends its calls in progress; with the last one, closes the store.

        That makes durable what it can in time. Leases stay valid. A second close does nothing.

        Returns:
            How many blocks were dropped before they were durable.
        """
        return await asyncio.to_thread(self._core.close)
