"""What the bridge costs a serving loop, as ratios to the floor measured in the same run.

Run with `make bench`. The rows go to `build/reports/bridge.json`; the figures are a machine's own
and are asserted nowhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_kv import KvLayout, NamespaceSpec, TieredStore
from tiered_kv.blocking import BlockingStore

BLOCKS = 64
BLOCK_BYTES = 16 << 10
CALLS = 500
ROUNDS = 40
REPORT = Path(__file__).parents[1] / "build" / "reports" / "bridge.json"

Rows = list[dict[str, Any]]


def _spec(block_bytes: int) -> NamespaceSpec:
    layout = KvLayout(tokens_per_block=1, block_bytes=block_bytes)
    return NamespaceSpec(model="m", weights="w", kv_dtype="d", layout=layout)


@pytest.fixture
def resident() -> Iterator[tuple[Any, Any, bytes]]:
    """A store with 64 blocks in memory, its namespace and their keys."""
    with BlockingStore.open(dram_capacity="64MiB") as store:
        ns = store.namespace(_spec(BLOCK_BYTES))
        keys = ns.keys_from_tokens(range(BLOCKS))
        store.put(ns, keys, bytes(BLOCKS * BLOCK_BYTES))
        yield store, ns, keys


@pytest.fixture(scope="module")
def rows() -> Iterator[Rows]:
    """Rows of the report, written and printed at the end."""
    made: Rows = []
    yield made
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(made, indent=2) + "\n")
    for row in made:
        print(json.dumps(row))


def _row(name: str, micros: list[float], floor: list[float], of: str) -> dict[str, Any]:
    """Median and quartiles in microseconds, and the median as a multiple of the floor's."""
    low, median, high = statistics.quantiles(micros, n=4)
    ratio = median / statistics.median(floor)
    return {
        "name": name,
        "median_us": round(median, 3),
        "quartiles_us": [round(low, 3), round(high, 3)],
        "floor": of,
        "floor_us": round(statistics.median(floor), 3),
        "ratio": round(ratio, 2),
    }


def _interleaved(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds a call in each round; rounds take turns, so that noise meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter_ns() - begin) / CALLS / 1000)
    return times


def test_calls_beside_an_empty_one(resident: tuple[Any, Any, bytes], rows: Rows) -> None:
    store, ns, keys = resident
    request = store.begin_request()

    def lease() -> None:
        store.get(ns, keys).release()

    def lease_of_a_request() -> None:
        store.get(ns, keys, None, request).release()

    with store.channel() as channel:
        empty = channel._core.fileno
        calls: dict[str, Callable[[], object]] = {
            "empty": empty,
            "contains": lambda: store.contains(ns, keys[:32]),
            "lookup of 64": lambda: store.lookup(ns, keys),
            "lease of 64": lease,
            "lease of 64 in a request": lease_of_a_request,
        }
        times = _interleaved(calls)
    floor = times.pop("empty")
    rows += [_row(name, micros, floor, "empty call") for name, micros in times.items()]


async def _round_trip_of_an_eventfd() -> float:
    """One bare wake of the loop: write an eventfd, be called by its reader, read it."""
    loop = asyncio.get_running_loop()
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    done = loop.create_future()

    def woken() -> None:
        os.eventfd_read(fd)
        done.set_result(None)

    loop.add_reader(fd, woken)
    begin = time.perf_counter_ns()
    os.eventfd_write(fd, 1)
    await done
    micros = (time.perf_counter_ns() - begin) / 1000
    loop.remove_reader(fd)
    os.close(fd)
    return micros


async def _wakes() -> dict[str, list[float]]:
    """Awaited batches that the core's threads copy, and the same waited for by a thread."""
    size = 2 << 10
    times: dict[str, list[float]] = {"eventfd": [], "awaited": [], "waited": []}
    async with TieredStore.open(dram_capacity="64MiB") as store:
        blocking = BlockingStore(store._core)
        ns = store.namespace(_spec(size))
        keys = ns.keys_from_tokens(range(BLOCKS))
        await store.put(ns, keys, bytes(BLOCKS * size))
        out = bytearray(BLOCKS * size)
        for _ in range(CALLS):
            times["eventfd"].append(await _round_trip_of_an_eventfd())
            begin = time.perf_counter_ns()
            await store.get_into(ns, keys, out)
            times["awaited"].append((time.perf_counter_ns() - begin) / 1000)
            begin = time.perf_counter_ns()
            blocking.get_into(ns, keys, out)
            times["waited"].append((time.perf_counter_ns() - begin) / 1000)
    return times


def test_an_awaited_batch_beside_a_bare_wake(rows: Rows) -> None:
    """A copy of 128 KiB runs on a thread of the core, so both ways wait for it."""
    times = asyncio.run(_wakes())
    floor = times["eventfd"]
    rows.append(_row("get_into of 64, awaited", times["awaited"], floor, "eventfd round trip"))
    rows.append(_row("get_into of 64, waited for", times["waited"], floor, "eventfd round trip"))


def test_event_loop_turn(benchmark: Any) -> None:
    """The floor: one empty turn of an asyncio loop."""
    loop = asyncio.new_event_loop()

    async def nothing() -> None:
        pass

    benchmark(lambda: loop.run_until_complete(nothing()))
    loop.close()
