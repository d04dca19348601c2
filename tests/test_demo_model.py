"""The demo's own model and document: no bit changes when the document is restored."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered_kv import StoreConfig, TieredStore
from tiered_kv.demo import _model, run_from_cli
from tiered_kv.demo._prompt import Prompts, read_document
from tiered_kv.engines.transformers import TransformersEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    directory = _model.model_directory(None, print)
    return _model.load(str(directory))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TieredStore]:
    config = StoreConfig(dram_capacity="512MiB", nvme_paths=[str(tmp_path)], nvme_capacity="1GiB")
    async with TieredStore.open(config) as opened:
        yield opened


def test_the_document_is_long_enough_and_the_questions_are_eight(loaded: tuple[Any, Any]) -> None:
    document, questions = read_document(None)
    prompts = Prompts(loaded[0], document)
    assert prompts.document_tokens > 3000
    assert len(set(questions)) == 8
    first, second = (prompts.segments(question) for question in questions[:2])
    assert first[0] == second[0]
    assert first[1] != second[1]


async def test_blocks_are_32_tokens_in_fp32_and_chunks_512(
    loaded: tuple[Any, Any], store: TieredStore
) -> None:
    assert inspect.signature(run_from_cli).parameters["dram_capacity"].default == "512MiB"
    defaults = inspect.signature(TransformersEngine).parameters
    assert (defaults["tokens_per_block"].default, defaults["chunk_tokens"].default) == (32, 512)
    assert TransformersEngine(loaded[1], store).block_bytes == 1_474_560


async def assert_restored_is_cold(
    engine: TransformersEngine, prompts: Prompts, question: str
) -> None:
    segments = prompts.segments(question)
    cold = await engine.generate_uncached(segments, max_new_tokens=3, on_grid=True)
    restored = await engine.generate(segments, max_new_tokens=3)
    blocks = prompts.document_tokens // 32
    assert restored.reused_tokens == blocks * 32
    assert restored.source_bytes == {"dram": blocks * engine.block_bytes}
    assert torch.equal(restored.first_logits, cold.first_logits)
    assert restored.tokens == cold.tokens


async def test_logits_are_equal_to_the_bit_over_eight_questions(
    loaded: tuple[Any, Any], store: TieredStore
) -> None:
    # The first chapters: eight cold prefills of the whole would take minutes.
    tokenizer, model = loaded
    document, questions = read_document(None)
    prompts = Prompts(tokenizer, document[:5000])
    assert prompts.document_tokens > 2 * 512
    engine = TransformersEngine(model, store)
    await engine.generate(prompts.segments("What is this?"), max_new_tokens=1)
    for question in questions:
        await assert_restored_is_cold(engine, prompts, question)


async def test_logits_are_equal_to_the_bit_behind_the_whole_document(
    loaded: tuple[Any, Any], store: TieredStore
) -> None:
    tokenizer, model = loaded
    document, questions = read_document(None)
    prompts = Prompts(tokenizer, document)
    engine = TransformersEngine(model, store)
    segments = prompts.segments(questions[0])
    # The first answer of an empty store is a cold one.
    cold = await engine.generate(segments, max_new_tokens=3)
    restored = await engine.generate(segments, max_new_tokens=3)
    assert cold.reused_tokens == 0
    assert restored.reused_tokens == prompts.document_tokens // 32 * 32
    assert torch.equal(restored.first_logits, cold.first_logits)
    assert restored.tokens == cold.tokens
