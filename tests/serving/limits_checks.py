"""Checks of how long the vLLM adapter takes at most, and of the devices that it uses."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from serving.checks import BLOCK_BYTES, PLAIN, SPEC, TOKENS, Request
from tiered_kv import KEY_BYTES, KvLayout, RequestContext
from tiered_kv._core import describe_spec
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm import rank, scheduler, tenancy
from tiered_kv.engines.vllm.messages import Blocks, Owner, Step
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.engines.vllm.scheduler import SchedulerSide
from tiered_kv.engines.vllm.tenancy import Tenancy
from tiered_kv.engines.vllm.worker import Cached, WorkerSide


class _Elsewhere(PagedCache):
    """A cache that says it is on the second of several accelerators."""

    device = torch.device("cuda", 1)


@contextmanager
def worker_of(
    paged: PagedCache, timeout_s: float = 10, cpus: list[int] | None = None, **told: Any
) -> Iterator[WorkerSide]:
    """A worker's side with a new store."""
    with tempfile.TemporaryDirectory() as path:
        extra = {"path": path, "nvme_capacity": "64MiB", "dram_capacity": "4MiB", "cpus": cpus}
        options = Options.parse(extra)
        spec = dataclasses.replace(SPEC, layout=KvLayout(TOKENS, paged.block_bytes))
        config = options.store_config(options.make_directory(0, 0), 1)
        worker = WorkerSide(config, [Cached(spec, paged, TOKENS)], 0, timeout_s, **told)
        try:
            yield worker
        finally:
            worker.close()


def blocks_of(count: int) -> Blocks:
    """The first blocks of a request."""
    keys = b"".join(bytes([at + 1]) * KEY_BYTES for at in range(count))
    return Blocks("r", Tenancy("", ""), RequestContext(), 0, (keys,), (b"",), tuple(range(count)))


def check_a_load_waits_for_the_device_of_its_rank() -> None:
    paged = _Elsewhere({"a": torch.zeros(4, 32, 32)}, 4)
    with (
        mock.patch.object(torch.accelerator, "synchronize") as waited,
        mock.patch.object(torch.accelerator, "set_device_index") as used,
        worker_of(paged) as worker,
    ):
        worker.save(Step(saves=[blocks_of(2)]))
        worker.start(Step(loads=[blocks_of(2)]))
        while worker.ended() != {"r"}:
            threading.Event().wait(0.01)
        assert worker.take_failed() == set()
        assert used.call_args_list == [mock.call(paged.device)]
        assert waited.call_args_list == [mock.call(paged.device)]


class _Waiting(PagedCache):
    """A cache into which each copy waits until it may go on."""

    def __init__(self, caches: dict[str, torch.Tensor], blocks: int) -> None:
        super().__init__(caches, blocks)
        self.begun, self.go = threading.Event(), threading.Event()
        self.written = 0

    def write(
        self, block_ids: Sequence[int], buffers: Sequence[Any], layer: int | None = None
    ) -> None:
        self.begun.set()
        self.go.wait()
        self.written += len(block_ids)
        super().write(block_ids, buffers, layer)


def check_a_worker_that_is_told_to_end_loads_no_more_than_a_batch() -> None:
    # Of so little memory a batch is one block or two.
    paged = _Waiting({"a": torch.zeros(6, 64, 1024)}, 6)
    with worker_of(paged) as worker:
        worker.save(Step(saves=[blocks_of(6)]))
        worker.start(Step(loads=[blocks_of(6)]))
        assert paged.begun.wait(60)
        closing = threading.Thread(target=worker.close)
        closing.start()
        assert worker.stopped.wait(60)
        paged.go.set()
        closing.join()
        batch = paged.written
        assert 0 < batch < 6
        assert worker.ended() == {"r"}
        assert worker.take_failed() == set(range(batch, 6))


class _Slow:
    """Operators of stores of which each call takes some of the time that it was given."""

    def __init__(self, ranks: int) -> None:
        self.now_s = 0.0
        self.waits_s: list[float] = []
        self._together = threading.Barrier(ranks)
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now_s

    def attach(self, _directory: str, _timeout: float) -> Any:
        # All ranks are asked at once, or this breaks.
        self._together.wait(60)
        return SimpleNamespace(delete_before=self._delete, close=lambda: None)

    def _delete(self, _namespace: bytes, _before: None, timeout: float) -> tuple[int, bool]:
        with self._lock:
            self.waits_s.append(timeout)
            self.now_s += 10
        return 0, True


