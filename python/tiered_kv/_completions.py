"""asyncio on top of a channel: one an event loop, one wake a batch."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from tiered_kv import _core

Result = TypeVar("Result")


class _Kept(asyncio.Future[Result]):
    """A future that its waiter's cancellation does not end.

    Cancelling the waiting task asks the core to end the call, and is delivered to the task when the
    call has ended.
    """

    abort: Callable[[], None]

    def cancel(self, msg: Any | None = None) -> bool:
        del msg
        if not self.done():
            self.abort()
        # The task then keeps the cancellation until its next step.
        return False


class Call(Generic[Result]):
    """A call in progress: its future, and what cancels it."""

    __slots__ = ("_channel", "_number", "future")

    def __init__(self, channel: _core.Channel, number: int, future: asyncio.Future[Result]) -> None:
        self._channel = channel
        self._number = number
        self.future = future

    def cancel(self) -> None:
        """Asks the core to end the call, whose result still comes."""
        self._channel.cancel(self._number)


class Completions:
    """Results of the calls that one event loop has in progress.

    The loop's reader is the only strong reference: closing the loop drops this object, and with it
    all results that are still to come, their leases and their buffers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.channel = _core.Channel.for_loop()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._new_future = loop.create_future
        self._loop = loop
        loop.add_reader(self.channel.fileno(), self._drain)

    def call(self, number: int, kind: type[Result]) -> Call[Result]:
        """A call in progress, whose result is of type `kind`."""
        del kind
        future = self._futures[number] = self._new_future()
        return Call(self.channel, number, future)

    def kept(self, number: int, kind: type[Result]) -> Call[Result]:
        """The same for a call on the caller's memory, which waits for it even if cancelled."""
        del kind
        future: _Kept[Result] = _Kept(loop=self._loop)
        # Not the call's own method: the call holds the future.
        future.abort = partial(self.channel.cancel, number)
        self._futures[number] = future
        return Call(self.channel, number, future)

    def _drain(self) -> None:
        for number, result in self.channel.results():
            future = self._futures.pop(number, None)
            # A result that nobody waits for any more is dropped, and its leases with it.
            if future is not None and not future.done():
                future.set_result(result)

    def __del__(self) -> None:
        # Calls of coroutines that nobody will resume hold the channel too, so it ends here.
        self.channel.abandon()


_by_loop: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, weakref.ReferenceType[Completions]
] = weakref.WeakKeyDictionary()


def completions() -> Completions:
    """The completions of the running loop, made where it has none."""
    loop = asyncio.get_running_loop()
    ref = _by_loop.get(loop)
    found = ref() if ref is not None else None
    if found is None:
        found = Completions(loop)
        _by_loop[loop] = weakref.ref(found)
    return found


async def result_of(call: Call[Result]) -> Result:
    """Waits for a call that touches no memory of the caller: cancelling it returns at once."""
    try:
        return await call.future
    except asyncio.CancelledError:
        call.cancel()
        raise


async def settled(call: Call[Result]) -> Result:
    """Waits for a call on the caller's memory, one that is `kept`.

    Cancelled, it ends the call and still waits until the core no longer touches that memory, since
    the caller may reuse it as soon as this returns.
    """
    return await call.future
