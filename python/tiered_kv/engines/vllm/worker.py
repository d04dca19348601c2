"""A worker's side: the store of its rank, and the copies between it and the engine's cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from vllm.logger import init_logger

from tiered_kv import Namespace, NamespaceSpec, Request, TieredKvError
from tiered_kv.blocking import BlockingStore
from tiered_kv.config import StoreConfig
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.vllm.layerwise import StepLoads, StepSaves
from tiered_kv.engines.vllm.messages import Blocks, Owner, Saved, Step
from tiered_kv.engines.vllm.metrics import Reporter, Stats
from tiered_kv.engines.vllm.paged import PagedCache, SideStream
from tiered_kv.engines.vllm.tenancy import Tenancy
from tiered_kv.engines.vllm.transfers import Load, Reader, Saving

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
    """Loads blocks beside the engine's steps or within them, and saves them at the end of each.

    A load runs in a thread of its own: its blocks are the waiting request's alone, so that the
    engine goes on with others, or with the layers before the one that is being loaded. A save has
    copied its blocks when the step ends, so that the engine may preempt and overwrite at will.

    Args:
        config: The configuration of the rank's store, whose directory is there.
        groups: The engine's cache, by groups of layers.
        rank: The worker's rank.
        load_timeout_s: Seconds after which a load is a miss.
        is_plain: Whether a load that is cut keeps the blocks that it has filled: so it is where
            there is one group that needs all of them. Otherwise the engine begins anew.
        is_layered: Whether a step's layers tell when they are computed.
        agree: Where steps wait for their loads, whether one has failed on any rank, told of this
            one; all ranks ask it in the same steps. None where loads are beside the steps.

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
        is_layered: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._rank = rank
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
        begin = partial(_begin_loader, device, config)
        self._loader = ThreadPoolExecutor(1, "tiered-kv-load", begin)
        self._loads: dict[str, tuple[list[Blocks], Future[_Cut | None], float]] = {}
        self._reader = Reader(self._store, rank, load_timeout_s)
        self.stopped = self._reader.stopped
        self._told = True
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._cuts: dict[str, int] = {}
        self._saved_steps = 0
        self.faults = 0
        paged = [one.paged for one in self._groups]
        side = SideStream(device.device if is_layered else None)
        self._saves = StepSaves(paged, self._begin_save, self._fault, side)
        self._agree = agree
        self._step_loads: StepLoads | None = None
        self._begun_s: float | None = None
        self._is_good = True
        have = self.stats()
        self._reporter = Reporter(rank, have)
        batch = min(_BATCH_BYTES, have["dram"]["capacity_bytes"] // _BATCH_PART)
        self._batches = [max(1, batch // one.paged.block_bytes) for one in self._groups]
        if agree is not None:
            self._step_loads = StepLoads(
                self._reader, device, self._batches[0], load_timeout_s, self._loader
            )
        _LOG.info("tiered-kv serves rank %d from %s: %s", rank, self._directory, have["nvme"])

    @property
    def owner(self) -> Owner:
        """What the scheduler needs to attach."""
        return Owner(str(self._directory), tuple(one.spec for one in self._groups))

    def stats(self) -> dict[str, Any]:
        """What the store counts, and `adapter`: faults, loads cut short, and copies by layer."""
        loads = self._step_loads
        ours = {
            "faults": self.faults,
            "cut_loads": self._reader.cut_loads,
            "layer_saves": self._saves.early_copies,
            "layer_loads": loads.early_copies if loads is not None else 0,
        }
        return {**self._store.stats(), "adapter": ours}

    def report(self) -> Stats | None:
        """What was counted since the last report, None where that is a moment ago."""
        if self._told and not self._reporter.due():
            return None
        self._told = True
        return self._reporter.report(self.stats())

    def start(self, step: Step) -> None:
        """Begins the loads of a step."""
        if self._step_loads is not None:
            self._start_within(step, self._step_loads)
            return
        loads: dict[str, list[Blocks]] = {}
        for blocks in step.loads:
            loads.setdefault(blocks.request_id, []).append(blocks)
        for name, parts in loads.items():
            future: Future[_Cut | None] = Future()
            try:
                future = self._loader.submit(self._load_all, [self._load_of(one) for one in parts])
            except TieredKvError as error:
                future.set_exception(error)
            self._loads[name] = (parts, future, monotonic())

    def wait_layer(self, name: str) -> None:
        """Waits until a layer of what the step loads is in place, or known not to come."""
        if self._step_loads is not None:
            self._step_loads.wait(name)

    def save_layer(self, step: Step, name: str) -> None:
        """Copies a layer that the step has computed."""
        if step.saves:
            self._saves.layer(step, name)

    def save(self, step: Step, *, is_good: bool = True) -> None:
        """Copies the blocks that the step has computed into the store.

        What the store has no room for, it does without.

        Args:
            step: The step.
            is_good: Whether it has come to its end; otherwise nothing of it is stored.
        """
        begun_s = monotonic()
        if not is_good and self._step_loads is not None:
            # The other ranks may not have come so far: nobody is asked.
            self._step_loads.stop()
            self._begun_s = None
        # What stands on blocks that were not loaded is no key's content, on whatever rank.
        self._saves.end(step, is_good=is_good and self._settle())
        if step.saves:
            self._saved_steps += 1
            self._reporter.took("save_seconds", monotonic() - begun_s)

    def ended(self) -> set[str]:
        """Requests whose loads have ended; the engine's blocks are touched no more.

        Loads that the step waited for have ended too, and are not told: their requests run.
        """
        self._settle()
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
        if self._step_loads is not None:
            self._step_loads.stop()
        self._saves.drop()
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

    def _load_of(self, blocks: Blocks) -> Load:
        namespace = self._namespace(blocks)
        return Load(blocks, namespace, self._request(blocks, namespace))

    def _start_within(self, step: Step, loads: StepLoads) -> None:
        """Begins loads that the step waits for."""
        self._is_good = True
        found = []
        for blocks in step.loads:
            try:
                found.append(self._load_of(blocks))
            except TieredKvError as error:
                self._fault("load", error)
                self._failed.update(blocks.block_ids)
                self._is_good = False
        if step.loads:
            self._begun_s = monotonic()
        loads.start(found)

    def _settle(self) -> bool:
        """Whether all that the step waited for is there, on every rank; waits for it, once."""
        if self._begun_s is None or self._step_loads is None or self._agree is None:
            return self._is_good
        lost, error = self._step_loads.end()
        self._reporter.took("load_seconds", monotonic() - self._begun_s)
        self._begun_s = None
        if error is not None:
            self._fault("load", error)
        self._failed |= lost
        self._is_good = not self._agree(bool(lost) or not self._is_good)
        return self._is_good

    def _begin_save(self, blocks: Blocks, skipped: int) -> Saving:
        """Reserves memory for blocks that a request uses, but for the first ones."""
        namespace = self._namespace(blocks)
        request = self._request(blocks, namespace)
        blocks = blocks.behind(skipped)
        reservation = self._store.reserve(
            namespace,
            blocks.keys_of(self._rank),
            parent=blocks.parent_of(self._rank),
            depth=blocks.first,
            req=request,
        )
        paged = self._groups[blocks.group].paged
        return Saving(self._store, reservation, paged, blocks.block_ids)

    def _load_all(self, loads: Sequence[Load]) -> _Cut | None:
        """Fills the engine's blocks of each group in turn; returns where it was cut short.

        All groups are read, whatever lacks: what is damaged is found at once, and stored again when
        it is computed.
        """
        cuts = []
        for load in loads:
            filled = self._load(load)
            if filled < len(load.blocks.block_ids):
                cuts.append(_Cut(load.blocks, filled))
        return min(cuts, key=self._good_tokens, default=None)

    def _good_tokens(self, cut: _Cut) -> int:
        """Tokens up to which a load may be tried again that was cut there."""
        return (cut.blocks.first + cut.filled) * self._groups[cut.blocks.group].tokens

    def _load(self, load: Load) -> int:
        """Fills the engine's blocks; returns how many, from the first.

        A batch is read from the drives while the one before it is copied.
        """
        blocks = load.blocks
        paged, size = self._groups[blocks.group].paged, self._batches[blocks.group]
        count = len(blocks.block_ids)
        for first in range(0, count, size):
            if self.stopped.is_set():
                return first
            with self._reader.lease(load, first, size) as leases:
                hits = leases.hits
                paged.write(
                    blocks.block_ids[first : first + hits], [leases[at] for at in range(hits)]
                )
                if self._reader.lacks(load, first, leases):
                    return first + hits
        return count

    def _fault(self, what: str, error: BaseException) -> None:
        """Counts a fault, which is a miss, and tells of the first one."""
        self.faults += 1
        if self.faults == 1:
            _LOG.warning("a %s failed and counts as a miss, as others will: %s", what, error)


def _begin_loader(device: PagedCache, config: StoreConfig) -> None:
    """Has the thread that loads run where the store's own do.

    Where torch copies in parallel, OpenMP binds it as it binds whoever computes.
    """
    if config.cpus is not None:
        try:
            os.sched_setaffinity(0, [int(number) for number in config.cpus])
        except OSError as error:
            _LOG.warning("loads stay on the processors of the worker: %s", error)
    device.use_device()
