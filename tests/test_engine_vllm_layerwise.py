"""vLLM with `layerwise`: a step saves a layer when it is computed, and waits for it when needed.

The answers are those without the store, whatever of a load goes wrong within a step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import jobs
from serving.jobs import BLOCK, Answers, Round
from serving.model import LAYERS
from test_engine_vllm import (
    ALIGNED,
    ANSWER,
    CONVERSATION,
    EVERYTHING,
    FIRST,
    LONG,
    MANY,
    flip,
    held,
    tokens,
    whole,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Three that begin alike, of each of which a step computes a part: beside one that computes again
# what it could not load, the others go on.
BEGIN = tokens(300, 20)
ALIKE = [BEGIN + tokens(40, seed) for seed in (21, 22, 23)]
ALIKE_ROUND: dict[str, Any] = {"prompts": ALIKE, "max_tokens": ANSWER, "reset": True}
PARTS = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "long_prefill_token_threshold": 32}
BY_LAYERS: dict[str, Any] = {"layerwise": True}


@pytest.fixture(scope="module")
def plain(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Round]:
    """The rounds of an engine without the store."""
    job = tmp_path_factory.mktemp("plain") / "job.json"
    rounds = [*EVERYTHING, ALIKE_ROUND]
    return jobs.run(python, job, model=str(model), transfer=None, rounds=rounds).rounds


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "kv"


@pytest.fixture(scope="module")
def stored(
    python: Path, model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """What came of an engine with a new store, which is full of the rounds afterwards."""
    job = tmp_path_factory.mktemp("stored") / "job.json"
    transfer = jobs.transfer(store, **BY_LAYERS)
    rounds = [*EVERYTHING, ALIKE_ROUND]
    return jobs.run(python, job, model=str(model), transfer=transfer, rounds=rounds)


@pytest.fixture
def again(
    python: Path, model: Path, stored: Answers, store: Path, tmp_path: Path
) -> Callable[..., Answers]:
    """Starts an engine on a copy of the store, of which some slots have a flipped byte."""
    copy = Path(shutil.copytree(store, tmp_path / "kv"))
    assert stored.rounds

    def start(
        rounds: list[dict[str, Any]],
        policy: str = "recompute",
        damaged: slice | None = None,
        **fields: Any,
    ) -> Answers:
        if damaged is not None:
            flip(copy, damaged)
        transfer = jobs.transfer(copy, policy, **BY_LAYERS)
        told = [{"max_tokens": ANSWER, **one} for one in rounds]
        fields = {"model": str(model), "transfer": transfer, "rounds": told, **fields}
        return jobs.run(python, tmp_path / "again.json", **fields)

    return start


def test_answers_are_the_same(plain: list[Round], stored: Answers) -> None:
    assert [one.outputs for one in stored.rounds] == [one.outputs for one in plain]


def test_hits_are_those_of_the_other_way(stored: Answers) -> None:
    rounds = stored.rounds
    assert rounds[0].external == 0
    for turn in range(1, len(CONVERSATION)):
        wanted = [held(turn - 1, session) for session in (0, 1)]
        assert rounds[turn].cached == wanted
    assert rounds[3].external == len(ALIGNED) - 1
    assert rounds[6].external == whole(FIRST)[0]


def test_layers_are_copied_when_they_are_computed_and_when_they_are_needed(stored: Answers) -> None:
    counted = stored.stats["adapter"]
    assert counted["faults"] == counted["cut_loads"] == 0
    # The test of the store at its start writes and reads two blocks, which are no layer's.
    blocks = stored.stats["counters"]["put_stored"] - 2
    hits = sum(stored.stats[tier]["hits"] for tier in ("dram", "nvme")) - 2
    assert (blocks > 0, hits > 0) == (True, True)
    assert (counted["layer_saves"], counted["layer_loads"]) == (LAYERS * blocks, LAYERS * hits)


def test_a_restarted_engine_finds_what_is_on_the_drive(
    again: Callable[..., Answers], plain: list[Round]
) -> None:
    told = {"prompts": FIRST}
    found = again([told, {**told, "reset": True}])
    assert [one.outputs for one in found.rounds] == [plain[0].outputs] * 2
    assert [one.cached for one in found.rounds] == [whole(FIRST)] * 2
    assert found.stats["nvme"]["hits"] > 0
    assert found.stats["adapter"]["layer_loads"] > 0


@pytest.mark.parametrize("engine", [{}, PARTS], ids=["whole", "parts"])
def test_a_flipped_byte_is_computed_again_and_healed(
    engine: dict[str, Any], again: Callable[..., Answers], plain: list[Round]
) -> None:
    told = {**ALIKE_ROUND, "reset": False}
    rounds = [told, {**told, "reset": True}, told]
    found = again(rounds, damaged=slice(0, None, 5), engine=engine)
    assert found.stats["misses"]["corrupt"] > 0
    assert found.stats["adapter"]["cut_loads"] > 0
    assert [one.outputs for one in found.rounds] == [plain[-1].outputs] * 3
    assert found.rounds[1].cached == whole(ALIKE)
    assert "Recovered from KV load failure" in found.log


def test_where_vllm_fails_such_requests_no_wrong_token_comes(
    again: Callable[..., Answers], plain: list[Round]
) -> None:
    told = {"prompts": FIRST[:1]}
    # The engine's own cache keeps nothing of it either.
    first, *others = again([told, told, told], policy="fail", damaged=slice(None)).rounds
    assert (first.reasons, first.outputs) == (["error"], [[]])
    assert [one.outputs for one in others] == [plain[0].outputs[:1]] * 2


def test_a_copy_that_fails_once_is_computed_again(
    again: Callable[..., Answers], plain: list[Round]
) -> None:
    told = {"prompts": FIRST}
    found = again([{**told, "fail": 1}, {**told, "reset": True}])
    assert [one.outputs for one in found.rounds] == [plain[0].outputs] * 2
    assert found.stats["adapter"]["faults"] == 1
    assert found.rounds[1].cached == whole(FIRST)


def test_preempted_requests_get_their_blocks_back(
    again: Callable[..., Answers], plain: list[Round]
) -> None:
    told = {"prompts": MANY, "max_tokens": LONG}
    engine = {"num_gpu_blocks_override": 24, "max_num_seqs": 4, "max_model_len": 512}
    found = again([told, {**told, "reset": True}], engine=engine)
    wanted = plain[len(EVERYTHING) - 1].outputs
    assert [one.outputs for one in found.rounds] == [wanted] * 2
    assert found.rounds[0].preemptions > 0
    assert found.rounds[1].preemptions > found.rounds[0].preemptions
    assert found.rounds[1].cached == whole(MANY)
    assert found.stats["adapter"]["cut_loads"] == 0
    # And where some of them cannot be read.
    found = again([told], damaged=slice(0, None, 2), engine=engine)
    assert (found.rounds[0].outputs, found.rounds[0].preemptions > 0) == (wanted, True)
    assert found.stats["adapter"]["cut_loads"] > 0


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_what_one_rank_lacks_no_rank_stores(
    python: Path, model: Path, tmp_path: Path, plain: list[Round]
) -> None:
    told = {"prompts": FIRST, "max_tokens": ANSWER}
    fields: dict[str, Any] = {
        "model": str(model),
        "transfer": jobs.transfer(tmp_path / "kv", **BY_LAYERS),
        "engine": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        "stats": False,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    cold = jobs.run(python, tmp_path / "cold.json", rounds=[told], **fields).rounds[0]
    for path in (tmp_path / "kv/dp0/rank1").glob("segment-*.tkv"):
        data = bytearray(path.read_bytes())
        for at in range(4096 * 3, len(data), 4096 * 4):
            data[at] ^= 1
        path.write_bytes(data)
    rounds = [told, {**told, "reset": True}]
    found = jobs.run(python, tmp_path / "damaged.json", rounds=rounds, **fields)
    assert "Recovered from KV load failure" in found.log
    outputs = [cold.outputs, *(one.outputs for one in found.rounds)]
    assert outputs == [plain[0].outputs] * 3
    assert found.rounds[1].cached == whole(FIRST)
    # What the other rank has stored meanwhile is no less good.
    last = jobs.run(python, tmp_path / "again.json", rounds=[told], **fields).rounds[0]
    assert (last.outputs, last.cached) == (plain[0].outputs, whole(FIRST))


def test_a_model_of_several_groups_saves_by_layers_and_loads_beside_the_steps(
    python: Path, tmp_path: Path
) -> None:
    model = jobs.make("windows", python, tmp_path / "model")
    told = {"prompts": FIRST, "max_tokens": ANSWER}
    fields: dict[str, Any] = {"model": str(model), "rounds": [told, {**told, "reset": True}]}
    without = jobs.run(python, tmp_path / "plain.json", transfer=None, **fields).rounds
    transfer = jobs.transfer(tmp_path / "kv", **BY_LAYERS)
    found = jobs.run(python, tmp_path / "stored.json", transfer=transfer, **fields)
    assert [one.outputs for one in found.rounds] == [one.outputs for one in without]
    assert found.rounds[1].external > BLOCK
    counted = found.stats["adapter"]
    assert (counted["layer_saves"] > 0, counted["layer_loads"]) == (True, 0)
    assert "loads beside the steps: vLLM cannot take back a load" in found.log
