"""vLLM's own manager of tiers over a primary tier in plain memory, driven without an engine."""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

TOKENS = 16
CHUNK = 16 << 10
LIMIT_S = 60
TIER = {"type": "TieredKV", "module_path": "tiered_kv.engines.vllm"}
END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class Region:
    """A primary tier's memory, of what vLLM asks of its own."""

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self._memory = mmap.mmap(-1, chunks * chunk_bytes)
        self.rows = np.frombuffer(self._memory, dtype=np.int8).reshape(chunks, chunk_bytes)

    def create_kv_memoryview(self) -> memoryview:
        """A row a chunk."""
        return memoryview(self.rows)

    def cleanup(self) -> None:
        """Nothing: the memory goes with its last user."""


def offloading(replica: int = 0, replicas: int = 1, groups: int = 1) -> Any:
    """Of vLLM's `OffloadingSpec` what a tier looks at."""
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=replica,
        data_parallel_size=replicas,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer{at}",), at) for at in range(groups)),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("m", "float32"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
    )
    events = SimpleNamespace(enable_kv_cache_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)


def keys_of(name: str, chunks: int, group: int = 0) -> list[Any]:
    """Keys of the chunks of a prompt, as vLLM makes them."""
    hashes = (hashlib.sha256(f"{name} {at}".encode()).digest() for at in range(chunks))
    return [make_offload_key(one, group) for one in hashes]


class Driven:
    """An engine's scheduler, as far as tiers go.

    Args:
        tier: The entry of `secondary_tiers`, None for no tier.
        chunks: Chunks of the primary tier.
        chunk_bytes: Bytes of a chunk.
        spec: vLLM's `OffloadingSpec`.
        policy: Arguments of the primary tier that name its cache policy.
    """

    def __init__(
        self,
        tier: dict[str, Any] | None,
        chunks: int = 64,
        chunk_bytes: int = CHUNK,
        spec: Any = None,
        **policy: Any,
    ) -> None:
        self.region = Region(chunks, chunk_bytes)
        self.primary = CPUPrimaryTierOffloadingManager(chunks, self.region, **policy)
        view = self.primary.get_kv_memoryview()
        made = [] if tier is None else [tier]
        spec = offloading() if spec is None else spec
        self.tiers = [SecondaryTierFactory.create_secondary_tier(one, view, spec) for one in made]
        self.manager = TieringOffloadingManager(self.primary, self.tiers)

    def begin(self, name: str, keys: Sequence[Any], params: Any = None) -> ReqContext:
        """A request whose prompt has these chunks."""
        context = ReqContext(name, params)
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, keys: Sequence[Any]) -> int:
        """Computes chunks and stores them; returns how many were new."""
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        for key, slot in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            self.fill(key, slot)
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, context)
        return len(output.keys_to_store)

    def fill(self, key: Any, slot: int) -> None:
        """Computes a chunk."""
        self.region.rows[slot] = _content(key, self.region.rows.shape[1])

    def finish(self, context: ReqContext) -> None:
        """Ends a request."""
        self.manager.on_request_finished(context)

    def step(self) -> None:
        """The end of a scheduler's step."""
        self.manager.on_schedule_end(END)

    def settle(self) -> None:
        """Steps until no job is left."""
        end_s = time.monotonic() + LIMIT_S
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s
            self.step()
            # A tier's threads need the interpreter as well.
            time.sleep(0.0005)

    def hits(self, context: ReqContext, keys: Sequence[Any]) -> list[bool]:
        """Looks chunks up, step by step, until each is there or not; checks what is there."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            found = [self.manager.lookup(key, context) for key in keys]
            self.step()
            waiting = {LookupResult.HIT_PENDING, LookupResult.RETRY}
            if not waiting & set(found):
                break
            assert time.monotonic() < end_s
        there = [one is LookupResult.HIT for one in found]
        hits = [key for key, hit in zip(keys, there, strict=True) if hit]
        if hits:
            slots = self.manager.prepare_load(hits, context).block_ids
            for key, slot in zip(hits, slots, strict=True):
                row = self.region.rows[slot]
                assert row.tobytes() == _content(key, len(row)).tobytes(), "wrong bytes"
            self.manager.complete_load(hits, context)
        return there

    def forget(self) -> None:
        """Empties the primary tier, and nothing else: as if all of it had been evicted."""
        self.settle()
        self.primary.reset_cache()


def _content(key: bytes, size: int) -> Any:
    """What a chunk of this key holds."""
    return np.frombuffer((key * (size // len(key) + 1))[:size], dtype=np.int8)


def tier(path: str | Path, **options: Any) -> dict[str, Any]:
    """The entry of `secondary_tiers` of a small store."""
    plain = {"path": str(path), "nvme_capacity": "16MiB", "namespace": "test", "lora": "by_path"}
    return {**TIER, **plain, **options}


@contextmanager
def driven(
    path: str | Path, spec: Any = None, chunks: int = 64, **options: Any
) -> Iterator[Driven]:
    """A scheduler with our tier, which ends with the block."""
    made = Driven(tier(path, **options), chunks=chunks, spec=spec)
    try:
        yield made
    finally:
        made.manager.shutdown()
