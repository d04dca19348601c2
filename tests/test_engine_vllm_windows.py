"""A model with windows in some layers in vLLM: what is stored serves it as it does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving import jobs
from serving.jobs import BLOCK
from serving.model import WINDOW

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [5 + number * 7 % 120 for number in range(4 * WINDOW + 10)]
WHOLE = len(PROMPT) // BLOCK * BLOCK


def test_a_model_with_windows_is_served(tmp_path: Path) -> None:
    python = jobs.vllm_python()
    model = jobs.make("windows", python, tmp_path / "model")
    told = {"prompts": [PROMPT], "max_tokens": 40}
    fields: dict[str, Any] = {"model": str(model), "rounds": [told, {**told, "reset": True}]}
    plain = jobs.run(python, tmp_path / "plain.json", transfer=None, **fields).rounds
    transfer = jobs.transfer(tmp_path / "kv")
    stored = jobs.run(python, tmp_path / "stored.json", transfer=transfer, **fields).rounds
    again = jobs.run(python, tmp_path / "again.json", transfer=transfer, **fields).rounds
    for rounds in (stored, again):
        assert [one.outputs for one in rounds] == [one.outputs for one in plain]
    assert [one.external for one in (*stored, *again)] == [0, WHOLE, WHOLE, WHOLE]
