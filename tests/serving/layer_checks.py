"""Checks of saves and loads by layers, and of what a step that does not go well leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from serving.limits_checks import blocks_of, worker_of
from tiered_kv import KEY_BYTES, RequestContext
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm.connector import TieredKVConnector
from tiered_kv.engines.vllm.messages import Blocks, Step
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.engines.vllm.tenancy import Tenancy
from tiered_kv.engines.vllm.transfers import Reader
from tiered_kv.engines.vllm.worker import WorkerSide

COUNT = 8
LAYERS = ("a", "b", "c")


def caches(size: int = 256) -> dict[str, torch.Tensor]:
    """Caches of three layers in different types, all of them blocks first."""
    return {
        "a": torch.randn(COUNT, 2, 4, size),
        "b": torch.randn(2, COUNT, 4, size).to(torch.bfloat16).transpose(0, 1),
        "c": torch.randint(0, 255, (COUNT, 2, 4, size), dtype=torch.uint8),
    }


def bytes_of(cache: dict[str, torch.Tensor], block: int) -> bytes:
    """A block as the store keeps it."""
    paged = PagedCache(cache, COUNT)
    buffer = bytearray(paged.block_bytes)
    paged.read([block], [buffer])
    return bytes(buffer)


def some(first: int, count: int, name: str = "r", at: int | None = None) -> Blocks:
    """Blocks of a request, in the engine's blocks from `at` on."""
    at = first if at is None else at
    keys = b"".join(bytes([number + 1]) * KEY_BYTES for number in range(first, first + count))
    parents = bytes([first]) * KEY_BYTES if first else b""
    ids = tuple(range(at, at + count))
    return Blocks(name, Tenancy("", ""), RequestContext(), first, (keys,), (parents,), ids)


def stored(worker: WorkerSide, count: int = COUNT) -> list[bytes | None]:
    """What the store has of the first blocks."""
    store: BlockingStore = worker._store
    blocks = some(0, count)
    found: list[bytes | None] = []
    for number in range(count):
        key = blocks.keys[0][number * KEY_BYTES : (number + 1) * KEY_BYTES]
        with store.get(worker._namespace(blocks), key, 10) as leases:
            view = leases[0]
            found.append(None if view is None else bytes(view))
            del view
    return found


def used(worker: WorkerSide) -> int:
    return int(worker.stats()["dram"]["used_bytes"])


@contextmanager
def layered(
    cache: dict[str, torch.Tensor],
    made: Callable[[dict[str, torch.Tensor], int], PagedCache] = PagedCache,
    agree: Callable[[bool], bool] | None = bool,
    timeout_s: float = 10,
) -> Iterator[WorkerSide]:
    """A worker's side that saves by layers, and loads within steps where ranks agree."""
    with worker_of(made(cache, COUNT), timeout_s, is_layered=True, agree=agree) as worker:
        for name in LAYERS:
            worker.wait_layer(name)  # as those of the steps before have
        yield worker


def check_a_layer_alone_is_its_part_of_the_block() -> None:
    source, target = caches(), caches()
    reader, writer = PagedCache(source, COUNT), PagedCache(target, COUNT)
    whole, parts = bytearray(reader.block_bytes), bytearray(reader.block_bytes)
    reader.read([3], [whole])
    for name in LAYERS:
        layer = reader.layer(name)
        assert layer is not None
        reader.read([3], [parts], layer)
        writer.write([5], [bytes(whole)], layer)
        assert torch.equal(target[name][5], source[name][3])
        rest = LAYERS[LAYERS.index(name) + 1 :]
        assert not any(torch.equal(target[one][5], source[one][3]) for one in rest)
    assert parts == whole
    assert reader.layer("unknown") is None


def check_a_layer_is_copied_when_it_is_computed_and_no_later() -> None:
    cache = caches()
    with layered(cache) as worker:
        step = Step(saves=[some(0, 3)])
        before = [bytes_of(cache, block) for block in range(3)]
        for name in LAYERS:
            worker.save_layer(step, name)
            cache[name][:] = 0  # nobody's any more
            assert stored(worker, 3) == [None] * 3
        worker.save(step)
        assert stored(worker, 3) == before
        assert worker.stats()["adapter"]["layer_saves"] == 3 * len(LAYERS)


def check_a_layer_that_is_computed_in_parts_is_copied_again() -> None:
    cache = caches()
    with layered(cache) as worker:
        step = Step(saves=[some(0, 1)])
        for _ in range(2):
            for name in LAYERS:
                cache[name][0] += 1
                worker.save_layer(step, name)
        worker.save(step)
        assert stored(worker, 1) == [bytes_of(cache, 0)]


