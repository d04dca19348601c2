"""One owner: a second open is the same core, and other processes attach to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import api
import test_api_fork as fork
from tiered_kv import ClosedError, ConfigError, IoFaultError, NotFoundError, TieredStore
from tiered_kv.blocking import BlockingStore

PREAMBLE = """
import sys, api
from tiered_kv.blocking import BlockingStore
path = sys.argv[1]
"""
OWNER = """
with BlockingStore.open(**api.config(path)) as store:
    ns = store.namespace(api.spec())
    store.put(ns, ns.keys_from_tokens(api.tokens(4)), api.blocks(4))
    print("ready", flush=True)
    input()
"""
GUEST = """
store = BlockingStore.attach(path, timeout=60)
ns = store.namespace(api.spec())
hold = store.hold(ns, ns.keys_from_tokens(api.tokens(6)), 60)
assert hold.held == [True] * 4 + [False] * 2, hold.held
assert hold.in_force and hold.hits == 4
print("ready", flush=True)
input()
"""


@contextmanager
def other(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(api.__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def until(what: str, met: Callable[[], bool]) -> None:
    """Waits until something is so; it fails after a minute."""
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


def test_the_holds_of_another_process_end_when_it_is_killed(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        store.put(ns, ns.keys_from_tokens(api.tokens(4)), api.blocks(4))
        with other(GUEST, tmp_path) as guest:
            assert store.stats()["holds"] == 1
            assert store.stats()["held_bytes"] == 4 * api.BLOCK_BYTES
            assert store.health()["attach"]["connections"] == 1
            guest.send_signal(signal.SIGKILL)
            until("released", lambda: store.stats()["held_bytes"] == 0)
        attach = store.health()["attach"]
        assert attach["listening"]
        assert attach["reason"] == str(tmp_path / "attach.sock")
        assert (attach["accepted"], attach["refused"]) == (1, 0)


def test_lookups_from_another_process_and_an_owner_that_goes_away(tmp_path: Path) -> None:
    with other(OWNER, tmp_path) as owner:
        store = BlockingStore.attach(tmp_path, timeout=60)
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(6))
        assert store.lookup(ns, keys).hits == 4
        assert list(store.lookup(ns, keys, "each").tiers) == [1, 1, 1, 1, 0, 0]
        assert store.contains(ns, keys[:32])
        assert not store.contains(ns, keys[-32:])
        assert store.lookup_hybrid(ns, [(keys, "all"), (keys, ("window", 2))]) == 4
        assert store.stats()["blocks"] == 4
        assert store.health()["open"]
        assert store.alive
        with store.hold(ns, keys, 60) as hold:
            assert store.stats()["holds"] == 1
        assert store.stats()["holds"] == 0
        hold = store.hold(ns, keys, 60)
        owner.communicate("\n", timeout=60)
    until("noticed", lambda: not store.alive)
    assert store.lookup(ns, keys).hits == 0
    assert not store.contains(ns, keys[:32])
    assert store.hold(ns, keys, 60).held == [False] * 6
    assert not hold.in_force
    hold.release()
    assert store.counters()["unanswered"] >= 3
    with pytest.raises(NotFoundError, match=str(tmp_path)):
        store.stats()
    with other(OWNER, tmp_path):
        until("found again", lambda: store.lookup(ns, keys).hits == 4)
    store.close()
    store.close()
    with pytest.raises(ClosedError, match="attach again"):
        store.lookup(ns, keys)


def test_a_stopped_owner_is_a_miss_and_no_hang(tmp_path: Path) -> None:
    with other(OWNER, tmp_path) as owner, BlockingStore.attach(tmp_path, timeout=0.2) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        until("answered", lambda: store.lookup(ns, keys).hits == 4)
        owner.send_signal(signal.SIGSTOP)
        until("stopped", lambda: store.lookup(ns, keys).hits == 0)
        with pytest.raises(IoFaultError, match="timeout"):
            BlockingStore.attach(tmp_path, timeout=0.2)
        owner.send_signal(signal.SIGCONT)
        until("answered again", lambda: store.lookup(ns, keys).hits == 4)


def test_attaching_to_nothing_names_the_path(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotFoundError, match=f"{path}.*nvme_paths"):
            BlockingStore.attach(path)


async def test_the_asyncio_face_attaches_within_a_process_too(tmp_path: Path) -> None:
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        await store.put(ns, keys, api.blocks(4))
        async with TieredStore.attach(tmp_path) as attached:
            outside = attached.namespace(api.spec())
            assert (await attached.lookup(outside, keys)).hits == 4
            assert await attached.contains(ns, keys[:32]), "a namespace is its digest here"
            assert await attached.lookup_hybrid(outside, [(keys, "last")]) == 4
            hold = await attached.hold(outside, keys, 60)
            assert (await attached.stats())["holds"] == store.stats()["holds"] == 1
            assert (await attached.health())["attach"]["accepted"] == 0
            assert attached.path == str(tmp_path)
        assert store.stats()["holds"] == 0
        hold.release()
        with pytest.raises(ValueError, match="another store"):
            store.lookup(outside, keys)
        assert (await TieredStore.attach(tmp_path)).alive


def test_a_forked_child_of_an_attached_process_is_refused(tmp_path: Path) -> None:
    with other(OWNER, tmp_path), BlockingStore.attach(tmp_path, timeout=60) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        holds = [store.hold(ns, keys, 60)]

        def body() -> None:
            calls: list[Callable[[], object]] = [
                lambda: store.lookup(ns, keys),
                lambda: store.contains(ns, keys[:32]),
                lambda: store.hold(ns, keys, 1),
                lambda: store.namespace(api.spec()),
                store.stats,
                store.health,
            ]
            for call in calls:
                with pytest.raises(ClosedError, match="forked from"):
                    call()
            assert store.closed
            assert not store.alive
            holds.clear()
            store.close()
            with BlockingStore.attach(tmp_path, timeout=60) as own:
                assert own.lookup(ns, keys).hits == 4

        assert fork.in_child(body) == 0
        assert store.lookup(ns, keys).hits == 4
        assert store.stats()["holds"] == 1


def test_a_child_does_not_keep_its_parents_holds(tmp_path: Path) -> None:
    code = GUEST.replace("print(", "import os\nif os.fork() == 0: os.read(0, 1)\nprint(", 1)
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        store.put(ns, ns.keys_from_tokens(api.tokens(4)), api.blocks(4))
        with other(code, tmp_path) as guest:
            assert store.stats()["holds"] == 1
            guest.send_signal(signal.SIGKILL)
            guest.wait()
            until("released", lambda: store.stats()["holds"] == 0)


def test_two_loops_and_two_threads_share_one_store(tmp_path: Path) -> None:
    fields = api.config(tmp_path)
    begin = threading.Barrier(4)

    async def on_loop(number: int) -> None:
        await asyncio.to_thread(begin.wait)
        async with TieredStore.open(**fields) as store:
            ns = store.namespace(api.spec())
            for turn in range(20):
                start = 1000 * number + 10 * turn
                keys = ns.keys_from_tokens(api.tokens(1, start))
                blocks = api.blocks(1, start)
                await store.put(ns, keys, blocks)
                with await store.get(ns, keys) as leases:
                    assert api.contents(leases) in ([None], blocks)

    def on_thread(number: int) -> None:
        begin.wait()
        with BlockingStore.open(**fields) as store:
            ns = store.namespace(api.spec())
            for turn in range(20):
                start = 1000 * number + 10 * turn
                keys = ns.keys_from_tokens(api.tokens(1, start))
                blocks = api.blocks(1, start)
                store.put(ns, keys, blocks)
                with store.get(ns, keys) as leases:
                    assert api.contents(leases) in ([None], blocks)

    keeper = BlockingStore.open(**fields)
    bodies: list[Callable[[], None]] = [
        lambda: asyncio.run(on_loop(1)),
        lambda: asyncio.run(on_loop(2)),
        lambda: on_thread(3),
        lambda: on_thread(4),
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        for done in [pool.submit(body) for body in bodies]:
            done.result()
    assert keeper.stats()["counters"]["put_stored"] == 80, "all four were this one"
    assert keeper.audit()["faults"] == []
    keeper.close()


def test_handles_of_one_store(tmp_path: Path) -> None:
    first = BlockingStore.open(**api.config(tmp_path))
    second = BlockingStore.open(**api.config(tmp_path / "." / "", load_timeout_s=1.0))
    ns = first.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(2))
    hold = second.hold(ns, keys, 60)
    first.put(ns, keys, api.blocks(2))
    assert second.get(ns, keys, hold=hold).hits == 2
    channel = first.channel()
    first.close()
    assert first.closed
    assert not second.closed
    for call in (lambda: first.lookup(ns, keys), lambda: channel.submit_exists(ns, keys)):
        with pytest.raises(ClosedError, match="open it again"):
            call()
    channel.close()
    assert second.get(ns, keys).hits == 2
    with pytest.raises(ConfigError, match="`nvme_capacity` is 4194304, but 2097152"):
        BlockingStore.open(**api.config(tmp_path, nvme_capacity="4MiB"))
    second.close()
