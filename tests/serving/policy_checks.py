"""Checks of the cache policy below vLLM's own manager of host memory."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.v1.kv_offload.base import LookupResult

from serving.tiering import TOKENS, Driven, keys_of

OURS = {
    "cache_policy": "TieredKVPolicy",
    "cache_policy_module_path": "tiered_kv.engines.vllm",
}
SMALL = 512


def _driven(chunks: int) -> Driven:
    return Driven(None, chunks=chunks, chunk_bytes=SMALL, **OURS)


def check_a_request_is_held_and_found_again() -> None:
    one = _driven(8)
    keys = keys_of("a", 6)
    context = one.begin("r", keys)
    assert one.store(context, keys) == 6
    one.finish(context)
    context = one.begin("s", keys)
    assert one.hits(context, keys) == [True] * 6
    one.finish(context)


def check_what_is_in_use_or_asked_for_stays() -> None:
    one = _driven(8)
    keys, other = keys_of("a", 4), keys_of("b", 4)
    for name, some in (("a", keys), ("b", other)):
        context = one.begin(name, some)
        one.store(context, some)
        one.finish(context)
    pinned = one.begin("p", keys)
    one.manager.prepare_load(keys, pinned)
    # What is asked for again counts as in use, too.
    mixed = [*other[:2], *keys_of("c", 2)]
    context = one.begin("c", mixed)
    assert one.store(context, mixed) == 2
    found = [one.primary.lookup(key, context) for key in [*keys, *other]]
    assert found == [LookupResult.HIT] * 6 + [LookupResult.MISS] * 2
    # More than can leave: nothing does.
    assert one.manager.prepare_store(keys_of("d", 5), one.begin("d", keys_of("d", 5))) is None
    one.manager.complete_load(keys, pinned)


def check_a_store_that_fails_leaves_nothing() -> None:
    one = _driven(4)
    keys = keys_of("a", 4)
    context = one.begin("r", keys)
    assert one.manager.prepare_store(keys, context) is not None
    one.primary.complete_store(keys, context, False)
    assert [one.primary.lookup(key, context) for key in keys] == [LookupResult.MISS] * 4
    other = keys_of("b", 4)
    assert one.store(one.begin("s", other), other) == 4


def check_a_chunk_lies_where_its_own_request_has_it() -> None:
    one = _driven(8)
    first, other = keys_of("a", 4), keys_of("b", 2)
    late, early = one.begin("late", first), one.begin("early", other)
    policy = one.primary._policy
    policy.on_store_miss(first, late)
    policy.on_store_miss(other, early)
    inserted = []
    evictor = SimpleNamespace(insert=lambda *row: inserted.append(row[:3]), set_evictable=max)
    with mock.patch.object(policy, "_evictor", evictor):
        for key in (*first, *other):
            policy.insert(key, SimpleNamespace(ref_cnt=1))
    assert inserted == [
        (first[0], None, 0),
        (first[1], first[0], 1),
        (first[2], first[1], 2),
        (first[3], first[2], 3),
        (other[0], None, 0),
        (other[1], other[0], 1),
    ]


def check_a_request_counts_once_and_before_anything_leaves_for_it() -> None:
    one = _driven(4)
    policy = one.primary._policy
    calls: list[tuple[str, Any]] = []
    real = policy._evictor

    class Noting:
        """The evictor, which notes what it is asked."""

        def __getattr__(self, name: str) -> Any:
            def noting(*args: Any) -> Any:
                calls.append((name, args[0]))
                return getattr(real, name)(*args)

            return noting

        def __len__(self) -> int:
            return len(real)

    keys = keys_of("b", 5)
    with mock.patch.object(policy, "_evictor", Noting()):
        one.finish(_used(one, "a", keys_of("a", 4)))
        calls.clear()
        context = one.begin("b", keys[:3])
        one.store(context, keys[:3])
        for at, key in enumerate(keys[3:], 4):
            context.set_offload_key_position(key, at * TOKENS)
        one.store(context, keys[3:4])
        one.finish(context)
        told = [call for call in calls if call[0] in {"requested", "evict"}]
        # The answer is stored and is no access.
        assert told == [("requested", keys[:3]), ("evict", 3), ("evict", 1)]
        calls.clear()
        # One that finds everything counts as well.
        context = one.begin("c", keys[:2])
        hits = [key for key in keys[:2] if one.primary.lookup(key, context) is LookupResult.HIT]
        assert hits
        one.manager.prepare_load(hits, context)
        one.manager.complete_load(hits, context)
        one.finish(context)
        assert ("requested", hits) in calls


def _used(one: Driven, name: str, keys: list[Any]) -> Any:
    """A request that has stored chunks."""
    context = one.begin(name, keys)
    assert one.store(context, keys) == len(keys)
    return context


def check_a_reset_forgets_everything() -> None:
    one = _driven(4)
    keys = keys_of("a", 4)
    one.store(one.begin("r", keys), keys)
    one.manager.reset_cache()
    context = one.begin("s", keys)
    assert one.hits(context, keys) == [False] * 4
    assert one.store(context, keys) == 4


def check_vllms_manager_and_the_policy_agree_whatever_happens() -> None:
    draw, one = random.Random(7), _driven(32)
    running: list[tuple[Any, list[Any]]] = []
    for number in range(600):
        what = draw.randrange(4)
        if what == 0 or not running:
            name = f"p{draw.randrange(12)}"
            keys = keys_of(name, draw.randrange(1, 9))
            context = one.begin(f"r{number}", keys)
            there = one.hits(context, keys)
            hits = [key for key, hit in zip(keys, there, strict=True) if hit]
            if hits:
                one.manager.prepare_load(hits, context)
            running.append((context, hits))
            output = one.manager.prepare_store(keys, context)
            if output is not None and output.keys_to_store:
                for key, slot in zip(
                    output.keys_to_store, output.store_spec.block_ids, strict=True
                ):
                    one.fill(key, slot)
                if draw.random() < 0.8:
                    one.manager.complete_store(output.keys_to_store, context)
                else:
                    one.manager.complete_store(output.keys_to_store, context, False)
        else:
            context, hits = running.pop(draw.randrange(len(running)))
            if hits:
                one.manager.complete_load(hits, context)
            one.finish(context)
        one.step()
        policy = one.primary._policy
        assert len(policy._evictor) == len(policy._chunks) <= 32