def check_what_no_layer_tells_is_copied_at_the_end() -> None:
    cache = caches()
    # Of a cache that two use nobody knows which of them writes it.
    shared = {**cache, "uses a's": cache["a"]}
    with layered(shared) as worker:
        step = Step(saves=[some(0, 2)])
        worker.save_layer(step, "a")
        worker.save_layer(step, "b")
        worker.save_layer(step, "unknown")
        cache["a"][:2] += 1
        cache["c"][:2] = 7
        worker.save(step)
        assert worker.stats()["adapter"]["layer_saves"] == 2
        assert stored(worker, 2) == [bytes_of(cache, block) for block in range(2)]
        # None tells: as from within a graph of the whole model.
        worker.save(Step(saves=[some(2, 2)]))
        assert stored(worker, 4)[2:] == [bytes_of(cache, block) for block in (2, 3)]


def check_a_block_that_lacks_a_layer_is_not_published() -> None:
    cache = caches()
    with layered(cache) as worker:
        empty = used(worker)
        saving = worker._begin_save(some(0, 2), 0)
        saving.copy(0)
        saving.publish()
        assert (stored(worker, 2), used(worker)) == ([None] * 2, empty)


def check_what_two_requests_of_a_step_share_is_copied_once() -> None:
    cache = caches()
    with layered(cache) as worker:
        step = Step(saves=[some(0, 2), some(0, 3, "s"), some(1, 1, "t")])
        for name in LAYERS:
            worker.save_layer(step, name)
        worker.save(step)
        assert stored(worker, 3) == [bytes_of(cache, block) for block in range(3)]
        counted = worker.stats()["adapter"]
        assert (counted["layer_saves"], counted["faults"]) == (3 * len(LAYERS), 0)


def check_a_step_that_does_not_come_to_its_end_publishes_nothing() -> None:
    cache = caches()
    with layered(cache) as worker:
        empty = used(worker)
        raised = Step(saves=[some(0, 2)])
        worker.save_layer(raised, "a")
        assert used(worker) > empty
        worker.save(raised, is_good=False)
        assert stored(worker, 2) == [None] * 2
        assert used(worker) == empty
        worker.save(raised, is_good=False)  # also where no layer told
        assert stored(worker, 2) == [None] * 2
        # Whose end nobody tells; what comes behind it does not wait for it.
        worker.save_layer(Step(saves=[some(2, 2)]), "a")
        good = Step(saves=[some(0, 1)])
        for name in LAYERS:
            worker.save_layer(good, name)
        worker.save(good)
        assert stored(worker, 4) == [bytes_of(cache, 0), None, None, None]
        # Where layers tell, all must that have, and in this step.
        for name in LAYERS:
            worker.save_layer(Step(saves=[some(2, 2)]), name)
        early = Step(saves=[some(1, 1)])
        worker.save_layer(early, "a")
        worker.save(early)
        assert stored(worker, 2)[1] is None


def check_an_exception_in_a_step_is_seen_at_its_end() -> None:
    calls = []
    connector = TieredKVConnector.__new__(TieredKVConnector)
    connector._worker = mock.MagicMock(
        save=lambda _step, is_good: calls.append(is_good), ended=set, take_failed=set
    )
    connector._connector_metadata = None
    told = SimpleNamespace(
        kv_connector_metadata=Step(), has_sync_kv_loads=False, finished_req_ids=set()
    )
    with (
        mock.patch.object(kv_connector_model_runner_mixin, "get_forward_context"),
        mock.patch.object(kv_connector_model_runner_mixin, "has_kv_transfer_group"),
        mock.patch.object(
            kv_connector_model_runner_mixin, "get_kv_transfer_group", return_value=connector
        ),
    ):
        step = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
        with step(told):
            pass
        with contextlib.suppress(RuntimeError), step(told):
            raise RuntimeError
        # An engine in the process of a caller who handles one of his own.
        try:
            raise KeyError
        except KeyError:
            with step(told):
                pass
    assert calls == [True, False, True]


class _Broken(PagedCache):
    """A cache of which one layer cannot be copied."""

    def read(
        self, block_ids: Sequence[int], buffers: Sequence[Any], layer: int | None = None
    ) -> None:
        super().read(block_ids, buffers, layer)
        if layer == 1 and 0 in block_ids:
            message = "no such luck"
            raise RuntimeError(message)


def check_a_copy_that_fails_costs_its_own_blocks_alone() -> None:
    cache = caches()
    with layered(cache, _Broken) as worker:
        step = Step(saves=[some(0, 2), some(2, 2, "s")])
        for name in LAYERS:
            worker.save_layer(step, name)
        worker.save(step)
        assert stored(worker, 4) == [None, None, bytes_of(cache, 2), bytes_of(cache, 3)]
        assert worker.faults == 1
        worker._store.flush(60)
        assert used(worker) <= 2 * (1 << 16)


