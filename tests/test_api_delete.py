"""Deleting keys, namespaces and what is old: gone at once, and gone after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

import api
from tiered_kv import ClosedError, InvalidArgumentError, Namespace, TieredStore
from tiered_kv.blocking import BlockingStore


def filled(store: BlockingStore, ns: Namespace, start: int = 0) -> bytes:
    """Four durable blocks and their keys."""
    keys = ns.keys_from_tokens(api.tokens(4, start))
    assert store.put(ns, keys, api.blocks(4)).stored == 4
    assert store.flush().all_durable
    return keys


async def test_deleted_keys_are_gone_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        await store.put(ns, keys, api.blocks(4))
        assert (await store.flush()).all_durable
        leases = await store.get(ns, keys)
        report = await store.delete(ns, keys[32:96])
        assert (report.removed, report.durable) == (2, True)
        assert repr(report) == "<DeleteReport: 2 removed, durable>"
        assert [store.contains(ns, key) for key in api.split(keys)] == [True, False, False, True]
        assert api.contents(leases) == api.blocks(4), "leases stay valid"
        leases.release()
        assert (await store.get(ns, keys)).reasons == [None, "absent", "absent", None]
        again = await store.delete(ns, keys[32:96])
        assert (again.removed, again.durable) == (0, True)
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        assert [store.contains(ns, key) for key in api.split(keys)] == [True, False, False, True]
        assert (await store.put(ns, keys, api.blocks(4))).statuses == [
            *("exists", "stored", "stored", "exists")
        ]


@pytest.mark.parametrize("call", ["delete_namespace", "new_epoch"])
def test_a_namespace_goes_and_its_neighbour_stays(
    tmp_path: Path, call: Literal["delete_namespace", "new_epoch"]
) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(salt="b"))
        keys, kept = filled(store, ns), filled(store, other)
        report = getattr(store, call)(ns)
        assert (report.removed, report.durable) == (4, True)
        assert store.lookup(ns, keys).hits == 0
        # The handle stays good, and what is stored from here on stays.
        newer = filled(store, ns, 1000)
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(salt="b"))
        hits = [store.lookup(*pair).hits for pair in ((ns, keys), (ns, newer), (other, kept))]
        assert hits == [0, 4, 4]


async def test_only_what_is_old_is_deleted(tmp_path: Path) -> None:
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        old, new = (ns.keys_from_tokens(api.tokens(2, start)) for start in (0, 1000))
        await store.put(ns, old, api.blocks(2))
        between = time.time()
        await asyncio.sleep(0.01)
        await store.put(ns, new, api.blocks(2))
        assert (await store.delete_older_than(ns, 3600)).removed == 0
        report = await store.delete_older_than(ns, time.time() - between)
        assert (report.removed, report.durable) == (2, True)
        assert (store.lookup(ns, old).hits, store.lookup(ns, new).hits) == (0, 2)
        assert (await store.delete_older_than(ns, 0)).removed == 2


def test_a_durable_delete_outlives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, api; from pathlib import Path\n"
        "from tiered_kv.blocking import BlockingStore\n"
        "store = BlockingStore.open(**api.config(Path(sys.argv[1])))\n"
        "ns = store.namespace(api.spec())\n"
        "keys = ns.keys_from_tokens(api.tokens(4))\n"
        "store.put(ns, keys, api.blocks(4))\n"
        "assert store.flush().all_durable\n"
        "assert store.delete(ns, keys[:64]).durable\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=False)
    assert run.returncode == -signal.SIGKILL
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        keys = api.split(ns.keys_from_tokens(api.tokens(4)))
        assert [store.contains(ns, key) for key in keys] == [False, False, True, True]


def test_memory_alone_deletes_too() -> None:
    with BlockingStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(2))
        store.put(ns, keys, api.blocks(2))
        assert store.delete(ns, keys).removed == 2
        assert store.audit()["dram_used_bytes"] == 0


async def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    store = await TieredStore.open(**api.config(tmp_path))
    ns = store.namespace(api.spec())
    with pytest.raises(InvalidArgumentError, match="key"):
        await store.delete(ns, b"short")
    with pytest.raises(InvalidArgumentError, match="`seconds` is -1"):
        await store.delete_older_than(ns, -1)
    with pytest.raises(InvalidArgumentError, match="`timeout` is -1"):
        await store.new_epoch(ns, timeout=-1)
    async with TieredStore.open(**api.config()) as other:
        with pytest.raises(InvalidArgumentError, match="`ns` belongs to another store"):
            await other.delete_namespace(ns)
    await store.close()
    with pytest.raises(ClosedError):
        await store.delete(ns, bytes(32))
