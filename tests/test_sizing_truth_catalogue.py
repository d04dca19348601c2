"""Models of the catalogue hold at their real size what the sizing says.

They are built on the device that has no data. Here one of each kind of cache, `make sizing-truth`
takes them all.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from sizing_truth import published

SOME = (
    "llama-3.2-1b",
    "mistral-7b-v0.1",
    "gemma-3-4b",
    "gpt-oss-20b",
    "deepseek-v3",
    "jamba-v0.1",
    "whisper-large-v3",
)


@pytest.mark.parametrize("name", SOME)
def test_a_model_at_its_real_size_holds_what_the_sizing_says(name: str) -> None:
    found = published.measure(name)
    assert [(row.context, row.held) for row in found.rows] == [
        (row.context, row.said) for row in found.rows
    ], found.classes
