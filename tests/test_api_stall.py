"""A drive that stalls: calls end on time, and nothing writes to their memory afterwards."""

from __future__ import annotations

import asyncio
import gc
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import (
    ClosedError,
    Completion,
    InvalidArgumentError,
    Namespace,
    NoSpaceError,
    TieredStore,
    _core,
)
from tiered_kv.blocking import BlockingStore
from tiered_kv.config import resolve

BLOCKS = 8
CANARY = b"\xc5"
SECOND = 30.0

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "StallGate"), reason="a release build has no gate"
)


class Stalled:
    """A store whose blocks are on a drive that does not answer until `gate` is opened."""

    def __init__(self, directory: Path) -> None:
        fields = resolve(None, api.config(directory))
        self.contents = api.blocks(BLOCKS)
        self.gate = _core.StallGate()
        with BlockingStore.open(**fields) as store:
            ns = store.namespace(api.spec())
            self.keys = ns.keys_from_tokens(api.tokens(BLOCKS))
            assert store.put(ns, self.keys, self.contents).stored == BLOCKS
            assert store.flush().all_durable
        self.core = self.gate.open_store(fields)
        self.store = BlockingStore(self.core)
        self.ns: Namespace = self.store.namespace(api.spec())
        self.gate.shut()

    def is_stalled(self) -> bool:
        """Whether reads have reached the drive and wait there."""
        return self.gate.waiting > 0

    def settle(self) -> None:
        """Lets the drive answer, and waits until nothing of any call is left."""
        self.gate.open()
        wait_until(lambda: self.gate.waiting == 0)
        wait_until(self.is_settled)
        assert self.store.audit()["faults"] == []

    def is_settled(self) -> bool:
        gc.collect()
        stats = self.store.stats()
        return not (stats["calls"] or stats["leased_bytes"] or stats["loading_bytes"])


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"never came: {holds}")


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Stalled]:
    made = Stalled(tmp_path)
    yield made
    made.gate.open()
    made.store.close()


def reused() -> bytearray:
    """Memory of a caller, for all blocks."""
    return bytearray(BLOCKS * api.BLOCK_BYTES)


def fill(out: bytearray) -> None:
    """The caller uses its memory again: no byte of it may change from now on."""
    out[:] = CANARY * len(out)


def next_of(channel: Any) -> list[Completion]:
    assert select.select([channel], [], [], SECOND)[0]
    drained: list[Completion] = channel.drain()
    return drained


def test_a_timed_out_get_into_never_writes_afterwards(stalled: Stalled) -> None:
    out = reused()
    report = stalled.store.get_into(stalled.ns, stalled.keys, out, timeout=0.05)
    assert report.items == ["deadline"] * BLOCKS
    fill(out)
    assert stalled.is_stalled(), "the read outlives the call"
    stalled.settle()
    assert out == CANARY * len(out)


async def test_a_cancelled_get_into_never_writes_afterwards(stalled: Stalled) -> None:
    store, out = TieredStore(stalled.core), reused()
    task = asyncio.ensure_future(store.get_into(stalled.ns, stalled.keys, out))
    await asyncio.to_thread(wait_until, stalled.is_stalled)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Exported no more, though the read has not ended.
    fill(out)
    out.extend(CANARY)
    assert stalled.is_stalled()
    await asyncio.to_thread(stalled.settle)
    assert out == CANARY * len(out)


def test_closing_a_channel_ends_its_calls_before_it_returns(stalled: Stalled) -> None:
    channel = stalled.store.channel()
    outs = [reused() for _ in range(4)]
    for out in outs:
        channel.submit_get_into(stalled.ns, stalled.keys, out)
    wait_until(stalled.is_stalled)
    assert channel.pending() == len(outs)
    channel.close()
    assert (channel.closed, channel.pending(), channel.drain()) == (True, 0, [])
    assert select.select([channel], [], [], 0)[0], "pollers wake and see that it is closed"
    for out in outs:
        fill(out)
        out.extend(CANARY)
    assert stalled.is_stalled(), "nothing has answered yet"
    with pytest.raises(ClosedError, match="channel is closed"):
        channel.submit_exists(stalled.ns, stalled.keys)
    channel.close()
    stalled.settle()
    for out in outs:
        assert out == CANARY * len(out)
    # The store and its other channels go on.
    with stalled.store.channel() as other:
        other.submit_get_into(stalled.ns, stalled.keys, out := reused())
        assert next_of(other)[0].ok
        assert out == b"".join(stalled.contents)


def test_quiesce_says_when_the_time_is_over(stalled: Stalled) -> None:
    with stalled.store.channel() as channel:
        assert channel.quiesce(0), "nothing is in progress"
        channel.submit_get_into(stalled.ns, stalled.keys, out := reused())
        assert not channel.quiesce(0)
        assert not channel.quiesce(0.05)
        assert (channel.pending(), channel.drain()) == (1, [])
        with pytest.raises(BufferError):
            out.append(0)
        stalled.gate.open()
        assert channel.quiesce()
        assert channel.pending() == 0
        (done,) = channel.drain()
        assert (done.ok, done.bytes) == (True, len(out))
        assert out == b"".join(stalled.contents)
        with pytest.raises(InvalidArgumentError, match="timeout"):
            channel.quiesce(-1)


