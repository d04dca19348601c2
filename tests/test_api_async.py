"""Cancellation, several loops on one store, closed loops, and threads that wait."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import Namespace, TieredStore, _completions
from tiered_kv.blocking import BlockingStore

MIB = 1 << 20
BLOCKS = 16
ATTEMPTS = 20


def _config(directory: Path) -> dict[str, Any]:
    return api.config(directory, dram_capacity="96MiB", nvme_capacity="256MiB", load_threads=1)


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[tuple[TieredStore, Namespace, list[bytes]]]:
    """A store with batches of 16 MiB that are on the drive only."""
    batches = []
    async with TieredStore.open(**_config(tmp_path)) as store:
        ns = store.namespace(api.spec(MIB))
        for number in range(4):
            keys = ns.keys_from_tokens(api.tokens(BLOCKS, number * 1000))
            block = number.to_bytes(1, "little") * MIB
            assert (await store.put(ns, keys, [block] * BLOCKS)).stored == BLOCKS
            assert (await store.flush()).all_durable
            batches.append(keys)
    async with TieredStore.open(**_config(tmp_path)) as store:
        yield store, store.namespace(api.spec(MIB)), batches


async def _cancelled_in_flight(call: Callable[..., Awaitable[object]], *args: object) -> bool:
    """Begins a call and cancels it; False where it had ended before."""
    task = asyncio.ensure_future(call(*args))
    await asyncio.sleep(0)
    if task.done():
        await task
        return False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return True


async def _settle(store: TieredStore) -> dict[str, Any]:
    """Statistics once no call is in progress and nothing is leased."""
    for _ in range(1000):
        gc.collect()
        stats = store.stats()
        if stats["calls"] == 0 and stats["leased_bytes"] == 0:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(stats)


async def _cleared(out: bytearray) -> None:
    """Clears a buffer that a thread of the core releases, once that thread has got the GIL."""
    for _ in range(1000):
        try:
            out.clear()
            return
        except BufferError:
            await asyncio.sleep(0.01)
    out.clear()


async def test_a_cancelled_get_frees_its_leases(
    stored: tuple[TieredStore, Namespace, list[bytes]],
) -> None:
    store, ns, batches = stored
    cancelled = [await _cancelled_in_flight(store.get, ns, keys) for keys in batches]
    assert any(cancelled)
    await _settle(store)
    assert store.audit()["faults"] == []
    for number, keys in enumerate(batches[:2]):
        leases = await store.get(ns, keys)
        assert leases.hits == BLOCKS
        assert api.contents(leases) == [number.to_bytes(1, "little") * MIB] * BLOCKS
        leases.release()


async def test_a_cancelled_get_into_gives_the_buffer_back(
    stored: tuple[TieredStore, Namespace, list[bytes]],
) -> None:
    store, ns, batches = stored
    cancelled = []
    for keys in batches:
        out = bytearray(BLOCKS * MIB)
        cancelled.append(await _cancelled_in_flight(store.get_into, ns, keys, out))
        # A buffer that the core still held could not be resized.
        out.clear()
    assert any(cancelled)
    await _settle(store)
    assert store.audit()["faults"] == []


async def test_a_cancelled_put_gives_the_buffer_back() -> None:
    async with TieredStore.open(**api.config(dram_capacity="96MiB")) as store:
        ns = store.namespace(api.spec(MIB))
        cancelled = False
        for number in range(ATTEMPTS):
            keys = ns.keys_from_tokens(api.tokens(BLOCKS, number * 1000))
            data = bytearray(number.to_bytes(1, "little") * (BLOCKS * MIB))
            cancelled |= await _cancelled_in_flight(store.put, ns, keys, data)
            data.clear()
            # All of it or none of it became visible, and never another's bytes.
            tiers = set(store.lookup(ns, keys, "each").tiers)
            assert tiers in ({0}, {1})
            if tiers == {1}:
                with await store.get(ns, keys) as leases:
                    assert api.contents(leases) == [number.to_bytes(1, "little") * MIB] * BLOCKS
        assert cancelled
        await _settle(store)
        assert store.audit()["faults"] == []


async def test_a_buffer_is_held_during_the_call(
    stored: tuple[TieredStore, Namespace, list[bytes]],
) -> None:
    store, ns, batches = stored
    held = 0
    for keys in batches:
        out = bytearray(BLOCKS * MIB)
        task = asyncio.ensure_future(store.get_into(ns, keys, out))
        await asyncio.sleep(0)
        if not task.done():
            held += 1
            with pytest.raises(BufferError):
                out.append(0)
        assert (await task).hits == BLOCKS
        out.append(0)
    assert held


async def test_a_second_cancel_does_not_shorten_the_wait(
    stored: tuple[TieredStore, Namespace, list[bytes]],
) -> None:
    store, ns, batches = stored
    for keys in batches:
        out = bytearray(BLOCKS * MIB)
        task = asyncio.ensure_future(store.get_into(ns, keys, out))
        await asyncio.sleep(0)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        out.clear()
    await _settle(store)


async def test_a_deadline_is_a_miss_with_a_reason(
    stored: tuple[TieredStore, Namespace, list[bytes]],
) -> None:
    store, ns, batches = stored
    leases = await store.get(ns, batches[0], timeout=0)
    assert set(leases.reasons) <= {None, "deadline"}
    assert "deadline" in leases.reasons
    assert (await store.get(ns, batches[1], timeout=float("inf"))).hits == BLOCKS


async def test_one_wake_serves_many_calls(
    stored: tuple[TieredStore, Namespace, list[bytes]],
) -> None:
    store, ns, batches = stored
    keys = api.split(b"".join(batches[:2]))
    found = await asyncio.gather(*(store.get(ns, key) for key in keys))
    assert [leases.hits for leases in found] == [1] * len(keys)
    assert [bytes(leases[0] or b"")[0] for leases in found] == [0] * BLOCKS + [1] * BLOCKS
    ticket = _completions.completions()
    assert ticket is _completions.completions()


async def test_a_closed_loop_drops_its_results(
    stored: tuple[TieredStore, Namespace, list[bytes]],
) -> None:
    store, ns, batches = stored

    def abandon(keys: bytes, out: bytearray) -> None:
        loop = asyncio.new_event_loop()
        tasks = [
            loop.create_task(store.get(ns, keys)),
            loop.create_task(store.get_into(ns, keys, out)),
        ]
        loop.run_until_complete(asyncio.sleep(0))
        loop.set_exception_handler(lambda *_: None)
        loop.close()
        for task in tasks:
            # A task of a closed loop can only be forgotten; that is not what is tested.
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    for keys in batches:
        out = bytearray(BLOCKS * MIB)
        await asyncio.to_thread(abandon, keys, out)
        await _settle(store)
        await _cleared(out)
    assert store.audit()["faults"] == []
    assert (await store.get(ns, batches[0])).hits == BLOCKS


async def test_two_loops_in_two_threads_share_a_store(tmp_path: Path) -> None:
    async with TieredStore.open(**api.config(tmp_path, dram_capacity="8MiB")) as store:

        async def work(number: int) -> int:
            ns = store.namespace(api.spec(100_000, salt=f"thread {number}"))
            done = 0
            for turn in range(10):
                keys = ns.keys_from_tokens(api.tokens(4, turn * 100))
                blocks = api.blocks(4, seed=number * 100 + turn, size=100_000)
                await asyncio.gather(store.put(ns, keys, blocks), store.get(ns, keys))
                out = bytearray(400_000)
                leases, report = await asyncio.gather(
                    store.get(ns, keys), store.get_into(ns, keys, out)
                )
                for index in range(leases.hits):
                    assert api.contents(leases)[index] == blocks[index]
                if report.hits == 4:
                    assert out == b"".join(blocks)
                done += leases.hits + report.hits
            return done

        results = await asyncio.gather(
            work(0), *(asyncio.to_thread(asyncio.run, work(n)) for n in (1, 2))
        )
        assert min(results) > 0
        assert (await store.flush()).pending == 0
        await _settle(store)
        assert store.audit()["faults"] == []


def test_waiting_threads_let_go_of_the_gil(tmp_path: Path) -> None:
    with BlockingStore.open(**_config(tmp_path)) as store:
        ns = store.namespace(api.spec(MIB))
        inside = False
        seen = 0

        def work(keys: bytes) -> None:
            nonlocal inside
            inside = True
            store.put(ns, keys, bytes(BLOCKS * MIB))
            inside = False

        interval = sys.getswitchinterval()
        # No thread is made to let go: what the loop below sees, a waiting call has allowed.
        sys.setswitchinterval(1000)
        try:
            for number in range(ATTEMPTS):
                keys = ns.keys_from_tokens(api.tokens(BLOCKS, number * 1000))
                thread = threading.Thread(target=work, args=(keys,))
                thread.start()
                while thread.is_alive():
                    seen += inside
                    time.sleep(0)
                thread.join()
                if seen:
                    break
        finally:
            sys.setswitchinterval(interval)
        assert seen


def test_contains_keeps_the_gil() -> None:
    with BlockingStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        key = ns.keys_from_tokens(api.tokens(1))
        store.put(ns, key, api.blocks(1))
        ran = 0
        stop = False

        def other() -> None:
            nonlocal ran
            while not stop:
                ran += 1
                time.sleep(0)

        interval = sys.getswitchinterval()
        thread = threading.Thread(target=other)
        thread.start()
        # No thread is made to let go: were it to run below, a call has allowed it.
        sys.setswitchinterval(1000)
        try:
            time.sleep(0)
            before = ran
            found = all(store.contains(ns, key) for _ in range(20_000))
            after = ran
        finally:
            stop = True
            sys.setswitchinterval(interval)
            thread.join()
        assert found
        assert after == before


INTERRUPTED = """
import os, signal, sys, threading
import api
from tiered_kv.blocking import BlockingStore
store = BlockingStore.open(**api.config(sys.argv[1], dram_capacity="64MiB", nvme_capacity="64MiB"))
ns = store.namespace(api.spec(1 << 20))
keys = ns.keys_from_tokens(api.tokens(16))
data = bytearray(16 << 20)
# The signal comes before a call or while it waits; either way it ends in KeyboardInterrupt, and the
# buffer is free again.
try:
    threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    for number in range(10_000):
        keys = ns.keys_from_tokens(api.tokens(16, number * 1000))
        store.put(ns, keys, data)
