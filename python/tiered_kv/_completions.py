"""Completions of the core in asyncio: one queue an event loop, one wake a batch."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, TypeVar

from tiered_kv import _core

Result = TypeVar("Result")


class Completions:
    """Results of the calls that one event loop has in progress.

    The loop's reader is the only strong reference: closing the loop drops this object, and with it
    all results that are still to come, their leases and their buffers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue = _core.CompletionQueue()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._new_future = loop.create_future
        loop.add_reader(self.queue.fileno(), self._drain)

    def future(self, call: _core.Call, kind: type[Result]) -> asyncio.Future[Result]:
        """A future of the call's result, which is of type `kind`."""
        del kind
        future = self._futures[call.token] = self._new_future()
        return future

    def _drain(self) -> None:
        for token, result in self.queue.drain():
            future = self._futures.pop(token, None)
            # A result that nobody waits for any more is dropped, and its leases with it.
            if future is not None and not future.done():
                future.set_result(result)

    def __del__(self) -> None:
        self.queue.close()


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


async def result_of(call: _core.Call, future: asyncio.Future[Result]) -> Result:
    """Waits for a call that touches no memory of the caller: cancelling it returns at once."""
    try:
        return await future
    except asyncio.CancelledError:
        call.cancel()
        raise


async def settled(call: _core.Call, future: asyncio.Future[Result]) -> Result:
    """Waits for a call on the caller's memory.

    Cancelled, it ends the call and still waits until the core no longer touches that memory, since
    the caller may reuse it as soon as this returns.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            # `wait` does not cancel what it waits for.
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            if cancelled is None:
                cancelled = error
                call.cancel()
    if cancelled is not None:
        raise cancelled
    return future.result()
