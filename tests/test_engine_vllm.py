"""vLLM on CPU answers with the store as it does without, and takes from it what is there.

Each engine is a process of its own, with a tiny model of random weights, in which every token of a
prompt changes the answer: what was not the prompt's own KV would show.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from serving import jobs
from serving.jobs import BLOCK, Round
from serving.model import VOCABULARY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TURNS, ANSWER = 3, 40


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
EVERYTHING = [{"max_tokens": ANSWER, **one} for one in CONVERSATION + OTHERS]


def held(turn: int, session: int) -> int:
    """Tokens that are stored after a turn: the last token's keys and values nobody computed."""
    length = sum(len(one["prompts"][session]) + ANSWER for one in CONVERSATION[: turn + 1])
    return (length - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def python() -> Path:
    return jobs.vllm_python()


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(python, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plain(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Round]:
    """The rounds of an engine without the store."""
    job = tmp_path_factory.mktemp("plain") / "job.json"
    return jobs.run(python, job, model=str(model), transfer=None, rounds=EVERYTHING)[0]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "kv"


@pytest.fixture(scope="module")
def stored(
    python: Path, model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Round]:
    """The rounds of an engine with a new store, which is full of them afterwards."""
    job = tmp_path_factory.mktemp("stored") / "job.json"
    fields = {"model": str(model), "transfer": jobs.transfer(store), "rounds": EVERYTHING}
    return jobs.run(python, job, **fields)[0]


@pytest.fixture
def copy(stored: list[Round], store: Path, tmp_path: Path) -> Path:
    """A store of this test's own, as the engine has left it."""
    assert stored
    return Path(shutil.copytree(store, tmp_path / "kv"))


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
    assert again.external == len(FIRST[0]) // BLOCK * BLOCK


def again(python: Path, model: Path, path: Path, tmp_path: Path, **fields: Any) -> list[Round]:
    """An engine that is started anew on a store; it answers the two first prompts."""
    told = {"prompts": FIRST, "max_tokens": ANSWER}
    rounds = fields.pop("rounds", [told])
    transfer = jobs.transfer(path, **fields.pop("options", {}))
    job = tmp_path / "again.json"
    return jobs.run(python, job, model=str(model), transfer=transfer, rounds=rounds, **fields)[0]


def test_a_restarted_engine_finds_what_is_on_the_drive(
    python: Path, model: Path, copy: Path, tmp_path: Path, plain: list[Round]
) -> None:
    told = {"prompts": FIRST, "max_tokens": ANSWER}
    rounds = [told, {**told, "reset": "external"}, {**told, "reset": True}]
    first, forgotten, last = again(python, model, copy, tmp_path, rounds=rounds)
    whole = [len(prompt) // BLOCK * BLOCK for prompt in FIRST]
    assert first.cached == whole
    # A reset of external caches, as after an update of the weights, forgets it all.
    assert (forgotten.reset, forgotten.external) == (True, 0)
    assert last.cached == whole
    assert [one.outputs for one in (first, forgotten, last)] == [plain[0].outputs] * 3


def test_other_weights_find_nothing(python: Path, copy: Path, tmp_path: Path) -> None:
    other = jobs.make_model(python, tmp_path / "tiny", seed=1)
    assert again(python, other, copy, tmp_path)[0].external == 0
