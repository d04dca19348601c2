"""Holds, prefetch, hybrid lookups, puts that wait for room; integers out of range are named."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import (
    ClosedError,
    Hold,
    InvalidArgumentError,
    Namespace,
    RequestContext,
    TieredStore,
)
from tiered_kv.blocking import BlockingStore

LONG_S = 60.0
BLOCKS = 4


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with BlockingStore.open(**api.config()) as opened:
        yield opened


def _stored(store: BlockingStore, start: int = 0) -> tuple[Namespace, bytes]:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(BLOCKS, start))
    store.put(ns, keys, api.blocks(BLOCKS))
    return ns, keys


def _crowd_out(store: BlockingStore) -> None:
    """Stores other chains until everything that may be evicted has been."""
    for start in range(1000, 101_000, 1000):
        _stored(store, start)


def _holds(store: BlockingStore | TieredStore) -> tuple[int, int]:
    stats = store.stats()
    return stats["holds"], stats["held_bytes"]


def test_held_blocks_stay_until_the_hold_is_released(store: BlockingStore) -> None:
    ns, keys = _stored(store)
    more = ns.keys_from_tokens(api.tokens(BLOCKS + 1))
    with store.hold(ns, more, ttl=LONG_S) as hold:
        assert (hold.hits, hold.held) == (BLOCKS, [True] * BLOCKS + [False])
        count, held_bytes = _holds(store)
        assert count == 1
        assert held_bytes >= BLOCKS * api.BLOCK_BYTES
        _crowd_out(store)
        assert store.lookup(ns, keys).hits == BLOCKS
    assert _holds(store) == (0, 0)
    hold.release()
    _crowd_out(store)
    assert store.lookup(ns, keys).hits == 0


def test_a_hold_ends_when_it_is_dropped_or_its_time_is_over(store: BlockingStore) -> None:
    ns, keys = _stored(store)
    hold = store.hold(ns, keys, math.inf)
    assert _holds(store)[0] == 1
    del hold
    assert _holds(store) == (0, 0)
    brief = store.hold(ns, keys, 0.0)
    _crowd_out(store)
    assert store.get(ns, keys, hold=brief).hits == 0


def test_a_hold_ends_with_the_get_that_uses_it(store: BlockingStore) -> None:
    ns, keys = _stored(store)
    into = bytearray(BLOCKS * api.BLOCK_BYTES)
    holds = [store.hold(ns, keys, LONG_S) for _ in range(3)]
    assert store.get(ns, keys, hold=holds[0]).hits == BLOCKS
    assert _holds(store)[0] == 2
    assert store.get_into(ns, keys, into, hold=holds[1]).hits == BLOCKS
    assert _holds(store)[0] == 1
    with store.channel() as channel:
        channel.submit_get_into(ns, keys, into, hold=holds[2])
        assert channel.quiesce(LONG_S)
    assert _holds(store) == (0, 0)
    assert store.get(ns, keys, hold=holds[0]).hits == BLOCKS


async def test_asyncio_holds_and_prefetches(tmp_path: Path) -> None:
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(BLOCKS))
        assert (await store.put(ns, keys, api.blocks(BLOCKS), wait=LONG_S)).stored == BLOCKS
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        store.prefetch(ns, keys[:64])
        until = time.monotonic() + LONG_S
        while store.lookup(ns, keys).tiers != bytes([1, 1, 3, 3]):
            assert time.monotonic() < until, "the loads never end"
            await asyncio.sleep(0.001)
        with await store.get(ns, keys, hold=store.hold(ns, keys, LONG_S)) as leases:
            assert leases.sources == bytes([1, 1, 3, 3])
        into = bytearray(BLOCKS * api.BLOCK_BYTES)
        hold = store.hold(ns, keys, LONG_S)
        assert (await store.get_into(ns, keys, into, hold=hold)).hits == BLOCKS
        assert bytes(into) == b"".join(api.blocks(BLOCKS))
        assert _holds(store) == (0, 0)


def test_a_hybrid_hit_is_all_that_a_position_needs(store: BlockingStore) -> None:
    ns, full = _stored(store)
    window = ns.keys_from_tokens(api.tokens(BLOCKS, 500))
    state = ns.keys_from_tokens(api.tokens(BLOCKS, 600))
    store.put(ns, window[32:96], api.blocks(2), chain=False)
    store.put(ns, state[64:96], api.blocks(1), chain=False)
    assert store.lookup_hybrid(ns, [(full, "all")]) == BLOCKS
    assert store.lookup_hybrid(ns, [(full, "all"), (state, "last")]) == 3
    assert store.lookup_hybrid(ns, [(full, "all"), (window, ("window", 2)), (state, "last")]) == 3
    assert store.lookup_hybrid(ns, [(full, "all"), (window, ("window", 3)), (state, "last")]) == 0


BAD_GROUPS: list[tuple[Any, str]] = [
    (7, "`groups` is not a sequence"),
    ([7], r"`groups\[0\]` is not a pair"),
    ([(bytes(32), "all"), (bytes(33), "all")], r"`groups\[1\]` holds 33 bytes"),
    ([(bytes(32), "all"), (bytes(64), "all")], "`groups` have different numbers of keys"),
    ([(bytes(32), "some")], r"`groups\[0\]` has the rule 'some'"),
    ([(bytes(32), "window")], r"`groups\[0\]` has the rule 'window'"),
    ([(bytes(32), ("window", 0))], r"`groups\[0\]` has the rule \('window', 0\)"),
    ([(bytes(32), ("window", -1))], r"`groups\[0\]` has the rule \('window', -1\)"),
]


@pytest.mark.parametrize(("groups", "named"), BAD_GROUPS)
def test_wrong_groups_are_named(store: BlockingStore, groups: Any, named: str) -> None:
    ns = store.namespace(api.spec())
    with pytest.raises(InvalidArgumentError, match=named):
        store.lookup_hybrid(ns, groups)


async def test_a_put_that_may_wait_is_stored_when_there_is_room_again() -> None:
    async with TieredStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        reservation = store.reserve(ns, ns.keys_from_tokens(api.tokens(300, 10_000)))
        keys, blocks = ns.keys_from_tokens(api.tokens(1)), api.blocks(1)
        assert (await store.put(ns, keys, blocks)).throttled == 1
        assert (await store.put(ns, keys, blocks, wait=0)).throttled == 1
        waiting = asyncio.ensure_future(store.put(ns, keys, blocks, wait=LONG_S, timeout=LONG_S))
        until = time.monotonic() + LONG_S
        while store.stats()["calls"] == 0:
            assert time.monotonic() < until, "the put does not wait"
            await asyncio.sleep(0.001)
        reservation.abandon()
        # Any other call lets it try again.
        store.prefetch(ns, b"")
        assert (await waiting).stored == 1


@pytest.mark.parametrize("seconds", [-1.0, math.nan, -math.inf])
def test_wrong_seconds_are_named(store: BlockingStore, seconds: float) -> None:
    ns, keys = _stored(store)
    with pytest.raises(InvalidArgumentError, match="`ttl` is"):
        store.hold(ns, keys, ttl=seconds)
    with pytest.raises(InvalidArgumentError, match="`wait` is"):
        store.put(ns, keys, api.blocks(BLOCKS), wait=seconds)
    assert _holds(store) == (0, 0)


def test_a_hold_is_good_for_its_own_store_only(store: BlockingStore) -> None:
    ns, keys = _stored(store)
    hold = store.hold(ns, keys, LONG_S)
    with BlockingStore.open(**api.config()) as other, other.channel() as channel:
        theirs, into = other.namespace(api.spec()), bytearray(BLOCKS * api.BLOCK_BYTES)
        calls: list[Callable[[], object]] = [
            lambda: other.get(theirs, keys, hold=hold),
            lambda: other.get_into(theirs, keys, into, hold=hold),
            lambda: channel.submit_get_into(theirs, keys, into, hold=hold),
        ]
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="`hold` belongs to another store"):
                call()
        with pytest.raises(InvalidArgumentError, match="`ns` belongs to another store"):
            other.hold(ns, keys, LONG_S)
    assert _holds(store)[0] == 1


def _hold_of_a_closed_store() -> Hold:
    with BlockingStore.open(**api.config()) as store:
        ns, keys = _stored(store)
        return store.hold(ns, keys, LONG_S)


def test_a_hold_outlives_its_store() -> None:
    hold = _hold_of_a_closed_store()
    hold.release()
    assert hold.held == [True] * BLOCKS


def test_a_closed_store_makes_no_holds() -> None:
    store = BlockingStore.open(**api.config())
    ns, keys = _stored(store)
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.hold(ns, keys, LONG_S),
        lambda: store.prefetch(ns, keys),
        lambda: store.lookup_hybrid(ns, [(keys, "all")]),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()


@pytest.mark.parametrize("value", [-1, 1 << 64, "x"])
def test_an_integer_out_of_range_is_named(store: BlockingStore, value: Any) -> None:
    ns, keys = _stored(store)
    with pytest.raises(InvalidArgumentError, match=r"`depth` is .*2\^32 - 1"):
        store.put(ns, keys, api.blocks(BLOCKS), depth=value)
    with pytest.raises(InvalidArgumentError, match=r"`turn` is .*2\^32 - 1"):
        store.begin_request(RequestContext(turn=value))
    with pytest.raises(InvalidArgumentError, match=r"`position` is .*2\^64 - 1"):
        store.begin_request().observe(ns, keys, value)
    store.begin_request(RequestContext(turn=(1 << 32) - 1)).observe(ns, keys, (1 << 64) - 1)
