"""Jobs of a secondary tier, which a thread of their own hands to the store."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.logger import init_logger

from tiered_kv import Namespace
from tiered_kv.blocking import BlockingStore
from tiered_kv.channel import Completion
from tiered_kv.engines._record import Recorder
from tiered_kv.engines.vllm.tier_metrics import EVERY_S
from tiered_kv.engines.vllm.tier_requests import Run, Tracked, positions, runs

_LOG = init_logger("vllm.tiered_kv")

_CALLS = 1 << 16


class Job:
    """A job of vLLM's, as the calls that it is cut into.

    Args:
        told: vLLM's `TransferJob`.
        is_load: Whether it fills the primary tier.

    Attributes:
        told: vLLM's own.
        is_load: Whether it fills the primary tier.
        waiting: Calls that have not ended.
        lacking: Keys for which it was not done.
        moved: Bytes that were moved.
    """

    __slots__ = ("is_load", "lacking", "moved", "told", "waiting")

    def __init__(self, told: Any, *, is_load: bool) -> None:
        self.told = told
        self.is_load = is_load
        self.waiting = 0
        # Mostly none: what a job costs the scheduler is then the same for any number of keys.
        self.lacking: list[bytes] = []
        self.moved = 0


class Jobs:
    """Hands jobs to the store beside vLLM's scheduler, and tells which have ended.

    What one thread does for all: order the blocks of a job, make their keys, begin the calls, and
    count what requests use. The scheduler's thread only puts jobs in and takes ended ones out.

    Args:
        store: The store.
        view: The primary tier, a row a chunk.
        tokens: Tokens of a chunk.
        groups: Groups of layers.
        look: What counts, after each batch of jobs; it is told whether none has come.
        least_key: Bytes of the shortest key that is trusted.
        recorder: What writes down the requests, None for nothing.
        put_wait_s: Seconds for which a write may wait for room.
        load_timeout_s: Seconds after which a load is a miss.

    Attributes:
        open: Jobs that have not been taken out.
        storing: Those of them that write.
        faults: Calls that failed.
    """

    def __init__(
        self,
        store: BlockingStore,
        view: memoryview,
        *,
        tokens: int,
        groups: int,
        least_key: int,
        look: Callable[[bool], None],
        recorder: Recorder | None,
        put_wait_s: float,
        load_timeout_s: float,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._groups = groups
        self._least_key = least_key
        self._look = look
        self._recorder = recorder
        self._put_wait_s = put_wait_s
        self._load_timeout_s = load_timeout_s
        self._region = store.register(view.cast("B"), view.strides[0] if view.strides else 0)
        self.channel = store.channel(_CALLS)
        self.open = 0
        self.storing = 0
        self.faults = 0
        # Written by the thread before a call can be seen to have ended, and read by the scheduler's
        # thread; each operation on them is one of the interpreter's own.
        self._calls: dict[int, tuple[Job, list[bytes]]] = {}
        self._dropped: deque[tuple[Job, Sequence[bytes]]] = deque()
        # Ends of calls whose beginning has not been noted yet.
        self._early: list[Completion] = []
        # The thread's own.
        self._requests: dict[str, Tracked] = {}
        self._batch: list[tuple[Any, ...]] = []
        self._queue: queue.SimpleQueue[list[tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tiered-kv-jobs", daemon=True)
        self._thread.start()

    def submit(self, job: Job, ns: Namespace | None) -> None:
        """Begins a job; one without a namespace ends at once, and nothing is done."""
        self.open += 1
        if not job.is_load:
            self.storing += 1
        if ns is None:
            job.waiting = 1
            self._dropped.append((job, job.told.keys))
        else:
            self._batch.append((self._begin, job, ns))

    def finish(self, req_context: Any, ns: Namespace | None) -> None:
        """Ends a request, behind all of its jobs.

        Args:
            req_context: vLLM's own.
            ns: The namespace of its record; None for none.
        """
        self._batch.append((self._finish, req_context, ns))

    def begin_record(self, req_context: Any, ns: Namespace) -> None:
        """Notes a request whose prompt is what is known by now."""
        self._batch.append((self._begin_record, req_context, len(positions(req_context)), ns))

    def hand_over(self) -> None:
        """Gives the thread what has come: once a step, since waking it costs more than the rest."""
        if self._batch:
            self._queue.put(self._batch)
            self._batch = []

    def ended(self) -> list[Job]:
        """Jobs whose calls have all ended, each told once: nothing touches their chunks now."""
        if not self.open:
            return []
        found: list[Job] = []
        early, self._early = self._early, []
        for done in (*early, *self.channel.drain()):
            call = self._calls.pop(done.id, None)
            if call is None:
                self._early.append(done)
                continue
            job, keys = call
            job.moved += done.bytes
            if not _whole(done, job, len(keys)):
                job.lacking += [key for at, key in enumerate(keys) if not done.done(at)]
            self._ended_one(job, found)
        while self._dropped:
            job, lacking = self._dropped.popleft()
            job.lacking += lacking
            self._ended_one(job, found)
        return found

    def _ended_one(self, job: Job, found: list[Job]) -> None:
        """Notes that a call of a job has ended, which may have been the last."""
        job.waiting -= 1
        if not job.waiting:
            found.append(job)
            self.open -= 1
            if not job.is_load:
                self.storing -= 1

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until no job is in progress; `ended` then tells them all.

        Returns:
            Whether none is.
        """
        idle = threading.Event()
        self._batch.append((idle.set,))
        self.hand_over()
        return idle.wait(timeout) and self.channel.quiesce(timeout)

    def close(self, timeout: float) -> None:
        """Ends what is in progress, and lets go of vLLM's memory."""
        self.drain(timeout)
        self._queue.put(None)
        self.channel.close()
        self._thread.join()
        self._region.close()
        del self._region

    def _run(self) -> None:
        _give_way()
        while True:
            try:
                batch = self._queue.get(timeout=EVERY_S)
            except queue.Empty:
                batch = []
            if batch is None:
                return
            # The engine computes now: what takes a while is done here and not while it schedules.
            for call, *given in (*batch, (self._look, not batch)):
                try:
                    call(*given)
                except Exception as error:  # noqa: BLE001 - a job not told of stops the engine
                    self._fault("note of a request", error)

    def _begin(self, job: Job, ns: Namespace) -> None:
        job.waiting = 1
        try:
            keys, slots = list(job.told.keys), job.told.chunk_ids.tolist()
            if len(keys[0]) < self._least_key:
                self._dropped.append((job, keys))
                return
            tracked = self._tracked(job.told.req_context)
            if job.is_load:
                self._load(job, tracked, ns, keys, slots)
                return
            parts = runs(tracked, keys, slots, self._tokens, self._groups)
        except Exception as error:  # noqa: BLE001 - a job not told of stops the engine
            self._fault("load" if job.is_load else "store", error)
            self._dropped.append((job, job.told.keys))
            return
        job.waiting = len(parts)
        for run in parts:
            try:
                self._write_run(job, tracked, run, ns)
            except Exception as error:  # noqa: BLE001 - as above
                self._fault("store", error)
                self._dropped.append((job, run.keys))

    def _tracked(self, req_context: Any) -> Tracked:
        tracked = self._requests.get(req_context.req_id)
        if tracked is None:
            tracked = self._requests[req_context.req_id] = Tracked(req_context)
        return tracked

    def _write_run(self, job: Job, tracked: Tracked, run: Run, ns: Namespace) -> None:
        keys = ns.keys_from_opaque(b"".join(run.keys), len(run.keys[0]))
        parent = tracked.parent(run, ns, self._tokens)
        request = tracked.used(self._store, ns, keys, self._tokens, run.keys[0])
        tracked.stored(run, keys)
        call = self.channel.submit_put(
            ns,
            keys,
            self._region.slots(run.slots),
            parent=parent,
            depth=run.depth,
            chain=run.chained,
            wait=self._put_wait_s,
            req=request,
        )
        self._calls[call] = job, run.keys

    def _load(
        self, job: Job, tracked: Tracked, ns: Namespace, keys: list[bytes], slots: list[int]
    ) -> None:
        ours = ns.keys_from_opaque(b"".join(keys), len(keys[0]))
        request = tracked.used(self._store, ns, ours, self._tokens, keys[0])
        into = self._region.slots(slots)
        call = self.channel.submit_get_into(ns, ours, into, self._load_timeout_s, request)
        self._calls[call] = job, keys

    def _finish(self, req_context: Any, ns: Namespace | None) -> None:
        tracked = self._requests.pop(req_context.req_id, None)
        if tracked is not None:
            tracked.finish()
        if self._recorder is not None and ns is not None:
            known = Tracked.sequence(req_context, self._tokens)
            tokens = len(known) * self._tokens
            self._recorder.end(req_context.req_id, tokens, _packed(known, ns))

    def _begin_record(self, req_context: Any, most: int, ns: Namespace) -> None:
        if self._recorder is not None:
            known = Tracked.sequence(req_context, self._tokens, most)
            context, tokens = Tracked(req_context).context, len(known) * self._tokens
            self._recorder.begin(req_context.req_id, context, tokens, _packed(known, ns))

    def _fault(self, what: str, error: Exception) -> None:
        """Counts a fault, which is a miss, and tells of the first one."""
        self.faults += 1
        if self.faults == 1:
            _LOG.warning("a %s failed and counts as a miss, as others will: %s", what, error)


def _give_way() -> None:
    """Keeps this thread from interrupting the one that wakes it, on the same processor.

    It could not do anything then but wait for the interpreter, which the other one has.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _whole(done: Completion, job: Job, keys: int) -> bool:
    """Whether a call did all that was asked of it."""
    # Of a load, a miss is no failure.
    return done.ok and (not job.is_load or int.from_bytes(done.bitmap, "little") == (1 << keys) - 1)


def _packed(keys: list[bytes], ns: Namespace) -> bytes:
    return ns.keys_from_opaque(b"".join(keys), len(keys[0])) if keys else b""