def check_what_has_no_room_is_not_stored() -> None:
    cache = caches(1 << 13)  # twelve blocks of 448 KiB, and memory of 4 MiB
    with layered(cache) as worker:
        ids = tuple(number % COUNT for number in range(12))
        step = Step(saves=[dataclasses.replace(some(0, 12), block_ids=ids)])
        for name in LAYERS:
            worker.save_layer(step, name)
        worker.save(step)
        found = stored(worker, 12)
        assert None in found
        for number, content in enumerate(found):
            assert content in (None, bytes_of(cache, ids[number]))
        assert worker.faults == 0


def check_a_shutdown_in_a_step_publishes_nothing() -> None:
    cache = caches()
    with layered(cache) as worker:
        step = Step(saves=[some(0, 2)])
        for name in LAYERS:
            worker.save_layer(step, name)
        saving = worker._saves._open[0][1]
        views = list(saving._views)
        spec, directory = worker.owner.specs[0], Path(worker.owner.directory)
        worker.close()
        assert (len(views), saving._views, worker._saves._open) == (2, [], [])
        fields: dict[str, Any] = {
            "nvme_paths": [str(directory)],
            "nvme_capacity": "64MiB",
            "dram_capacity": "4MiB",
        }
        with BlockingStore.open(**fields) as store:
            ns = store.namespace(Tenancy("", "").of(spec))
            assert store.lookup(ns, some(0, 2).keys[0]).hits == 0


class _Gated(PagedCache):
    """A cache into which a layer is copied when it may be; says in which way."""

    def __init__(self, cache: dict[str, torch.Tensor], blocks: int) -> None:
        super().__init__(cache, blocks)
        self.go = [threading.Event() for _ in LAYERS]
        self.writes: list[tuple[int | None, int]] = []

    def write(
        self, block_ids: Sequence[int], buffers: Sequence[Any], layer: int | None = None
    ) -> None:
        for go in self.go if layer is None else [self.go[layer]]:
            assert go.wait(60)
        self.writes.append((layer, len(block_ids)))
        super().write(block_ids, buffers, layer)


def filled(worker: WorkerSide, cache: dict[str, torch.Tensor], count: int) -> list[bytes]:
    """Stores the first blocks, and wipes the cache; returns what they were."""
    before = [bytes_of(cache, block) for block in range(count)]
    worker.save(Step(saves=[some(0, count)]))
    for one in cache.values():
        one[:] = 0
    return before


def check_a_layer_waits_for_its_own_part_and_for_no_other() -> None:
    cache = caches()
    with layered(cache, _Gated) as worker:
        before = filled(worker, cache, 4)
        source = {name: one.clone() for name, one in cache.items()}
        paged: Any = worker._groups[0].paged
        step = Step(loads=[some(0, 2), some(2, 2, "s")])
        worker.start(step)
        late = threading.Thread(target=worker.wait_layer, args=("a",))
        late.start()
        late.join(0.05)
        assert late.is_alive()
        for at, name in enumerate(LAYERS):
            paged.go[at].set()
            worker.wait_layer(name)
            assert not torch.equal(cache[name][:4], source[name][:4])
            for rest in LAYERS[at + 1 :]:
                assert torch.equal(cache[rest], source[rest]), rest
        late.join()
        worker.save(step)
        assert worker.take_failed() == set()
        assert [bytes_of(cache, block) for block in range(4)] == before
        assert worker.ended() == set()
        assert worker.stats()["adapter"]["layer_loads"] == 4 * len(LAYERS)


def check_what_no_layer_waits_for_is_there_before_the_step() -> None:
    cache = caches()
    paged = _Gated(cache, COUNT)
    with worker_of(paged, is_layered=True, agree=bool) as worker:
        before = filled(worker, cache, 4)
        # An indexer reads its cache and asks nobody; here it is the last one's.
        for _ in range(2):
            for one, go in zip(cache.values(), paged.go, strict=True):
                one[:] = 0
                go.clear()
                threading.Timer(0.1, go.set).start()
            step = Step(loads=[some(0, 4)])
            worker.start(step)
            assert [bytes_of(cache, block) for block in range(4)] == before
            worker.wait_layer("a")
            worker.wait_layer("b")
            worker.save(step)


def check_no_more_is_leased_than_may_be_and_the_last_of_it_by_layers() -> None:
    # A block has 448 KiB, and an eighth of the memory is 512: one a batch.
    cache = caches(1 << 13)
    with layered(cache, _Gated) as worker:
        before = filled(worker, cache, 5)
        paged: Any = worker._groups[0].paged
        for go in paged.go:
            go.set()
        step = Step(loads=[some(0, 3), some(3, 2, "s")])
        worker.start(step)
        worker.wait_layer("unknown")  # whatever it is, it may need all
        assert [bytes_of(cache, block) for block in range(5)] == before
        assert paged.writes == [(None, 1)] * 4 + [(0, 1), (1, 1), (2, 1)]
        worker.save(step)
        assert worker.take_failed() == set()


