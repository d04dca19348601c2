"""Several drives and both I/O backends, as health tells of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import ConfigError, UnsupportedError, _core
from tiered_kv.blocking import BlockingStore

URING, WHY_NOT = _core.probe_io_uring()


def spread(store: BlockingStore, chains: int = 8) -> dict[bytes, bytes]:
    """Stores blocks of several chains and waits until they are durable."""
    ns = store.namespace(api.spec())
    stored: dict[bytes, bytes] = {}
    for number in range(chains):
        keys = ns.keys_from_tokens(api.tokens(4, number * 1000))
        contents = api.blocks(4, number)
        store.put(ns, keys, contents)
        stored |= dict(zip(api.split(keys), contents, strict=True))
    assert store.flush().all_durable
    return stored


def found(store: BlockingStore, stored: dict[bytes, bytes]) -> set[bytes]:
    """The keys that are served, each with its bytes."""
    ns = store.namespace(api.spec())
    hits = set()
    for key, content in stored.items():
        with store.get(ns, key) as leases:
            view = leases[0]
            if view is not None:
                assert bytes(view) == content
                hits.add(key)
    return hits


def two(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """A configuration of two drives, one of them on a mount point of its own."""
    (tmp_path / "mount").mkdir(exist_ok=True)
    paths = [tmp_path / "a", tmp_path / "mount" / "b"]
    return api.config(None, nvme_paths=paths, nvme_capacity="2MiB") | fields


def test_two_drives_share_the_blocks_and_both_are_told_of(tmp_path: Path) -> None:
    with BlockingStore.open(**two(tmp_path)) as store:
        stored = spread(store)
        drives = store.health()["drives"]
        assert [drive["path"] for drive in drives] == [
            str(path) for path in two(tmp_path)["nvme_paths"]
        ]
        assert [drive["state"] for drive in drives] == ["working"] * 2
        assert all(drive["backend"] and drive["reason"] for drive in drives)
        assert len({drive["store_id"] for drive in drives}) == 2
        assert store.health()["store_id"] == drives[0]["store_id"]
    assert all(list(path.glob("segment-*.tkv")) for path in two(tmp_path)["nvme_paths"])
    with BlockingStore.open(**two(tmp_path)) as store:
        assert found(store, stored) == set(stored)
        assert store.stats()["nvme"]["hits"] == len(stored)


def test_a_lost_drive_is_misses_until_it_is_back(tmp_path: Path) -> None:
    with BlockingStore.open(**two(tmp_path)) as store:
        stored = spread(store)
    config = two(tmp_path)
    (tmp_path / "mount").rename(tmp_path / "away")
    with BlockingStore.open(**config) as store:
        there, lost = store.health()["drives"]
        assert (there["state"], lost["state"]) == ("working", "lost")
        assert (lost["path"], lost["store_id"]) == (str(tmp_path / "mount" / "b"), "")
        assert "nvme_paths" in lost["reason"]
        kept = found(store, stored)
        assert 0 < len(kept) < len(stored)
    (tmp_path / "away").rename(tmp_path / "mount")
    with BlockingStore.open(**config) as store:
        assert found(store, stored) == set(stored)


def test_a_full_journal_does_not_hold_up_the_close(tmp_path: Path) -> None:
    """With a drive away no tombstone retires: close waited for room until its deadline."""
    config = two(tmp_path, nvme_capacity="512KiB", close_timeout_s=3600)
    with BlockingStore.open(**config) as store:
        spread(store, 1)
    (tmp_path / "mount").rename(tmp_path / "away")
    store = BlockingStore.open(**config)
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(1))
    durable = [store.delete(ns, keys, timeout=0.5).durable for _ in range(10)]
    assert durable[0]
    assert not durable[-1], "the journal has room for all: the test tests nothing"
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_the_backend_is_the_one_asked_for(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path, io_backend="blocking")) as store:
        health = store.health()
        assert health["backend"] == "blocking"
        assert 'io_backend = "blocking"' in health["backend_reason"]
        assert health["drives"][0]["backend"] == health["backend_reason"]
        stored = spread(store)
    with BlockingStore.open(**api.config(tmp_path)) as store:
        health = store.health()
        assert health["backend"] == ("io_uring" if URING else "blocking")
        assert URING or WHY_NOT in health["backend_reason"]
        assert found(store, stored) == set(stored)


@pytest.mark.skipif(not URING, reason=f"no io_uring here: {WHY_NOT}")
def test_io_uring_can_be_demanded(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path, io_backend="io_uring")) as store:
        assert store.health()["backend"] == "io_uring"
        assert store.health()["backend_reason"].startswith("io_uring: ")
        stored = spread(store)
        assert found(store, stored) == set(stored)


@pytest.mark.skipif(URING, reason="io_uring can be had here")
def test_a_demand_for_io_uring_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="io_backend"):
        BlockingStore.open(**api.config(tmp_path, io_backend="io_uring"))


def test_drives_and_backends_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nvme_paths.*twice"):
        BlockingStore.open(**api.config(tmp_path, nvme_paths=[tmp_path, tmp_path]))
    with pytest.raises(ConfigError, match="io_backend"):
        BlockingStore.open(**api.config(tmp_path, io_backend="aio"))


def test_a_store_of_memory_only_has_no_drive() -> None:
    with BlockingStore.open(**api.config()) as store:
        health = store.health()
        assert (health["backend"], health["drives"]) == ("none", [])
