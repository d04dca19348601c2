"""Generation with `transformers` models that reuses stored KV prefixes.

The engine restores the longest stored prefix of a prompt into the model's cache, prefills the rest
and stores what is new:

    engine = TransformersEngine(model, store)
    result = await engine.generate([document, question], max_new_tokens=32, eos=[2])

With `exact=True`, the default, an answer computed from a restored prefix is the one that the same
process would have computed without the store, logits equal to the bit: prefill runs on a grid of
chunks that depends on the prompt alone (see `_grid`), restored blocks come from the same grid, and
whatever else changes the last bits (attention kernel, threads, versions) is in the namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import torch

from tiered_kv import (
    KEY_BYTES,
    InvalidArgumentError,
    Leases,
    Namespace,
    NamespaceSpec,
    Request,
    RequestContext,
    TieredStore,
)
from tiered_kv.engines._allocator import keep_freed_memory
from tiered_kv.engines._fingerprint import weights_fingerprint as fingerprint
from tiered_kv.engines._grid import Grid, exact_digests, make_grid
from tiered_kv.engines._identity import namespace_spec, numerics
from tiered_kv.engines._inspect import inspect_model
from tiered_kv.engines._plan import Plan, Planner, common_prefix, leading, part
from tiered_kv.engines._result import TIER_NAMES, GenerationResult, Restored, make_result
from tiered_kv.engines._runner import Run, Runner, Stopped
from tiered_kv.torch import as_buffer

__all__ = ["GenerationResult", "TransformersEngine"]


_STAGING_BYTES = 32 << 20
_THROTTLE_PAUSE_S = 0.02

T = TypeVar("T")


class TransformersEngine:
    """Generates greedily with a model, reusing prefixes from a store.

    Any decoder of full, sliding-window or latent attention is served; requests run one at a time.
    The weights are fingerprinted here: make a new engine after changing them.

    Args:
        model: A causal language model of `transformers`, in evaluation mode, on one device.
        store: An open store; it must outlive the engine's calls.
        tokens_per_block: Tokens of a stored block.
        exact: Restore only what makes the answer equal to the bit to one without the store.
            Otherwise any stored prefix is taken, blocks of earlier answers included.
        chunk_tokens: Tokens of a prefill chunk, a multiple of `tokens_per_block`.
        lora: Name of the adapter in use; prefixes are not shared across names.
        salt: Isolates tenants: prefixes are not shared across salts.
        weights_fingerprint: Fingerprint of the weights; by default it is computed.
        reserve_tokens: Longest sequence to make room for now instead of at its first request.
        load_timeout_s: Seconds after which a load counts as a miss.
        store_timeout_s: Seconds to wait, after an answer, for a throttled store.
        tune_allocator: Let the C library keep freed memory (a setting of the whole process), which
            halves the time to first token on CPUs; see `_allocator`.

    Raises:
        UnsupportedError: The model's cache is not supported; the message names the config field.
        InvalidArgumentError: An argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        store: TieredStore,
        *,
        tokens_per_block: int = 32,
        exact: bool = True,
        chunk_tokens: int = 512,
        lora: str = "",
        salt: str = "",
        weights_fingerprint: str | None = None,
        reserve_tokens: int = 0,
        load_timeout_s: float = 10.0,
        store_timeout_s: float = 10.0,
        tune_allocator: bool = True,
    ) -> None:
        if tokens_per_block < 1:
            raise InvalidArgumentError(f"tokens_per_block: {tokens_per_block}; give 1 or more")
        if chunk_tokens < 1 or chunk_tokens % tokens_per_block:
            raise InvalidArgumentError(
                f"chunk_tokens: {chunk_tokens}; give a multiple of tokens_per_block "
                f"({tokens_per_block})"
            )
        if tune_allocator:
            keep_freed_memory()
        # All of torch's work is done in one thread: OpenMP has a pool of workers for each thread
        # that calls it, and two pools on the same cores are in each other's way.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tiered-kv-engine")
        self._geometry, style = self._worker.submit(inspect_model, model).result()
        self._model = model
        self._store = store
        self._tokens_per_block = tokens_per_block
        self._chunk_tokens = chunk_tokens
        self._exact = exact
        self._labels = (lora, salt)
        self._weights = weights_fingerprint or self._worker.submit(fingerprint, model).result()
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        self._slab_bytes = self._geometry.layout(tokens_per_block).slab_bytes
        self._planner = Planner(store, self._geometry, tokens_per_block, exact)
        self._runner = Runner(model, self._geometry, style, tokens_per_block)
        self._worker.submit(self._runner.reserve, reserve_tokens).result()
        self._namespaces: dict[str | None, Namespace] = {}
        self._lock = asyncio.Lock()

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block."""
        return sum(self._slab_bytes)

    def namespace_spec(self) -> NamespaceSpec:
        """The namespace that this engine reads and writes, as of now."""
        return self._spec(self._numerics())

    def _numerics(self) -> str | None:
        return numerics(self._model, self._geometry.device) if self._exact else None

    def _spec(self, numeric: str | None) -> NamespaceSpec:
        lora, salt = self._labels
        return namespace_spec(
            self._model,
            self._geometry,
            self._tokens_per_block,
            weights=self._weights,
            lora=lora,
            salt=salt,
            numerics=numeric,
        )

    def close(self) -> None:
        """Ends the engine's thread and frees its memory; the store stays open."""
        self._worker.shutdown()
        self._runner.release()

    async def generate(
        self,
        segments: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        context: RequestContext | None = None,
        eos: Collection[int] = (),
    ) -> GenerationResult:
        """Answers a prompt, restoring what is stored of it and storing what is new.

        New blocks are stored after the last token, before the call returns; they are no part of the
        time to first token. A cancelled call ends after the chunk being computed, and stores
        nothing.

        Args:
            segments: The prompt as lists of token ids. Reuse is exact up to where a segment ended,
                rounded down to a block: give a shared document a segment of its own.
            max_new_tokens: Tokens to generate at most.
            context: Who asks; without it the request is anonymous.
            eos: Token ids that end the answer.

        Raises:
            InvalidArgumentError: An argument is out of range or the prompt too long.
            TieredKvError: The store is closed or refused the call.
        """
        began = time.perf_counter()
        prompt, grid = self._prepare(segments, max_new_tokens)
        async with self._lock:
            namespace = self._namespace()
            request = self._store.begin_request(context) if context is not None else None
            output_tokens = 0
            try:
                plan = self._plan(namespace, prompt, grid)
                if request is not None:
                    first = self._geometry.first_block(plan.wanted, self._tokens_per_block)
                    request.observe(namespace, plan.keys[first * KEY_BYTES :], first)
                await self._reserve(len(prompt) + max_new_tokens)
                restored = await self._restore(namespace, plan, prompt, grid, request)
                run = await self._run(prompt, restored.tokens, grid.ends, max_new_tokens, eos)
                output_tokens = len(run.tokens)
                stored = time.perf_counter()
                taken, dropped = await self._save(namespace, plan, prompt, grid, run)
                return make_result(
                    run,
                    prompt,
                    restored,
                    began,
                    store_s=time.perf_counter() - stored,
                    stored_blocks=taken,
                    dropped_blocks=dropped,
                )
            finally:
                if request is not None:
                    request.finish(output_tokens=output_tokens, engine_hit_tokens=0)

    async def generate_uncached(
        self,
        segments: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos: Collection[int] = (),
        on_grid: bool = False,
    ) -> GenerationResult:
        """Answers a prompt without the store.

        Args:
            segments: The prompt as lists of token ids.
            max_new_tokens: Tokens to generate at most.
            eos: Token ids that end the answer.
            on_grid: Prefill in the chunks that `generate` uses, which makes logits equal to the
                bit; otherwise in one go.

        Raises:
            InvalidArgumentError: An argument is out of range or the prompt too long.
        """
        began = time.perf_counter()
        prompt, grid = self._prepare(segments, max_new_tokens)
        ends = grid.ends if on_grid else (len(prompt),)
        async with self._lock:
            await self._reserve(len(prompt) + max_new_tokens)
            run = await self._run(prompt, 0, ends, max_new_tokens, eos)
        return make_result(run, prompt, Restored(), began)

    async def generate_resident(
        self,
        segments: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos: Collection[int] = (),
    ) -> GenerationResult:
        """Answers a prompt whose prefix the last call left in the model's own cache.

        Nothing is restored: this is the limit that a restore from any store can approach. The
        prefix ends at a chunk end, as in `generate`.

        Args:
            segments: The prompt as lists of token ids.
            max_new_tokens: Tokens to generate at most.
            eos: Token ids that end the answer.

        Raises:
            InvalidArgumentError: An argument is out of range or the prompt too long.
        """
        began = time.perf_counter()
        prompt, grid = self._prepare(segments, max_new_tokens)
        async with self._lock:
            await self._reserve(len(prompt) + max_new_tokens)
            shared = common_prefix(self._runner.resident, prompt) // self._tokens_per_block
            blocks = grid.last_end_within(min(shared, grid.reusable_blocks))
            while blocks and not self._runner.resumable(blocks * self._tokens_per_block):
                blocks = grid.last_end_within(blocks - 1)
            start = blocks * self._tokens_per_block
            run = await self._run(prompt, start, grid.ends, max_new_tokens, eos)
        return make_result(run, prompt, Restored(tokens=start), began)

    def resident_prefix(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of what a cache holds after the first tokens that the last call left in memory.

        Args:
            tokens: How many; at most what is there.

        Returns:
            For each layer that has a cache its keys and values, `[1, heads, tokens, dim]`; with a
            window of W tokens only the last W - 1.

        Raises:
            InvalidArgumentError: There are fewer tokens, or windows were not restored there.
        """
        there = len(self._runner.resident)
        if not 0 <= tokens <= there:
            raise InvalidArgumentError(f"tokens: {tokens}; the last call left {there}")
        if tokens and not self._runner.resumable(tokens):
            raise InvalidArgumentError(
                f"tokens: {tokens}; only the windows behind {there} were restored: give that many"
            )
        return self._worker.submit(self._runner.copy_of, tokens).result()

    def _prepare(
        self, segments: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[list[int], Grid]:
        prompt = [token for segment in segments for token in segment]
        if not prompt:
            raise InvalidArgumentError("segments: no token in them; give at least one")
        if max_new_tokens < 1:
            raise InvalidArgumentError(f"max_new_tokens: {max_new_tokens}; give 1 or more")
        text = self._model.config.get_text_config(decoder=True)
        if min(prompt) < 0 or max(prompt) >= text.vocab_size:
            raise InvalidArgumentError(
                f"segments: token ids from {min(prompt)} to {max(prompt)}, the vocabulary has "
                f"{text.vocab_size}; use this model's tokenizer"
            )
        limit = getattr(text, "max_position_embeddings", None)
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise InvalidArgumentError(
                f"segments: {len(prompt)} tokens and {max_new_tokens} new ones are more than the "
                f"model's {limit} positions; shorten the prompt or max_new_tokens"
            )
        lengths = [len(segment) for segment in segments]
        return prompt, make_grid(lengths, self._tokens_per_block, self._chunk_tokens)

    def _namespace(self) -> Namespace:
        numeric = self._numerics()
        if numeric not in self._namespaces:
            self._namespaces[numeric] = self._store.namespace(self._spec(numeric))
        return self._namespaces[numeric]

    def _plan(self, namespace: Namespace, prompt: list[int], grid: Grid) -> Plan:
        if self._exact:
            keys = namespace.keys_from_opaque(exact_digests(prompt, grid), KEY_BYTES)
        else:
            keys = namespace.keys_from_tokens(prompt)
        return self._planner.plan(namespace, keys, grid)

    async def _reserve(self, tokens: int) -> None:
        await self._call(lambda _stop: self._runner.reserve(tokens))

    async def _restore(
        self,
        namespace: Namespace,
        plan: Plan,
        prompt: list[int],
        grid: Grid,
        request: Request | None,
    ) -> Restored:
        """Restores the position that the plan wants, or the best one that can be loaded."""
        if not plan.wanted:
            return Restored()
        began = time.perf_counter()
        restored = Restored()
        wanted, count = plan.wanted, 0
        while wanted and not count:
            first = self._geometry.first_block(wanted, self._tokens_per_block)
            left = max(0.0, began + self._load_timeout_s - time.perf_counter())
            keys = plan.part(first, wanted)
            loading = self._store.get(namespace, keys, timeout=left, req=request)
            with await loading as leases:
                reached = first + leases.hits
                count = wanted if reached == wanted else self._planner.cut(grid, first, reached)
                if count:
                    restored.source_bytes = await self._copy(leases, first, count, prompt)
            wanted = self._planner.position(namespace, plan, grid, reached) if not count else 0
        if count < plan.wanted:
            # The lookup promised blocks that the load did not bring: they are stored again.
            plan.present = count
        restored.tokens = count * self._tokens_per_block
        restored.seconds = time.perf_counter() - began
        return restored

    async def _copy(
        self, leases: Leases, first: int, count: int, prompt: list[int]
    ) -> dict[str, int]:
        """Copies what the token after `count` blocks attends to; returns bytes by tier."""
        size = self._tokens_per_block
        begins = [group.first_block(count, size) for group in self._geometry.groups]
        needed = [
            [group for group, begin in enumerate(begins) if block >= begin]
            for block in range(first, count)
        ]
        copied: Counter[str] = Counter()
        for tier, groups in zip(leases.sources, needed, strict=False):
            name = TIER_NAMES.get(tier, str(tier))
            copied[name] += sum(self._slab_bytes[group] for group in groups)
        blocks = [
            {group: leases.slab(at, group) for group in groups} for at, groups in enumerate(needed)
        ]
        try:
            await self._call(lambda stop: self._runner.restore(first, blocks, prompt, stop))
        finally:
            blocks.clear()
        return dict(copied)

    async def _run(
        self,
        prompt: list[int],
        start: int,
        ends: Sequence[int],
        max_new_tokens: int,
        eos: Collection[int],
    ) -> Run:
        left = [end for end in ends if end > start]
        return await self._call(
            lambda stop: self._runner.run(prompt, start, left, max_new_tokens, eos, stop)
        )

    async def _save(
        self, namespace: Namespace, plan: Plan, prompt: list[int], grid: Grid, run: Run
    ) -> tuple[int, int]:
        """Stores what the store lacks; returns blocks taken and blocks given up."""
        prefilled = len(plan.keys) // KEY_BYTES
        keys = plan.keys
        if not self._exact:
            # Keys and values of the last token were never computed. In exact mode blocks of the
            # answer are not stored: no prompt could restore them.
            keys = namespace.keys_from_tokens([*prompt, *run.tokens[:-1]])
        total = len(keys) // KEY_BYTES
        deadline = time.monotonic() + self._store_timeout_s
        batch = max(1, _STAGING_BYTES // self.block_bytes)
        taken = 0
        first = plan.present
        while first < total:
            stop = prefilled if first < prefilled else total
            count = min(batch, stop - first)
            stored, complete = await self._put(
                namespace, keys, grid, first, count, prefilled, deadline
            )
            taken += stored
            if not complete:
                break  # the blocks after these would be stored without their parents
            first += count
        return taken, total - first

    async def _put(
        self,
        namespace: Namespace,
        keys: bytes,
        grid: Grid,
        first: int,
        count: int,
        prefilled: int,
        deadline: float,
    ) -> tuple[int, bool]:
        """Puts some blocks, waiting for a throttled store; returns blocks taken, and if all."""
        rows = await self._call(lambda _stop: self._runner.stage(first, count))
        computed: Literal["prefill", "decode"] = "prefill" if first < prefilled else "decode"
        ends = [
            computed == "prefill" and grid.block_ends_chunk(block)
            for block in range(first, first + count)
        ]
        # Behind a window a block needs no parent: the first ones may be evicted first.
        chain = not self._geometry.windowed
        taken = done = 0
        while True:
            at = first + done
            report = await self._store.put(
                namespace,
                part(keys, at, first + count),
                as_buffer(rows[done:]),
                parent=part(keys, at - 1, at) if at and chain else None,
                depth=at,
                chain=chain,
                chunk_ends=ends[done:],
                computed=computed,
            )
            taken += report.stored
            # Only what was refused is tried again: what was taken may be evicted to make room.
            done += leading(report.statuses, ("stored", "exists"))
            if done == count:
                return taken, True
            if time.monotonic() >= deadline:
                return taken, False
            await asyncio.sleep(_THROTTLE_PAUSE_S)

    async def _call(self, work: Callable[[threading.Event], T]) -> T:
        """Runs `work` in the engine's thread; the event loop stays free.

        A cancelled caller waits until the thread has let go of the arena and of leased memory: the
        event that `work` gets is set, and it ends at its next look.
        """
        stop = threading.Event()
        future = asyncio.get_running_loop().run_in_executor(self._worker, work, stop)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError, Stopped):
                    await asyncio.shield(future)
            raise
