"""The calls of the asyncio store: what goes in comes out, here and after a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import api
from tiered_kv import (
    ConfigError,
    InvalidArgumentError,
    KvLayout,
    RequestContext,
    StoreConfig,
    TieredStore,
    _core,
)
from tiered_kv.blocking import BlockingStore

DRAM, NVME = 1, 3


async def test_a_round_trip() -> None:
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        stored = api.blocks(4)
        assert store.lookup(ns, keys).tiers == bytes(4)
        report = await store.put(ns, keys, stored, chunk_ends=[False, True, False, True])
        assert (report.stored, report.exists, report.throttled) == (4, 0, 0)
        assert report.statuses == ["stored"] * 4
        assert (await store.put(ns, keys, api.blocks(4, seed=9))).statuses == ["exists"] * 4
        found = store.lookup(ns, keys)
        assert (found.hits, found.tiers, found.flags) == (4, bytes([DRAM] * 4), bytes([0, 1, 0, 1]))
        with await store.get(ns, keys) as leases:
            assert (len(leases), leases.hits) == (4, 4)
            assert api.contents(leases) == stored
            assert bytes(leases[-1] or b"") == stored[-1]
            assert leases.sources == bytes([DRAM] * 4)
            assert leases.flags == bytes([0, 1, 0, 1])
            assert leases.reasons == [None] * 4
        out = [bytearray(api.BLOCK_BYTES) for _ in range(4)]
        into = await store.get_into(ns, keys, out)
        assert (into.hits, into.items, into.sources) == (4, [None] * 4, bytes([DRAM] * 4))
        assert out == stored
        assert (await store.flush()).no_durable_tier
        assert store.contains(ns, keys[:32])


async def test_one_buffer_holds_all_blocks() -> None:
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(3))
        whole = b"".join(api.blocks(3))
        assert (await store.put(ns, keys, memoryview(whole))).stored == 3
        out = bytearray(len(whole))
        assert (await store.get_into(ns, keys, out)).hits == 3
        assert out == whole


async def test_a_restart_serves_from_the_drive(tmp_path: Path) -> None:
    stored = api.blocks(4)
    async with TieredStore.open(StoreConfig(**api.config(tmp_path))) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        await store.put(ns, keys, stored, computed="decode", tokens=[4, 4, 4, 2])
        report = await store.flush()
        assert report.all_durable
        assert (report.pending, report.failed, report.no_durable_tier) == (0, 0, False)
        assert (await store.close()).dropped == 0
    store = await TieredStore.open(**api.config(tmp_path))
    assert store.open_seconds >= store.open_times["recover_s"] > 0
    ns = store.namespace(api.spec())
    found = store.lookup(ns, keys)
    assert (found.tiers, found.flags) == (bytes([NVME] * 4), bytes([2] * 4))
    leases = await store.get(ns, keys)
    assert leases.sources == bytes([NVME] * 4)
    assert api.contents(leases) == stored
    assert store.stats()["nvme"]["hits"] == 4
    assert (await store.get(ns, keys)).sources == bytes([DRAM] * 4)
    assert store.audit()["faults"] == []
    await store.close()


async def test_a_closed_store_lets_go_of_its_directory(tmp_path: Path) -> None:
    first = await TieredStore.open(**api.config(tmp_path))
    await first.close()
    second = await TieredStore.open(**api.config(tmp_path))
    await second.close()
    assert (first.closed, second.closed) == (True, True)
    assert (await second.close()).dropped == 0


async def test_misses_carry_reasons() -> None:
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(3))
        first, _, third = api.split(keys)
        await store.put(ns, first + third, api.blocks(2), chain=False)
        assert store.lookup(ns, keys).tiers == bytes([DRAM, 0, 0])
        assert store.lookup(ns, keys, "each").tiers == bytes([DRAM, 0, DRAM])
        assert store.lookup(ns, keys, "each").hits == 1
        leases = await store.get(ns, keys)
        assert leases.reasons == [None, "absent", None]
        assert leases[1] is None
        assert leases.dlpack(1) is None
        assert leases.sources == bytes([DRAM, 0, DRAM])
        into = await store.get_into(ns, keys, bytearray(3 * api.BLOCK_BYTES))
        assert into.items == [None, "absent", None]
        stats = store.stats()
        hits = stats["dram"]["hits"] + stats["nvme"]["hits"]
        assert hits + sum(stats["misses"].values()) == stats["requested"] == 6


async def test_a_grid_has_slabs() -> None:
    layout = KvLayout(api.TOKENS, layer_groups=2, slab_bytes=[1000, 2500])
    assert layout.block_bytes == 3500
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(dataclasses.replace(api.spec(), layout=layout))
        assert (ns.block_bytes, ns.slab_bytes) == (3500, (1000, 2500))
        keys = ns.keys_from_tokens(api.tokens(1))
        (block,) = api.blocks(1, size=3500)
        await store.put(ns, keys, block)
        leases = await store.get(ns, keys)
        assert bytes(leases.slab(0, 0) or b"") == block[:1000]
        assert bytes(leases.slab(0, 1) or b"") == block[1000:]
        with pytest.raises(InvalidArgumentError, match="slab"):
            leases[0]
        with pytest.raises(IndexError):
            leases.slab(0, 2)
        with pytest.raises(IndexError):
            leases.slab(1, 0)
        other = ns.keys_from_tokens(api.tokens(1, 100))
        with store.reserve(ns, other) as reservation:
            for slab, part in enumerate((block[:1000], block[1000:])):
                view = reservation.slab(0, slab)
                assert view is not None
                view[:] = part
                view.release()
            assert (await store.publish(reservation)).stored == 1
        leases = await store.get(ns, other)
        assert bytes(leases.slab(0, 1) or b"") == block[1000:]


async def test_reserve_and_publish() -> None:
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(3))
        stored = api.blocks(3)
        await store.put(ns, keys[:32], stored[:1])
        reservation = store.reserve(ns, keys, chunk_ends=[False, True, False])
        assert len(reservation) == 3
        assert reservation.statuses == ["exists", None, None]
        assert reservation[0] is None
        for index in (1, 2):
            view = reservation[index]
            assert view is not None
            assert not view.readonly
            view[:] = stored[index]
        assert view is not None
        part = view[10:20]
        view.release()
        with pytest.raises(InvalidArgumentError, match="1 writable views alive"):
            await store.publish(reservation)
        part.release()
        assert store.lookup(ns, keys, "each").tiers[1:] == bytes(2)
        report = await store.publish(reservation)
        assert report.statuses == ["exists", "stored", "stored"]
        with pytest.raises(BufferError):
            reservation[1]
        with pytest.raises(InvalidArgumentError, match="reserve anew"):
            await store.publish(reservation)
        leases = await store.get(ns, keys)
        assert api.contents(leases) == stored
        assert leases.flags == bytes([0, 1, 0])


async def test_an_abandoned_reservation_waits_for_its_last_view() -> None:
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(1))
        with store.reserve(ns, keys) as reservation:
            view = reservation[0]
            assert view is not None
        assert store.audit()["dram_used_bytes"] > 0
        view[:] = api.blocks(1)[0]
        view.release()
        assert store.audit()["dram_used_bytes"] == 0
        assert store.lookup(ns, keys).hits == 0
        with pytest.raises(BufferError):
            reservation[0]


async def test_requests_count_their_accesses_once() -> None:
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(2))
        await store.put(ns, keys, api.blocks(2))
        context = RequestContext(session="s", turn=2, tenant="t", kind="chat", block_type="user")
        request = store.begin_request(context)
        request.observe(ns, keys, position=0)
        assert (await store.get(ns, keys, req=request)).hits == 2
        request.finish(output_tokens=3, engine_hit_tokens=4)
        request.finish()
        store.begin_request().finish()
        with pytest.raises(InvalidArgumentError, match="block_type"):
            store.begin_request(RequestContext(block_type="other"))


async def test_health_and_events(tmp_path: Path) -> None:
    config = api.config(tmp_path, dram_capacity="64KiB", dirty_high_fraction=0.25)
    async with TieredStore.open(**config) as store:
        health = store.health()
        assert health["open"]
        assert len(health["store_id"]) == 32
        ns = store.namespace(api.spec())
        statuses: list[str] = []
        for number in range(16):
            keys = ns.keys_from_tokens(api.tokens(8, number * 1000))
            statuses += (await store.put(ns, keys, api.blocks(8))).statuses
        assert "throttled" in statuses
        events = store.events()
        assert {"throttled"} <= {event["kind"] for event in events}
        assert {len(event["key"]) for event in events} == {32}
        assert store.events(events[-1]["seq"] + 1) == []
    assert not store.health()["open"]


def test_the_core_owns_the_configuration() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(StoreConfig)}
    defaults = _core.default_config()
    assert fields == defaults
    assert StoreConfig.from_dict({}) == StoreConfig()


def test_one_schema_for_text_file_and_environment(tmp_path: Path) -> None:
    text = 'dram_capacity = "2MiB"\nnvme_paths = "kv"\nnvme_capacity = "1GiB"\n'
    env = {"TIERED_KV_NVME_CAPACITY": "2GiB", "TIERED_KV_HUGE_PAGES": "false", "HOME": "/"}
    (tmp_path / "store.toml").write_text(text, encoding="utf-8")
    for source in (text, tmp_path / "store.toml", str(tmp_path / "store.toml")):
        config = StoreConfig.from_toml(source, env)
        assert (config.dram_capacity, config.nvme_capacity) == (2 << 20, 2 << 30)
        assert config.nvme_paths == ("kv",)
        assert config.huge_pages is False
    assert StoreConfig.from_env({"TIERED_KV_LOAD_THREADS": "3"}).load_threads == 3
    assert StoreConfig.from_env({"TIERED_KV_TRACEBACK": "1"}) == StoreConfig()
    assert StoreConfig.from_dict({"segment_bytes": None}) == StoreConfig()
    with pytest.raises(ConfigError, match=r"absent.toml"):
        StoreConfig.from_toml(tmp_path / "absent.toml")


def test_the_process_environment_configures_an_open() -> None:
    code = (
        "from tiered_kv.blocking import BlockingStore\n"
        "with BlockingStore.open() as store: print(store.stats()['dram']['capacity_bytes'])"
    )
    env = {**os.environ, "TIERED_KV_DRAM_CAPACITY": "1MiB"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    assert run.stdout == f"{1 << 20}\n"


def test_the_import_is_light() -> None:
    code = (
        "import sys, tiered_kv, tiered_kv.blocking\n"
        "heavy = {'torch', 'transformers', 'numpy', 'typer', 'rich', 'blake3'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"


def test_digests() -> None:
    from blake3 import blake3

    data = os.urandom(3 << 20)
    assert _core.blake3(data) == blake3(data).hexdigest()
    assert _core.blake3(memoryview(b"")) == blake3(b"").hexdigest()


def test_a_file_is_digested_as_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom((2 << 20) + 1))
    assert (
        _core.blake3_file(path) == _core.blake3_file(str(path)) == _core.blake3(path.read_bytes())
    )


async def test_an_unclosed_store_says_so() -> None:
    store = await TieredStore.open(**api.config())
    with pytest.warns(ResourceWarning, match="unclosed store"):
        del store
    await asyncio.sleep(0)


def test_a_request_counts_each_block_in_its_own_namespace() -> None:
    page = 4096
    with BlockingStore.open(**api.config(dram_capacity=8 * page)) as store:
        first = store.namespace(api.spec(page, salt="a"))
        second = store.namespace(api.spec(page, salt="b"))
        keys = [ns.keys_from_tokens(api.tokens(4)) for ns in (first, second)]
        for ns, packed in zip((first, second), keys, strict=True):
            store.put(ns, packed, api.blocks(4, size=page), chain=False)
        request = store.begin_request()
        request.observe(first, keys[0][:32])
        request.observe(second, keys[1][:32])
        request.finish()
        assert store.predictor() is not None, "takes in what was told so far"
        newer = first.keys_from_tokens(api.tokens(6, start=1000))
        assert store.put(first, newer, api.blocks(6, size=page), chain=False).stored == 6
        assert store.contains(first, keys[0][:32])
        assert store.contains(second, keys[1][:32])


def test_a_position_at_the_end_of_the_range_is_taken() -> None:
    with BlockingStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        request = store.begin_request()
        request.observe(ns, ns.keys_from_tokens(api.tokens(4)), position=2**64 - 1)
        request.finish()


def _stored_type(directory: Path, key: bytes) -> int:
    """The block type in a key's header on the drive, by `docs/format.md`."""
    for file in directory.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        for at in (found.start() - 64 for found in re.finditer(re.escape(key), content)):
            if at >= 0 and at % 512 == 0 and content[at : at + 6] == b"TKVREC":
                return content[at + 156]
    raise AssertionError("no header of the key")


