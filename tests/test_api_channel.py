"""Channels: submit from any thread, poll a descriptor, drain; nothing waits, no buffer is lost."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import api
from tiered_kv import (
    Channel,
    ClosedError,
    Completion,
    InvalidArgumentError,
    Namespace,
    TieredStore,
)
from tiered_kv.blocking import BlockingStore

MIB = 1 << 20
LARGE = 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockingStore]:
    with BlockingStore.open(**api.config(tmp_path, dram_capacity="2MiB")) as opened:
        yield opened


@pytest.fixture
def on_drive(tmp_path: Path) -> Iterator[tuple[BlockingStore, Namespace, bytes]]:
    """A store with a batch of 16 MiB that is on the drive only."""
    config = api.config(tmp_path, dram_capacity="64MiB", nvme_capacity="128MiB", load_threads=1)
    config["io_backend"] = "blocking"
    with BlockingStore.open(**config) as opened:
        ns = opened.namespace(api.spec(MIB))
        keys = ns.keys_from_tokens(api.tokens(LARGE))
        assert opened.put(ns, keys, b"x" * (LARGE * MIB)).stored == LARGE
        assert opened.flush().all_durable
    with BlockingStore.open(**config) as opened:
        yield opened, opened.namespace(api.spec(MIB)), keys


def readable(channel: Channel) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def next_of(channel: Channel) -> list[Completion]:
    """Waits with poll(2), as an engine does, and drains."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    assert poll.poll(30_000)
    return channel.drain()


def only(channel: Channel) -> Completion:
    (done,) = next_of(channel)
    return done


def test_every_call_comes_back_through_the_descriptor(store: BlockingStore) -> None:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(10))
    stored = api.blocks(10)
    with store.channel() as channel:
        assert not readable(channel)
        first = channel.submit_put(ns, keys[: 9 * 32], stored[:9])
        done = only(channel)
        assert (done.id, done.ok, done.bitmap) == (first, True, b"\xff\x01")
        assert done.bytes == 9 * api.BLOCK_BYTES
        assert done.seconds > 0
        assert not readable(channel), "draining reads the descriptor"
        assert channel.submit_exists(ns, keys) == first + 1
        done = only(channel)
        assert (done.ok, done.bitmap, done.bytes) == (True, b"\xff\x01", 0)
        assert [done.done(index) for index in range(10)] == [True] * 9 + [False]
        out = [bytearray(api.BLOCK_BYTES) for _ in range(10)]
        channel.submit_get_into(ns, keys, out)
        done = only(channel)
        assert (done.ok, done.bitmap) == (True, b"\xff\x01"), "a miss is no failure"
        assert done.bytes == 9 * api.BLOCK_BYTES
        assert out[:9] == stored[:9]
        channel.submit_delete(ns, keys[32:])
        done = only(channel)
        assert (done.ok, done.bitmap) == (True, b"\xff\x01")
        channel.submit_exists(ns, keys)
        assert only(channel).bitmap == b"\x01\x00"
        assert (channel.pending(), channel.drain()) == (0, [])


def test_several_channels_keep_their_calls_apart(store: BlockingStore) -> None:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(2))
    with store.channel() as one, store.channel() as two:
        one.submit_put(ns, keys, api.blocks(2))
        assert only(one).ok
        assert not readable(two)
        two.submit_exists(ns, keys)
        assert only(two).bitmap == b"\x03"
        assert one.drain() == []


def test_a_full_queue_ends_calls_as_failed(store: BlockingStore) -> None:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(2))
    out = bytearray(2 * api.BLOCK_BYTES)
    with store.channel(capacity=2) as channel:
        ids = [channel.submit_exists(ns, keys) for _ in range(2)]
        late = channel.submit_get_into(ns, keys, out)
        out.clear()  # The channel has not kept it.
        late_put = channel.submit_put(ns, keys, api.blocks(2))
        done = channel.drain()
        assert [one.id for one in done] == [*ids, late, late_put]
        assert [one.ok for one in done] == [True, True, False, False]
        assert done[2][2:] == (b"\x00", 0, 0.0)
        assert not store.contains(ns, keys[:32]), "a failed put has stored nothing"
        channel.submit_put(ns, keys, api.blocks(2))
        assert only(channel).ok, "there is room again"


def test_a_put_that_is_not_stored_is_not_ok(tmp_path: Path) -> None:
    config = api.config(tmp_path, dram_capacity="64KiB", dirty_high_fraction=0.25)
    with BlockingStore.open(**config) as store, store.channel() as channel:
        ns = store.namespace(api.spec())
        seen = []
        for number in range(16):
            keys = ns.keys_from_tokens(api.tokens(8, number * 1000))
            channel.submit_put(ns, keys, api.blocks(8))
            seen.append(only(channel))
        throttled = [done for done in seen if not done.ok]
        assert throttled
        for done in seen:
            count = sum(done.done(index) for index in range(8))
            assert (count == 8, count * api.BLOCK_BYTES) == (done.ok, done.bytes)


