"""What the bridge costs a serving loop: metadata calls and leases of 64 resident blocks.

Run with `make bench`; the figures are a machine's own and are asserted nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tiered_kv import KvLayout, NamespaceSpec
from tiered_kv.blocking import TieredStore

BLOCKS = 64
BLOCK_BYTES = 16 << 10


@pytest.fixture
def resident() -> Iterator[tuple[Any, Any, bytes]]:
    """A store with 64 blocks in memory, its namespace and their keys."""
    with TieredStore.open(dram_capacity="64MiB") as store:
        layout = KvLayout(tokens_per_block=1, block_bytes=BLOCK_BYTES)
        ns = store.namespace(NamespaceSpec(model="m", weights="w", kv_dtype="d", layout=layout))
        keys = ns.keys_from_tokens(range(BLOCKS))
        store.put(ns, keys, bytes(BLOCKS * BLOCK_BYTES))
        yield store, ns, keys


def test_lookup(benchmark: Any, resident: tuple[Any, Any, bytes]) -> None:
    """Looks 64 keys up."""
    store, ns, keys = resident
    found = benchmark(store.lookup, ns, keys)
    assert found.hits == BLOCKS


def test_lease(benchmark: Any, resident: tuple[Any, Any, bytes]) -> None:
    """Leases 64 resident blocks and gives them back."""
    store, ns, keys = resident

    def lease() -> int:
        with store.get(ns, keys) as leases:
            return int(leases.hits)

    assert benchmark(lease) == BLOCKS


def test_event_loop_turn(benchmark: Any) -> None:
    """The floor: one empty turn of an asyncio loop."""
    loop = asyncio.new_event_loop()

    async def nothing() -> None:
        pass

    benchmark(lambda: loop.run_until_complete(nothing()))
    loop.close()
