"""What a process may ask of its own store: usage, quotas, names, and why a prompt missed."""

from __future__ import annotations

from pathlib import Path

import pytest

import api
from tiered_kv import (
    ClosedError,
    InUseError,
    InvalidArgumentError,
    RequestContext,
    TieredStore,
    UnsupportedError,
    _core,
    operator,
)
from tiered_kv.blocking import BlockingStore

SLOT = 8192
"""Bytes of a block's slot: its payload rounded up to 4 KiB."""


def test_usage_and_quota_by_namespace(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path), policy="lru") as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(salt="b"))
        assert store.set_quota(ns, dram_bytes=3 * SLOT, nvme_bytes=2 * SLOT)
        for start in range(0, 6000, 1000):
            store.put(ns, ns.keys_from_tokens(api.tokens(1, start)), api.blocks(1))
            store.put(other, other.keys_from_tokens(api.tokens(1, start)), api.blocks(1))
            assert store.flush().pending == 0
        rows = {row["namespace"].hex(): row for row in store.stats()["namespaces"]}
        limited, free = rows[ns.id], rows[other.id]
        assert limited["dram_bytes"] <= 3 * SLOT == limited["dram_quota_bytes"]
        assert limited["nvme_bytes"] <= 2 * SLOT == limited["nvme_quota_bytes"]
        assert (free["dram_blocks"], free["nvme_blocks"]) == (6, 6)
        assert free["nvme_bytes"] == 6 * SLOT
        assert free["dram_quota_bytes"] is None
        assert store.audit()["faults"] == []
        # The newest stay; without a quota there is room again.
        assert store.contains(ns, ns.keys_from_tokens(api.tokens(1, 5000)))
        assert not store.contains(ns, ns.keys_from_tokens(api.tokens(1, 0)))
        assert store.set_quota(ns)
        assert store.put(ns, ns.keys_from_tokens(api.tokens(6, 9000)), api.blocks(6)).stored == 6


def test_a_quota_of_nothing_throttles(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        store.put(ns, ns.keys_from_tokens(api.tokens(2)), api.blocks(2))
        assert store.flush().all_durable
        with store.get(ns, ns.keys_from_tokens(api.tokens(2))) as leases:
            assert leases.hits == 2
            assert not store.set_quota(ns, dram_bytes=0), "a lease keeps memory"
        del leases
        assert store.set_quota(ns, dram_bytes=0)
        keys = ns.keys_from_tokens(api.tokens(1, 100))
        assert store.put(ns, keys, api.blocks(1)).throttled == 1
        assert store.explain(ns, keys)["keys"][0]["cause"] == "throttled"


async def test_explain_tells_causes_and_the_field_that_differs(tmp_path: Path) -> None:
    async with TieredStore.open(**api.config(tmp_path)) as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(weights="newer"))
        keys = ns.keys_from_tokens(api.tokens(4))
        await store.put(ns, keys, api.blocks(4))
        assert (await store.flush()).all_durable
        assert store.explain(ns, keys)["verdict"] == "all 4 blocks are there"
        told = store.explain(other, tokens=api.tokens(5))
        assert (told["hits"], told["complete"], told["known"]) == (0, True, True)
        assert [row["cause"] for row in told["keys"]] == ["never_stored"] * 5
        nearest = told["elsewhere"][0]
        assert (nearest["namespace"].hex(), nearest["hits"]) == (ns.id, 4)
        assert nearest["differs"] == {"weights": ("newer", "weights")}
        assert "differs in `weights` (asked for 'newer'" in told["verdict"]
        await store.delete(ns, keys[64:96])
        told = store.explain(ns, tokens=api.tokens(5))
        causes = [row["cause"] for row in told["keys"]]
        assert causes == ["resident", "resident", "deleted", "resident", "never_stored"]
        assert told["verdict"].startswith("block 2 of 5 is missed: deleted at ")
        assert told["keys"][2]["events"][0]["kind"] == "deleted"
        with pytest.raises(InvalidArgumentError, match="`keys` or `tokens`"):
            store.explain(ns)
        assert store.explain(ns, b"")["verdict"] == "all 0 blocks are there"


def test_names_outlive_the_process_that_gave_them(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        store.namespace(api.spec(lora="sql", salt="hidden"))
        assert store.namespaces()[0]["fields"]["lora"] == "sql"
    with BlockingStore.open(**api.config(tmp_path)) as store:
        (row,) = store.namespaces()
        assert row["fields"]["lora"] == "sql"
        assert row["fields"]["salt"].startswith("digest:")
        assert row["dram_blocks"] == row["nvme_blocks"] == 0


@pytest.mark.parametrize("reserved", [False, True])
def test_blocks_keep_the_tenant_of_their_request(tmp_path: Path, reserved: bool) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        req = store.begin_request(RequestContext(tenant="acme"))
        keys = ns.keys_from_tokens(api.tokens(2))
        if reserved:
            with store.reserve(ns, keys, req=req) as reservation:
                for index, block in enumerate(api.blocks(2)):
                    view = reservation[index]
                    assert view is not None
                    view[:] = block
                    view.release()
                assert store.publish(reservation).stored == 2
        else:
            store.put(ns, keys, api.blocks(2), req=req)
        store.put(ns, ns.keys_from_tokens(api.tokens(1, 500)), api.blocks(1))
        assert store.flush().all_durable
    core = _core.Operator.read([tmp_path])
    payers = [row["tenant"] for row in operator.blocks(core)]
    acme = _core.tenant_digest("acme")
    assert sorted(payers, key=str) == sorted([acme, acme, None], key=str)
    assert len(list(operator.blocks(core, tenant=acme))) == 2
    assert len(list(operator.blocks(core, tenant=bytes(16)))) == 1
    with pytest.raises(UnsupportedError):
        core.delete_before(bytes(32), None, 1.0)
    with pytest.raises(InUseError):
        BlockingStore.open(**api.config(tmp_path))
    core.close()
    BlockingStore.open(**api.config(tmp_path)).close()


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    store = BlockingStore.open(**api.config(tmp_path))
    ns = store.namespace(api.spec())
    with pytest.raises(InvalidArgumentError, match="`dram_bytes` is -1"):
        store.set_quota(ns, dram_bytes=-1)
    with (
        BlockingStore.open(**api.config()) as other,
        pytest.raises(InvalidArgumentError, match="`ns` belongs to another store"),
    ):
        other.set_quota(ns, dram_bytes=1)
    with pytest.raises(InvalidArgumentError, match="`key` holds 5 bytes"):
        store._core.operator().inspect(b"short")
    store.close()
    for call in (lambda: store.set_quota(ns), store.namespaces, lambda: store.explain(ns, b"")):
        with pytest.raises(ClosedError):
            call()