def check_a_reset_asks_all_ranks_at_once_and_ends_in_time() -> None:
    side = SchedulerSide(Options.parse({"path": "/kv", "nvme_capacity": "8MiB"}), PLAIN)
    owners = {(0, at): Owner(f"/kv/{at}", (SPEC,)) for at in range(2)}
    slow = _Slow(2)
    fields = describe_spec(SPEC.canonical())[1]
    rows = [{"namespace": bytes(32), "fields": fields}] * 20
    with (
        mock.patch.object(BlockingStore, "attach"),
        mock.patch.object(tenancy, "Operator", slow),
        mock.patch.object(tenancy, "namespaces", return_value=rows),
        mock.patch.object(scheduler, "monotonic", slow.clock),
        mock.patch.object(tenancy, "monotonic", slow.clock),
    ):
        side.attach(owners)
        assert not side.reset(), "not all is forgotten"
    assert 3 <= len(slow.waits_s) <= 4
    assert max(slow.waits_s) <= 30
    assert min(slow.waits_s) > 0


@contextmanager
def _elsewhere() -> Iterator[tuple[SchedulerSide, Path, Callable[[int], None]]]:
    """A scheduler's side, and its worker as a process that can be sent signals."""
    with tempfile.TemporaryDirectory() as path:
        options = Options.parse({"path": path, "nvme_capacity": "8MiB", "dram_capacity": "4MiB"})
        directory = options.make_directory(0, 0)
        here, there = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(
            target=_own, args=(options, directory, there)
        )
        worker.start()
        try:
            assert here.poll(60), "the worker has a store"
            side = SchedulerSide(options, PLAIN)
            side.attach({(0, 0): Owner(str(directory), (SPEC,))})
            yield side, directory, partial(_send, worker.pid or 0)
            side.close()
        finally:
            worker.kill()
            worker.join()


def check_a_lookup_waits_for_a_worker_that_is_kept_from_answering() -> None:
    with _elsewhere() as (side, directory, send), ThreadPoolExecutor(1) as asking:
        with BlockingStore.attach(directory) as hasty:
            ns = hasty.namespace(SPEC)
            keys = ns.keys_from_tokens(range(5 * TOKENS))
            assert hasty.lookup(ns, keys).hits == 5
            send(signal.SIGSTOP)
            found = asking.submit(side.matched, Request("r", 7 * TOKENS), 0)
            assert hasty.lookup(ns, keys).hits == 0, "it was stopped for long enough"
        send(signal.SIGCONT)
        assert found.result(60) == 5 * TOKENS
        assert side.faults == 0


def check_a_worker_that_does_not_answer_is_waited_for_once() -> None:
    with mock.patch.object(rank, "_LOOKUP_S", 1.0), _elsewhere() as (side, _, send):
        send(signal.SIGSTOP)
        (store,) = (one.store for one in side._ranks)
        for number in range(5):
            assert side.matched(Request(f"r{number}", 7 * TOKENS), 0) == 0
            assert side.faults == number + 1
            assert store.counters()["unanswered"] == 1
        send(signal.SIGCONT)
        with mock.patch.object(rank, "monotonic") as now:
            now.side_effect = lambda: monotonic() + 60
            until_s = monotonic() + 60
            while not side.matched(Request("again", 7 * TOKENS), 0):
                assert monotonic() < until_s
                sleep(0.01)


def check_loads_run_where_the_store_does() -> None:
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    paged = PagedCache({"a": torch.zeros(4, 32, 32)}, 4)
    with worker_of(paged, cpus=[cpu]) as worker:
        assert worker._loader.submit(os.sched_getaffinity, 0).result(60) == {cpu}
    with worker_of(paged) as worker:
        everywhere = os.sched_getaffinity(0)
        assert worker._loader.submit(os.sched_getaffinity, 0).result(60) == everywhere


def _send(process: int, number: int) -> None:
    """Sends a signal to a child; one that is stopped has stopped when this returns."""
    os.kill(process, number)
    if number == signal.SIGSTOP:
        # Until then a thread on another processor may go on answering.
        _, status = os.waitpid(process, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


def _own(options: Options, directory: Path, ready: Any) -> None:
    """A worker's process: a store with some blocks, until it is killed."""
    with BlockingStore.open(options.store_config(directory, 1)) as store:
        ns = store.namespace(SPEC)
        keys = ns.keys_from_tokens(range(5 * TOKENS))
        assert store.put(ns, keys, [bytes(BLOCK_BYTES)] * 5).stored == 5
        ready.send(True)
        sleep(600)
