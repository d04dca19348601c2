"""Checks of what the vLLM adapter decides: what is served, under which name, and which blocks."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from tiered_kv import ConfigError, IoFaultError, KvLayout, NamespaceSpec, UnsupportedError
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm import identity
from tiered_kv.engines.vllm.connector import TieredKVConnector
from tiered_kv.engines.vllm.groups import Group, groups_of
from tiered_kv.engines.vllm.identity import Adapters, place_of
from tiered_kv.engines.vllm.messages import Owner
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.engines.vllm.scheduler import SchedulerSide
from tiered_kv.engines.vllm.within import Within

TOKENS, BLOCK_BYTES = 16, 4096
SPEC = NamespaceSpec("m", "w", "float32", KvLayout(TOKENS, BLOCK_BYTES))
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
HIDDEN = HiddenStateCacheSpec(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
DROPS = RSWASpec(
    block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32, rswa_window=64
)
STATE = MambaSpec(
    block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
NGRAM = SimpleNamespace(method="ngram", uses_draft_kv_cache=lambda: False)
PLAIN = (Group(0, "all", TOKENS),)


def _refusal(specs: list[Any], **changes: Any) -> str:
    """Why it is not served, and whether that is told before there is a cache."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    drafts = changes.pop("speculative", None)
    model = {"is_prefix_caching_supported": True, "is_diffusion": False, "architectures": ["M"]}
    model |= {"is_hybrid": False, **changes.pop("model", {})}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**{**parallel, **changes}),
        speculative_config=drafts,
        cache_config=SimpleNamespace(enable_prefix_caching=changes.pop("caching", True)),
    )
    groups = [KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(specs)]
    when = "early"
    try:
        assert TieredKVConnector.get_required_kvcache_layout(config) is None
        when = "late"
        found = groups_of(config, SimpleNamespace(kv_cache_groups=groups))
    except UnsupportedError as error:
        return f"{when}: {error}"
    assert [one.tokens for one in found] == [one.block_size for one in specs]
    return ""


def check_what_is_not_served_is_refused_by_name() -> None:
    assert _refusal([FULL]) == ""
    for served in ([WINDOW], [FULL, STATE], [FULL, WINDOW], [WINDOW, FULL, STATE], [STATE]):
        assert _refusal(served) == ""
    assert "decode_context_parallel_size" in _refusal([FULL], decode_context_parallel_size=2)
    assert _refusal([LATENT]) == ""
    assert "HiddenStateCacheSpec" in _refusal([HIDDEN])
    assert "RSWASpec" in _refusal([DROPS])
    assert "causal" in _refusal([dataclasses.replace(FULL, non_causal=True)])
    for unfit in ({"is_prefix_caching_supported": False}, {"is_diffusion": True}):
        assert "no prefix caching for M" in _refusal([FULL], model=unfit)
    hybrid = {"model": {"is_hybrid": True}}
    assert _refusal([FULL, STATE], **hybrid) == ""
    assert _refusal([FULL], caching=False, **hybrid).startswith(
        "early: vllm: M has layers with recurrent state, which vLLM keeps at no block's end"
    )
    loose = dataclasses.replace(STATE, mamba_cache_mode="none")
    assert "give `--enable-prefix-caching`" in _refusal([FULL, loose])
    assert "drafts" in _refusal([FULL, STATE], speculative=NGRAM, **hybrid)
    assert "drafts" in _refusal([STATE], speculative=NGRAM)
    chunked = ChunkedLocalAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.float32,
        attention_chunk_size=64,
    )
    assert "`--disable-hybrid-kv-cache-manager`" in _refusal([FULL, chunked])
    eagle = SimpleNamespace(method="eagle", uses_draft_kv_cache=lambda: True)
    assert "eagle" in _refusal([FULL], speculative=eagle)
    assert _refusal([FULL], speculative=NGRAM) == ""