def check_a_step_that_lacks_a_block_publishes_nothing_on_any_rank() -> None:
    cache = caches()
    asked: list[bool] = []

    def agree(failed: bool) -> bool:
        asked.append(failed)
        return failed or len(asked) > 1

    with layered(cache, agree=agree) as worker:
        filled(worker, cache, 3)
        step = Step(loads=[some(0, 5)], saves=[some(5, 1), some(6, 1, "s")])
        worker.start(step)
        for name in LAYERS:
            worker.wait_layer(name)
            worker.save_layer(step, name)
        worker.save(step)
        assert stored(worker)[3:] == [None] * 5
        assert worker.ended() == set()
        assert worker.take_failed() == {3, 4}
        assert worker.take_failed() == set()
        assert worker.stats()["adapter"]["cut_loads"] == 1
        # All is there, but not on another rank.
        step = Step(loads=[some(0, 3)], saves=[some(5, 1)])
        worker.start(step)
        worker.save(step)
        assert (worker.take_failed(), stored(worker)[5]) == (set(), None)
        assert asked == [True, False]
        # A step that loads nothing asks nobody, and is a good one.
        step = Step(saves=[some(5, 1)])
        worker.start(step)
        worker.save(step)
        assert stored(worker)[5] == bytes_of(cache, 5)
        taken = worker.take_saved()
        assert taken is not None
        assert taken.steps == 4


def check_loads_that_nobody_waits_for_end_with_the_step() -> None:
    cache = caches()
    with layered(cache, _Gated) as worker:
        before = filled(worker, cache, 4)
        paged: Any = worker._groups[0].paged
        # No layer calls, and with drafts vLLM asks for the ends before the saves.
        step = Step(loads=[some(0, 4)], saves=[some(4, 1)])
        worker.start(step)
        for go in paged.go:
            threading.Timer(0.1, go.set).start()
        assert worker.ended() == set()
        assert [bytes_of(cache, block) for block in range(4)] == before
        worker.save(step)
        assert stored(worker, 5)[4] is not None


def check_a_load_that_comes_too_late_writes_no_more() -> None:
    cache = caches()
    go, begun = threading.Event(), threading.Event()
    lease = Reader.lease

    def slow(self: Reader, *args: Any) -> Any:
        leases = lease(self, *args)
        begun.set()
        assert go.wait(60)
        return leases

    with layered(cache, timeout_s=0.2) as worker:
        filled(worker, cache, 4)
        with mock.patch.object(Reader, "lease", slow):
            step = Step(loads=[some(0, 4)], saves=[some(4, 1)])
            worker.start(step)
            assert begun.wait(60)
            begun_s = monotonic()
            worker.wait_layer("a")
            worker.wait_layer("b")
            assert monotonic() - begun_s < 30
            worker.save(step)
            assert worker.take_failed() == {0, 1, 2, 3}
            assert worker.faults == 1
            # The engine's again.
            for one in cache.values():
                one[:] = 1
            go.set()
            worker._loader.submit(bool).result(60)
        for one in cache.values():
            assert bool((one == 1).all())
        assert stored(worker, 5)[4] is None
        # The next one is served.
        again = Step(loads=[some(0, 4)])
        worker.start(again)
        worker.save(again)
        assert worker.take_failed() == set()


def check_a_load_that_fails_costs_a_step_and_no_more() -> None:
    cache = caches()
    with layered(cache) as worker:
        filled(worker, cache, 4)
        step = Step(loads=[some(0, 4)])
        with mock.patch.object(PagedCache, "write", side_effect=RuntimeError("once")):
            worker.start(step)
            worker.wait_layer("a")
            worker.save(step)
        assert worker.take_failed() == {0, 1, 2, 3}
        worker.start(step)
        worker.save(step)
        assert (worker.take_failed(), worker.faults) == (set(), 1)


def check_without_the_option_nothing_is_by_layers() -> None:
    cache = caches()
    with worker_of(PagedCache(cache, COUNT)) as worker:
        worker.wait_layer("a")
        worker.save(Step(saves=[blocks_of(2)]))
        worker.start(Step(loads=[blocks_of(2)]))
        while worker.ended() != {"r"}:
            threading.Event().wait(0.01)
        counted = worker.stats()["adapter"]
        assert (counted["layer_saves"], counted["layer_loads"]) == (0, 0)
