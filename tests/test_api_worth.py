"""Loads that are not worth their wait, through the faces of Python."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import ConfigError, InvalidArgumentError, TieredStore
from tiered_kv.blocking import BlockingStore

N = 6


def cold(directory: Path, **fields: Any) -> BlockingStore:
    """A store whose blocks are all on its drive, of which one was loaded."""
    config = api.config(directory, **fields)
    for open_again in (False, True):
        store = BlockingStore.open(**config)
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(N))
        if open_again:
            assert store.health()["drives"][0]["load_bytes_per_s"] is None
            assert store.get(ns, keys[:32]).hits == 1, "nothing is known of the drive yet"
            assert store.health()["drives"][0]["load_bytes_per_s"] > 0
            return store
        assert store.put(ns, keys, api.blocks(N)).stored == N
        store.close()
    raise AssertionError


def test_case_21_what_is_computed_at_once_is_not_loaded(tmp_path: Path) -> None:
    with cold(tmp_path) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(N))
        missed = ["recompute"] * (N - 1)
        buffers = bytearray(b"\x5a" * (N * api.BLOCK_BYTES))
        assert list(store.get(ns, keys, recompute_s=0).reasons) == [None, *missed]
        report = store.get_into(ns, keys, buffers, recompute_s=0)
        assert list(report.items) == [None, *missed]
        assert buffers[api.BLOCK_BYTES :] == b"\x5a" * ((N - 1) * api.BLOCK_BYTES), "untouched"
        assert store.stats()["misses"]["recompute"] == 2 * (N - 1)
        told = store.explain(ns, keys)["keys"]
        assert [key["cause"] for key in told] == ["resident", *missed]
        assert "compute it sooner" in told[1]["why"]
        assert store.get(ns, keys, recompute_s=3600).hits == N, "the drive is the faster way"


def test_the_configuration_speaks_where_a_call_does_not(tmp_path: Path) -> None:
    with cold(tmp_path, recompute_tokens_per_s=1e18) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(N))
        assert store.get(ns, keys).hits == 1
        channel = store.channel()
        number = channel.submit_get_into(ns, keys, bytearray(N * api.BLOCK_BYTES))
        assert number
        assert store.get(ns, keys, recompute_s=3600).hits == N
    with pytest.raises(ConfigError, match="`recompute_tokens_per_s` is 0"):
        BlockingStore.open(**api.config(), recompute_tokens_per_s=0.0)


def test_a_coroutine_gets_the_same_answer_and_the_same_errors(tmp_path: Path) -> None:
    cold(tmp_path).close()

    async def ask() -> None:
        async with TieredStore.open(**api.config(tmp_path)) as store:
            ns = store.namespace(api.spec())
            keys = ns.keys_from_tokens(api.tokens(N))
            assert (await store.get(ns, keys[:32], recompute_s=0)).hits == 1, "not known yet"
            assert (await store.get(ns, keys, recompute_s=0)).hits == 1
            buffers = bytearray(N * api.BLOCK_BYTES)
            report = await store.get_into(ns, keys, buffers, recompute_s=0)
            assert list(report.items)[1:] == ["recompute"] * (N - 1)
            for wrong in (-1, float("nan"), "soon"):
                with pytest.raises(InvalidArgumentError, match=re.escape("`recompute_s` is")):
                    await store.get(ns, keys, recompute_s=wrong)  # type: ignore[arg-type]

    asyncio.run(ask())


def test_what_is_stored_behind_what_is_read_is_moved_up(tmp_path: Path) -> None:
    for waste, moved in ((0.0, 0), (0.05, N - 1)):
        with cold(tmp_path / str(waste), ahead_waste=waste) as store:
            counters: dict[str, int] = {}
            for _ in range(6000):
                counters = store.stats()["counters"]
                if counters["ahead_loaded"] >= moved:
                    break
                time.sleep(0.01)
            assert counters["ahead_loaded"] == moved
            assert store.get(store.namespace(api.spec()), keys_of(store)).hits == N
            assert store.stats()["counters"]["ahead_wasted"] == 0
    with pytest.raises(ConfigError, match="ahead_waste"):
        BlockingStore.open(**api.config(tmp_path / "no", ahead_waste=2.0))


def keys_of(store: BlockingStore) -> bytes:
    """Keys of the blocks of `cold`."""
    return store.namespace(api.spec()).keys_from_tokens(api.tokens(N))