def _caches() -> dict[str, torch.Tensor]:
    """Caches of six blocks: plain, in another order in memory, in two parts a block, of bytes."""
    plain = torch.randn(6, 2, 16, 8)
    turned = torch.randn(2, 6, 16, 8).transpose(0, 1)
    halves = torch.randn(12, 2, 8, 8).to(torch.bfloat16)
    small = torch.randint(0, 255, (6, 2, 16, 8), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"a": plain, "b": turned, "c": halves, "d": small, "uses a's": plain}


def check_blocks_come_back_to_the_bit_wherever_they_go() -> None:
    source, target = _caches(), _caches()
    reader, writer = PagedCache(source, 6), PagedCache(target, 6)
    assert reader.block_bytes == 2 * 16 * 8 * (4 + 4 + 2 + 1)
    buffers = [bytearray(reader.block_bytes) for _ in range(3)]
    reader.read([4, 0, 3], buffers)
    before = {name: cache.clone() for name, cache in target.items()}
    writer.write([1, 2, 5], [bytes(one) for one in buffers])
    for name, cache in target.items():
        there = cache.unflatten(0, (6, -1)).contiguous().view(torch.uint8)
        here = source[name].unflatten(0, (6, -1)).contiguous().view(torch.uint8)
        old = before[name].unflatten(0, (6, -1)).contiguous().view(torch.uint8)
        for to, come_from in ((1, 4), (2, 0), (5, 3)):
            assert torch.equal(there[to], here[come_from]), name
        for other in (0, 3, 4):
            assert torch.equal(there[other], old[other]), name


def check_layers_in_another_order_are_another_layout() -> None:
    float_first = {"a": torch.zeros(2, 4, 4), "b": torch.zeros(2, 4, 4, dtype=torch.int32)}
    int_first = {"a": float_first["b"], "b": float_first["a"]}
    described = [PagedCache(one, 2).describe() for one in (float_first, int_first, float_first)]
    assert described[0] == described[2] != described[1]


def _sharers(told: int | None = None, **changes: Any) -> int | str:
    """Ranks that divide the capacities of a node, or why they are not known."""
    plain = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "nnodes": 1,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_index": 0,
        "data_parallel_external_lb": False,
    }
    config = SimpleNamespace(parallel_config=SimpleNamespace(**{**plain, **changes}))
    try:
        return place_of(config, 0, 0, told).sharers
    except ConfigError as error:
        return str(error)


def check_capacities_are_divided_among_all_ranks_of_the_node() -> None:
    assert _sharers() == 4
    assert _sharers(nnodes=2) == 2
    assert _sharers(data_parallel_size=8, data_parallel_size_local=3, data_parallel_index=1) == 12
    # One replica a process, and dense ones, know of themselves alone.
    outside: dict[str, Any] = {"data_parallel_size": 8, "data_parallel_external_lb": True}
    for unknown in (outside, {"data_parallel_index": 1}):
        assert "`sharers` is missing" in str(_sharers(**unknown))
        assert _sharers(32, **unknown) == 32


def _adapter(directory: Path, content: bytes, number: int = 1, **fields: Any) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(content)
    (directory / "adapter_config.json").write_text("{}")
    plain = {"lora_int_id": number, "lora_path": str(directory), "load_inplace": False}
    return SimpleNamespace(**{**plain, **fields})


def _started() -> Adapters:
    """An engine that starts long after all files were written."""
    return Adapters(started_s=time.time() + 3600)


def check_an_adapter_is_told_by_its_files() -> None:
    with tempfile.TemporaryDirectory() as made:
        adapters = _started()
        assert adapters.identity(None) == ""
        loras = [
            _adapter(Path(made, name), content, number)
            for number, (name, content) in enumerate([("a", b"1"), ("b", b"1"), ("c", b"2")], 1)
        ]
        first, same, other = [adapters.identity(lora) for lora in loras]
        assert first
        assert first == same != other
        assert adapters.ready(loras[0])
        gone = SimpleNamespace(lora_int_id=9, lora_path=f"{made}/d", load_inplace=False)
        assert adapters.identity(gone) is None


