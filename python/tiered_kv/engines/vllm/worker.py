"""A worker's side: the store of its rank, and the copies between it and the engine's cache."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from vllm.logger import init_logger

from tiered_kv import Namespace, NamespaceSpec, Request, TieredKvError
from tiered_kv.blocking import BlockingStore
from tiered_kv.config import StoreConfig
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.vllm.messages import Blocks, Owner, Saved, Step, part
from tiered_kv.engines.vllm.metrics import Reporter, Stats
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.engines.vllm.tenancy import Tenancy

_LOG = init_logger("vllm.tiered_kv")

# Of a load, so much is pinned at a time, however long the prompt: at most this, and this part of
# host memory, of which only so much may be leased.
_BATCH_BYTES = 32 << 20
_BATCH_PART = 8
_NAMESPACES_KEPT = 1024


class Cached(NamedTuple):
    """A group of the rank's layers.

    Attributes:
        spec: The namespace of its blocks, without LoRA and salt.
        paged: The engine's cache of its layers.
        tokens: Tokens of a block.
    """

    spec: NamespaceSpec
    paged: PagedCache
    tokens: int


class _Cut(NamedTuple):
    """Where a load ended early: so many blocks of one group were filled, none of those behind."""

    blocks: Blocks
    filled: int


class WorkerSide:
    """Loads blocks beside the engine's steps, and saves them at the end of each.

    A load runs in a thread of its own: its blocks are the waiting request's alone, so that the
    engine goes on with others. A save has copied its blocks when the step ends, so that the engine
    may preempt and overwrite at will.

    Args:
        config: The configuration of the rank's store, whose directory is there.
        groups: The engine's cache, by groups of layers.
        rank: The worker's rank.
        load_timeout_s: Seconds after which a load is a miss.
        is_plain: Whether a load that is cut keeps the blocks that it has filled: so it is where
            there is one group that needs all of them. Otherwise the engine begins anew.

    Raises:
        TieredKvError: The store cannot be opened, or does not give back what is written.
    """

    def __init__(
        self,
        config: StoreConfig,
        groups: Sequence[Cached],
        rank: int,
        load_timeout_s: float,
        *,
        is_plain: bool = True,
    ) -> None:
        self._groups = tuple(groups)
        self._rank = rank
        self._load_timeout_s = load_timeout_s
        self._is_plain = is_plain
        self._store = BlockingStore.open(config)
        try:
            for size in sorted({one.paged.block_bytes for one in self._groups}):
                self_test(self._store, size)
            for one in self._groups:
                self._store.namespace(one.spec)
        except BaseException:
            self._store.close()
            raise
        self._directory = Path(self._store.health()["drives"][0]["path"])
        self._namespaces: dict[tuple[Tenancy, int], Namespace] = {}
        self._requests: dict[str, Request] = {}
        device = self._groups[0].paged
        self._loader = ThreadPoolExecutor(1, "tiered-kv-load", device.use_device)
        self._loads: dict[str, tuple[list[Blocks], Future[_Cut | None], float]] = {}
        self._told = True
        self.stopped = threading.Event()
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._cuts: dict[str, int] = {}
        self._saved_steps = 0
        self.faults = 0
        self.cut_loads = 0
        have = self.stats()
        self._reporter = Reporter(rank, have)
        batch = min(_BATCH_BYTES, have["dram"]["capacity_bytes"] // _BATCH_PART)
        self._batches = [max(1, batch // one.paged.block_bytes) for one in self._groups]
        _LOG.info("tiered-kv serves rank %d from %s: %s", rank, self._directory, have["nvme"])

    @property
    def owner(self) -> Owner:
        """What the scheduler needs to attach."""
        return Owner(str(self._directory), tuple(one.spec for one in self._groups))

    def stats(self) -> dict[str, Any]:
        """What the store counts, and `adapter`: faults and loads cut short."""
        ours = {"faults": self.faults, "cut_loads": self.cut_loads}
        return {**self._store.stats(), "adapter": ours}

    def report(self) -> Stats | None:
        """What was counted since the last report, None where that is a moment ago."""
        if self._told and not self._reporter.due():
            return None
        self._told = True
        return self._reporter.report(self.stats())

    def start(self, step: Step) -> None:
        """Begins the loads of a step."""
        loads: dict[str, list[Blocks]] = {}
        for blocks in step.loads:
            loads.setdefault(blocks.request_id, []).append(blocks)
        for name, parts in loads.items():
            future: Future[_Cut | None] = Future()
            try:
                known = [(one, self._namespace(one)) for one in parts]
                requests = [self._request(one, namespace) for one, namespace in known]
                future = self._loader.submit(self._load_all, known, requests[0])
            except TieredKvError as error:
                future.set_exception(error)
            self._loads[name] = (parts, future, monotonic())

    def save(self, step: Step) -> None:
        """Copies the blocks that the step has computed into the store.

        What the store has no room for, it does without.
        """
        begun_s = monotonic()
        for blocks in step.saves:
            try:
                self._save(blocks)
            except TieredKvError as error:
                self._fault("save", error)
        if step.saves:
            self._saved_steps += 1
            self._reporter.took("save_seconds", monotonic() - begun_s)

    def ended(self) -> set[str]:
        """Requests whose loads have ended; the engine's blocks are touched no more."""
        ended = {name for name, (_, future, _) in self._loads.items() if future.done()}
        for name in ended:
            parts, future, begun_s = self._loads.pop(name)
            self._reporter.took("load_seconds", monotonic() - begun_s)
            error = future.exception()
            cut = _Cut(parts[0], 0) if error is not None else future.result()
            if error is not None:
                self._fault("load", error)
            if cut is None:
                continue
            if self._is_plain:
                self._failed.update(cut.blocks.block_ids[cut.filled :])
            else:
                self._failed_requests.add(name)
                self._cuts[name] = self._good_tokens(cut)
        return ended

    def take_failed(self) -> set[int]:
        """The engine's blocks that ended loads did not fill, each told once."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests whose ended loads did not fill all, each told once."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_saved(self) -> Saved | None:
        """Steps with saves and loads cut short since the last call, None for none."""
        steps, self._saved_steps = self._saved_steps, 0
        cuts, self._cuts = self._cuts, {}
        return Saved(steps, cuts) if steps or cuts else None

    def finished(self, request_ids: Iterable[str]) -> None:
        """Counts the accesses of requests that have ended."""
        for request_id in request_ids:
            # An engine with nothing left to do makes no more steps: it tells all now.
            self._told = False
            request = self._requests.pop(request_id, None)
            if request is not None:
                request.finish()

    def close(self) -> None:
        """Ends the loads, writes what is not yet durable and closes the store.

        vLLM gives its workers a few seconds, which are for the writes: a load in progress ends with
        its batch.
        """
        self.stopped.set()
        self._loader.shutdown(cancel_futures=True)
        self.finished(list(self._requests))
        self._store.close()

    def _namespace(self, blocks: Blocks) -> Namespace:
        key = (blocks.tenancy, blocks.group)
        found = self._namespaces.get(key)
        if found is None:
            if len(self._namespaces) >= _NAMESPACES_KEPT:
                self._namespaces.clear()
            spec = blocks.tenancy.of(self._groups[blocks.group].spec)
            found = self._namespaces[key] = self._store.namespace(spec)
        return found

    def _request(self, blocks: Blocks, namespace: Namespace) -> Request:
        """The request as the store counts it, which has now used these blocks."""
        request = self._requests.get(blocks.request_id)
        if request is None:
            request = self._store.begin_request(blocks.context)
            self._requests[blocks.request_id] = request
        request.observe(namespace, blocks.keys_of(self._rank), blocks.first)
        return request

    def _save(self, blocks: Blocks) -> None:
        namespace = self._namespace(blocks)
        request = self._request(blocks, namespace)
        paged = self._groups[blocks.group].paged
        reservation = self._store.reserve(
            namespace,
            blocks.keys_of(self._rank),
            parent=blocks.parent_of(self._rank),
            depth=blocks.first,
            req=request,
        )
        with reservation:
            free = [at for at, why in enumerate(reservation.statuses) if why is None]
            if not free:
                return
            views = [reservation[at] for at in free]
            try:
                paged.read([blocks.block_ids[at] for at in free], views)
            finally:
                # A block with a writable view alive is not published.
                for one in views:
                    if one is not None:
                        one.release()
            self._store.publish(reservation)

    def _load_all(self, parts: Sequence[tuple[Blocks, Namespace]], request: Request) -> _Cut | None:
        """Fills the engine's blocks of each group in turn; returns where it was cut short.

        All groups are read, whatever lacks: what is damaged is found at once, and stored again when
        it is computed.
        """
        cuts = []
        for blocks, namespace in parts:
            filled = self._load(blocks, namespace, request)
            if filled < len(blocks.block_ids):
                cuts.append(_Cut(blocks, filled))
        return min(cuts, key=self._good_tokens, default=None)

    def _good_tokens(self, cut: _Cut) -> int:
        """Tokens up to which a load may be tried again that was cut there."""
        return (cut.blocks.first + cut.filled) * self._groups[cut.blocks.group].tokens

    def _load(self, blocks: Blocks, namespace: Namespace, request: Request) -> int:
        """Fills the engine's blocks; returns how many, from the first.

        A batch is read from the drives while the one before it is copied.
        """
        keys = blocks.keys_of(self._rank)
        paged, size = self._groups[blocks.group].paged, self._batches[blocks.group]
        count = len(blocks.block_ids)
        for first in range(0, count, size):
            if self.stopped.is_set():
                return first
            last = min(first + size, count)
            self._store.prefetch(namespace, part(keys, last, min(last + size, count)))
            with self._store.get(
                namespace, part(keys, first, last), self._load_timeout_s, request
            ) as leases:
                hits = leases.hits
                views = [leases[at] for at in range(hits)]
                paged.write(blocks.block_ids[first : first + hits], views)
                views.clear()
                why = None if hits == last - first else leases.reasons[hits]
            if hits < last - first:
                self._cut(count - first - hits, why)
                if why == "corrupt":
                    # Others may be too, and are found so while this one is computed.
                    self._store.prefetch(namespace, part(keys, last, count))
                # A block is of no use without those before it.
                return first + hits
        return count

    def _cut(self, blocks: int, why: str | None) -> None:
        """Counts a load that was cut short, and tells of the first one."""
        self.cut_loads += 1
        if self.cut_loads == 1:
            _LOG.warning(
                "a load was cut by %d blocks (%s), which are computed again, as with later ones",
                blocks,
                why,
            )

    def _fault(self, what: str, error: BaseException) -> None:
        """Counts a fault, which is a miss, and tells of the first one."""
        self.faults += 1
        if self.faults == 1:
            _LOG.warning("a %s failed and counts as a miss, as others will: %s", what, error)
