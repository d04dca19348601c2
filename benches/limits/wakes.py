"""What it takes a coroutine to go on once its batch is done, beside a bare wake of its loop."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tiered_kv import TieredStore
from tiered_kv._completions import completions

from ._rows import Row, compare
from .copies import namespace

BLOCKS = 64
# More than what is copied on the caller's own thread.
BLOCK_BYTES = 2 << 10
SAMPLES = 1000

# Another process, so that no lock of the interpreter is between the two; told to, it works for as
# long as the copy of a batch takes, and then writes the time into the descriptor.
WRITER = """
import os, sys, time
go, wake = int(sys.argv[1]), int(sys.argv[2])
while os.eventfd_read(go) == 1:
    until = time.perf_counter_ns() + 40_000
    while (now := time.perf_counter_ns()) < until:
        pass
    os.eventfd_write(wake, now)
"""
STOP = 2


class _Bare:
    """A descriptor that another process writes, and a future that its reader completes."""

    def __init__(self, go: int, wake: int) -> None:
        self._go, self._wake = go, wake
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(wake, self._woken)

    def _woken(self) -> None:
        self._future.set_result(os.eventfd_read(self._wake))

    async def latency(self) -> float:
        """Microseconds from the write to the coroutine that waits for it."""
        self._future = self._loop.create_future()
        os.eventfd_write(self._go, 1)
        written = await self._future
        return (time.perf_counter_ns() - written) / 1e3

    def close(self) -> None:
        self._loop.remove_reader(self._wake)


@contextmanager
def _writer() -> Iterator[tuple[int, int]]:
    go, wake = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
    command = [sys.executable, "-c", WRITER, str(go), str(wake)]
    with subprocess.Popen(command, pass_fds=(go, wake)):
        yield go, wake
        os.eventfd_write(go, STOP)
    os.close(go)
    os.close(wake)


def _percentiles(samples: list[float]) -> tuple[float, float]:
    return statistics.median(samples), statistics.quantiles(samples, n=100)[98]


Percentiles = list[tuple[float, float]]


async def _measure(descriptors: tuple[int, int], rounds: int) -> tuple[Percentiles, Percentiles]:
    ours, theirs = [], []
    async with TieredStore.open(dram_capacity="64MiB") as store:
        bare = _Bare(*descriptors)
        ns = namespace(store, BLOCK_BYTES)
        keys = ns.keys_from_tokens(range(BLOCKS))
        out = bytearray(BLOCKS * BLOCK_BYTES)
        await store.put(ns, keys, out)
        channel = completions().channel

        async def awaited() -> float:
            await store.get_into(ns, keys, out)
            ago = channel.rung_ago
            assert ago is not None, "the batch was awaited"
            return ago * 1e6

        for number in range(rounds + 1):
            samples: tuple[list[float], list[float]] = ([], [])
            # Turn about, so that noise meets both alike.
            for _ in range(SAMPLES):
                samples[0].append(await awaited())
                samples[1].append(await bare.latency())
            if number:
                ours.append(_percentiles(samples[0]))
                theirs.append(_percentiles(samples[1]))
        bare.close()
    return ours, theirs


def rows(rounds: int) -> list[Row]:
    """From the moment that the core has completed a batch to the coroutine that awaits it."""
    # Before there is a store, which would not let its threads be forked away from.
    with _writer() as descriptors:
        ours, theirs = asyncio.run(_measure(descriptors, rounds))
    made = []
    for at, name in enumerate(("p50", "p99")):
        pairs = ([sample[at] for sample in ours], [sample[at] for sample in theirs])
        most = 1.5 if name == "p50" else None
        what = f"awaited batch, completion to resume, {name}"
        made.append(compare(what, "us", "bare eventfd", pairs, most=most))
    return made
