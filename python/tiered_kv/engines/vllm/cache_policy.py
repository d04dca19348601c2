"""vLLM's `CachePolicy` for its own tier of host memory, by what the predictor makes of its use."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from tiered_kv._core import CountedRequest, Evictor
from tiered_kv.engines.vllm.tenancy import request_context
from tiered_kv.engines.vllm.tier_requests import GROUP_BYTES, positions

# Of the predictor, for each chunk: its own, and those that it remembers after they left.
_METADATA_EACH = 1024
_LEAST_METADATA = 64 << 20
# Chunks that wait to be inserted, for each that the tier has room for.
_ANNOUNCED_EACH = 4


@dataclasses.dataclass
class _Told:
    """What the predictor learns of a request."""

    session: str
    kind: str
    turn: int
    prompt: int
    block_tokens: int


class _Sequence:
    """Which chunk lies before which in a request, by groups of layers, as far as is known.

    It is kept with vLLM's own context of the request.
    """

    def __init__(self) -> None:
        self.before: dict[bytes, bytes | None] = {}
        self.depth: dict[bytes, int] = {}
        self.prompt = 0
        # As what it was counted, by group; none before it was.
        self.counted: dict[bytes, CountedRequest] | None = None
        self._last: dict[bytes, tuple[bytes, int]] = {}
        self._read = 0

    def read(self, req_context: Any) -> None:
        """Reads on, up to what vLLM knows by now."""
        known = positions(req_context)
        for key in islice(known, self._read, None):
            before, depth = self._last.get(key[-GROUP_BYTES:], (None, -1))
            self.before[key], self.depth[key] = before, depth + 1
            self._last[key[-GROUP_BYTES:]] = key, depth + 1
        # What is known first is the prompt.
        self.prompt = self.prompt or len(known)
        self._read = len(known)


class TieredKVPolicy(CachePolicy):  # type: ignore[misc]  # vLLM's classes are Any here
    """Evicts what it is worth least to keep, by predicted reuse; leaves of a prompt first.

    A request counts when it first stores something, before anything leaves for its sake: what it
    stores would else be of nobody, and the first to leave. When it has ended, its answer is added:
    in the next turn it is part of the prompt. What it says of itself by
    `kv_transfer_params={"tiered_kv": {"session": ..., "turn": ...}}` is learned from; without it
    sessions are inferred.

    Args:
        cache_capacity: Chunks of the tier.
        clock_ns: A clock that never goes back, in nanoseconds.
    """

    def __init__(
        self, cache_capacity: int, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        super().__init__(cache_capacity)
        self.clock_ns = clock_ns
        self._chunks: dict[bytes, ChunkStatus] = {}
        # Of chunks that may be inserted, the oldest first: what lies before them, and their depth.
        # vLLM tells each once, and inserts it when there is room, maybe behind other requests'.
        self._announced: dict[bytes, tuple[bytes | None, int]] = {}
        self._evictor = self._new()

    def _new(self) -> Evictor:
        return Evictor(max(_LEAST_METADATA, self.cache_capacity * _METADATA_EACH))

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of a key, None where there is none."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        """A chunk is there; which request it is of, `on_store_miss` has told."""
        self._chunks[key] = chunk
        before, depth = self._announced.pop(key, (None, 0))
        self._evictor.insert(key, before, depth, self.clock_ns())
        if chunk.ref_cnt == 0:
            self._evictor.set_evictable(key, True)

    def remove(self, key: bytes) -> None:
        """A chunk could not be stored."""
        del self._chunks[key]
        self._evictor.remove(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Nothing: a request counts when it first stores, and when it has ended."""

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Notes where chunks lie that may be inserted, and counts their request."""
        told = self._sequence(req_context)
        if told.counted is None:
            groups: dict[bytes, list[bytes]] = {}
            for key in islice(told.depth, told.prompt):
                groups.setdefault(key[-GROUP_BYTES:], []).append(key)
            self._count(tuple(groups.values()), told, req_context)
        for key in keys:
            self._announced.pop(key, None)
            self._announced[key] = told.before.get(key), told.depth.get(key, 0)
        while len(self._announced) > _ANNOUNCED_EACH * self.cache_capacity:
            del self._announced[next(iter(self._announced))]

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],  # noqa: ARG002
        reused_keys: set[bytes],  # noqa: ARG002
        req_context: Any,
    ) -> None:
        """Adds its answer to a request, or counts one that has stored nothing."""
        groups = [order_request_keys([group], req_context) for group in key_groups]
        self._count(groups, self._sequence(req_context), req_context)

    def _count(self, groups: Sequence[Sequence[bytes]], told: _Sequence, req_context: Any) -> None:
        """Counts an access of chunks of a request: each group of layers is a stream."""
        context = request_context(req_context.kv_transfer_params)
        if told.counted is None:
            told.counted = {}
        for keys in groups:
            if not keys:
                continue
            end = req_context.get_offload_key_position(keys[0]) or 1
            tokens = end // (told.depth.get(keys[0], 0) + 1)
            prompt = sum(told.depth.get(key, 0) < told.prompt for key in keys)
            group = keys[0][-GROUP_BYTES:]
            name = f"{context.session} {group.hex()}" if context.session else ""
            row = _Told(name, context.kind, context.turn, prompt, max(1, tokens))
            counted = told.counted.get(group)
            counted = self._evictor.requested(list(keys), row, self.clock_ns(), counted)
            told.counted[group] = counted

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        """Takes out exactly `n` chunks that nobody uses, or none: None where there are fewer."""
        gone = self._evictor.evict(n, protected, self.clock_ns())
        return None if gone is None else [(key, self._chunks.pop(key)) for key in gone]

    def clear(self) -> None:
        """Forgets all chunks, and what was learned of them."""
        self._chunks.clear()
        self._announced.clear()
        self._evictor = self._new()

    def mark_evictable(self, key: bytes) -> None:
        """Nobody uses a chunk any more."""
        self._evictor.set_evictable(key, True)

    def mark_non_evictable(self, key: bytes) -> None:
        """A chunk is in use."""
        self._evictor.set_evictable(key, False)

    def _sequence(self, req_context: Any) -> _Sequence:
        found: _Sequence | None = req_context.get_state(_Sequence)
        if found is None:
            found = _Sequence()
            req_context.set_state(found)
        found.read(req_context)
        return found
