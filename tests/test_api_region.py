"""Regions: an engine's own memory, read into without a copy, in every face of the store."""

from __future__ import annotations

import asyncio
import gc
import mmap
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

import api
from tiered_kv import (
    ClosedError,
    ConfigError,
    InvalidArgumentError,
    Namespace,
    TieredStore,
    UnsupportedError,
)
from tiered_kv.blocking import BlockingStore

BLOCK = 16 << 10
N = 8


@pytest.fixture(params=["auto", "blocking"])
def on_drive(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[BlockingStore, Namespace, bytes, list[bytes]]]:
    """A store with a few blocks that are on the drive only."""
    config = api.config(tmp_path, io_backend=request.param)
    stored = api.blocks(N, size=BLOCK)
    with BlockingStore.open(**config) as opened:
        ns = opened.namespace(api.spec(BLOCK))
        keys = ns.keys_from_tokens(api.tokens(N))
        assert opened.put(ns, keys, stored).stored == N
        assert opened.flush().all_durable
    with BlockingStore.open(**config) as opened:
        yield opened, opened.namespace(api.spec(BLOCK)), keys, stored


OnDrive = tuple[BlockingStore, Namespace, bytes, list[bytes]]


def pool(slots: int) -> memoryview:
    """An engine's pool on page addresses, each byte 0xa5."""
    memory = mmap.mmap(-1, slots * BLOCK)
    memory.write(b"\xa5" * (slots * BLOCK))
    return memoryview(memory)


def slot(memory: memoryview, number: int) -> bytes:
    return bytes(memory[number * BLOCK : (number + 1) * BLOCK])


def test_a_pool_is_filled_by_the_drive_and_the_other_slots_stay(on_drive: OnDrive) -> None:
    store, ns, keys, stored = on_drive
    memory = pool(12)
    region = store.register(memory, BLOCK)
    assert len(region) == 12
    assert region.slot_bytes == BLOCK
    assert "12 slots" in repr(region)
    places = [11, 3, 5, 9, 0, 1, 7, 2]
    report = store.get_into(ns, keys, region.slots(places))
    assert report.hits == N
    assert report.sources == bytes([3]) * N
    for place, block in zip(places, stored, strict=True):
        assert slot(memory, place) == block
        assert region.read(place) == block
    assert all(slot(memory, place) == b"\xa5" * BLOCK for place in (4, 6, 8, 10))
    counters = store.stats()["counters"]
    assert counters["direct_reads"] == N
    assert counters["direct_bytes"] == N * BLOCK
    assert store.stats()["dram"]["blocks"] == 0
    health = store.health()
    assert health["regions"] == 1
    assert isinstance(health["region_reason"], str)
    bounced = store.get_into(ns, keys, region.slots(places), on_stall="bounce")
    assert bounced.hits == N
    assert store.stats()["counters"]["direct_reads"] == N
    assert region.slots_used == 0
    assert store.audit()["faults"] == []


def test_slots_are_put_like_buffers(on_drive: OnDrive) -> None:
    store, ns, _, _ = on_drive
    region = store.register(pool(3), BLOCK)
    for place, block in enumerate(api.blocks(3, seed=7, size=BLOCK)):
        region.write(place, block)
    keys = ns.keys_from_tokens(api.tokens(3, start=1000))
    assert store.put(ns, keys, region.slots([2, 0, 1])).stored == 3
    with store.get(ns, keys) as leases:
        blocks = api.blocks(3, seed=7, size=BLOCK)
        assert api.contents(leases) == [blocks[2], blocks[0], blocks[1]]


def test_a_channel_fills_and_stores_slots(on_drive: OnDrive) -> None:
    store, ns, keys, stored = on_drive
    memory = pool(N)
    region = store.register(memory, BLOCK)
    places = list(range(N))[::-1]
    with store.channel() as channel:
        wanted = channel.submit_get_into(ns, keys, region.slots(places))
        select.select([channel], [], [], 30)
        [done] = channel.drain()
        assert (done.id, done.ok, done.bytes) == (wanted, True, N * BLOCK)
        others = ns.keys_from_tokens(api.tokens(N, start=500))
        channel.submit_put(ns, others, region.slots(places))
        assert channel.quiesce(30)
        assert channel.drain()[0].ok
    assert [slot(memory, place) for place in places] == stored
    with store.get(ns, others) as leases:
        assert api.contents(leases) == stored