def check_an_adapter_that_vllm_may_have_loaded_otherwise_goes_without_the_store() -> None:
    with tempfile.TemporaryDirectory() as made:
        adapters = _started()
        lora = _adapter(Path(made, "a"), b"one")
        assert adapters.identity(lora)
        changed = _adapter(Path(made, "a"), b"other")
        assert adapters.identity(changed) is None
        # It stays so, since vLLM may go on with either.
        _adapter(Path(made, "a"), b"one")
        assert adapters.identity(lora) is None
        # One number with two directories: vLLM has loaded either.
        second = _adapter(Path(made, "b"), b"one", 2)
        assert adapters.identity(second)
        assert adapters.identity(_adapter(Path(made, "c"), b"two", 2)) is None
        assert adapters.identity(second) is None
        # Loaded in place, once: whatever was in use before.
        third = _adapter(Path(made, "d"), b"one", 3)
        assert adapters.identity(third)
        third.load_inplace = True
        assert adapters.identity(third) is None
        third.load_inplace = False
        assert adapters.identity(third) is None


def check_an_adapter_that_is_younger_than_the_engine_goes_without_the_store() -> None:
    with tempfile.TemporaryDirectory() as made:
        lora = _adapter(Path(made, "a"), b"one")
        # vLLM may have loaded what was there before these files.
        assert Adapters().identity(lora) is None
        assert _started().identity(lora)


