"""Sliding windows in the transformers engine: what is stored, what is a hit, what is restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import tiny_models
from tiered_kv import InvalidArgumentError, StoreConfig, TieredStore, UnsupportedError
from tiered_kv.demo import _naive
from tiered_kv.engines._arena import ArenaCache
from tiered_kv.engines._grid import exact_digests, make_grid
from tiered_kv.engines.transformers import TransformersEngine
from tiered_kv.sizing import read_config

BLOCK = 8
CHUNK = 32
WINDOW = tiny_models.WINDOW
QUESTION = tiny_models.token_ids(13, seed=2)
# Shorter than the window, as long, a token more, at and beyond blocks and chunks, far beyond.
LENGTHS = (5, WINDOW - 1, WINDOW, WINDOW + 1, 32, 41, 64, 150)

Engine = TransformersEngine


def config(directory: Path) -> StoreConfig:
    return StoreConfig(dram_capacity="32MiB", nvme_paths=[str(directory)], nvme_capacity="128MiB")


def memory() -> StoreConfig:
    return StoreConfig(dram_capacity="32MiB", nvme_paths=[])


def engine_of(build: Callable[[], Any], store: TieredStore, **options: Any) -> Engine:
    settings: dict[str, Any] = {"tokens_per_block": BLOCK, "chunk_tokens": CHUNK, **options}
    return TransformersEngine(tiny_models.make(build), store, **settings)


async def cold(engine: Engine, *segments: list[int], on_grid: bool = True) -> Any:
    return await engine.generate_uncached(segments, max_new_tokens=4, on_grid=on_grid)


async def warm(engine: Engine, *segments: list[int]) -> Any:
    return await engine.generate(segments, max_new_tokens=4)


def assert_same(answer: Any, reference: Any) -> None:
    assert torch.equal(answer.first_logits, reference.first_logits)
    assert answer.tokens == reference.tokens


def prefilled(model: Any, prompt: Sequence[int], ends: Sequence[int]) -> tuple[Any, torch.Tensor]:
    """The cache of transformers itself after chunks that end at `ends`, and the last logits."""
    cache = DynamicCache(config=model.config)
    start, logits = 0, torch.empty(0)
    with torch.inference_mode():
        for end in ends:
            ids = torch.tensor([prompt[start:end]])
            output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            start, logits = end, output.logits[0, -1]
    return cache, logits


@pytest.mark.parametrize("name", tiny_models.WINDOWED)
async def test_a_restored_window_changes_no_bit(name: str) -> None:
    async with TieredStore.open(memory()) as store:
        engine = engine_of(tiny_models.WINDOWED[name], store)
        for length in LENGTHS:
            document = tiny_models.token_ids(length, seed=length)
            expected = await cold(engine, document, QUESTION)
            ends = make_grid([length, len(QUESTION)], BLOCK, CHUNK).ends
            _, logits = prefilled(engine._model, document + QUESTION, ends)
            assert torch.equal(expected.first_logits, logits)
            first = await warm(engine, document, QUESTION)
            again = await warm(engine, document, QUESTION)
            assert first.reused_tokens == 0
            assert again.reused_tokens == length // BLOCK * BLOCK
            assert_same(first, expected)
            assert_same(again, expected)
            assert again.tokens == (await cold(engine, document, QUESTION, on_grid=False)).tokens


@pytest.mark.parametrize("build", [tiny_models.mistral, tiny_models.gemma3])
@pytest.mark.parametrize("window", [2, 8, 9, 10, 17, 45])
async def test_any_window_and_any_prefix(build: Callable[[int], Any], window: int) -> None:
    # Chunks of one block: a prefix may end at every block, anywhere in the window.
    source = random.Random(window)
    async with TieredStore.open(memory()) as store:
        engine = engine_of(lambda: build(window), store, chunk_tokens=BLOCK)
        whole = tiny_models.token_ids(120, seed=window)
        await warm(engine, whole)
        for _ in range(6):
            shared = source.randrange(len(whole))
            prompt = whole[:shared] + tiny_models.token_ids(source.randrange(1, 20), seed=shared)
            expected = await cold(engine, prompt)
            answer = await warm(engine, prompt)
            assert answer.reused_tokens >= min(shared, len(prompt) - 1) // BLOCK * BLOCK
            assert_same(answer, expected)
            assert_same(await warm(engine, prompt), expected)


@pytest.mark.parametrize("name", tiny_models.WINDOWED)
async def test_what_is_restored_is_what_transformers_holds(name: str) -> None:
    async with TieredStore.open(memory()) as store:
        engine = engine_of(tiny_models.WINDOWED[name], store)
        document = tiny_models.token_ids(96, seed=7)
        await warm(engine, document, QUESTION)
        engine._worker.submit(_poison, engine).result()
        assert (await warm(engine, document, QUESTION)).reused_tokens == 96
        cache, _ = prefilled(engine._model, document, (32, 64, 96))
        held = [layer for layer in cache.layers if layer.keys is not None]
        layers = ArenaCache(engine._runner.arena, 96).layers
        mine = [layer for layer in layers if layer.keys is not None]
        for layer, own, pair in zip(held, mine, engine.resident_prefix(96), strict=True):
            assert torch.equal(layer.keys, pair[0])
            assert torch.equal(layer.values, pair[1])
            assert own.get_mask_sizes(5) == layer.get_mask_sizes(5)
            if isinstance(layer, DynamicSlidingWindowLayer):
                assert isinstance(own, DynamicSlidingWindowLayer)
                assert own.cumulative_length == layer.cumulative_length == 96
                assert own.keys.shape[-2] == WINDOW - 1


def _poison(engine: Engine) -> None:
    """Fills the arena with NaN: what is not restored must not be read."""
    for planes in engine._runner.arena._planes:
        for plane in planes:
            plane.fill_(float("nan"))


@pytest.mark.parametrize("name", tiny_models.WINDOWED)
async def test_the_naive_file_of_the_demo_holds_windows_too(name: str, tmp_path: Path) -> None:
    async with TieredStore.open(memory()) as store:
        engine = engine_of(tiny_models.WINDOWED[name], store)
        document = tiny_models.token_ids(96, seed=7)
        expected = await warm(engine, document, QUESTION)
        _naive.save(engine.resident_prefix(96), 96, tmp_path / "naive.pt")
        segments = [document, QUESTION]
        run = _naive.answer(engine._model, tmp_path / "naive.pt", "", segments, 4, (), "naive")
        assert run.reused_tokens == 96
        assert run.tokens == expected.tokens


@pytest.mark.parametrize("build", [tiny_models.mistral, tiny_models.gemma3])
async def test_only_what_the_window_needs_is_copied(build: Callable[[], Any]) -> None:
    async with TieredStore.open(memory()) as store:
        engine = engine_of(build, store)
        layout = engine.namespace_spec().layout
        spec = read_config(engine._model.config.to_dict(), kv_dtype="fp32")
        assert layout == spec.to_layout(BLOCK)
        document = tiny_models.token_ids(150, seed=8)
        expected = await warm(engine, document, QUESTION)
        engine._worker.submit(_poison, engine).result()
        again = await warm(engine, document, QUESTION)
        # 23 tokens of the past reach into three blocks; full attention needs all 18.
        slabs = [3 * layout.slab_bytes[0], *(18 * size for size in layout.slab_bytes[1:])]
        assert again.source_bytes == {"dram": sum(slabs)}
        assert_same(again, expected)


@pytest.mark.parametrize(
    ("build", "windowed"), [(tiny_models.mistral, True), (tiny_models.gemma3, False)]
)
async def test_a_hit_is_what_the_rule_of_every_group_says(
    build: Callable[[], Any], windowed: bool
) -> None:
    blocks, needed = 16, 3
    prompt = tiny_models.token_ids(blocks * BLOCK + 3, seed=9)
    digests = exact_digests(prompt, make_grid([len(prompt)], BLOCK, BLOCK))
    source = random.Random(11)
    async with TieredStore.open(memory()) as store:
        engine = engine_of(build, store, chunk_tokens=BLOCK)
        expected = await cold(engine, prompt)
        space = store.namespace(engine.namespace_spec())
        keys = space.keys_from_opaque(digests, 32)
        hits = set()
        for lost in [
            {0},
            {5},
            {12},
            {13},
            {15},
            *(set(source.sample(range(16), 4)) for _ in "abc"),
        ]:
            await warm(engine, prompt)
            for block in lost:
                await store.delete(space, keys[block * 32 : block * 32 + 32])
            there = [block not in lost for block in range(blocks)]
            hit = max(
                position
                for position in range(blocks + 1)
                if all(there[max(0, position - needed) if windowed else 0 : position])
            )
            answer = await warm(engine, prompt)
            assert answer.reused_tokens == hit * BLOCK
            assert_same(answer, expected)
            hits.add(hit)
            await store.delete_namespace(space)
        assert (blocks in hits) == windowed


@pytest.mark.parametrize("build", [tiny_models.mistral, tiny_models.gemma3])
async def test_a_restart_restores_windows_from_nvme(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    document = tiny_models.token_ids(150, seed=10)
    async with TieredStore.open(config(tmp_path)) as store:
        expected = await warm(engine_of(build, store), document, QUESTION)
        await store.flush()
    async with TieredStore.open(config(tmp_path)) as store:
        again = await warm(engine_of(build, store), document, QUESTION)
    assert list(again.source_bytes) == ["nvme"]
    assert again.reused_tokens == 144
    assert_same(again, expected)


@pytest.mark.parametrize("build", [tiny_models.mistral, tiny_models.gemma3])
async def test_a_block_that_goes_between_lookup_and_load_is_a_smaller_hit(
    build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny_models.token_ids(131, seed=12)
    async with TieredStore.open(memory()) as store:
        engine = engine_of(build, store, chunk_tokens=BLOCK)
        expected = await warm(engine, prompt)
        space = store.namespace(engine.namespace_spec())
        get = store.get
        calls: list[int] = []

        async def late(ns: Any, keys: bytes, **options: Any) -> Any:
            if not calls:
                await store.delete(space, keys[-64:-32])  # the last but one
            calls.append(len(keys) // 32)
            return await get(ns, keys, **options)

        monkeypatch.setattr(store, "get", late)
        answer = await warm(engine, prompt)
        assert answer.reused_tokens == 14 * BLOCK
        assert_same(answer, expected)
        # What was lost is stored again.
        assert (await warm(engine, prompt)).reused_tokens == 16 * BLOCK


@pytest.mark.parametrize("build", [tiny_models.mistral, tiny_models.gemma3])
async def test_a_resident_prefix_needs_its_windows(build: Callable[[], Any]) -> None:
    document = tiny_models.token_ids(150, seed=13)
    async with TieredStore.open(memory()) as store:
        engine = engine_of(build, store)
        await warm(engine, document, QUESTION)
        await warm(engine, document, QUESTION)
        answer = await engine.generate_resident([document, QUESTION], max_new_tokens=4)
        assert answer.reused_tokens == 144
        # The windows of an earlier position were not restored: nothing there can be resumed.
        with pytest.raises(InvalidArgumentError, match="windows"):
            engine.resident_prefix(64)
        other = [document[:64], QUESTION]
        answer = await engine.generate_resident(other, max_new_tokens=4)
        assert answer.reused_tokens == 0
        assert_same(answer, await cold(engine, *other))
        answer = await engine.generate_resident(other, max_new_tokens=4)
        assert answer.reused_tokens == 64
        assert_same(answer, await cold(engine, *other))


async def test_answers_are_reused_without_exact() -> None:
    document = tiny_models.token_ids(60, seed=14)
    async with TieredStore.open(memory()) as store:
        engine = engine_of(tiny_models.gemma3, store, exact=False)
        answer = await engine.generate([document], max_new_tokens=40)
        conversation = [document, answer.tokens, QUESTION]
        again = await warm(engine, *conversation)
        assert again.reused_tokens == (60 + 39) // BLOCK * BLOCK
        assert again.tokens == (await cold(engine, *conversation)).tokens


async def test_first_blocks_of_a_windowed_model_need_not_stay() -> None:
    # Room for 20 of the document's 31 blocks, each in a slot of 8 KiB: with parents that may not go
    # before their children only the first 20 would stay.
    document = tiny_models.token_ids(248, seed=15)
    small = StoreConfig(dram_capacity=20 * 8192, nvme_paths=[])
    async with TieredStore.open(small) as store:
        engine = engine_of(tiny_models.mistral, store)
        first = await warm(engine, document, QUESTION)
        assert (first.stored_blocks, first.dropped_blocks) == (31, 0)
        again = await warm(engine, document, QUESTION)
        assert again.reused_tokens == 248
        assert_same(again, await cold(engine, document, QUESTION))


async def test_a_cache_that_is_not_what_the_configuration_says_is_refused() -> None:
    model = tiny_models.make(tiny_models.mistral)
    model.config.num_key_value_heads = 4
    async with TieredStore.open(memory()) as store:
        with pytest.raises(UnsupportedError, match=r"\[1, 4, 2, 16\].*\[1, 2, 2, 16\]"):
            TransformersEngine(model, store)


async def test_a_window_of_one_token_is_refused() -> None:
    async with TieredStore.open(memory()) as store:
        with pytest.raises(UnsupportedError, match=r"config\.sliding_window"):
            engine_of(lambda: tiny_models.mistral(1), store)
