"""Models whose layers keep different parts of a block, in vLLM with its hybrid manager on.

One has windows in some layers, one recurrent state in some. Case 34: without any one part, a block
is a miss and never a wrong token.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from serving import jobs, peers
from serving.jobs import BLOCK, Round
from serving.model import WINDOW
from test_engine_vllm import tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ANSWER = 40
PARTS = {"windows": ("window", "all"), "states": ("state", "all")}
PROMPTS = [tokens(4 * WINDOW + 10, 1), tokens(4 * WINDOW, 2)]
MANY = [tokens(100, seed) for seed in range(10, 14)]
LONG = 150


def aligned(prompt: list[int]) -> int:
    """Of a prompt that is stored whole, what comes back: the last token has to be computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


WHOLE = [aligned(one) for one in PROMPTS]
ASKED: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": ANSWER, "reset": True}
FOLLOW: dict[str, Any] = {"prompts": [tokens(21, 3), tokens(50, 4)], "follow": True}
BUSY: dict[str, Any] = {"prompts": MANY, "max_tokens": LONG, "reset": True}
SMALL = {"max_num_seqs": 4, "max_model_len": 512}


@pytest.fixture(scope="module", params=sorted(PARTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make(kind, python, tmp_path_factory.mktemp(kind) / "tiny")


@pytest.fixture(scope="module")
def fields(kind: str, model: Path) -> dict[str, Any]:
    """What all engines are told; LFM2 on CPUs answers in a batch otherwise than alone."""
    return {"model": str(model), "engine": {"max_num_seqs": 1} if kind == "states" else {}}


@pytest.fixture(scope="module")
def plain(
    python: Path, fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[Round]:
    """The rounds of an engine without the store."""
    job = tmp_path_factory.mktemp("plain") / "job.json"
    rounds = [ASKED, {**ASKED, **FOLLOW}, BUSY]
    return jobs.run(python, job, transfer=None, rounds=rounds, **fields).rounds


def test_a_hit_is_all_parts_and_without_one_it_is_a_miss(
    kind: str, python: Path, fields: dict[str, Any], plain: list[Round], tmp_path: Path
) -> None:
    told_all = {**fields, "transfer": jobs.transfer(tmp_path / "kv")}
    directory = str(tmp_path / "kv/dp0/rank0")
    drops = [{**ASKED, "drop": [directory, part]} for part in PARTS[kind]]
    first, again = drops[0], drops[1]
    told = [ASKED, {**ASKED, **FOLLOW}, ASKED, first, ASKED, again, ASKED]
    found = jobs.run(python, tmp_path / "job.json", rounds=told, **told_all)
    assert "Turning off hybrid kv cache manager" not in found.log
    outputs = [one.outputs for one in found.rounds]
    asked, follow = plain[0].outputs, plain[1].outputs
    if kind == "states":
        # With chunks behind a hit LFM2 on CPUs answers otherwise than with its own cache, and
        # with that otherwise than without: what vLLM says itself is nothing to compare with.
        follow = outputs[1]
    assert outputs == [asked, follow, asked, asked, asked, asked, asked]
    assert all(one.dropped > 0 for one in (found.rounds[3], found.rounds[5]))
    cached = [one.cached for one in found.rounds]
    answered = [(len(one) + ANSWER - 1) // BLOCK * BLOCK for one in PROMPTS]
    # By default vLLM keeps a state at a prompt's end, and none within an answer.
    known = WHOLE if kind == "states" else answered
    assert cached == [[0, 0], known, WHOLE, [0, 0], WHOLE, [0, 0], WHOLE]
    assert found.rounds[2].external == sum(WHOLE)
    # After a restart, from the drive.
    restarted = jobs.run(python, tmp_path / "again.json", rounds=[ASKED, first, ASKED], **told_all)
    assert [one.outputs for one in restarted.rounds] == [asked] * 3
    assert [one.cached for one in restarted.rounds] == [WHOLE, [0, 0], WHOLE]
    assert restarted.stats["nvme"]["hits"] > 0


def _flip(store: Path) -> None:
    """Flips a byte in every slot of the shortest blocks: of states, or of all where none is."""
    found = []
    for path in sorted((store / "dp0/rank0").glob("segment-*.tkv")):
        data = bytearray(path.read_bytes())
        slot_bytes, slots = struct.unpack_from("<QI", data, 40)
        found.append((slot_bytes, slots, path, data))
    shortest = min(slot_bytes for slot_bytes, *_ in found)
    for slot_bytes, slots, path, data in found:
        if slot_bytes == shortest:
            (at,) = struct.unpack_from("<Q", data, 64)
            for slot in range(slots):
                data[at + slot * slot_bytes + 100] ^= 1
            path.write_bytes(data)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_part_that_cannot_be_read_is_computed_again(
    policy: str, python: Path, fields: dict[str, Any], plain: list[Round], tmp_path: Path
) -> None:
    told = {**fields, "transfer": jobs.transfer(tmp_path / "kv", policy)}
    jobs.run(python, tmp_path / "job.json", rounds=[ASKED], **told)
    _flip(tmp_path / "kv")
    found = jobs.run(python, tmp_path / "again.json", rounds=[ASKED, ASKED], **told)
    first, second = found.rounds
    asked = plain[0].outputs
    assert found.stats["adapter"]["cut_loads"] > 0
    if policy == "recompute":
        assert (first.outputs, second.outputs) == (asked, asked)
        assert second.cached == WHOLE
    else:
        assert "error" in first.reasons
        kept = zip(first.outputs, asked, strict=True)
        assert all(ours in ([], theirs) for ours, theirs in kept)
        assert second.outputs == asked


def test_preempted_requests_get_all_their_parts_back(
    kind: str, python: Path, model: Path, plain: list[Round], tmp_path: Path
) -> None:
    if kind == "states":
        pytest.skip("what is preempted is in a batch, in which LFM2 answers in another way")
    found = jobs.run(
        python,
        tmp_path / "job.json",
        model=str(model),
        transfer=jobs.transfer(tmp_path / "kv"),
        rounds=[BUSY, BUSY],
        engine={**SMALL, "num_gpu_blocks_override": 40, "max_model_len": 320},
    )
    first, second = found.rounds
    assert first.preemptions > 0
    assert (first.outputs, second.outputs) == (plain[2].outputs, plain[2].outputs)
    assert second.external > 0


def test_vllms_own_offloading_gives_every_part_back(
    python: Path, fields: dict[str, Any], plain: list[Round], tmp_path: Path
) -> None:
    tier = {
        "type": "TieredKV",
        "module_path": "tiered_kv.engines.vllm",
        "path": str(tmp_path / "kv"),
        "nvme_capacity": "256MiB",
    }
    told = {
        **fields,
        "transfer": json.loads(peers.tiering(tier)[1]),
        "rounds": [ASKED, ASKED],
        "stats": False,
        "env": peers.environment(),
    }
    cold, _ = jobs.run(python, tmp_path / "job.json", **told).rounds
    restarted, again = jobs.run(python, tmp_path / "again.json", **told).rounds
    assert cold.external == 0
    asked = plain[0].outputs
    assert cold.outputs == restarted.outputs == again.outputs == asked
    # vLLM's primary tier is empty after a restart: what comes back is from the drive.
    assert restarted.external > WHOLE[0]
