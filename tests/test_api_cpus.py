"""A store's threads run where they are told, whatever the thread that opens it is bound to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

import api
from tiered_kv import ConfigError, StoreConfig
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines import _cpus
from tiered_kv.engines.lmcache.options import Options as LmcacheOptions
from tiered_kv.engines.vllm.options import Options as VllmOptions

ALL = sorted(os.sched_getaffinity(0))
FLAG: dict[str, Any] = {"path": "/mnt/kv", "nvme_capacity": "1GiB", "dram_capacity": "256MiB"}
LIMIT_S = 60
R = TypeVar("R")

several = pytest.mark.skipif(len(ALL) < 2, reason="the machine has one processor")


def bound(work: Callable[[], R]) -> R:
    """What a thread returns that is bound to one processor."""
    with ThreadPoolExecutor(1, initializer=lambda: os.sched_setaffinity(0, ALL[:1])) as thread:
        return thread.submit(work).result(LIMIT_S)


def places() -> dict[str, list[int]]:
    """By name, where the threads of the stores of this process may run."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name = (task / "comm").read_text().strip()
            if name.startswith("tkv-"):
                found[name] = sorted(os.sched_getaffinity(int(task.name)))
    return found


def opened(directory: Path, **fields: Any) -> dict[str, list[int]]:
    def run() -> dict[str, list[int]]:
        with BlockingStore.open(**api.config(directory, **fields)) as store:
            ns = store.namespace(api.spec())
            keys = ns.keys_from_tokens(api.tokens(2))
            assert store.put(ns, keys, api.blocks(2)).stored == 2
            store.flush()
            return places()

    return bound(run)


@several
@pytest.mark.parametrize("backend", ["blocking", "auto"])
def test_threads_run_where_they_are_told(tmp_path: Path, backend: str) -> None:
    left = opened(tmp_path / "left", io_backend=backend)
    told = opened(tmp_path / "told", io_backend=backend, cpus=ALL)
    assert set(left) & set(told) >= {"tkv-timer", "tkv-attach", "tkv-copy-0"}
    assert all(place == ALL[:1] for place in left.values()), left
    assert all(place == ALL for place in told.values()), told


@pytest.mark.parametrize(
    ("given", "read"),
    [([3, 1, 1], (1, 3)), ((2,), (2,)), ("0-2,5", (0, 1, 2, 5)), ("7", (7,)), (None, None)],
    ids=repr,
)
def test_processors_read_as_people_write_them(given: Any, read: Any) -> None:
    assert StoreConfig.from_dict({"dram_capacity": "1MiB", "cpus": given}).cpus == read


def test_the_environment_names_processors() -> None:
    for text, read in (("0-1,4", (0, 1, 4)), ("6", (6,))):
        assert StoreConfig.from_env({"TIERED_KV_CPUS": text}).cpus == read


@pytest.mark.parametrize(
    "given",
    [[], "", "3-1", "0-", "-1", [-1], [1024], "0-1024", 1 << 40, ["0"], [[0]], [0.5], True, "a,b"],
    ids=repr,
)
def test_what_is_no_list_of_processors_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="cpus"):
        BlockingStore.open(**api.config(None, cpus=given))


def test_processors_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`cpus` is 1022-1023, and this process may run on none"):
        BlockingStore.open(**api.config(tmp_path, cpus=[1022, 1023]))
    with BlockingStore.open(**api.config(tmp_path)) as store:
        assert store.health()["drives"], "nothing was left behind that keeps others out"


def _worker(
    names: dict[str, str], place: list[int], binding: tuple[str, ...] = _cpus._BINDING
) -> tuple[list[int] | None, Any, Any]:
    """In a process that an engine has made: what is found, and what the adapters' stores get."""
    os.environ.update(names)
    os.sched_setaffinity(0, place)
    with mock.patch.object(_cpus, "_BINDING", binding):
        vllm = VllmOptions.parse(FLAG).store_config(Path("/mnt/kv"), 1)
        lmcache = LmcacheOptions.parse({"namespace": "m/w/d", **FLAG}).store
        stores = [None if cpus is None else list(cpus) for cpus in (vllm.cpus, lmcache.cpus)]
        return _cpus.cpus_beside_computation(), stores[0], stores[1]


@several
@pytest.mark.parametrize(
    ("told", "found"),
    [
        (({"OMP_PLACES": "{0},{0}"}, ALL[:1]), ALL),
        (({"KMP_AFFINITY": "granularity=fine,disabled"}, ALL[:1]), ALL),
        (({"OMP_PLACES": "{0},{0}"}, ALL), None),
        # As `numactl` binds a worker to the memory beside its device.
        (({}, ALL[:1]), None),
        # The same, where a variable is whoever's that started the engine.
        (({}, ALL[:1], ("PATH",)), None),
    ],
    ids=["bound", "bound by Intel's", "as wide as the parent", "an operator's", "a site's"],
)
def test_stores_of_an_engines_worker_keep_out_of_its_computation(
    told: tuple[Any, ...], found: list[int] | None
) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_worker, told) == (found, found, found)


def test_processors_of_other_nodes_are_not_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cpus, "_NODES", tmp_path)
    assert _cpus._near({0}) == set(), "nobody says"
    for node, numbers in ("node0", (0, 1, 4)), ("node1", (2, 3)):
        for number in numbers:
            (tmp_path / node / f"cpu{number}").mkdir(parents=True)
        (tmp_path / node / "cpulist").write_text("")
    (tmp_path / "online").write_text("0-1")
    assert _cpus._near({1}) == {0, 1, 4}
    assert _cpus._near({1, 2}) == {0, 1, 2, 3, 4}


@several
def test_an_option_wins_over_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _cpus.cpus_beside_computation() is None, "no engine has made this process"
    for options in ("tiered_kv.engines.vllm.options", "tiered_kv.engines.lmcache.options"):
        monkeypatch.setattr(f"{options}.cpus_beside_computation", lambda: ALL)
    for given, read in ({}, tuple(ALL)), ({"cpus": "1"}, (1,)), ({"cpus": None}, None):
        vllm = VllmOptions.parse(FLAG | given).store_config(Path("/mnt/kv"), 1)
        lmcache = LmcacheOptions.parse({"namespace": "m/w/d", **FLAG, **given}).store
        assert vllm.cpus == lmcache.cpus == read
