"""What an event loop notices of the store: how late it answers a timer, with work and without."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import statistics
import time

from tiered_kv import TieredStore

from ._rows import Row, compare
from .copies import namespace

BLOCKS = 64
BLOCK_BYTES = 16 << 10
BLOCKS_A_SECOND = 10_000
# Both sides take turns within a round, so that a bad moment meets both.
TURNS = 20
TICKS = 200
TICK_NS = 1_000_000
_SECOND_NS = 1_000_000_000
_ABSOLUTE = 1

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Ticks:
    """A timer of the kernel that a loop reads; each reading tells how late it is.

    Not a sleep of asyncio: the loop rounds what is left of a sleep up to whole milliseconds each
    time that anything wakes it, and that would be most of what is measured.
    """

    def __init__(self, count: int) -> None:
        self.late_us: list[float] = []
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._fd = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._next_ns = time.monotonic_ns() + TICK_NS
        first = _Timespec(*divmod(self._next_ns, _SECOND_NS))
        timer = _Timer(_Timespec(0, TICK_NS), first)
        if _LIBC.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(timer), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._loop.add_reader(self._fd, self._tick)

    def _tick(self) -> None:
        ticks = int.from_bytes(os.read(self._fd, 8), "little")
        self.late_us.append((time.monotonic_ns() - self._next_ns) / 1e3)
        self._next_ns += ticks * TICK_NS
        if len(self.late_us) == self._count:
            self._done.set_result(None)

    def close(self) -> None:
        """Ends it."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    async def wait(self) -> list[float]:
        """How late each was, in microseconds."""
        await self._done
        return self.late_us[: self._count]


async def lateness() -> list[float]:
    """How late a loop answers, in microseconds."""
    with contextlib.closing(Ticks(TICKS)) as ticks:
        return await ticks.wait()


def p99(samples: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(samples, n=100)[98]


async def _measure(rounds: int) -> tuple[list[float], list[float]]:
    ours, idle = [], []
    async with TieredStore.open(dram_capacity="256MiB") as store:
        ns = namespace(store, BLOCK_BYTES)
        keys = ns.keys_from_tokens(range(BLOCKS))
        buffer = bytearray(BLOCKS * BLOCK_BYTES)
        await store.put(ns, keys, buffer)

        async def work() -> None:
            while True:
                await store.get_into(ns, keys, buffer)
                await asyncio.sleep(BLOCKS / BLOCKS_A_SECOND)

        for _ in range(rounds):
            late, late_idle = [], []
            for _ in range(TURNS):
                late_idle += await lateness()
                task = asyncio.create_task(work())
                late += await lateness()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            ours.append(p99(late))
            idle.append(p99(late_idle))
    return ours, idle


def rows(rounds: int) -> list[Row]:
    """What an event loop notices of 10,000 block operations a second."""
    pairs = asyncio.run(_measure(rounds))
    what = "event loop delay, 10 k blocks/s, p99"
    return [compare(what, "us", "idle loop", pairs, most=2.0)]