async def test_asyncio_fills_slots_also_where_several_calls_do(tmp_path: Path) -> None:
    stored = api.blocks(N, size=BLOCK)
    config = api.config(tmp_path)
    async with TieredStore.open(**config) as store:
        ns = store.namespace(api.spec(BLOCK))
        keys = ns.keys_from_tokens(api.tokens(N))
        await store.put(ns, keys, stored)
        await store.flush()
    async with TieredStore.open(**config) as store:
        ns = store.namespace(api.spec(BLOCK))
        memory = pool(N)
        region = store.register(memory, BLOCK)
        calls = [
            store.get_into(ns, keys[32 * i : 32 * i + 32], region.slots([i])) for i in range(N)
        ]
        reports = await asyncio.gather(*calls)
        assert [report.hits for report in reports] == [1] * N
        assert [slot(memory, i) for i in range(N)] == stored


def test_a_numpy_pool_is_filled(on_drive: OnDrive) -> None:
    numpy = pytest.importorskip("numpy")
    store, ns, keys, stored = on_drive
    memory = numpy.zeros((N, BLOCK // 4), dtype=numpy.float32)
    region = store.register(memory, BLOCK)
    assert store.get_into(ns, keys, region.slots(range(N))).hits == N
    assert [memory[i].tobytes() for i in range(N)] == stored
    memory.setflags(write=False)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        store.register(memory, BLOCK)


def test_a_torch_pool_is_filled_whatever_its_alignment(on_drive: OnDrive) -> None:
    torch = pytest.importorskip("torch")
    from tiered_kv.torch import as_buffer

    store, ns, keys, stored = on_drive
    tensor = torch.zeros(N * BLOCK // 4 + 1, dtype=torch.float32)[1:]
    region = store.register(as_buffer(tensor), BLOCK)
    assert store.get_into(ns, keys, region.slots(range(N))).hits == N
    got = tensor.view(torch.uint8).reshape(N, BLOCK)
    assert [bytes(got[i].numpy()) for i in range(N)] == stored


def test_the_memory_stays_exported_until_the_region_is_gone(on_drive: OnDrive) -> None:
    store, ns, keys, _ = on_drive
    memory = bytearray(N * BLOCK)
    with store.register(memory, BLOCK) as region:
        slots = region.slots(range(N))
        with pytest.raises(BufferError):
            memory.extend(b"x")
    assert region.closed
    with pytest.raises(ClosedError, match="the region is closed"):
        store.get_into(ns, keys, slots)
    del region, slots
    gc.collect()
    memory.extend(b"x")
    assert store.health()["regions"] == 0


def test_what_is_wrong_with_a_region_is_named(on_drive: OnDrive) -> None:
    store, ns, keys, _ = on_drive
    with pytest.raises(InvalidArgumentError, match="`memory` is read-only"):
        store.register(bytes(BLOCK), BLOCK)
    with pytest.raises(InvalidArgumentError, match="`slot_bytes` is 0"):
        store.register(bytearray(BLOCK), 0)
    with pytest.raises(InvalidArgumentError, match="`stride` is 8"):
        store.register(bytearray(BLOCK), 16, stride=8)
    region = store.register(pool(N), BLOCK)
    with pytest.raises(InvalidArgumentError, match="`numbers` is 8: give an integer from 0 to 7"):
        region.slots([1, 8])
    with pytest.raises(InvalidArgumentError, match="2 slots for 8 keys"):
        store.get_into(ns, keys, region.slots([0, 1]))
    with pytest.raises(InvalidArgumentError, match="slot 3 is in use"):
        store.get_into(ns, keys[:64], region.slots([3, 3]))
    with pytest.raises(InvalidArgumentError, match=r"`on_stall` is .hope."):
        store.get_into(ns, keys, region.slots(range(N)), on_stall="hope")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="`data` holds 1 bytes"):
        region.write(0, b"x")
    small = store.register(bytearray(64), 16)
    with pytest.raises(InvalidArgumentError, match=f"slot_bytes={BLOCK}"):
        store.get_into(ns, keys[:32], small.slots([0]))
    with (
        BlockingStore.open(**api.config()) as other,
        pytest.raises(InvalidArgumentError, match="another store's region"),
    ):
        other.get_into(other.namespace(api.spec(BLOCK)), keys[:32], region.slots([0]))
    assert region.slots_used == 0, "a call that is refused gives its slots back"


def test_without_dram_blocks_go_to_the_drive_and_come_from_it(tmp_path: Path) -> None:
    config = api.config(tmp_path, dram_capacity=0, staging_capacity="1MiB")
    stored = api.blocks(N, size=BLOCK)
    with BlockingStore.open(**config) as store:
        ns = store.namespace(api.spec(BLOCK))
        keys = ns.keys_from_tokens(api.tokens(N))
        assert store.put(ns, keys, stored).statuses == ["stored"] * N
        assert store.lookup(ns, keys).tiers == bytes([3]) * N
        for call in (lambda: store.get(ns, keys), lambda: store.reserve(ns, keys)):
            with pytest.raises(UnsupportedError, match="`dram_capacity` is 0"):
                call()
    with BlockingStore.open(**config) as store:
        ns = store.namespace(api.spec(BLOCK))
        memory = pool(N)
        region = store.register(memory, BLOCK)
        assert store.get_into(ns, keys, region.slots(range(N))).hits == N
        assert [slot(memory, i) for i in range(N)] == stored
        plain = bytearray(N * BLOCK)
        assert store.get_into(ns, keys, plain).hits == N
        assert bytes(plain) == b"".join(stored)
        store.prefetch(ns, keys)
        stats = store.stats()
        assert stats["counters"]["prefetch_ignored"] == N
        assert (stats["staging_bytes"], stats["staging_used_bytes"]) == (1 << 20, 0)
        assert (stats["dram"]["capacity_bytes"], stats["dram"]["used_bytes"]) == (0, 0)
        assert store.audit()["faults"] == []
        with pytest.raises(InvalidArgumentError, match="`staging_capacity` to 1638400 bytes"):
            store.namespace(api.spec(200 << 10))


def test_no_tier_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="`dram_capacity` and `nvme_capacity` are both 0"):
        BlockingStore.open(dram_capacity=0)


def test_buffers_anywhere_are_lent_to_one_call(on_drive: OnDrive) -> None:
    store, ns, keys, stored = on_drive
    memory = [pool(1) for _ in range(N)]
    assert store.get_into(ns, keys, store.lend(memory)).hits == N
    assert [bytes(buffer) for buffer in memory] == stored
    assert store.stats()["counters"]["direct_reads"] == N
    assert store.health()["regions"] == 0, "the kernel is told nothing"
    others = ns.keys_from_tokens(api.tokens(N, start=900))
    assert store.put(ns, others, store.lend(memory)).stored == N
    with store.get(ns, others) as leases:
        assert api.contents(leases) == stored


def test_what_is_wrong_with_lent_buffers_is_named(on_drive: OnDrive) -> None:
    store, ns, keys, _ = on_drive
    whole = pool(2)
    with pytest.raises(InvalidArgumentError, match=r"`buffers\[0\]` and `buffers\[1\]` overlap"):
        store.lend([whole[:BLOCK], whole[100 : 100 + BLOCK]])
    with pytest.raises(InvalidArgumentError, match=r"`buffers\[0\]` is read-only"):
        store.lend([bytes(BLOCK)])
    with pytest.raises(InvalidArgumentError, match="give a block's bytes"):
        store.lend([bytearray()])
    with pytest.raises(InvalidArgumentError, match="give one a key"):
        store.lend(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"slot_bytes={BLOCK}"):
        store.get_into(ns, keys[:32], store.lend([bytearray(16)]))
    lent = bytearray(BLOCK)
    slots = store.lend([lent])
    with pytest.raises(BufferError):
        lent.extend(b"x")
    del slots
    gc.collect()
    lent.extend(b"x")
