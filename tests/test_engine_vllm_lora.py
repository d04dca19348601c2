"""LoRA adapters in vLLM: what one computed is never another's, whatever its name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from serving import jobs
from serving.jobs import BLOCK

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = list(range(5, 105))
WHOLE = len(PROMPT) // BLOCK * BLOCK
ENGINE = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


def asked(lora: tuple[int, Path] | None) -> dict[str, Any]:
    """A round; every adapter has the same name."""
    told = None if lora is None else [lora[0], str(lora[1])]
    return {"prompts": [PROMPT], "max_tokens": 20, "reset": True, "lora": told}


def test_case_2_adapters_share_nothing_but_with_themselves(tmp_path: Path) -> None:
    python = jobs.vllm_python()
    model = jobs.make("model", python, tmp_path / "model")
    a, b = (jobs.make("adapter", python, tmp_path / f"adapter{n}", seed=n) for n in (1, 2))
    # The same files at another place are the same adapter.
    copy = Path(shutil.copytree(a, tmp_path / "copy"))
    rounds = [asked(one) for one in (None, (1, a), (2, b), None, (1, a), (2, b), (3, copy))]
    fields: dict[str, Any] = {"model": str(model), "engine": ENGINE, "rounds": rounds}
    plain = jobs.run(python, tmp_path / "plain.json", transfer=None, **fields)
    transfer = jobs.transfer(tmp_path / "kv")
    stored = jobs.run(python, tmp_path / "stored.json", transfer=transfer, **fields)
    assert [one.outputs for one in stored.rounds] == [one.outputs for one in plain.rounds]
    assert len({tuple(one.outputs[0]) for one in plain.rounds}) == 3, "they answer differently"
    assert [one.external for one in stored.rounds] == [0, 0, 0, WHOLE, WHOLE, WHOLE, WHOLE]
