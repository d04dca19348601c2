"""The transformers engine: what is restored, what is refused, and that no bit changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from tiered_kv import (
    InvalidArgumentError,
    RequestContext,
    StoreConfig,
    TieredStore,
    UnsupportedError,
)
from tiered_kv.engines import _runner
from tiered_kv.engines.transformers import TransformersEngine
from tiered_kv.torch import view

BLOCK = 8
CHUNK = 32
DOCUMENT = tiny_models.token_ids(150, seed=1)
QUESTION = tiny_models.token_ids(21, seed=2)
OTHER_QUESTION = tiny_models.token_ids(13, seed=3)
# The document's end, rounded down to a block boundary.
DOCUMENT_BLOCKS = len(DOCUMENT) // BLOCK


def config(directory: Path) -> StoreConfig:
    return StoreConfig(dram_capacity="64MiB", nvme_paths=[str(directory)], nvme_capacity="256MiB")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TieredStore]:
    async with TieredStore.open(config(tmp_path)) as opened:
        yield opened


@pytest.fixture
def make_engine(store: TieredStore) -> Callable[..., TransformersEngine]:
    def build(model: Any = None, **options: Any) -> TransformersEngine:
        settings: dict[str, Any] = {"tokens_per_block": BLOCK, "chunk_tokens": CHUNK, **options}
        return TransformersEngine(model or tiny_models.llama(), store, **settings)

    return build


async def cold(engine: TransformersEngine, *segments: list[int], tokens: int = 6) -> Any:
    return await engine.generate_uncached(segments, max_new_tokens=tokens, on_grid=True)


async def warm(engine: TransformersEngine, *segments: list[int], tokens: int = 6) -> Any:
    return await engine.generate(segments, max_new_tokens=tokens)


def assert_same(answer: Any, reference: Any) -> None:
    assert torch.equal(answer.first_logits, reference.first_logits)
    assert answer.tokens == reference.tokens


@pytest.mark.parametrize("name", tiny_models.SUPPORTED)
async def test_a_restored_prefix_changes_no_bit(
    name: str, make_engine: Callable[..., TransformersEngine]
) -> None:
    engine = make_engine(tiny_models.make(tiny_models.SUPPORTED[name]))
    first = await warm(engine, DOCUMENT, QUESTION)
    assert first.reused_tokens == 0
    for question in (QUESTION, OTHER_QUESTION):
        expected = await cold(engine, DOCUMENT, question)
        again = await warm(engine, DOCUMENT, question)
        assert again.reused_tokens == DOCUMENT_BLOCKS * BLOCK
        assert again.computed_tokens == len(DOCUMENT) + len(question) - again.reused_tokens
        assert again.source_bytes == {"dram": DOCUMENT_BLOCKS * engine.block_bytes}
        assert_same(again, expected)


@pytest.mark.parametrize("name", tiny_models.SUPPORTED)
async def test_answers_are_those_of_the_model_itself(
    name: str, make_engine: Callable[..., TransformersEngine]
) -> None:
    model = tiny_models.make(tiny_models.SUPPORTED[name])
    prompt = DOCUMENT + QUESTION
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=[]
    )
    engine = make_engine(model)
    answer = await engine.generate_uncached([prompt], max_new_tokens=8)
    assert answer.tokens == expected[0, len(prompt) :].tolist()
    with torch.inference_mode():
        assert torch.equal(answer.first_logits, model(ids, logits_to_keep=1).logits[0, -1])


async def test_low_precision_blocks_are_exact(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    engine = make_engine(tiny_models.llama().to(torch.bfloat16))
    await warm(engine, DOCUMENT, QUESTION)
    again = await warm(engine, DOCUMENT, QUESTION)
    assert again.reused_tokens == DOCUMENT_BLOCKS * BLOCK
    assert_same(again, await cold(engine, DOCUMENT, QUESTION))


async def test_a_restart_restores_from_nvme(tmp_path: Path) -> None:
    model = tiny_models.llama()
    options: dict[str, Any] = {"tokens_per_block": BLOCK, "chunk_tokens": CHUNK}
    async with TieredStore.open(config(tmp_path)) as store:
        engine = TransformersEngine(model, store, **options)
        expected = await warm(engine, DOCUMENT, QUESTION)
        await store.flush()
    async with TieredStore.open(config(tmp_path)) as store:
        engine = TransformersEngine(model, store, **options)
        again = await warm(engine, DOCUMENT, QUESTION)
    assert again.source_bytes == {"nvme": DOCUMENT_BLOCKS * engine.block_bytes}
    assert_same(again, expected)


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1])
async def test_at_least_one_token_is_left_to_compute(
    length: int, make_engine: Callable[..., TransformersEngine]
) -> None:
    # Chunks of one block: every block boundary is a chunk end.
    engine = make_engine(chunk_tokens=BLOCK)
    prompt = tiny_models.token_ids(length, seed=4)
    await warm(engine, prompt)
    again = await warm(engine, prompt)
    assert again.reused_tokens == (length - 1) // BLOCK * BLOCK
    assert_same(again, await cold(engine, prompt))


async def test_exact_restores_nothing_that_decode_computed(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    engine = make_engine()
    answer = await warm(engine, DOCUMENT, QUESTION, tokens=40)
    conversation = [DOCUMENT, QUESTION, answer.tokens, OTHER_QUESTION]
    again = await warm(engine, *conversation)
    assert again.reused_tokens == DOCUMENT_BLOCKS * BLOCK
    assert_same(again, await cold(engine, *conversation))


async def test_without_exact_the_answer_is_reused_too(
    make_engine: Callable[..., TransformersEngine], store: TieredStore
) -> None:
    engine = make_engine(exact=False)
    answer = await warm(engine, DOCUMENT, QUESTION, tokens=40)
    known = DOCUMENT + QUESTION + answer.tokens[:-1]
    space = store.namespace(engine.namespace_spec())
    found = store.lookup(space, space.keys_from_tokens(known), mode="prefix")
    prompt_blocks = (len(DOCUMENT) + len(QUESTION)) // BLOCK
    assert found.hits == len(known) // BLOCK
    assert [bool(flag & 2) for flag in found.flags] == [
        block >= prompt_blocks for block in range(found.hits)
    ]
    again = await warm(engine, DOCUMENT, QUESTION, answer.tokens, OTHER_QUESTION)
    assert again.reused_tokens == len(known) // BLOCK * BLOCK


async def test_a_document_that_extends_another_keeps_to_its_own_grid(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    # The short one ends within the chunk 128..160 of the long one: only what lies before it is
    # common to both grids, in either order and however often.
    engine = make_engine()
    long = DOCUMENT + tiny_models.token_ids(90, seed=5)
    expected = {
        length: await cold(engine, document, QUESTION)
        for length, document in ((150, DOCUMENT), (240, long))
    }
    reused = []
    for document in (DOCUMENT, long, DOCUMENT, long):
        answer = await warm(engine, document, QUESTION)
        assert_same(answer, expected[len(document)])
        reused.append(answer.reused_tokens)
    assert reused == [0, 128, DOCUMENT_BLOCKS * BLOCK, 240]


async def test_a_prompt_that_ended_within_a_chunk_is_not_mixed_with_a_longer_one(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    # Blocks of an unfinished chunk hold other bits than those of the finished one, although no
    # chunk boundary lies between them.
    engine = make_engine()
    long = tiny_models.token_ids(130, seed=6)
    await warm(engine, long[: 32 + 20])
    await warm(engine, long)
    answer = await warm(engine, long)
    assert answer.reused_tokens == 128
    assert_same(answer, await cold(engine, long))


async def test_engines_with_other_chunks_share_a_store_but_no_block(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    model = tiny_models.llama()
    await warm(make_engine(model, chunk_tokens=16), DOCUMENT, QUESTION)
    engine = make_engine(model, chunk_tokens=64)
    answer = await warm(engine, DOCUMENT, QUESTION)
    assert answer.reused_tokens == 0
    assert_same(answer, await cold(engine, DOCUMENT, QUESTION))


@pytest.mark.parametrize(
    "options",
    [{"lora": "adapter"}, {"salt": "tenant"}, {"tokens_per_block": 16}, {"exact": False}],
    ids=str,
)
async def test_another_label_misses(
    options: dict[str, Any], make_engine: Callable[..., TransformersEngine]
) -> None:
    model = tiny_models.llama()
    await warm(make_engine(model), DOCUMENT, QUESTION)
    assert (await warm(make_engine(model, **options), DOCUMENT, QUESTION)).reused_tokens == 0
    assert (await warm(make_engine(model), DOCUMENT, QUESTION)).reused_tokens > 0


def _other_weights() -> Any:
    return tiny_models.llama(seed=1)


def _nudged_weights() -> Any:
    model = tiny_models.llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1e-3
    return model


def _other_dtype() -> Any:
    return tiny_models.llama().to(torch.bfloat16)


def _other_rope() -> Any:
    model = tiny_models.llama()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5000.0}
    return model


def _other_attention() -> Any:
    model = tiny_models.llama()
    model.set_attn_implementation("eager")
    return model


def _other_norm() -> Any:
    model = tiny_models.llama()
    model.config.rms_norm_eps = 1e-3
    return model


@pytest.mark.parametrize(
    "build",
    [
        _other_weights,
        _nudged_weights,
        _other_dtype,
        _other_rope,
        _other_attention,
        _other_norm,
    ],
)
async def test_another_model_misses(
    build: Callable[[], Any], make_engine: Callable[..., TransformersEngine]
) -> None:
    await warm(make_engine(), DOCUMENT, QUESTION)
    assert (await warm(make_engine(build()), DOCUMENT, QUESTION)).reused_tokens == 0
    assert (await warm(make_engine(), DOCUMENT, QUESTION)).reused_tokens > 0


async def test_another_number_of_threads_misses_in_exact_mode(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    engine = make_engine()
    await warm(engine, DOCUMENT, QUESTION)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert (await warm(engine, DOCUMENT, QUESTION)).reused_tokens == 0
    finally:
        torch.set_num_threads(threads)
    assert (await warm(engine, DOCUMENT, QUESTION)).reused_tokens > 0


@pytest.mark.parametrize("name", tiny_models.REFUSED)
async def test_other_caches_are_refused(
    name: str, make_engine: Callable[..., TransformersEngine]
) -> None:
    build, field = tiny_models.REFUSED[name]
    with pytest.raises(UnsupportedError, match=field.replace(".", r"\.")):
        make_engine(tiny_models.make(build))


async def test_a_quantised_cache_is_refused(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    model = tiny_models.llama()
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(UnsupportedError, match=r"generation_config\.cache_implementation"):
        make_engine(model)


async def test_wrong_arguments_name_their_field(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    with pytest.raises(InvalidArgumentError, match="chunk_tokens"):
        make_engine(chunk_tokens=BLOCK + 1)
    with pytest.raises(InvalidArgumentError, match="eval"):
        make_engine(tiny_models.llama().train())
    engine = make_engine()
    for segments, tokens, field in (
        ([], 1, "segments"),
        ([[], []], 1, "segments"),
        ([[tiny_models.VOCABULARY]], 1, "vocabulary"),
        ([DOCUMENT], 0, "max_new_tokens"),
        ([DOCUMENT], tiny_models.POSITIONS, "positions"),
    ):
        with pytest.raises(InvalidArgumentError, match=field):
            await engine.generate(segments, max_new_tokens=tokens)


async def test_an_end_token_ends_the_answer(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    engine = make_engine()
    whole = await warm(engine, DOCUMENT, QUESTION, tokens=12)
    assert whole.finish_reason == "length"
    end = whole.tokens[4]
    cut = whole.tokens.index(end) + 1
    answer = await engine.generate([DOCUMENT, QUESTION], max_new_tokens=12, eos=[end])
    assert answer.tokens == whole.tokens[:cut]
    assert answer.finish_reason == "eos"


async def test_the_resident_prefix_is_used_without_the_store(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    engine = make_engine()
    expected = await cold(engine, DOCUMENT, OTHER_QUESTION)
    await warm(engine, DOCUMENT, QUESTION)
    answer = await engine.generate_resident([DOCUMENT, OTHER_QUESTION], max_new_tokens=6)
    assert answer.reused_tokens == DOCUMENT_BLOCKS * BLOCK
    assert answer.source_bytes == {}
    assert_same(answer, expected)


async def test_a_request_cancelled_at_any_forward_pass_leaves_everything_whole(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    engine = make_engine()
    expected = await cold(engine, DOCUMENT, QUESTION)
    loop = asyncio.get_running_loop()
    passes = 0
    while True:
        task = asyncio.create_task(warm(engine, DOCUMENT, QUESTION))
        left = passes

        def cancel_after(*_: Any, task: asyncio.Task[Any] = task) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                loop.call_soon_threadsafe(task.cancel)

        hook = engine._model.register_forward_pre_hook(cancel_after)
        try:
            answer = await task
        except asyncio.CancelledError:
            passes += 1
        else:
            break  # there was no such pass
        finally:
            hook.remove()
    assert passes == 6 + 5  # chunks of the prompt, tokens after the first
    assert answer.reused_tokens == 0
    assert_same(answer, expected)
    assert_same(await warm(engine, DOCUMENT, QUESTION), expected)


async def test_a_request_cancelled_while_blocks_are_copied_lets_go_of_them(
    make_engine: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = await warm(engine, DOCUMENT, QUESTION)
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(warm(engine, DOCUMENT, QUESTION))
    copied = []

    def copy(block: Any, *arguments: Any) -> torch.Tensor:
        copied.append(1)
        loop.call_soon_threadsafe(task.cancel)
        return view(block, *arguments)

    monkeypatch.setattr(_runner, "view", copy)
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.undo()
    assert copied
    assert_same(await warm(engine, DOCUMENT, QUESTION), expected)


async def test_concurrent_requests_take_turns(
    make_engine: Callable[..., TransformersEngine],
) -> None:
    engine = make_engine()
    questions = [tiny_models.token_ids(10 + number, seed=20 + number) for number in range(5)]
    expected = [await cold(engine, DOCUMENT, question) for question in questions]
    context = [RequestContext(session=str(number), turn=1) for number in range(5)]
    answers = await asyncio.gather(
        *(
            engine.generate([DOCUMENT, question], max_new_tokens=6, context=who)
            for question, who in zip(questions, context, strict=True)
        )
    )
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
    assert sum(answer.reused_tokens == 0 for answer in answers) == 1