def test_buffers_are_held_until_their_completion_is_drained(
    on_drive: tuple[BlockingStore, Namespace, bytes],
) -> None:
    store, ns, keys = on_drive
    out = bytearray(LARGE * MIB)
    with store.channel() as channel:
        channel.submit_get_into(ns, keys, out)
        with pytest.raises(BufferError):
            out.clear()
        assert channel.quiesce(30)
        assert channel.pending() == 0
        with pytest.raises(BufferError):
            out.clear()
        assert out == b"x" * (LARGE * MIB), "after quiesce the core is done with the memory"
        (done,) = channel.drain()
        assert (done.ok, done.bitmap, done.bytes) == (True, b"\xff\xff", LARGE * MIB)
        out.clear()


def test_a_closed_store_ends_the_calls_of_its_channels(
    on_drive: tuple[BlockingStore, Namespace, bytes],
) -> None:
    store, ns, keys = on_drive
    out = bytearray(LARGE * MIB)
    with store.channel() as channel:
        number = channel.submit_get_into(ns, keys, out)
        store.close()
        done = only(channel)
        assert done.id == number
        assert done.ok == (done.bitmap == b"\xff\xff")
        out.clear()
        with pytest.raises(ClosedError):
            channel.submit_exists(ns, keys)
    with pytest.raises(ClosedError):
        store.channel()


def test_threads_share_a_channel(store: BlockingStore) -> None:
    """Four threads submit and two poll and drain; every call comes back once, with its bytes."""
    ns = store.namespace(api.spec())
    submitters, rounds = 4, 40
    ended: dict[int, Completion] = {}
    wanted: dict[int, tuple[bytearray, bytes]] = {}
    lock, stop = threading.Lock(), threading.Event()
    faults: list[BaseException] = []

    def submit(thread: int, channel: Channel) -> None:
        for number in range(rounds):
            keys = ns.keys_from_tokens(api.tokens(2, (thread * rounds + number) * 100))
            content = b"".join(api.blocks(2, thread * rounds + number))
            if store.put(ns, keys, content).stored != 2:
                store.flush()
                continue
            out = bytearray(len(content))
            call = channel.submit_get_into(ns, keys, out)
            with lock:
                wanted[call] = (out, content)

    def drain(channel: Channel) -> None:
        while not stop.is_set() or channel.pending() or readable(channel):
            select.select([channel], [], [], 0.05)
            for done in channel.drain():
                with lock:
                    assert done.id not in ended
                    ended[done.id] = done

    def guarded(work: object, *args: object) -> None:
        try:
            work(*args)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            faults.append(error)

    with store.channel() as channel:
        drainers = [threading.Thread(target=guarded, args=(drain, channel)) for _ in range(2)]
        threads = [
            threading.Thread(target=guarded, args=(submit, number, channel))
            for number in range(submitters)
        ]
        for thread in (*drainers, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        assert channel.quiesce(30)
        stop.set()
        for thread in drainers:
            thread.join()
        assert faults == []
        assert set(ended) == set(wanted)
        assert len(wanted) > submitters
        for number, (out, content) in wanted.items():
            if ended[number].bitmap == b"\x03":
                assert out == content
        assert any(done.bitmap == b"\x03" for done in ended.values())


async def test_a_loop_and_a_channel_share_a_store(tmp_path: Path) -> None:
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(2))
        with store.channel() as channel:
            channel.submit_put(ns, keys, api.blocks(2))
            done = await asyncio.to_thread(only, channel)
            assert done.ok
            assert (await store.get(ns, keys)).hits == 2


def test_wrong_arguments_raise_and_leave_nothing_behind(store: BlockingStore) -> None:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(2))
    with store.channel() as channel:
        with pytest.raises(InvalidArgumentError, match="key"):
            channel.submit_exists(ns, b"short")
        with pytest.raises(InvalidArgumentError, match="read-only"):
            channel.submit_get_into(ns, keys, bytes(2 * api.BLOCK_BYTES))
        with pytest.raises(InvalidArgumentError, match="buffers"):
            channel.submit_put(ns, keys, b"short")
        with pytest.raises(InvalidArgumentError, match="tokens"):
            channel.submit_put(ns, keys, api.blocks(2), tokens=[1])
        with BlockingStore.open(**api.config()) as other:
            with pytest.raises(InvalidArgumentError, match="belongs to another store"):
                channel.submit_exists(other.namespace(api.spec()), keys)
            with pytest.raises(InvalidArgumentError, match="belongs to another store"):
                channel.submit_get_into(ns, keys, bytearray(10_000), req=other.begin_request())
        assert (channel.pending(), channel.drain()) == (0, [])
    for capacity in (0, 1 << 30):
        with pytest.raises(InvalidArgumentError, match="`capacity`"):
            store.channel(capacity)
