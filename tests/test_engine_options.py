"""The options of the vLLM flag, and the test that an adapter makes before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import ConfigError, IoFaultError
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines import flags
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.vllm.options import Options, TierOptions

GOOD: dict[str, Any] = {"path": "/mnt/kv", "nvme_capacity": "1GiB", "dram_capacity": "256MiB"}

WRONG_ANYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"path": None}, "path"),
    ({"path": ""}, "path"),
    ({"pat": "/mnt/kv"}, "pat"),
    ({"nvme_paths": ["/mnt/kv"]}, "nvme_paths"),
    ({"nvme_capacity": "lots"}, "nvme_capacity"),
    ({"record": ""}, "record"),
    ({"record": True}, "record"),
    ({"record_bytes": "1GiB"}, "record_bytes"),
]
"""Options that no adapter of an engine takes, and what the error names."""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *WRONG_ANYWHERE,
        ({"nvme_capacity": 0}, "nvme_capacity"),
        ({"dram_capacity": 0}, "dram_capacity"),
        ({"on_reset": "forget"}, "on_reset"),
        ({"load_timeout_s": "soon"}, "load_timeout_s"),
        ({"weights": 7}, "weights"),
        ({"sharers": 0}, "sharers"),
        ({"sharers": True}, "sharers"),
    ],
)
def test_a_wrong_option_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"`?{named}"):
        Options.parse({**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"path": None}, "path"),
        ({"weak_hash": 1}, "weak_hash"),
        ({"namespace": 7}, "namespace"),
        ({"lora": "by_name"}, "lora"),
        ({"locality": "there"}, "locality"),
        ({"root_dir": "/mnt/kv"}, "root_dir"),
    ],
)
def test_a_wrong_option_of_the_tier_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"secondary_tiers: `{named}`"):
        TierOptions.parse({**GOOD, **change})


def test_the_tier_has_no_memory_of_its_own_but_where_it_is_given_some(tmp_path: Path) -> None:
    plain = TierOptions.parse({"path": str(tmp_path), "nvme_capacity": "8GiB"})
    made = plain.make_directory(1, None)
    assert made == tmp_path / "dp1"
    config = plain.store_config(made, 2)
    assert (config.dram_capacity, config.nvme_capacity) == (0, 4 << 30)
    assert TierOptions.parse({**GOOD, "path": str(tmp_path)}).store["dram_capacity"] == "256MiB"


def test_each_rank_has_its_directory_and_its_share(tmp_path: Path) -> None:
    options = Options.parse({**GOOD, "path": str(tmp_path / "a/kv"), "drive_stall_s": 3})
    made = options.make_directory(1, 3)
    assert made == tmp_path / "a/kv/dp1/rank3"
    assert [one.stat().st_mode & 0o777 for one in (made, made.parent)] == [0o700, 0o700]
    config = options.store_config(made, 4)
    assert (config.nvme_capacity, config.dram_capacity) == (256 << 20, 64 << 20)
    assert (config.nvme_paths, config.drive_stall_s) == ((str(made),), 3)


def test_the_engine_records_and_not_each_rank(tmp_path: Path) -> None:
    options = Options.parse({**GOOD, "record": str(tmp_path / "traces")})
    assert options.record == tmp_path / "traces"
    assert options.store_config(tmp_path, 1).record is None


def test_ranks_share_the_default_memory_too(tmp_path: Path) -> None:
    options = Options.parse({"path": str(tmp_path), "nvme_capacity": "8GiB"})
    shared = options.store_config(tmp_path, 8).dram_capacity
    assert isinstance(shared, int)
    assert shared <= (4 << 30) // 8


class Lying:
    """A store that gives back something else."""

    def __init__(self, store: BlockingStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_into(self, ns: Any, keys: bytes, buffers: Any, **options: Any) -> Any:
        return self._store.get_into(ns, keys[32:] + keys[:32], buffers, **options)


def test_case_20_a_store_that_gives_back_other_bytes_does_not_serve(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        self_test(store, 8192)
        lying: Any = Lying(store)
        with pytest.raises(IoFaultError, match="other bytes"):
            self_test(lying, 8192)


def test_the_flag_is_one_that_the_options_take(tmp_path: Path) -> None:
    row, *_ = flags.engines(tmp_path, None, "1GiB")
    options = Options.parse(row["config"]["kv_connector_extra_config"])
    assert options.path == tmp_path
    assert row["config"]["kv_load_failure_policy"] == "recompute"
