"""vLLM on CPU answers with the store as it does without, and takes from it what is there.

Each engine is a process of its own, with a tiny model of random weights, in which every token of a
prompt changes the answer: what was not the prompt's own KV would show.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import jobs
from serving.jobs import BLOCK, Answers, Round
from serving.model import VOCABULARY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ANSWER = 40
BLOCK_BYTES = 3 * 2 * 2 * 32 * BLOCK * 4
"""Layers, keys and values, heads, dimensions, tokens, bytes of a float."""


def tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


# Two sessions share a document, and go on for three turns with the engine's own cache emptied.
DOCUMENT = tokens(200, 0)
FIRST = [DOCUMENT + tokens(30, seed) for seed in (1, 2)]
CONVERSATION: list[dict[str, Any]] = [
    {"prompts": FIRST},
    {"prompts": [tokens(21, 3), tokens(50, 4)], "follow": True, "reset": True},
    {"prompts": [tokens(33, 5), tokens(7, 6)], "follow": True, "reset": True},
]
ALIGNED = FIRST[0][: 6 * BLOCK]
# A prompt that is stored whole; two salts; a salt again, and another one.
OTHERS: list[dict[str, Any]] = [
    {"prompts": [ALIGNED], "reset": True},
    {"prompts": [FIRST[0]], "salts": ["a"], "reset": True},
    {"prompts": [FIRST[0]], "salts": ["b"], "reset": True},
    {"prompts": [FIRST[0]], "salts": ["a"], "reset": True},
]
# Their answers do not fit into a small cache of the engine at once.
MANY = [tokens(100, seed) for seed in range(10, 14)]
LONG = 150
OTHERS.append({"prompts": MANY, "max_tokens": LONG, "reset": True})
EVERYTHING = [{"max_tokens": ANSWER, **one} for one in CONVERSATION + OTHERS]


def held(turn: int, session: int) -> int:
    """Tokens that are stored after a turn: the last token's keys and values nobody computed."""
    length = sum(len(one["prompts"][session]) + ANSWER for one in CONVERSATION[: turn + 1])
    return (length - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def plain(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Round]:
    """The rounds of an engine without the store."""
    job = tmp_path_factory.mktemp("plain") / "job.json"
    return jobs.run(python, job, model=str(model), transfer=None, rounds=EVERYTHING).rounds


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "kv"


@pytest.fixture(scope="module")
def stored(
    python: Path, model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Round]:
    """The rounds of an engine with a new store, which is full of them afterwards."""
    job = tmp_path_factory.mktemp("stored") / "job.json"
    transfer = jobs.transfer(store)
    return jobs.run(python, job, model=str(model), transfer=transfer, rounds=EVERYTHING).rounds


@pytest.fixture
def copy(stored: list[Round], store: Path, tmp_path: Path) -> Path:
    """A store of this test's own, as the engine has left it."""
    assert stored
    return Path(shutil.copytree(store, tmp_path / "kv"))


@pytest.fixture
def again(python: Path, model: Path, copy: Path, tmp_path: Path) -> Callable[..., Answers]:
    """Starts an engine on the copy, which then answers some rounds."""

    def start(rounds: list[dict[str, Any]], policy: str = "recompute", **fields: Any) -> Answers:
        fields = {"model": str(model), "transfer": jobs.transfer(copy, policy), **fields}
        told = [{"max_tokens": ANSWER, **one} for one in rounds]
        return jobs.run(python, tmp_path / "again.json", rounds=told, **fields)

    return start


def whole(prompts: list[list[int]]) -> list[int]:
    return [len(prompt) // BLOCK * BLOCK for prompt in prompts]


def test_answers_are_the_same(plain: list[Round], stored: list[Round]) -> None:
    assert [one.outputs for one in stored] == [one.outputs for one in plain]


def test_without_the_store_nothing_is_external(plain: list[Round]) -> None:
    assert [one.external for one in plain] == [0] * len(EVERYTHING)


def test_a_turn_finds_the_prompt_and_the_answers_before_it(stored: list[Round]) -> None:
    assert stored[0].external == 0
    for turn in (1, 2):
        wanted = [held(turn - 1, session) for session in (0, 1)]
        assert stored[turn].cached == wanted
        assert stored[turn].external == sum(wanted)


def test_of_a_prompt_that_is_stored_whole_the_last_token_is_computed(stored: list[Round]) -> None:
    assert stored[3].external == len(ALIGNED) - 1


def test_salts_never_share(stored: list[Round]) -> None:
    first, other, again = stored[4], stored[5], stored[6]
    assert (first.external, other.external) == (0, 0)
    assert again.external == whole(FIRST)[0]


def test_a_restarted_engine_finds_what_is_on_the_drive(
    again: Callable[..., Answers], plain: list[Round]
) -> None:
    told = {"prompts": FIRST}
    found = again([told, {**told, "reset": "external"}, {**told, "reset": True}])
    first, forgotten, last = found.rounds
    assert first.cached == whole(FIRST)
    assert found.stats["nvme"]["hits"] > 0
    # A reset of external caches, as after an update of the weights, forgets it all.
    assert (forgotten.reset, forgotten.external) == (True, 0)
    assert last.cached == whole(FIRST)
    assert [one.outputs for one in found.rounds] == [plain[0].outputs] * 3


def test_other_weights_find_nothing(
    python: Path, again: Callable[..., Answers], tmp_path: Path
) -> None:
    other = jobs.make("model", python, tmp_path / "tiny", seed=1)
    assert again([{"prompts": FIRST}], model=str(other)).rounds[0].external == 0


def flip(store: Path, slots: slice) -> None:
    """Flips a byte in some slots of each segment that holds the model's blocks."""
    for path in (store / "dp0/rank0").glob("segment-*.tkv"):
        data = bytearray(path.read_bytes())
        slot_bytes, count = struct.unpack_from("<QI", data, 40)
        (at,) = struct.unpack_from("<Q", data, 64)
        if slot_bytes == BLOCK_BYTES:
            for slot in range(count)[slots]:
                data[at + slot * slot_bytes + 1234] ^= 1
        path.write_bytes(data)


def test_a_flipped_byte_is_computed_again_and_healed(
    again: Callable[..., Answers], copy: Path, plain: list[Round]
) -> None:
    flip(copy, slice(3, None))
    told = {"prompts": FIRST}
    found = again([told, {**told, "reset": True}])
    assert found.stats["misses"]["corrupt"] > 0
    assert found.stats["adapter"]["cut_loads"] > 0
    assert [one.outputs for one in found.rounds] == [plain[0].outputs] * 2
    assert found.rounds[1].cached == whole(FIRST)


def test_where_vllm_fails_such_requests_no_wrong_token_comes(
    again: Callable[..., Answers], copy: Path, plain: list[Round]
) -> None:
    flip(copy, slice(None))
    told = {"prompts": FIRST[:1]}
    first, second = again([told, {**told, "reset": True}], policy="fail").rounds
    assert first.reasons == ["error"]
    assert first.outputs == [[]]
    # Case 33: the lookup does not promise them again.
    assert second.outputs == plain[0].outputs[:1]


@pytest.mark.parametrize("kind", ["truncate", "lengthen", "delete"])
def test_files_that_change_under_the_engine_change_no_answer(
    kind: str, python: Path, model: Path, tmp_path: Path, plain: list[Round]
) -> None:
    # So little memory that the first prompts are on the drive alone when they are asked for again.
    transfer = jobs.transfer(tmp_path / "kv", dram_capacity="1MiB")
    again = {"prompts": FIRST, "max_tokens": ANSWER, "reset": True}
    many = {"prompts": MANY, "max_tokens": LONG, "reset": True}
    damage = [str(tmp_path / "kv/dp0/rank0"), kind]
    told = [again, many, {**again, "damage": damage}, many, again]
    found = jobs.run(
        python, tmp_path / "job.json", model=str(model), transfer=transfer, rounds=told
    )
    outputs = [one.outputs for one in found.rounds]
    first, last = plain[0].outputs, plain[-1].outputs
    assert outputs == [first, last, first, last, first]
    # What is cut off cannot be read; a file that is open stays whole without its name.
    assert kind != "truncate" or found.stats["adapter"]["cut_loads"] > 0
    assert kind == "truncate" or found.stats["nvme"]["hits"] > 0


def test_other_weights_under_the_same_name_find_nothing(
    python: Path, again: Callable[..., Answers], model: Path, tmp_path: Path, plain: list[Round]
) -> None:
    # As an update of a model's directory in place.
    name = Path(shutil.copytree(model, tmp_path / "name"))
    told = [{"prompts": FIRST}]
    assert again(told, model=str(name)).rounds[0].cached == whole(FIRST)
    jobs.make("model", python, name, seed=1)
    updated = again(told, model=str(name)).rounds[0]
    assert updated.external == 0
    assert updated.outputs != plain[0].outputs


def test_other_types_of_the_cache_find_nothing(again: Callable[..., Answers]) -> None:
    changes = [{"dtype": "bfloat16"}]
    if "avx512f" in Path("/proc/cpuinfo").read_text():  # without it, vLLM has no fp8 on CPUs
        changes.append({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"})
    for engine in changes:
        told = [{"prompts": FIRST, "max_tokens": 1}]
        assert again(told, engine=engine).rounds[0].external == 0


def test_preempted_requests_get_their_blocks_back(
    again: Callable[..., Answers], plain: list[Round]
) -> None:
    told = {"prompts": MANY, "max_tokens": LONG}
    engine = {"num_gpu_blocks_override": 24, "max_num_seqs": 4, "max_model_len": 512}
    found = again([told, {**told, "reset": True}], engine=engine)
    assert found.rounds[0].preemptions > 0
    assert found.rounds[1].preemptions > found.rounds[0].preemptions
    assert [one.outputs for one in found.rounds] == [plain[-1].outputs] * 2
    assert found.rounds[1].cached == whole(MANY)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_a_hit_is_what_all_ranks_have(
    python: Path, model: Path, tmp_path: Path, plain: list[Round]
) -> None:
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    told = {"prompts": FIRST, "max_tokens": ANSWER}
    fields: dict[str, Any] = {
        "model": str(model),
        "transfer": jobs.transfer(tmp_path / "kv"),
        "rounds": [told, {**told, "reset": True}],
        "engine": engine,
        "stats": False,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    cold, warm = jobs.run(python, tmp_path / "two.json", **fields).rounds
    assert (cold.external, warm.cached) == (0, whole(FIRST))
    shutil.rmtree(tmp_path / "kv/dp0/rank1")
    cold, warm = jobs.run(python, tmp_path / "one.json", **fields).rounds
    assert (cold.external, warm.cached) == (0, whole(FIRST))
    assert cold.outputs == warm.outputs == plain[0].outputs
