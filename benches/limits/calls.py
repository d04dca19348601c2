"""Metadata calls: lookups, `contains` beside busy threads, and what a loaded event loop notices."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

from tiered_kv import _core
from tiered_kv.blocking import TieredStore

from . import delay, wakes
from ._rows import Row, at_least, compare, interleave, progress
from .copies import namespace
from .delay import p99

BLOCKS = 64
BLOCK_BYTES = 16 << 10
BUSY_THREADS = 4
SAMPLES = 2000
# Both sides of a 99th percentile take turns within a round, so that a bad moment meets both.
TURNS = 20


def lookups(rounds: int) -> Row:
    """Keys looked up a second on one thread, 64 a call, from Python."""
    with TieredStore.open(dram_capacity="64MiB") as store:
        ns = namespace(store, BLOCK_BYTES)
        keys = ns.keys_from_tokens(range(BLOCKS))
        store.put(ns, keys, bytes(BLOCKS * BLOCK_BYTES))
        rates = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(SAMPLES):
                store.lookup(ns, keys)
            rates.append(SAMPLES * BLOCKS / (time.perf_counter() - begin) / 1e6)
    return at_least("lookups, one thread, 64 a call", "M keys/s", rates, 3.0)


def leases(rounds: int) -> list[Row]:
    """A resident prefix of 64 blocks leased and released, beside four empty calls and 1 us."""
    with TieredStore.open(dram_capacity="64MiB") as store, store.channel() as channel:
        ns = namespace(store, BLOCK_BYTES)
        keys = ns.keys_from_tokens(range(BLOCKS))
        store.put(ns, keys, bytes(BLOCKS * BLOCK_BYTES))
        request = store.begin_request()
        get, empty, now = store.get, channel._core.fileno, time.perf_counter_ns
        calls = range(10)

        # The loops are written out: a function of Python's own costs as much as an empty call.
        def allowed() -> float:
            samples = []
            for _ in range(SAMPLES):
                begin = now()
                for _ in calls:
                    empty()
                samples.append(now() - begin)
            return 4 * statistics.median(samples) / 1e3 / len(calls) + 1

        def leased(req: _core.Request | None) -> float:
            samples = []
            for _ in range(SAMPLES):
                begin = now()
                for _ in calls:
                    get(ns, keys, None, req).release()
                samples.append(now() - begin)
            return statistics.median(samples) / 1e3 / len(calls)

        made = []
        for name, req in (("", None), (" in a request", request)):

            def ours(req: _core.Request | None = req) -> float:
                return leased(req)

            pairs = interleave(ours, allowed, rounds)
            what = f"lease of 64 resident blocks{name}, p50"
            made.append(compare(what, "us", "4 empty calls + 1 us", pairs, most=1.0))
        tail = interleave(lambda: timed(lambda: get(ns, keys).release()), allowed, rounds)
        what = "lease of 64 resident blocks, p99"
        made.append(compare(what, "us", "4 empty calls + 1 us", tail))
    return made


def samples_of(call: Callable[[], object]) -> list[float]:
    """What calls took, in microseconds."""
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    return samples


def timed(call: Callable[[], object]) -> float:
    """The 99th percentile of a call in microseconds."""
    return p99(samples_of(call))


def contains_beside_threads(rounds: int) -> Row:
    """One-key `contains` beside an empty call, with four busy Python threads."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    with TieredStore.open(dram_capacity="64MiB") as store:
        ns = namespace(store, BLOCK_BYTES)
        key = ns.keys_from_tokens([1])
        store.put(ns, key, bytes(BLOCK_BYTES))
        threads = [threading.Thread(target=spin) for _ in range(BUSY_THREADS)]
        for thread in threads:
            thread.start()
        core = store._core
        ours, theirs = [], []
        try:
            for _ in range(rounds):
                found, empty = [], []
                for _ in range(TURNS):
                    found += samples_of(lambda: core.contains(ns, key))
                    empty += samples_of(lambda: core.closed)
                ours.append(p99(found))
                theirs.append(p99(empty))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    pairs = (ours, theirs)
    return compare("contains, 4 busy threads, p99", "us", "an empty call", pairs, most=2.0)


def rows(rounds: int) -> list[Row]:
    """All of them."""
    progress("lookups")
    out = [lookups(rounds)]
    progress("leases of resident blocks")
    out += leases(rounds)
    progress("wakes of awaited batches")
    out += wakes.rows(rounds)
    progress("contains beside busy threads")
    sys.setswitchinterval(0.005)
    out.append(contains_beside_threads(rounds))
    progress("event loop delay")
    out += delay.rows(rounds)
    return out
