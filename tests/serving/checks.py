"""Checks of the vLLM adapter's parts, for the environment that has vLLM: `python checks.py OUT`.

Each function here that begins with `check_` is run; `OUT` gets, by name, what went wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from tiered_kv import KvLayout, NamespaceSpec, UnsupportedError
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm.identity import Adapters, block_tokens
from tiered_kv.engines.vllm.messages import Owner
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.engines.vllm.scheduler import SchedulerSide

TOKENS, BLOCK_BYTES = 16, 4096
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
)
STATE = MambaSpec(block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float32,))


def _refusal(specs: list[Any], **changes: Any) -> str:
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    drafts = changes.pop("speculative", None)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **changes}), speculative_config=drafts
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    try:
        tokens = block_tokens(config, SimpleNamespace(kv_cache_groups=groups))
    except UnsupportedError as error:
        return str(error)
    assert tokens == TOKENS
    return ""


def check_what_is_not_served_is_refused_by_name() -> None:
    assert _refusal([FULL]) == ""
    assert "SlidingWindowSpec" in _refusal([WINDOW])
    assert "MambaSpec" in _refusal([FULL, STATE])
    assert "2 groups" in _refusal([FULL, WINDOW])
    assert "decode_context_parallel_size" in _refusal([FULL], decode_context_parallel_size=2)
    eagle = SimpleNamespace(method="eagle", uses_draft_kv_cache=lambda: True)
    assert "eagle" in _refusal([FULL], speculative=eagle)
    ngram = SimpleNamespace(method="ngram", uses_draft_kv_cache=lambda: False)
    assert _refusal([FULL], speculative=ngram) == ""


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


def _adapter(directory: Path, content: bytes) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(content)
    (directory / "adapter_config.json").write_text("{}")
    return SimpleNamespace(lora_int_id=1, lora_path=str(directory), load_inplace=False)


def check_an_adapter_that_changes_under_vllm_goes_without_the_store() -> None:
    with tempfile.TemporaryDirectory() as made:
        adapters = Adapters()
        assert adapters.identity(None) == ""
        lora = _adapter(Path(made, "a"), b"one")
        first = adapters.identity(lora)
        assert first
        assert adapters.identity(lora) == first
        _adapter(Path(made, "a"), b"other")
        assert adapters.identity(lora) is None
        lora.load_inplace = True
        second = adapters.identity(lora)
        assert second
        assert second != first
        gone = SimpleNamespace(lora_int_id=2, lora_path=f"{made}/b", load_inplace=False)
        assert adapters.identity(gone) is None


class Request(SimpleNamespace):
    """Of vLLM's request what the scheduler's side looks at."""

    def __init__(self, name: str, tokens: int, **fields: Any) -> None:
        plain: dict[str, Any] = {
            "request_id": name,
            "all_token_ids": list(range(tokens)),
            "num_tokens": tokens,
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
def _served(blocks: int) -> Iterator[tuple[SchedulerSide, BlockingStore]]:
    """A scheduler's side on a store that holds some blocks of the tokens 0, 1, 2 and so on."""
    spec = NamespaceSpec("m", "w", "float32", KvLayout(TOKENS, BLOCK_BYTES))
    with tempfile.TemporaryDirectory() as path:
        options = Options.parse({"path": path, "nvme_capacity": "8MiB", "dram_capacity": "4MiB"})
        config = options.store_config(options.make_directory(0, 0), 1)
        with BlockingStore.open(config) as store:
            ns = store.namespace(spec)
            keys = ns.keys_from_tokens(range(blocks * TOKENS))
            assert store.put(ns, keys, [bytes(BLOCK_BYTES)] * blocks).stored == blocks
            side = SchedulerSide(options, TOKENS)
            side.attach({(0, 0): Owner(str(options.directory(0, 0)), spec)})
            yield side, store
            side.close()


