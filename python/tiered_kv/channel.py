"""Calls for engines without an event loop: submit, poll a descriptor, drain.

```python
with store.channel() as channel:
    wanted = channel.submit_get_into(ns, keys, pool)
    select.select([channel], [], [])
    for done in channel.drain():
        assert done.id == wanted
```
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, cast

from tiered_kv import _core

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered_kv._base import Buffers, OnStall


class Completion(NamedTuple):
    """How a call ended."""

    id: int
    """What the submission returned."""
    ok: bool
    """Whether the store did the call. False for a call that the queue had no room for or that ended
    early (deadline, cancelled, closed); for a put of which a block is not stored; for a delete that
    is not durable. A miss is no failure.
    """
    bitmap: bytes
    """Bit `i % 8`, the lowest first, of byte `i // 8` is that of key `i`: it is there, its buffer
    was filled, it is stored, it is gone.
    """
    bytes: int
    """Bytes that were moved."""
    seconds: float
    """Seconds from the submission to the end."""

    def done(self, index: int) -> bool:
        """Whether it was done for the key at `index`."""
        return bool(self.bitmap[index // 8] >> index % 8 & 1)


def _queued(result: object) -> int:
    """The number of a call: with a channel that a store made, no call returns anything else."""
    return cast("int", result)


class Channel:
    """Calls on one store that never wait, and their ends. Make one with `store.channel()`.

    Any thread may submit, poll and drain. The buffers of a call stay exported until its completion
    has been drained; the core touches none of them once the call is no longer pending.

    A call beyond the channel's capacity ends as failed: its completion comes like any other. Where
    as many calls have ended so and nobody has drained, there is no room for that either, and the
    call raises NoSpaceError (`retry` is true): drain, then submit again.
    """

    def __init__(self, store: _core.Store, core: _core.Channel) -> None:
        self._store = store
        self._core = core

    @property
    def closed(self) -> bool:
        """Whether the channel takes no more calls."""
        return self._core.closed

    def fileno(self) -> int:
        """The descriptor that is readable while there is something to drain.

        It belongs to the channel: poll it, and do not read it or close it. That of a closed channel
        stays readable until the channel is freed.
        """
        return self._core.fileno()

    def submit_exists(self, ns: _core.Namespace, keys: Buffer) -> int:
        """Asks which keys are in any tier.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.

        Returns:
            The number that the completion will carry.

        Raises:
            InvalidArgumentError: `keys` or `ns` is wrong.
            ClosedError: The store or the channel is closed.
            NoSpaceError: See `Channel`.
        """
        return self._store.exists(ns, keys, self._core)

    def submit_get_into(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        buffers: Buffers,
        timeout: float | None = None,
        req: _core.Request | None = None,
        hold: _core.Hold | None = None,
        on_stall: OnStall = "wait",
        recompute_s: float | None = None,
    ) -> int:
        """Brings blocks into the caller's memory; see `tiered_kv.TieredStore.get_into`.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            buffers: One writable contiguous buffer of all blocks, a sequence of one a block, or
                `region.slots(numbers)`. Of one that was not filled, the bytes mean nothing.
            timeout: Seconds to wait for loads; the configuration's by default.
            req: The request that counts the accesses.
            hold: A hold of this store, which ends with this call.
            on_stall: Of slots: whether the call waits for a device that stalls, as in `get_into`.
            recompute_s: Seconds in which the caller would compute one block, as in `get_into`.

        Returns:
            The number that the completion will carry.

        Raises:
            InvalidArgumentError: An argument is wrong.
            ClosedError: The store or the channel is closed.
            NoSpaceError: See `Channel`.
        """
        done = self._store.get_into(
            ns, keys, buffers, timeout, req, hold, self._core, on_stall, recompute_s
        )
        return _queued(done)

    def submit_put(
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
    ) -> int:
        """Stores blocks; the arguments are those of `tiered_kv.TieredStore.put`.

        Returns:
            The number that the completion will carry.

        Raises:
            InvalidArgumentError: An argument is wrong.
            ClosedError: The store or the channel is closed.
            NoSpaceError: See `Channel`.
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
        return _queued(self._store.put(ns, keys, buffers, options, self._core))

    def submit_delete(self, ns: _core.Namespace, keys: Buffer, timeout: float | None = None) -> int:
        """Deletes blocks; see `tiered_kv.TieredStore.delete`.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            timeout: Seconds to wait for the drives; the configuration's `put_timeout_s` by default.

        Returns:
            The number that the completion will carry; every key of it is gone.

        Raises:
            InvalidArgumentError: An argument is wrong.
            ClosedError: The store or the channel is closed.
            NoSpaceError: See `Channel`.
        """
        return _queued(self._store.delete(ns, keys, timeout, self._core))

    def drain(self) -> list[Completion]:
        """Takes all completions, waits for nothing, and gives their buffers back.

        Each completion is given to one caller. A closed channel has none.
        """
        return [Completion(*done) for done in self._core.drain()]

    def pending(self) -> int:
        """Calls in progress: submitted, and not yet ready to be drained."""
        return self._core.pending()

    def quiesce(self, timeout: float | None = None) -> bool:
        """Waits, without the GIL, until no call is in progress; their completions stay.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Returns:
            Whether the core touches none of the callers' buffers any more.

        Raises:
            InvalidArgumentError: `timeout` is negative.
        """
        return self._core.quiesce(timeout)

    def close(self) -> None:
        """Cancels what is in progress and drops all completions; pollers wake.

        It returns when the core touches none of the callers' buffers any more. A second close does
        nothing.
        """
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