except KeyboardInterrupt:
    data.clear()
    store.close()
    print("interrupted")
"""


def test_a_waiting_thread_can_be_interrupted(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.stdout == "interrupted\n", run.stderr
    assert run.returncode in (0, -signal.SIGINT)


def test_the_blocking_store_does_what_the_other_does(tmp_path: Path) -> None:
    blocks = api.blocks(2)
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(3))
        assert store.put(ns, keys[:64], blocks).statuses == ["stored"] * 2
        reservation = store.reserve(ns, keys[64:])
        view = reservation[0]
        assert view is not None
        view[:] = blocks[0]
        view.release()
        assert store.publish(reservation).stored == 1
        assert store.flush(timeout=60).all_durable
        assert store.lookup(ns, keys).hits == 3
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        out = bytearray(3 * api.BLOCK_BYTES)
        assert store.get_into(ns, keys, out).sources == bytes([3] * 3)
        assert out == blocks[0] + blocks[1] + blocks[0]
        with store.get(ns, keys, timeout=60) as leases:
            assert leases.hits == 3
    asynchronous = {name for name in dir(TieredStore) if not name.startswith("_")}
    assert asynchronous == {name for name in dir(BlockingStore) if not name.startswith("_")}


def test_a_store_can_be_dropped_with_the_last_reference(tmp_path: Path) -> None:
    store = BlockingStore.open(**api.config(tmp_path))
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(1))
    store.put(ns, keys, api.blocks(1))
    with pytest.warns(ResourceWarning):
        del store
    with BlockingStore.open(**api.config(tmp_path)) as again:
        assert again.lookup(again.namespace(api.spec()), keys).hits == 1
