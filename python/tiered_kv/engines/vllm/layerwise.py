"""A layer at a time: blocks are saved as a layer is computed, and loaded as it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack
from time import monotonic

from tiered_kv import Leases
from tiered_kv.engines.vllm.messages import Blocks, Step, part
from tiered_kv.engines.vllm.paged import PagedCache, SideStream
from tiered_kv.engines.vllm.tenancy import Tenancy
from tiered_kv.engines.vllm.transfers import Load, Reader, Saving

Fault = Callable[[str, BaseException], None]


class StepSaves:
    """Saves what a step computes, and publishes it at the step's end.

    Where layers tell that they are computed, all blocks of the step are reserved at the first one,
    and each layer is copied then. What no layer told is copied at the end.

    Args:
        groups: The engine's cache, by groups of layers.
        begin: Reserves memory for blocks, all but the first ones, of which it is told how many.
        fault: Counts a fault. Whatever it is, the step goes on.
        side: Where copies are put.
    """

    def __init__(
        self,
        groups: Sequence[PagedCache],
        begin: Callable[[Blocks, int], Saving],
        fault: Fault,
        side: SideStream,
    ) -> None:
        self._groups = tuple(groups)
        self._begin = begin
        self._fault = fault
        self._side = side
        self._step: Step | None = None
        self._open: list[tuple[int, Saving]] = []
        self._taken: set[tuple[Tenancy, int, bytes]] = set()
        self._told: set[str] = set()
        self._tellers: set[str] = set()
        self.early_copies = 0

    def layer(self, step: Step, name: str) -> None:
        """Copies a layer that the step has just computed.

        Where a step computes its tokens in parts, it says so after each: the last copy has all.
        """
        if self._step is not step:
            self.drop()
            self._step = step
            for blocks in step.saves:
                self._reserve(blocks)
        self._told.add(name)
        self._side.follow()
        with self._side.copying():
            for entry in tuple(self._open):
                place = self._groups[entry[0]].own_layer(name)
                if place is not None:
                    self.early_copies += self._attempt(entry, Saving.copy, place)

    def end(self, step: Step, *, is_good: bool) -> None:
        """Publishes the blocks of a step.

        Args:
            step: The step.
            is_good: Whether all that it computed is as it should be; otherwise nothing of it is
                published.
        """
        told, self._told = self._told, set()
        if self._step is not step:
            self.drop()  # of a step whose end nobody told
            # One after the other: none waits with its memory for the next.
            for blocks in step.saves if is_good else ():
                self._reserve(blocks)
                self._finish()
            return
        # Layers that have told before and did not now: it has ended before its last one.
        if is_good and not told < self._tellers:
            self._tellers |= told
            self._finish()
        self.drop()

    def drop(self) -> None:
        """Gives back what was reserved and is not published."""
        opened, self._open, self._step = self._open, [], None
        self._told = set()
        self._taken.clear()
        if opened:
            self._side.wait()
        for _, saving in opened:
            saving.drop()

    def _reserve(self, blocks: Blocks) -> None:
        keys = [
            (blocks.tenancy, blocks.group, part(blocks.keys[0], at, at + 1))
            for at in range(len(blocks.block_ids))
        ]
        # Requests that begin alike share blocks of the engine: one copy is enough.
        shared = next((at for at, key in enumerate(keys) if key not in self._taken), len(keys))
        self._taken.update(keys)
        try:
            self._open.append((blocks.group, self._begin(blocks, shared)))
        except Exception as error:  # noqa: BLE001 - the step goes on without it
            self._fault("save", error)

    def _finish(self) -> None:
        self._side.follow()
        with self._side.copying():
            for entry in tuple(self._open):
                self._attempt(entry, Saving.fill)
        self._side.wait()
        for entry in tuple(self._open):
            self._attempt(entry, Saving.publish)
        self._open = []
        self._taken.clear()

    def _attempt(
        self, entry: tuple[int, Saving], what: Callable[..., int | None], *args: int
    ) -> int:
        """Does something to a saving; drops it where that fails. Returns what came of it."""
        try:
            return what(entry[1], *args) or 0
        except Exception as error:  # noqa: BLE001 - the step goes on without it
            self._fault("save", error)
            self._side.wait()
            self._open.remove(entry)
            entry[1].drop()
            return 0


class _Run:
    """The loads of one step.

    The lock is held for each copy, and whoever sets `is_over` holds it: no copy comes after that.
    """

    def __init__(self, loads: Sequence[Load], layers: int, end_s: float) -> None:
        self.loads = loads
        self.end_s = end_s
        self.ready = [threading.Event() for _ in range(layers)]
        self.filled = [0] * len(loads)
        self.lock = threading.Lock()
        self.is_over = False
        self.future: Future[None] = Future()

    def stop(self) -> None:
        """Ends the copies into the engine's blocks: when this returns, there are no more."""
        with self.lock:
            self.is_over = True


class _OverError(Exception):
    """Nobody waits for the loads any more."""


