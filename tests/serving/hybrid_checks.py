"""Checks of models whose layers keep different parts of a block: a hit is all that is needed."""

from __future__ import annotations

import dataclasses
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from serving.checks import FULL, SPEC, STATE, TOKENS, WINDOW, Request
from tiered_kv import KEY_BYTES, KvLayout, NamespaceSpec, RequestContext
from tiered_kv._core import blake3
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm.groups import Group, groups_of, runs, step_of
from tiered_kv.engines.vllm.messages import Blocks, Owner, Saved, Step
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.engines.vllm.scheduler import SchedulerSide
from tiered_kv.engines.vllm.tenancy import Tenancy
from tiered_kv.engines.vllm.worker import Cached, WorkerSide

SIZES = (4096, 8192, 512)
"""Bytes of a block of each part."""
WIDE = dataclasses.replace(FULL, block_size=2 * TOKENS)
MODELS = {
    "a window": [FULL, WINDOW],
    "a state": [STATE, FULL],
    "both": [WINDOW, FULL, STATE],
    "nothing but windows": [WINDOW],
    "blocks of two lengths": [WIDE, WINDOW],
}


def config_of(specs: Sequence[Any]) -> KVCacheConfig:
    """The description that vLLM makes of a model with such groups."""
    groups = [KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


def parts_of(specs: Sequence[Any]) -> tuple[Group, ...]:
    """The adapter's groups of such a model."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    model = {"is_prefix_caching_supported": True, "is_diffusion": False, "architectures": ["M"]}
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=False, **model),
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    return groups_of(config, config_of(specs))


def specs_of(groups: Sequence[Group]) -> list[NamespaceSpec]:
    """A namespace a group."""
    return [
        dataclasses.replace(SPEC, engine=one.name, layout=KvLayout(one.tokens, SIZES[one.index]))
        for one in groups
    ]


class Served:
    """A scheduler's side on a store, and what the store has of each request."""

    def __init__(self, path: str, groups: Sequence[Group]) -> None:
        options = Options.parse({"path": path, "nvme_capacity": "64MiB", "dram_capacity": "16MiB"})
        self.groups, self.specs = groups, specs_of(groups)
        config = options.store_config(options.make_directory(0, 0), 1)
        self.store = BlockingStore.open(config)
        self.side = SchedulerSide(options, groups)
        owner = Owner(str(options.directory(0, 0)), tuple(self.specs))
        self.side.attach({(0, 0): owner})

    def put(self, request: Request, group: int, places: Sequence[int]) -> None:
        """Has the store keep some blocks of a request's part."""
        tenancy = Tenancy("", blake3(request.cache_salt.encode()) if request.cache_salt else "")
        ns = self.store.namespace(tenancy.of(self.specs[group]))
        keys = ns.keys_from_tokens(request.all_token_ids)
        for at in places:
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            assert self.store.put(ns, key, [bytes(SIZES[self.groups[group].index])]).stored == 1

    def close(self) -> None:
        """Ends both."""
        self.side.close()
        self.store.close()


@contextmanager
def serving(specs: Sequence[Any]) -> Iterator[Served]:
    """Such a model's scheduler, with a new store."""
    with tempfile.TemporaryDirectory() as path:
        served = Served(path, parts_of(specs))
        try:
            yield served
        finally:
            served.close()


def _vllms_hit(specs: Sequence[Any], request: Request, have: Sequence[set[int]]) -> int:
    """What vLLM's own prefix cache makes of the same blocks: the longest hit, in tokens."""
    config = config_of(specs)
    coordinator: Any = get_kv_cache_coordinator(
        kv_cache_config=config,
        max_model_len=1024,
        max_in_flight_tokens=1024,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=max(one.block_size for one in specs),
        hash_block_size=TOKENS,
    )
    hashes = [sha256(("block", at)) for at in range(request.num_tokens // TOKENS)]
    pool = coordinator.block_pool
    for group, (spec, places) in enumerate(zip(specs, have, strict=True)):
        scale = spec.block_size // TOKENS
        for at in places:
            # A long block has the name of its last part.
            name = make_block_hash_with_group_id(hashes[(at + 1) * scale - 1], group)
            (block,) = pool.get_new_blocks(1)
            block.set_block_hash(name, (at + 1) * spec.block_size)
            pool.cached_block_hash_to_block.insert(name, block)
    return int(coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)[1])


def check_a_hit_of_several_parts_is_what_vllms_own_cache_calls_one() -> None:
    for name, specs in MODELS.items():
        source = random.Random(name)
        lengths = set()
        with serving(specs) as served:
            for trial in range(100):
                tokens = source.choice([8 * TOKENS, 8 * TOKENS + 5])
                request = Request(f"r{trial}", tokens, cache_salt=f"{name} {trial}")
                # Of each part most blocks, so that runs of some length come about.
                have = [
                    {at for at in range(tokens // spec.block_size) if source.random() < 0.8}
                    for spec in specs
                ]
                for group, places in enumerate(have):
                    served.put(request, group, sorted(places))
                wanted = _vllms_hit(specs, request, have)
                assert served.side.matched(request, 0) == wanted, (name, have)
                lengths.add(wanted)
                served.side.finished(request.request_id)
            assert served.store.stats()["holds"] == 0
        assert len(lengths) > 2, (name, lengths)


def check_without_any_one_part_there_is_no_hit() -> None:
    specs = MODELS["both"]
    with serving(specs) as served:
        for missing in (None, 0, 1, 2):
            request = Request(f"r{missing}", 6 * TOKENS + 3, cache_salt=f"s{missing}")
            for group in range(len(specs)):
                served.put(request, group, [] if group == missing else range(6))
            wanted = 6 * TOKENS if missing is None else 0
            assert served.side.matched(request, 0) == wanted, missing


def check_what_the_engine_has_is_not_asked_for_again() -> None:
    # A window of four blocks: of a hit behind the engine's own blocks it needs these two alone.
    with serving(MODELS["a window"]) as served:
        request = Request("r", 5 * TOKENS + 1)
        served.put(request, 0, [3, 4])
        served.put(request, 1, [3, 4])
        assert served.side.matched(request, 3 * TOKENS) == 2 * TOKENS
        assert served.side.matched(request, 0) == 0


def _output(scheduled: dict[str, int], ids: Any, states: Any = ()) -> Any:
    state = SimpleNamespace(
        get_block_ids=lambda _name: ids, boundary_state_offloads={"r": list(states)}
    )
    return SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)


def check_blocks_that_windows_have_left_are_neither_loaded_nor_saved() -> None:
    with serving(MODELS["both"]) as served:
        request = Request("r", 8 * TOKENS + 3)
        for group in range(3):
            served.put(request, group, range(8))
        assert served.side.matched(request, 0) == 8 * TOKENS
        ids = ([0, 0, 0, 0, 21, 22, 23, 24], list(range(31, 39)), [0] * 7 + [48])
        served.side.allocated(request, ids, 8 * TOKENS)
        window, whole, state = served.side.step(_output({}, ids)).loads
        assert (window.group, window.first, window.block_ids) == (0, 4, (21, 22, 23, 24))
        assert (whole.group, whole.first, whole.block_ids) == (1, 0, tuple(range(31, 39)))
        assert (state.group, state.first, state.block_ids) == (2, 7, (48,))
        # One key space a part: the same place has another name in each, and its own parent.
        assert window.keys[0][-KEY_BYTES:] != whole.keys[0][-KEY_BYTES:] != state.keys[0]
        assert state.parent_of(0) not in (None, whole.keys[0][6 * KEY_BYTES : 7 * KEY_BYTES])
        served.side.loaded(["r"], set())
        assert served.store.stats()["holds"] == 0


def check_states_are_saved_where_vllm_says_they_are() -> None:
    with serving(MODELS["a state"]) as served:
        request = Request("r", 8 * TOKENS)
        assert served.side.matched(request, 0) == 0
        ids = ([0, 0, 0, 54, 55], list(range(31, 36)))
        offered = [
            (0, 54, 4 * TOKENS),
            (0, 55, 4 * TOKENS + 3),  # within a block
            (0, 56, 8 * TOKENS),  # more than the step computes
            (0, 0, 2 * TOKENS),
            (1, 57, 4 * TOKENS),
        ]
        step = served.side.step(_output({"r": 4 * TOKENS + 7}, ids, offered))
        found = [(one.group, one.first, one.block_ids) for one in step.saves]
        assert found == [(0, 3, (54,)), (1, 0, (31, 32, 33, 34))]


def check_runs_of_blocks_end_where_one_is_dropped() -> None:
    assert list(runs(3, [0, 5, 6, 0, 0, 7])) == [(4, [5, 6]), (8, [7])]
    assert list(runs(3, [0, 0])) == []
    assert list(runs(0, [1, 2])) == [(0, [1, 2])]


@contextmanager
def _worker(groups: Sequence[Group]) -> Iterator[tuple[WorkerSide, list[torch.Tensor]]]:
    """A worker's side of several parts with a new store, and the caches."""
    caches = [torch.randn(16, size // 16, 4) for size in SIZES[: len(groups)]]
    with tempfile.TemporaryDirectory() as path:
        options = Options.parse({"path": path, "nvme_capacity": "64MiB", "dram_capacity": "4MiB"})
        paged = [PagedCache({f"layer {at}": one}, 16) for at, one in enumerate(caches)]
        cached = [
            Cached(spec, one, group.tokens)
            for spec, one, group in zip(specs_of(groups), paged, groups, strict=True)
        ]
        config = options.store_config(options.make_directory(0, 0), 1)
        worker = WorkerSide(config, cached, 0, 10, is_plain=False)
        try:
            yield worker, caches
        finally:
            worker.close()


def _blocks(group: int, first: int, block_ids: Sequence[int]) -> Blocks:
    keys = b"".join(bytes([group, first + at]) * 16 for at in range(len(block_ids)))
    parent = bytes([group, first - 1]) * 16 if first else b""
    tenancy, context = Tenancy("", ""), RequestContext()
    return Blocks("r", tenancy, context, first, (keys,), (parent,), tuple(block_ids), group)


def _load(worker: WorkerSide, loads: list[Blocks]) -> tuple[set[str], Saved | None]:
    worker.take_saved()
    worker.start(Step(loads=loads))
    while not worker.ended():
        threading.Event().wait(0.01)
    assert worker.take_failed() == set(), "these are for one group alone"
    return worker.take_failed_requests(), worker.take_saved()


def check_a_load_has_every_part_or_fails_as_a_whole() -> None:
    groups = parts_of(MODELS["both"])
    with _worker(groups) as (worker, caches):
        kept = [one.clone() for one in caches]
        saves = [_blocks(0, 2, [1, 2]), _blocks(1, 0, [1, 2, 3, 4]), _blocks(2, 3, [4])]
        worker.save(Step(saves=saves))
        for one in caches:
            one.zero_()
        loads = [_blocks(0, 2, [5, 6]), _blocks(1, 0, [5, 6, 7, 8]), _blocks(2, 3, [9])]
        assert _load(worker, loads) == (set(), None)
        for cache, old, to, come_from in zip(
            caches, kept, ([5, 6], [5, 6, 7, 8], [9]), ([1, 2], [1, 2, 3, 4], [4]), strict=True
        ):
            assert torch.equal(cache[to], old[come_from])
        # The second block of the window is not there, then the state.
        failed = _load(worker, [_blocks(1, 0, [5, 6, 7, 8]), _blocks(0, 2, [5, 6, 7])])
        assert failed == ({"r"}, Saved(0, {"r": 4 * TOKENS}))
        failed = _load(worker, [_blocks(0, 2, [5, 6]), _blocks(2, 2, [9])])
        assert failed == ({"r"}, Saved(0, {"r": 2 * TOKENS}))


def check_a_load_of_several_parts_that_failed_is_tried_no_further_than_to_its_cut() -> None:
    cut = Saved(1, {"r": 4 * TOKENS, "s": 9}).aggregate(Saved(1, {"r": 3 * TOKENS + 1}))
    assert cut == Saved(1, {"r": 3 * TOKENS + 1, "s": 9})
    with serving(MODELS["a state"]) as served:
        request = Request("r", 6 * TOKENS)
        for group in range(2):
            served.put(request, group, range(6))
        # The state behind the last token is of no use: that token is computed from the one before.
        assert served.side.matched(request, 0) == 5 * TOKENS
        served.side.allocated(request, ([0] * 4 + [7], [1, 2, 3, 4, 5]), 5 * TOKENS)
        served.side.loaded([], set(), cut.cuts)
        served.side.loaded(["r"], set())
        assert served.side.matched(request, 0) == 3 * TOKENS


def check_a_reset_forgets_every_part() -> None:
    with serving(MODELS["a window"]) as served:
        request = Request("r", 5 * TOKENS)
        for group in range(2):
            served.put(request, group, range(5))
        assert served.side.matched(request, 0) == 4 * TOKENS
        served.side.finished("r")
        assert served.side.reset()
        for group, spec in enumerate(served.specs):
            ns = served.store.namespace(spec)
            keys = ns.keys_from_tokens(request.all_token_ids)
            assert served.store.lookup(ns, keys).hits == 0, group


def check_layers_of_several_types_lie_where_their_elements_may_begin() -> None:
    # A page of states has padding behind it, and shares its memory with others.
    memory = torch.arange(8 * 64, dtype=torch.int16).view(torch.int8)
    states = memory.as_strided((8, 1, 1, 6), (128, 128, 128, 1))
    floats = torch.randn(8, 2, 2)
    paged = PagedCache({"a": states, "b": floats}, 8)
    assert paged.block_bytes == 8 + 16
    buffer = bytearray(b"x" * paged.block_bytes)
    before, old = states[3].clone(), memory.clone()
    paged.read([3], [buffer])
    assert buffer[6:8] == bytes(2)
    paged.write([5], [bytes(buffer)])
    assert torch.equal(states[5], before)
    assert torch.equal(floats[5], floats[3])
    changed = (memory != old).nonzero().flatten().tolist()
    assert all(5 * 128 <= at < 5 * 128 + 6 for at in changed)


def check_every_group_has_its_own_name() -> None:
    groups = parts_of(MODELS["both"])
    assert len({one.name for one in groups}) == 3
    assert step_of(parts_of(MODELS["blocks of two lengths"])) == 2 * TOKENS
    # Of a model with one part that keeps all, the name is as it was before there were parts.
    assert [one.name for one in parts_of([FULL])] == [""]