def check_a_hit_is_held_until_the_load_has_ended() -> None:
    with _served(5) as (side, store):
        request = Request("r", 7 * TOKENS)
        for _ in range(3):  # vLLM asks again while it has no room
            assert side.matched(request, TOKENS) == 4 * TOKENS
            assert store.stats()["holds"] == 1
        side.allocated(request, list(range(10, 17)), 4 * TOKENS)
        (load,) = side.step(_output({})).loads
        assert (load.first, load.block_ids) == (1, (11, 12, 13, 14))
        assert store.stats()["holds"] == 1
        side.loaded(["r"], set())
        assert store.stats()["holds"] == 0


def check_a_failed_load_is_not_promised_again() -> None:
    with _served(5) as (side, store):
        request = Request("r", 7 * TOKENS)
        assert side.matched(request, 0) == 5 * TOKENS
        side.allocated(request, list(range(10, 17)), 5 * TOKENS)
        side.step(_output({}))
        side.loaded(["r"], {13, 14})
        assert side.matched(request, 0) == 3 * TOKENS
        side.finished("r")
        assert store.stats()["holds"] == 0
        # Others may well find them again.
        assert side.matched(Request("s", 7 * TOKENS), 0) == 5 * TOKENS
        side.finished("s")
        assert store.stats()["holds"] == 0


def check_only_what_is_known_and_computed_is_saved() -> None:
    with _served(1) as (side, _):
        request = Request("r", 3 * TOKENS + 1)
        side.matched(request, 0)
        # A chunk of the prompt; then its end with drafts behind it, which are nobody's tokens yet.
        (save,) = side.step(_output({"r": 2 * TOKENS + 3})).saves
        assert (save.first, save.block_ids) == (0, (10, 11))
        request.num_computed_tokens = 2 * TOKENS + 3
        (save,) = side.step(_output({"r": 3 * TOKENS})).saves
        assert (save.first, save.block_ids) == (2, (12,))
        assert save.parents[0] == save.parent_of(0)
        request.num_computed_tokens = 3 * TOKENS + 1
        assert side.step(_output({"r": 1})).saves == []


def check_a_strangers_words_do_no_harm() -> None:
    with _served(5) as (side, _):
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
    with _served(5) as (side, _):
        plain = Request("p", 7 * TOKENS)
        assert side.matched(plain, 0) == 5 * TOKENS
        others = [
            Request("a", 7 * TOKENS, mm_features=[object()]),
            Request("b", 7 * TOKENS, prompt_embeds=object()),
            Request("c", 7 * TOKENS, resumable=True),
        ]
        for request in others:
            assert side.matched(request, 0) == 0
            assert side.step(_output({request.request_id: 3 * TOKENS})).saves == []
        # It is not read for one that must not be, but stored.
        unread = Request("d", 7 * TOKENS, skip_reading_prefix_cache=True)
        assert side.matched(unread, 0) == 0
        assert len(side.step(_output({"d": 3 * TOKENS})).saves) == 1


def check_an_owner_that_is_gone_is_a_miss() -> None:
    with _served(5) as (side, store):
        store.close()
        assert side.matched(Request("r", 7 * TOKENS), 0) == 0
        assert not side.reset()


def check_a_reset_waits_for_steps_that_save_and_forgets_every_tenancy() -> None:
    with _served(5) as (side, _):
        request = Request("r", 7 * TOKENS)
        side.matched(request, 0)
        side.step(_output({"r": 7 * TOKENS}))
        assert not side.reset()
        side.saved(1)
        assert side.reset()
        assert side.matched(Request("s", 7 * TOKENS), 0) == 0


def _output(scheduled: dict[str, int]) -> Any:
    """Of vLLM's `SchedulerOutput` what the scheduler's side looks at."""
    state = SimpleNamespace(get_block_ids=lambda _name: (list(range(10, 17)),))
    return SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)


CHECKS: dict[str, Callable[[], None]] = {
    name: what for name, what in list(globals().items()) if name.startswith("check_")
}

if __name__ == "__main__":
    faults = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:  # noqa: BLE001 - whatever it is goes to the one who asked
            faults[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps({"ran": sorted(CHECKS), "faults": faults}))