async def test_puts_of_a_request_have_its_block_type(tmp_path: Path) -> None:
    system, tool, user, unknown = 1, 2, 3, 0
    async with TieredStore.open(**api.config(tmp_path)) as store:
        blocking = BlockingStore(store._core)
        ns = store.namespace(api.spec())
        keys = api.split(ns.keys_from_tokens(api.tokens(6)))
        blocks = api.blocks(6)
        request = store.begin_request(RequestContext(block_type="tool"))
        await store.put(ns, keys[0], blocks[0], req=request)
        await store.put(ns, keys[1], blocks[1], req=request, block_type="user")
        await store.put(ns, keys[2], blocks[2], req=store.begin_request())
        blocking.put(ns, keys[3], blocks[3], req=request)
        with store.channel() as channel:
            channel.submit_put(ns, keys[4], blocks[4], req=request)
            assert channel.quiesce(30)
            assert channel.drain()[0].ok
        options = {"req": request, "block_type": "system"}
        with store.reserve(ns, keys[5], **options) as reservation:  # type: ignore[arg-type]
            await store.publish(reservation)
        request.finish()
        async with TieredStore.open(**api.config()) as other:
            stranger = other.begin_request()
            with pytest.raises(InvalidArgumentError, match="`req` belongs to another store"):
                await store.put(ns, keys[0], blocks[0], req=stranger)
            with pytest.raises(InvalidArgumentError, match="`req` belongs to another store"):
                store.reserve(ns, keys[0], req=stranger)
    found = [_stored_type(tmp_path, key) for key in keys]
    assert found == [tool, user, unknown, tool, tool, system]


def test_a_put_has_captured_its_bytes_when_it_resolves() -> None:
    with BlockingStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        stored = b"".join(api.blocks(4))
        buffer = bytearray(stored)
        assert store.put(ns, keys, buffer).stored == 4
        buffer[:] = bytes(len(buffer))
        with store.get(ns, keys) as leases:
            assert b"".join(block or b"" for block in api.contents(leases)) == stored