class StepLoads:
    """Loads what a step needs while it is computed: each layer waits for its own part.

    What fits into the memory that a load may pin is put in place layer by layer; what comes before
    it in whole blocks, since it has to go to make room.

    A cache that no layer is known to wait for, as that of an indexer or of layers within a graph of
    the whole model, would be read before it is there: as long as there is one, the step begins when
    all is in place.

    Args:
        reader: Leases blocks.
        paged: The engine's cache.
        batch: Blocks that may be leased at a time.
        limit_s: Seconds that a step waits at most.
        executor: The thread that reads and copies.
    """

    def __init__(
        self, reader: Reader, paged: PagedCache, batch: int, limit_s: float, executor: Executor
    ) -> None:
        self._reader = reader
        self._paged = paged
        self._batch = batch
        self._limit_s = limit_s
        self._executor = executor
        self._side = SideStream(paged.device)
        self._run: _Run | None = None
        # Places of caches that a layer has waited for, in whatever step.
        self._waiters: set[int] = set()
        self.early_copies = 0

    def start(self, loads: Sequence[Load]) -> None:
        """Begins to load for a step."""
        self.stop()
        if loads:
            self._run = _Run(loads, self._paged.layers, monotonic() + self._limit_s)
            # The blocks may be in use by what the engine has been given to do before.
            self._side.follow()
            self._run.future = self._executor.submit(self._read, self._run)
            if len(self._waiters) < self._paged.layers:
                self._wait(self._run, self._run.ready)

    def wait(self, name: str) -> None:
        """Waits until a layer of all blocks is in place, or nobody can wait any longer."""
        place = self._paged.layer(name)
        if place is not None:
            self._waiters.add(place)
        run = self._run
        if run is not None:
            self._wait(run, run.ready if place is None else [run.ready[place]])

    @staticmethod
    def _wait(run: _Run, layers: Sequence[threading.Event]) -> None:
        for ready in layers:
            if run.is_over or not ready.wait(max(0.0, run.end_s - monotonic())):
                run.stop()
                return

    def stop(self) -> None:
        """Ends the loads of a step whose end nobody waits for."""
        run, self._run = self._run, None
        if run is not None:
            run.stop()

    def end(self) -> tuple[set[int], BaseException | None]:
        """Waits for the loads of the step, as long as one may; no block is written afterwards.

        Returns:
            The engine's blocks that were not filled, and what went wrong, if it was an error.
        """
        run, self._run = self._run, None
        if run is None:
            return set(), None
        wait([run.future], max(0.0, run.end_s - monotonic()))
        run.stop()
        lost: set[int] = set()
        for load, filled in zip(run.loads, run.filled, strict=True):
            lost.update(load.blocks.block_ids[filled:])
        if not run.future.done():
            return lost, TimeoutError(f"a step waited {self._limit_s} s for its loads")
        error = run.future.exception()
        return lost, None if isinstance(error, _OverError) else error

    def _read(self, run: _Run) -> None:
        """Fills the engine's blocks, in the thread of the executor."""
        try:
            whole, layered = self._pieces(run.loads)
            ended: set[int] = set()
            for at, first in whole:
                if at not in ended:
                    with self._lease(run, at, first, ended) as leases:
                        self._copy(run, at, first, leases)
                        run.filled[at] = first + leases.hits
            with ExitStack() as stack:
                leased = [
                    (at, first, stack.enter_context(self._lease(run, at, first, ended)))
                    for at, first in layered
                    if at not in ended
                ]
                for layer, ready in enumerate(run.ready):
                    for at, first, leases in leased:
                        self._copy(run, at, first, leases, layer)
                        self.early_copies += leases.hits
                    ready.set()
                for at, first, leases in leased:
                    run.filled[at] = first + leases.hits
        finally:
            for ready in run.ready:
                ready.set()

    def _pieces(self, loads: Sequence[Load]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Batches as the load's number and the first block: whole ones, and those by layers."""
        pieces = [
            (at, first)
            for at, load in enumerate(loads)
            for first in range(0, len(load.blocks.block_ids), self._batch)
        ]
        room, cut = self._batch, len(pieces)
        while cut:
            at, first = pieces[cut - 1]
            room -= min(self._batch, len(loads[at].blocks.block_ids) - first)
            if room < 0:
                break
            cut -= 1
        return pieces[:cut], pieces[cut:]

    def _lease(self, run: _Run, at: int, first: int, ended: set[int]) -> Leases:
        """Leases a batch; notes a load that ends with it, since it lacks a block."""
        if run.is_over or self._reader.stopped.is_set():
            raise _OverError
        load, left_s = run.loads[at], max(0.0, run.end_s - monotonic())
        leases = self._reader.lease(load, first, self._batch, left_s)
        if self._reader.lacks(load, first, leases):
            ended.add(at)
        return leases

    def _copy(
        self, run: _Run, at: int, first: int, leases: Leases, layer: int | None = None
    ) -> None:
        """Copies what there is of a batch, one layer or all; nothing once it is over."""
        hits = leases.hits
        block_ids = run.loads[at].blocks.block_ids[first : first + hits]
        with run.lock:
            if run.is_over:
                raise _OverError
            with self._side.copying():
                self._paged.write(block_ids, [leases[number] for number in range(hits)], layer)
