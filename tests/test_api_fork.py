"""A forked child has a store's memory but none of its threads: calls raise, drops do nothing."""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import api
from tiered_kv import ClosedError, Reservation, UnsupportedError
from tiered_kv.blocking import BlockingStore

DEADLINE_S = 30.0


def in_child(body: Callable[[], None]) -> int:
    """Runs `body` in a forked child and returns how that ended, as `waitstatus_to_exitcode` does.

    A child that has not ended by the deadline is killed.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


def test_calls_of_a_forked_child_raise_and_leave_the_parent_alone(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        blocks = api.blocks(4)
        keys = ns.keys_from_tokens(api.tokens(4))
        others = ns.keys_from_tokens(api.tokens(4, start=1000))
        store.put(ns, keys, blocks)
        request = store.begin_request()

        def body() -> None:
            into = [bytearray(api.BLOCK_BYTES) for _ in range(4)]
            calls: list[Callable[[], object]] = [
                lambda: store.put(ns, others, blocks),
                lambda: store.get(ns, keys),
                lambda: store.get_into(ns, keys, into),
                lambda: store.reserve(ns, others),
                lambda: store.lookup(ns, keys),
                lambda: store.contains(ns, keys[:32]),
                lambda: store.namespace(api.spec()),
                store.flush,
                store.begin_request,
                lambda: request.observe(ns, keys),
                request.finish,
                store.stats,
                store.health,
                store.audit,
                store.events,
            ]
            for call in calls:
                with pytest.raises(ClosedError, match="forked from"):
                    call()
            assert store.closed
            store.close()

        assert in_child(body) == 0
        assert api.contents(store.get(ns, keys)) == blocks
        assert store.get(ns, others).hits == 0
        assert store.audit()["faults"] == []


def test_a_forked_child_drops_a_store_without_waiting_for_its_threads(tmp_path: Path) -> None:
    stores = [BlockingStore.open(**api.config(tmp_path))]
    ns = stores[0].namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(4))
    stores[0].put(ns, keys, api.blocks(4))

    def body() -> None:
        stores.clear()
        gc.collect()

    assert in_child(body) == 0
    assert stores[0].flush().failed == 0
    stores[0].close()


def test_a_forked_child_leaves_the_parents_channel_alone(tmp_path: Path) -> None:
    """Its calls raise; neither its close nor its end takes the results or wakes the pollers."""
    with BlockingStore.open(**api.config(tmp_path)) as store, store.channel() as channel:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(1))

        def body() -> None:
            calls: list[Callable[[], object]] = [
                lambda: channel.submit_exists(ns, keys),
                channel.drain,
                channel.pending,
                channel.quiesce,
            ]
            for call in calls:
                with pytest.raises(ClosedError, match="forked"):
                    call()
            channel.close()
            channel._core.abandon()

        assert in_child(body) == 0
        assert not select.select([channel], [], [], 0)[0]
        number = channel.submit_exists(ns, keys)
        assert [done.id for done in channel.drain()] == [number]


def test_a_forked_child_does_not_keep_the_directory_locked(tmp_path: Path) -> None:
    store = BlockingStore.open(**api.config(tmp_path))
    waiting, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(waiting, 1)
        os._exit(0)
    try:
        store.close()
        BlockingStore.open(**api.config(tmp_path)).close()
    finally:
        os.close(go)
        os.waitpid(pid, 0)
        os.close(waiting)


def test_a_forked_child_cannot_write_into_the_parents_memory() -> None:
    with BlockingStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        reservation: Reservation = store.reserve(ns, ns.keys_from_tokens(api.tokens(1)))
        view = reservation[0]
        assert view is not None
        view[:4] = b"mine"

        def body() -> None:
            view[:4] = b"your"

        assert in_child(body) == -signal.SIGSEGV
        assert bytes(view[:4]) == b"mine"
        view.release()
        reservation.abandon()


def test_a_child_forked_while_a_store_is_open_is_refused_one_of_its_own(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path / "parent")):

        def body() -> None:
            with pytest.raises(UnsupportedError, match="fork before a store is opened"):
                BlockingStore.open(**api.config(tmp_path / "child"))

        assert in_child(body) == 0


def test_a_child_forked_after_the_close_opens_a_store_of_its_own(tmp_path: Path) -> None:
    code = (
        "import gc, sys; from pathlib import Path; import api, test_api_fork as fork\n"
        "from tiered_kv.blocking import BlockingStore\n"
        "closed = BlockingStore.open(**api.config(Path(sys.argv[1])))\n"
        "closed.close()\n"
        "def body():\n"
        "    with BlockingStore.open(**api.config(Path(sys.argv[1]))) as own:\n"
        "        ns = own.namespace(api.spec())\n"
        "        keys = ns.keys_from_tokens(api.tokens(4))\n"
        "        own.put(ns, keys, api.blocks(4))\n"
        "        assert own.flush().failed == 0\n"
        "        assert own.get(ns, keys).hits == 4\n"
        "assert fork.in_child(body) == 0\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(api.__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_every_descriptor_is_closed_on_exec(tmp_path: Path) -> None:
    before = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        channel = store.channel()
        store.put(ns, ns.keys_from_tokens(api.tokens(4)), api.blocks(4))
        assert store.flush().all_durable
        opened = {int(path.name) for path in Path("/proc/self/fd").iterdir()} - before
        kept = []
        for descriptor in sorted(opened):
            try:
                target = Path(f"/proc/self/fd/{descriptor}").readlink()
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
            except OSError:  # the one that listed the directory
                continue
            if not flags & fcntl.FD_CLOEXEC:
                kept.append(target)
        channel.close()
    assert len(opened) >= 4, "a lock, a journal, a segment, memory"
    assert kept == []


def test_the_end_of_a_forked_child_leaves_the_lock_with_the_parent(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:

        def body() -> None:
            store.close()

        assert in_child(body) == 0
        with (tmp_path / "LOCK").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "LOCK").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
