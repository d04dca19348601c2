"""Jobs of a secondary tier, which a thread of their own hands to the store."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from vllm.logger import init_logger

from tiered_kv import Namespace
from tiered_kv.blocking import BlockingStore
from tiered_kv.channel import Completion
from tiered_kv.engines._record import Recorder
from tiered_kv.engines.vllm.tier_requests import Run, Tracked, runs

_LOG = init_logger("vllm.tiered_kv")

_CALLS = 1 << 16


class Job:
    """A job of vLLM's, as the calls that it is cut into.

    Attributes:
        number: vLLM's number.
        keys: Its keys.
        slots: Where their chunks are in the primary tier.
        is_load: Whether it fills the primary tier.
        waiting: Calls that have not ended.
        done: Keys for which it was done.
        moved: Bytes that were moved.
        begun_s: When it was submitted, by the monotonic clock.
    """

    __slots__ = ("begun_s", "done", "is_load", "keys", "moved", "number", "slots", "waiting")

    def __init__(self, number: int, keys: list[bytes], slots: list[int], is_load: bool) -> None:
        self.number = number
        self.keys = keys
        self.slots = slots
        self.is_load = is_load
        self.waiting = 0
        self.done: list[bytes] = []
        self.moved = 0
        self.begun_s = monotonic()


class Jobs:
    """Hands jobs to the store beside vLLM's scheduler, and tells which have ended.

    What one thread does for all: order the blocks of a job, make their keys and begin the calls.
    The scheduler's thread only puts jobs in and takes ended ones out.

    Args:
        store: The store.
        view: The primary tier, a row a chunk.
        tokens: Tokens of a chunk.
        groups: Groups of layers.
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
        recorder: Recorder | None,
        put_wait_s: float,
        load_timeout_s: float,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._groups = groups
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
        self._dropped: deque[Job] = deque()
        # Ends of calls whose beginning has not been noted yet.
        self._early: list[Completion] = []
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tiered-kv-jobs", daemon=True)
        self._thread.start()

    def submit(self, job: Job, tracked: Tracked | None, ns: Namespace) -> None:
        """Begins a job; one of no request that uses the store ends at once, and nothing is done."""
        self.open += 1
        self.storing += not job.is_load
        if tracked is None:
            self._drop(job)
        elif job.is_load:
            self._queue.put(lambda: self._load(job, tracked, ns))
        else:
            self._queue.put(lambda: self._write(job, tracked, ns))

    def finish(self, tracked: Tracked, ns: Namespace | None) -> None:
        """Ends a request, behind all of its jobs.

        Args:
            tracked: The request.
            ns: The namespace of its record; None for none.
        """
        self._queue.put(lambda: self._finish(tracked, ns))

    def begin_record(self, tracked: Tracked, ns: Namespace) -> None:
        """Notes a request whose prompt is what is known by now."""
        known = Tracked.sequence(tracked.req_context, self._tokens)
        self._queue.put(lambda: self._begin_record(tracked, known, ns))

    def ended(self) -> list[Job]:
        """Jobs whose calls have all ended, each told once: nothing touches their chunks now."""
        if not self.open:
            return []
        found = []
        early, self._early = self._early, []
        for done in (*early, *self.channel.drain()):
            call = self._calls.pop(done.id, None)
            if call is None:
                self._early.append(done)
                continue
            job, keys = call
            job.moved += done.bytes
            if int.from_bytes(done.bitmap, "little") == (1 << len(keys)) - 1:
                job.done += keys
            else:
                job.done += [key for at, key in enumerate(keys) if done.done(at)]
            job.waiting -= 1
            if not job.waiting:
                found.append(job)
        while self._dropped:
            job = self._dropped.popleft()
            job.waiting -= 1
            if not job.waiting:
                found.append(job)
        self.open -= len(found)
        self.storing -= sum(not job.is_load for job in found)
        return found

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until no job is in progress; `ended` then tells them all.

        Returns:
            Whether none is.
        """
        idle = threading.Event()
        self._queue.put(idle.set)
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
        while (item := self._queue.get()) is not None:
            try:
                item()
            except Exception as error:  # noqa: BLE001 - a job that is not told of stops the engine
                self._fault("note of a request", error)

    def _write(self, job: Job, tracked: Tracked, ns: Namespace) -> None:
        parts = runs(tracked, job.keys, job.slots, self._tokens, self._groups)
        job.waiting = len(parts)
        for run in parts:
            try:
                self._write_run(job, tracked, run, ns)
            except Exception as error:  # noqa: BLE001 - as above
                self._fault("store", error)
                self._dropped.append(job)

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

    def _load(self, job: Job, tracked: Tracked, ns: Namespace) -> None:
        job.waiting = 1
        try:
            keys = ns.keys_from_opaque(b"".join(job.keys), len(job.keys[0]))
            request = tracked.used(self._store, ns, keys, self._tokens, job.keys[0])
            slots = self._region.slots(job.slots)
            call = self.channel.submit_get_into(ns, keys, slots, self._load_timeout_s, request)
        except Exception as error:  # noqa: BLE001 - as above
            self._fault("load", error)
            self._dropped.append(job)
        else:
            self._calls[call] = job, job.keys

    def _drop(self, job: Job) -> None:
        job.waiting = 1
        self._dropped.append(job)

    def _finish(self, tracked: Tracked, ns: Namespace | None) -> None:
        tracked.finish()
        if self._recorder is None or ns is None:
            return
        known = Tracked.sequence(tracked.req_context, self._tokens)
        self._recorder.end(
            tracked.req_context.req_id, len(known) * self._tokens, _packed(known, ns)
        )

    def _begin_record(self, tracked: Tracked, known: list[bytes], ns: Namespace) -> None:
        if self._recorder is not None:
            name, tokens = tracked.req_context.req_id, len(known) * self._tokens
            self._recorder.begin(name, tracked.context, tokens, _packed(known, ns))

    def _fault(self, what: str, error: Exception) -> None:
        """Counts a fault, which is a miss, and tells of the first one."""
        self.faults += 1
        if self.faults == 1:
            _LOG.warning("a %s failed and counts as a miss, as others will: %s", what, error)


def _packed(keys: list[bytes], ns: Namespace) -> bytes:
    return ns.keys_from_opaque(b"".join(keys), len(keys[0])) if keys else b""