def check_where_the_api_may_load_adapters_none_takes_part() -> None:
    # Case 2: one loaded in place, from another directory of old files, under a request that runs.
    with served(5) as (side, _), tempfile.TemporaryDirectory() as made:
        lora = _adapter(Path(made, "a"), b"one")
        for setting, known in (("true", False), ("0", True)):
            with mock.patch.dict("os.environ", {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": setting}):
                side.adapters = _started()
            assert bool(side.adapters.identity(lora)) == known
            request = Request(setting, 3 * TOKENS, lora_request=lora)
            assert side.matched(request, 0) == 0
            assert len(side.step(output({setting: 3 * TOKENS})).saves) == known
        assert side.matched(Request("plain", 7 * TOKENS), 0) == 5 * TOKENS


def check_a_request_whose_adapter_changes_is_saved_no_more() -> None:
    with served(1) as (side, _), tempfile.TemporaryDirectory() as made:
        side.adapters = _started()
        lora = _adapter(Path(made, "a"), b"one")
        request = Request("r", 3 * TOKENS, lora_request=lora)
        side.adapters.identity(lora)
        assert side.matched(request, 0) == 0
        assert len(side.step(output({"r": TOKENS})).saves) == 1
        request.num_computed_tokens = TOKENS
        _adapter(Path(made, "a"), b"other")
        assert side.step(output({"r": 2 * TOKENS})).saves == []


def check_an_adapter_is_not_read_by_the_scheduler() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(_state: Any) -> str:
        begun.set()
        go.wait()
        raise IoFaultError("unreadable", op="blake3")

    with served(1) as (side, _), tempfile.TemporaryDirectory() as made:
        side.adapters = _started()
        lora = _adapter(Path(made, "a"), b"one")
        request = Request("r", 3 * TOKENS, lora_request=lora)
        with mock.patch.object(identity, "_adapter_digest", slow):
            assert side.matched(request, 0) is None
            assert begun.wait(60)
            assert side.matched(request, 0) is None
            go.set()
            # What cannot be read is nobody's failure.
            assert side.adapters.identity(lora) is None
        assert side.matched(request, 0) == 0
        assert side.step(output({"r": 3 * TOKENS})).saves == []


class Request(SimpleNamespace):
    """Of vLLM's request what the scheduler's side looks at."""

    def __init__(self, name: str, tokens: int, **fields: Any) -> None:
        plain: dict[str, Any] = {
            "request_id": name,
            "all_token_ids": list(range(tokens)),
            "num_tokens": tokens,
            "num_prompt_tokens": tokens,
            "num_computed_tokens": 0,
            "mm_features": [],
            "prompt_embeds": None,
            "resumable": False,
            "lora_request": None,
            "cache_salt": None,
            "session_id": None,
            "kv_transfer_params": None,
            "skip_reading_prefix_cache": False,
        }
        super().__init__(**{**plain, **fields})


@contextmanager
def served(
    blocks: int, within: Within | None = None
) -> Iterator[tuple[SchedulerSide, BlockingStore]]:
    """A scheduler's side on a store that holds some blocks of the tokens 0, 1, 2 and so on."""
    with tempfile.TemporaryDirectory() as path:
        options = Options.parse({"path": path, "nvme_capacity": "8MiB", "dram_capacity": "4MiB"})
        config = options.store_config(options.make_directory(0, 0), 1)
        with BlockingStore.open(config) as store:
            ns = store.namespace(SPEC)
            keys = ns.keys_from_tokens(range(blocks * TOKENS))
            assert store.put(ns, keys, [bytes(BLOCK_BYTES)] * blocks).stored == blocks
            side = SchedulerSide(options, PLAIN, within=within)
            side.attach({(0, 0): Owner(str(options.directory(0, 0)), (SPEC,))})
            yield side, store
            side.close()


def check_a_hit_is_held_until_the_load_has_ended() -> None:
    with served(5) as (side, store):
        request = Request("r", 7 * TOKENS)
        for _ in range(3):  # vLLM asks again while it has no room
            assert side.matched(request, TOKENS) == 4 * TOKENS
            assert store.stats()["holds"] == 1
        side.allocated(request, (list(range(10, 17)),), 4 * TOKENS)
        (load,) = side.step(output({})).loads
        assert (load.first, load.block_ids) == (1, (11, 12, 13, 14))
        assert store.stats()["holds"] == 1
        side.loaded(["r"], set())
        assert store.stats()["holds"] == 0


def check_a_failed_load_is_not_promised_again() -> None:
    with served(5) as (side, store):
        request = Request("r", 7 * TOKENS)
        assert side.matched(request, 0) == 5 * TOKENS
        side.allocated(request, (list(range(10, 17)),), 5 * TOKENS)
        side.step(output({}))
        side.loaded(["r"], {13, 14})
        assert side.matched(request, 0) == 3 * TOKENS
        side.finished("r")
        assert store.stats()["holds"] == 0
        # Others may well find them again.
        assert side.matched(Request("s", 7 * TOKENS), 0) == 5 * TOKENS
        side.finished("s")
        assert store.stats()["holds"] == 0


def check_what_one_rank_could_not_load_is_not_promised_when_all_have_ended() -> None:
    with served(5) as (side, store):
        request = Request("r", 7 * TOKENS)
        assert side.matched(request, 0) == 5 * TOKENS
        side.allocated(request, (list(range(10, 17)),), 5 * TOKENS)
        side.step(output({}))
        side.loaded([], {12, 13, 14})  # of the first rank to end
        assert store.stats()["holds"] == 1
        side.loaded([], {14})  # of the second
        side.loaded(["r"], set())
        assert side.matched(request, 0) == 2 * TOKENS


def check_only_what_is_known_and_computed_is_saved() -> None:
    with served(1) as (side, _):
        request = Request("r", 3 * TOKENS + 1)
        side.matched(request, 0)
        # A chunk of the prompt; then its end with drafts behind it, which are nobody's tokens yet.
        (save,) = side.step(output({"r": 2 * TOKENS + 3})).saves
        assert (save.first, save.block_ids) == (0, (10, 11))
        request.num_computed_tokens = 2 * TOKENS + 3
        (save,) = side.step(output({"r": 3 * TOKENS})).saves
        assert (save.first, save.block_ids) == (2, (12,))
        assert save.parents[0] == save.parent_of(0)
        request.num_computed_tokens = 3 * TOKENS + 1
        assert side.step(output({"r": 1})).saves == []


def check_a_strangers_words_do_no_harm() -> None:
    with served(5) as (side, _):
        told = {"tiered_kv": {"session": "s" * 10_000, "turn": -1, "tenant": 7, "kind": "a\nb"}}
        params: list[Any] = [told, {"tiered_kv": 7}, "x", {"tiered_kv": {"turn": True}}]
        for number, one in enumerate(params):
            request = Request(f"r{number}", 7 * TOKENS, kv_transfer_params=one)
            assert side.matched(request, 0) == 5 * TOKENS
        for number, salt in enumerate(["\ud800", "x" * 100_000, "a\0b"]):
            request = Request(f"s{number}", 7 * TOKENS, cache_salt=salt)
            assert side.matched(request, 0) == 0
        assert side.faults == 0


def check_what_tokens_do_not_tell_goes_without_the_store() -> None:
    with served(5) as (side, _):
        plain = Request("p", 7 * TOKENS)
        assert side.matched(plain, 0) == 5 * TOKENS
        others = [
            Request("a", 7 * TOKENS, mm_features=[object()]),
            Request("b", 7 * TOKENS, prompt_embeds=object()),
            Request("c", 7 * TOKENS, resumable=True),
        ]
        for request in others:
            assert side.matched(request, 0) == 0
            assert side.step(output({request.request_id: 3 * TOKENS})).saves == []
        # It is not read for one that must not be, but stored.
        unread = Request("d", 7 * TOKENS, skip_reading_prefix_cache=True)
        assert side.matched(unread, 0) == 0
        assert len(side.step(output({"d": 3 * TOKENS})).saves) == 1


def check_an_owner_that_is_gone_is_a_miss() -> None:
    with served(5) as (side, store):
        store.close()
        assert side.matched(Request("r", 7 * TOKENS), 0) == 0
        assert not side.reset()


def check_a_reset_waits_for_steps_that_save_and_forgets_every_tenancy() -> None:
    with served(5) as (side, _):
        request = Request("r", 7 * TOKENS)
        side.matched(request, 0)
        side.step(output({"r": 7 * TOKENS}))
        assert not side.reset()
        side.saved(1)
        assert side.reset()
        assert side.matched(Request("s", 7 * TOKENS), 0) == 0


def check_what_is_computed_after_a_reset_is_found_by_no_other_process() -> None:
    with served(5) as (side, store):
        running = Request("r", 7 * TOKENS)
        assert side.matched(running, 0) == 5 * TOKENS
        assert side.reset()
        # What it has computed so far is of the weights of before.
        assert side.step(output({"r": 7 * TOKENS})).saves == []
        assert store.stats()["holds"] == 0
        side.matched(Request("s", 7 * TOKENS), 0)
        (save,) = side.step(output({"s": 7 * TOKENS})).saves
        ns = store.namespace(save.tenancy.of(SPEC))
        assert store.put(ns, save.keys[0], [bytes(BLOCK_BYTES)] * 7).stored == 7
        side.saved(1)
        assert side.matched(Request("t", 7 * TOKENS), 0) == 7 * TOKENS - 1
        other = SchedulerSide(Options.parse({"path": "/kv", "nvme_capacity": "8MiB"}), PLAIN)
        other.attach({(0, 0): Owner(store.health()["drives"][0]["path"], (SPEC,))})
        assert other.matched(Request("u", 7 * TOKENS), 0) == 0
        # Its reset forgets also what epochs of before have left.
        assert other.reset()
        other.close()
        assert side.matched(Request("v", 7 * TOKENS), 0) == 0


def check_a_reset_waits_for_loads() -> None:
    with served(5) as (side, _):
        request = Request("r", 7 * TOKENS)
        assert side.matched(request, 0) == 5 * TOKENS
        side.allocated(request, (list(range(10, 17)),), 5 * TOKENS)
        side.step(output({}))
        assert not side.reset()
        side.loaded(["r"], set())
        assert side.reset()


def output(scheduled: dict[str, int]) -> Any:
    """Of vLLM's `SchedulerOutput` what the scheduler's side looks at."""
    state = SimpleNamespace(
        get_block_ids=lambda _name: (list(range(10, 17)),), boundary_state_offloads={}
    )
    return SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