def test_a_channel_that_is_dropped_cancels_its_calls(stalled: Stalled) -> None:
    out = reused()
    channel = stalled.store.channel()
    channel.submit_get_into(stalled.ns, stalled.keys, out)
    wait_until(stalled.is_stalled)
    del channel
    gc.collect()
    wait_until(lambda: stalled.store.stats()["calls"] == 0)
    fill(out)
    out.extend(CANARY)
    stalled.settle()
    assert out == CANARY * len(out)


def test_calls_beyond_the_capacity_have_a_bound(stalled: Stalled) -> None:
    """A stalled drive and an engine that does not drain: nothing grows without end."""
    with stalled.store.channel(capacity=2) as channel:
        for _ in range(2):
            channel.submit_get_into(stalled.ns, stalled.keys, reused())
        refused = [channel.submit_exists(stalled.ns, stalled.keys) for _ in range(2)]
        for _ in range(3):
            with pytest.raises(NoSpaceError, match="drain them") as caught:
                channel.submit_exists(stalled.ns, stalled.keys)
            assert caught.value.retry
        assert channel.pending() == 2
        assert [(done.id, done.ok) for done in channel.drain()] == [(id_, False) for id_ in refused]
        again = channel.submit_exists(stalled.ns, stalled.keys)
        assert [(done.id, done.ok) for done in channel.drain()] == [(again, False)]
        stalled.gate.open()
        assert channel.quiesce(SECOND)
        assert [done.ok for done in channel.drain()] == [True, True]
        channel.submit_exists(stalled.ns, stalled.keys)
        assert channel.drain()[0].ok, "there is room again"


def abandon_a_loop(stalled: Stalled, outs: list[bytearray]) -> None:
    """Closes an event loop whose calls the drive has not answered."""
    store = TieredStore(stalled.core)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    tasks: list[asyncio.Task[Any]] = [loop.create_task(store.get(stalled.ns, stalled.keys))]
    tasks += [loop.create_task(store.get_into(stalled.ns, stalled.keys, out)) for out in outs]
    loop.run_until_complete(asyncio.sleep(0))
    wait_until(stalled.is_stalled)
    loop.close()
    for task in tasks:
        # A task of a closed loop can only be forgotten; that is not what is tested.
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_closed_loop_cancels_its_calls(stalled: Stalled) -> None:
    outs = [reused(), reused()]
    abandon_a_loop(stalled, outs)
    wait_until(lambda: stalled.store.stats()["calls"] == 0)
    assert stalled.is_stalled(), "they did not wait for the drive"
    for out in outs:
        wait_until(lambda out=out: exported_no_more(out))  # type: ignore[misc]
        fill(out)
    stalled.settle()
    assert all(set(out) == set(CANARY) for out in outs)


def exported_no_more(out: bytearray) -> bool:
    try:
        out.append(0)
    except BufferError:
        return False
    return True


def test_loops_threads_and_a_channel_share_a_store(stalled: Stalled) -> None:
    """Two loops, one of them closed early; two blocking threads; a polling channel: no leak."""
    expected = b"".join(stalled.contents)
    dropped = [reused()]
    faults: list[BaseException] = []
    ended: list[str] = []

    def blocking(name: str) -> None:
        out = reused()
        assert stalled.store.get_into(stalled.ns, stalled.keys, out).hits == BLOCKS
        assert out == expected
        with stalled.store.get(stalled.ns, stalled.keys) as leases:
            assert api.contents(leases) == stalled.contents
        ended.append(name)

    async def in_a_loop() -> None:
        store, out = TieredStore(stalled.core), reused()
        leases, report = await asyncio.gather(
            store.get(stalled.ns, stalled.keys), store.get_into(stalled.ns, stalled.keys, out)
        )
        assert (leases.hits, report.hits) == (BLOCKS, BLOCKS)
        assert out == expected
        leases.release()
        ended.append("loop")

    def polling() -> None:
        out = reused()
        with stalled.store.channel() as channel:
            number = channel.submit_get_into(stalled.ns, stalled.keys, out)
            (done,) = next_of(channel)
            assert (done.id, done.ok, out == expected) == (number, True, True)
        ended.append("channel")

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            faults.append(error)

    works: list[Callable[[], None]] = [
        lambda: blocking("one"),
        lambda: blocking("two"),
        lambda: asyncio.run(in_a_loop()),
        polling,
    ]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    wait_until(lambda: stalled.store.stats()["calls"] == 5)
    abandon_a_loop(stalled, dropped)
    stalled.gate.open()
    for thread in threads:
        thread.join(SECOND)
    assert faults == []
    assert sorted(ended) == ["channel", "loop", "one", "two"]
    wait_until(lambda: exported_no_more(dropped[0]))
    stalled.settle()
    assert stalled.store.stats()["leased_bytes"] == 0
