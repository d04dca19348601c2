"""Checks of the secondary tier below vLLM's own manager: what is a hit, and what never is."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from serving.tiering import CHUNK, END, TOKENS, Driven, driven, keys_of, offloading, tier
from tiered_kv import IoFaultError, TieredKvError
from tiered_kv.engines.vllm import tier as module
from tiered_kv.engines.vllm import tier_identity
from tiered_kv.engines.vllm.options import TierOptions
from tiered_kv.engines.vllm.tier_identity import hash_of, tier_spec

COUNT = 12


def _refused(call: Callable[[], object]) -> str:
    """Why a call is refused."""
    try:
        return f"not refused: {call()}"
    except TieredKvError as error:
        return str(error)


def _stored(one: Driven, name: str = "a", count: int = COUNT) -> list[Any]:
    """Chunks of a prompt, stored by a request that has ended."""
    keys = keys_of(name, count)
    context = one.begin(f"{name} first", keys)
    assert one.store(context, keys) == count
    one.finish(context)
    one.settle()
    return keys


def _again(one: Driven, keys: list[Any], name: str = "again") -> list[bool]:
    """Which chunks another request finds, those of the primary tier apart."""
    one.forget()
    context = one.begin(name, keys)
    found = one.hits(context, keys)
    one.finish(context)
    return found


def check_chunks_come_back_after_a_restart_into_the_primary_tier_itself() -> None:
    with tempfile.TemporaryDirectory() as path:
        with driven(path) as one:
            keys = _stored(one)
            assert _again(one, keys) == [True] * COUNT
        with driven(path) as one:
            assert _again(one, keys) == [True] * COUNT
            stats = one.tiers[0].stats()
            assert stats["counters"]["direct_reads"] == COUNT
            assert stats["dram"]["capacity_bytes"] == 0
            assert one.tiers[0].cache_hit_source is CacheHitSource.DISK
        assert oct(Path(path, "dp0").stat().st_mode & 0o777) == "0o700"


def check_a_prompt_goes_on_where_another_job_has_ended() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path) as one:
        keys = keys_of("a", COUNT)
        context = one.begin("r", keys)
        for first in range(0, COUNT, 4):
            one.store(context, keys[first : first + 4])
        one.finish(context)
        # A request that goes on from what the engine itself had: its first chunk is behind them.
        other = [*keys, *keys_of("b", 2)]
        context = one.begin("s", other)
        one.store(context, other[COUNT:])
        one.finish(context)
        assert _again(one, other) == [True] * (COUNT + 2)


def check_what_is_damaged_or_gone_is_a_miss_once_and_for_all() -> None:
    """Flips a byte, cuts and removes files of the store."""

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        for at in range(4096 + 100, len(data), 4096):
            data[at] ^= 1
        file.write_bytes(data)

    def cut(file: Path) -> None:
        os.truncate(file, 8192)

    for damage in (flip, cut):
        with tempfile.TemporaryDirectory() as path:
            with driven(path) as one:
                keys = _stored(one)
            with driven(path) as one:
                for file in _segments(path):
                    damage(file)
                first, second = _again(one, keys, "x"), _again(one, keys, "y")
                assert not all(first), damage
                assert second == first, damage
                # What is computed again is stored again.
                context = one.begin("z", keys)
                one.store(context, keys)
                one.finish(context)
                one.settle()


def check_files_that_are_gone_are_misses() -> None:
    with tempfile.TemporaryDirectory() as path:
        with driven(path) as one:
            keys = _stored(one)
            # Whoever has them open goes on with them.
            for file in _segments(path):
                file.unlink()
            assert len(_again(one, keys)) == COUNT
        with driven(path) as one:
            assert _again(one, keys) == [False] * COUNT
            _stored(one)


def _segments(path: str) -> list[Path]:
    files = sorted(Path(path, "dp0").rglob("*seg*"))
    assert files, list(Path(path, "dp0").rglob("*"))
    return files


def check_a_load_that_fails_once_is_a_miss_until_it_is_stored_again() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path) as one:
        keys = _stored(one)
        (ours,) = one.tiers
        channel = ours._jobs.channel
        error = IoFaultError("the drive is gone", op="get_into")
        with mock.patch.object(channel, "submit_get_into", side_effect=error):
            assert _again(one, keys) == [False] * COUNT
        assert ours.stats()["adapter"]["faults"] == 1
        context = one.begin("look", keys)
        assert {ours.lookup(key, context) for key in keys} == {LookupResult.MISS}
        one.store(context, keys)
        one.finish(context)
        assert _again(one, keys, "later") == [True] * COUNT


def check_a_load_that_lacks_one_chunk_brings_the_others() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path) as one:
        keys = _stored(one)
        (ours,) = one.tiers
        one.forget()
        context = one.begin("r", keys)
        assert {one.manager.lookup(key, context) for key in keys} == {LookupResult.HIT_PENDING}
        # It goes between the lookup and the load, as an eviction does.
        lost = ours._ns.keys_from_opaque(keys[5], len(keys[5]))
        assert ours._store.delete(ours._ns, lost).removed == 1
        one.step()
        one.settle()
        found = one.hits(context, keys)
        assert found == [at != 5 for at in range(COUNT)]
        assert ours.failed_loads == 1


def check_a_step_asks_the_store_once_for_a_prompt_and_the_next_one_anew() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path) as one:
        keys = _stored(one)
        (ours,) = one.tiers
        context = one.begin("r", keys)
        store = ours._store
        with mock.patch.object(store, "lookup", side_effect=store.lookup) as asked:
            assert {ours.lookup(key, context) for key in keys} == {LookupResult.HIT}
            assert asked.call_count == 1
        lost = ours._ns.keys_from_opaque(keys[5], len(keys[5]))
        assert store.delete(ours._ns, lost).removed == 1
        # What a step has found, an eviction before the next one may take away.
        ours.on_schedule_end(END)
        hits = [ours.lookup(key, context) is LookupResult.HIT for key in keys]
        assert hits == [at != 5 for at in range(COUNT)]


def check_a_store_of_which_a_part_fails_keeps_the_others_and_is_told_as_failed() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path, offloading(groups=2)) as one:
        (ours,) = one.tiers
        keys = [*keys_of("a", 6), *keys_of("a", 6, 1)]
        context = ReqContext("r")
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at % 6 + 1) * TOKENS)
        one.manager.on_new_request(context)
        channel = ours._jobs.channel
        real, fails = channel.submit_put, [True, False]

        def put(*args: Any, **named: Any) -> int:
            if fails.pop(0):
                raise IoFaultError("the drive is gone", op="put")
            return int(real(*args, **named))

        told: list[Any] = []
        with (
            mock.patch.object(channel, "submit_put", side_effect=put),
            mock.patch.object(ours, "get_finished_jobs", _noting(ours, told)),
        ):
            one.store(context, keys)
            one.finish(context)
            one.settle()
        (job,) = told
        assert not job.success
        assert job.transfer_bytes == 6 * CHUNK
        assert _again(one, keys) == [at >= 6 for at in range(12)]


def _noting(ours: Any, told: list[Any]) -> Callable[[], list[Any]]:
    """`get_finished_jobs` that notes what it tells."""
    real = ours.get_finished_jobs

    def noting() -> list[Any]:
        found = list(real())
        told.extend(found)
        return found

    return noting


def check_each_job_is_reported_once_also_through_a_drain() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path, on_reset="keep") as one:
        (ours,) = one.tiers
        keys = keys_of("a", 32)
        context = one.begin("r", keys)
        jobs = [
            TransferJob(at, [keys[at]], np.array([at], dtype=np.int32), False, context)
            for at in range(32)
        ]
        told = []
        for job in jobs:
            ours.submit_store(job)
        told += ours.get_finished_jobs()
        ours.drain_jobs()
        told += ours.get_finished_jobs()
        assert not ours.has_pending_work()
        for at in range(32):
            slot = np.array([at + 32], dtype=np.int32)
            ours.submit_load(TransferJob(100 + at, [keys[at]], slot, True, context))
        ours.drain_jobs()
        told += ours.get_finished_jobs()
        told += ours.get_finished_jobs()
        assert sorted(one.job_id for one in told) == [*range(32), *range(100, 132)]
        assert all(one.success for one in told)


def check_replicas_have_a_directory_each_and_divide_the_capacities() -> None:
    with tempfile.TemporaryDirectory() as path:
        specs = [offloading(replica, 2) for replica in range(2)]
        with driven(path, specs[0]) as first, driven(path, specs[1]) as second:
            one = [_stored(first, "a"), _stored(second, "b")]
            capacities = {
                each.tiers[0].stats()["nvme"]["capacity_bytes"] for each in (first, second)
            }
            assert max(capacities) <= 8 << 20
        assert sorted(one.name for one in Path(path).iterdir()) == ["dp0", "dp1"]
        with driven(path, specs[1]) as second:
            assert _again(second, one[0], "x") == [False] * COUNT
            assert _again(second, one[1], "y") == [True] * COUNT


def check_a_reset_forgets_durably_and_names_what_follows_anew() -> None:
    with tempfile.TemporaryDirectory() as path:
        with driven(path) as one:
            keys = _stored(one)
            running = one.begin("running", keys_of("b", COUNT))
            one.manager.reset_cache()
            assert _again(one, keys) == [False] * COUNT
            # What has begun before goes on without the store: it is of the weights of before.
            one.store(running, keys_of("b", COUNT))
            one.finish(running)
            assert _again(one, keys_of("b", COUNT), "b") == [False] * COUNT
            one.store(one.begin("new", keys), keys)
            one.settle()
            assert _again(one, keys, "new again") == [True] * COUNT
        with driven(path) as one:
            # Neither what was before, nor what came after it and is of weights that nobody names.
            assert _again(one, keys) == [False] * COUNT
        with driven(path, on_reset="keep") as one:
            keys = _stored(one)
            one.manager.reset_cache()
            assert _again(one, keys) == [True] * COUNT


def check_a_reset_that_is_not_durable_ends_the_service() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path) as one:
        keys = _stored(one)
        with mock.patch.object(module, "forget_model", return_value=False):
            one.manager.reset_cache()
        (ours,) = one.tiers
        assert "in time" in ours.out_of_service
        assert _again(one, keys) == [False] * COUNT
        one.store(one.begin("new", keys), keys)
        one.settle()
        assert _again(one, keys, "new again") == [False] * COUNT


def check_a_store_that_does_not_give_back_what_is_written_does_not_start() -> None:
    error = IoFaultError("self-test: a block came back with other bytes", op="self-test")
    with (
        tempfile.TemporaryDirectory() as path,
        mock.patch.object(module, "self_test", side_effect=error),
    ):
        assert "other bytes" in _refused(lambda: Driven(tier(path)))
        # The store was closed: another one may have its directory.
        with mock.patch.object(module, "self_test"), driven(path):
            pass


def check_weak_hashes_and_random_seeds_are_refused() -> None:
    def refusal(algorithm: str, allowed: str, seed: str | None) -> str:
        env = {} if seed is None else {"PYTHONHASHSEED": seed}
        with mock.patch.dict(os.environ, env):
            if seed is None:
                os.environ.pop("PYTHONHASHSEED", None)
            return _refused(lambda: hash_of(algorithm, allowed))

    assert "sha256_cbor" in refusal("xxhash", "", "1")
    assert '"weak_hash": "xxhash"' in refusal("xxhash", "", "1")
    assert "set PYTHONHASHSEED" in refusal("xxhash", "xxhash", None)
    assert "weak_hash" in refusal("xxhash", "xxhash_cbor", "1")
    assert refusal("xxhash", "xxhash", "1").startswith("not refused: xxhash ")
    plain = refusal("sha256", "", None)
    assert plain.startswith("not refused: sha256 ")
    others = {refusal("sha256", "", "1"), refusal("sha256_cbor", "", None), plain}
    assert len(others) == 3


def check_keys_of_a_weak_hash_go_without_the_store_where_nobody_allows_them() -> None:
    short = [key[16:] for key in keys_of("a", COUNT)]
    for allowed, there in (("", False), ("xxhash", True)):
        with tempfile.TemporaryDirectory() as path, driven(path, weak_hash=allowed) as one:
            context = one.begin("r", short)
            one.store(context, short)
            one.finish(context)
            assert _again(one, short, "s") == [there] * COUNT


def check_an_unknown_model_needs_a_name() -> None:
    with tempfile.TemporaryDirectory() as path:
        assert "`namespace` is missing" in _refused(lambda: Driven(tier(path, namespace="")))
        unsaid = _refused(lambda: Driven(tier(path, lora="refuse")))
        assert '"lora": "by_path"' in unsaid, "nobody can tell whether LoRA is enabled"
        with driven(path) as one:
            keys = _stored(one)
        with driven(path, namespace="another revision") as one:
            assert _again(one, keys) == [False] * COUNT
        with driven(path) as one:
            assert _again(one, keys) == [True] * COUNT


def check_adapters_are_refused_or_told_by_their_path() -> None:
    config = SimpleNamespace(
        lora_config=object(),
        model_config=SimpleNamespace(is_prefix_caching_supported=True, is_diffusion=False),
        speculative_config=None,
    )
    options = TierOptions.parse({"path": "/kv", "nvme_capacity": "8MiB"})
    assert '"lora": "by_path"' in _refused(lambda: tier_spec(offloading(), config, options, CHUNK))


def check_layers_in_groups_have_chunks_each() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path, offloading(groups=2)) as one:
        keys = [*keys_of("a", 6), *keys_of("a", 6, 1)]
        context = ReqContext("r")
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at % 6 + 1) * TOKENS)
        one.manager.on_new_request(context)
        one.store(context, keys)
        one.finish(context)
        assert _again(one, keys) == [True] * 12
        # One part of a chunk that is gone is a miss, and the other is not.
        (ours,) = one.tiers
        lost = ours._ns.keys_from_opaque(keys[8], len(keys[8]))
        assert ours._store.delete(ours._ns, lost).removed == 1
        assert _again(one, keys, "later") == [at != 8 for at in range(12)]


def check_metrics_are_what_is_declared() -> None:
    with tempfile.TemporaryDirectory() as path, driven(path) as one:
        keys = _stored(one)
        (ours,) = one.tiers
        _again(one, keys)
        ours._stats.count()
        told = ours.get_stats()
        declared = type(ours).build_metric_definitions({})
        values = told.data["data"]
        assert values["vllm:tiered_kv_hits"][("0", "nvme")] == COUNT
        assert values["vllm:tiered_kv_capacity_bytes"][("0", "nvme")] > 0
        assert len(values["vllm:tiered_kv_load_seconds"][("0",)]) == 1
        for name, series in values.items():
            for labels in series:
                assert len(labels) == len(declared[name].labelnames), name
        assert ours.get_stats() is None


def check_what_a_request_says_reaches_the_predictor_and_the_record() -> None:
    with tempfile.TemporaryDirectory() as path:
        traces = Path(path, "traces")
        with driven(Path(path, "kv"), record=str(traces)) as one:
            keys = keys_of("a", COUNT)
            params = {"tiered_kv": {"session": "s1", "turn": 2, "kind": "chat"}}
            context = one.begin("r", keys[:8], params)
            (ours,) = one.tiers
            one.hits(context, keys[:8])
            one.store(context, keys[:8])
            for at, key in enumerate(keys):
                context.set_offload_key_position(key, (at + 1) * TOKENS)
            one.store(context, keys[8:])
            one.settle()
            before = ours._store.predictor().requests
            one.finish(context)
            assert ours._jobs.drain()
            assert ours._store.predictor().requests == before + 1
        (file,) = traces.iterdir()
        (line,) = [json.loads(text) for text in file.read_text().splitlines()]
        assert (line["session_id"], line["type"]) == ("s1", "chat")
        assert (line["input_length"], line["output_length"]) == (8 * TOKENS, 4 * TOKENS)
        assert (len(line["hash_runs"]), len(line["out_hash_runs"])) == (8, 4)


def check_the_configuration_is_found_where_vllm_makes_the_tier() -> None:
    class Config:
        model_config = SimpleNamespace(model="m")

    def connector(vllm_config: Any) -> Any:
        assert vllm_config is not None
        return tier_identity.config_of(offloading())

    with mock.patch.object(tier_identity, "VllmConfig", Config):
        found = connector(Config())
        assert isinstance(found, Config)
        other = Config()
        other.model_config = SimpleNamespace(model="another")
        assert connector(other) is None
    assert tier_identity.config_of(offloading()) is None
