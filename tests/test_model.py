"""The store against a dictionary, whatever is called in whatever order.

An acknowledged block is served with its bytes unless an event for its key says why not, what was
deleted never comes back, and every byte is accounted for: with either I/O backend, on one drive or
two, and whichever backend the next open has.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import api
from tiered_kv import Leases, Namespace, Reservation, TieredStore, _core

STEPS = int(os.environ.get("TIERED_KV_MODEL_STEPS", "800"))
"""Steps in all, give or take a discarded example. Hypothesis bounds what one example may draw and
discards a longer one, so the steps are spread over examples that stay well within the bound.
"""
STEPS_PER_EXAMPLE = min(100, STEPS)
EXAMPLES = -(-STEPS // STEPS_PER_EXAMPLE)

CHAINS, DEPTH = 24, 6
"""Every chain shares its first two blocks with its neighbour, so that the keys make a tree. The
upper half of the chains has the tokens of the lower half in a namespace of its own.
"""
SPACES = 2
BACKENDS = ["io_uring", "blocking"] if _core.probe_io_uring()[0] else ["blocking"]

# Reasons that speak of the moment, not of the block: it is still there afterwards.
PASSING = {"no_space", "lease_cap", "load_cap", "deadline", "cancelled"}
LOST = {"evicted", "fault", "undurable"}

chains = st.integers(0, CHAINS - 1)
starts = st.integers(0, DEPTH - 1)
lengths = st.integers(1, DEPTH)
seeds = st.integers(0, 1 << 16)
spaces = st.integers(0, SPACES - 1)
backends = st.sampled_from(BACKENDS)
computed_by = st.sampled_from(["prefill", "prefill", "prefill", "decode"])


class Known:
    """What the oracle knows of one key."""

    def __init__(self, content: bytes, computed: str, since: int) -> None:
        self.content = content
        self.computed = computed
        self.since = since
        """Events of the key from this number on may explain that it is gone."""


class Model(RuleBasedStateMachine):
    """Drives one store of 8 blocks in memory and some 40 on each drive, and over 100 keys."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tiered-kv-model-"))
        self.loop = asyncio.new_event_loop()
        self.drives = 1
        self.backend = "auto"
        self.space_of: dict[bytes, int] = {}
        self.known: dict[bytes, Known] = {}
        # Contents of puts whose end is not known: cancelled ones.
        self.possible: dict[bytes, list[tuple[bytes, str]]] = {}
        self.events: list[tuple[bytes, str]] = []
        self.held: list[tuple[Leases, list[bytes | None]]] = []
        self.reserved: list[tuple[Reservation, list[bytes], list[bytes]]] = []

    def config(self) -> dict[str, Any]:
        return api.config(
            None,
            nvme_paths=[self.directory / str(drive) for drive in range(self.drives)],
            io_backend=self.backend,
            dram_capacity="64KiB",
            nvme_capacity="512KiB",
            max_leased_fraction=0.4,
            event_log_entries=1 << 20,
        )

    def run(self, call: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(call)

    @initialize(backend=backends, drives=st.integers(1, 2))
    def begin(self, backend: str, drives: int) -> None:
        self.backend, self.drives = backend, drives
        self.open()

    def open(self) -> None:
        self.store: TieredStore = self.run(_opened(self.config()))
        self.next_event = 0
        assert self.store.health()["backend"] == self.backend
        assert len(self.store.health()["drives"]) == self.drives
        self.namespaces: list[Namespace] = [
            self.store.namespace(api.spec(salt=f"space {space}")) for space in range(SPACES)
        ]

    def teardown(self) -> None:
        self.held.clear()
        self.reserved.clear()
        if hasattr(self, "store"):
            self.run(self.store.close())
        self.loop.close()
        shutil.rmtree(self.directory)

    def ns(self, chain: int) -> Namespace:
        return self.namespaces[chain * SPACES // CHAINS]

    def keys(self, chain: int, start: int, length: int) -> tuple[bytes, bytes | None, list[bytes]]:
        """Packed keys of a part of a chain, the key before it, and the keys one by one."""
        space, number = divmod(chain, CHAINS // SPACES)
        shared = api.tokens(2, number // 2 * 1000)
        all_keys = api.split(
            self.ns(chain).keys_from_tokens(shared + api.tokens(DEPTH - 2, 100_000 + number * 1000))
        )
        self.space_of |= dict.fromkeys(all_keys, space)
        part = all_keys[start : start + length]
        return b"".join(part), all_keys[start - 1] if start else None, part

    def collect_events(self) -> int:
        for event in self.store.events(self.next_event):
            self.events.append((event["key"], event["kind"]))
            self.next_event = event["seq"] + 1
        return len(self.events)

    def explained(self, key: bytes) -> bool:
        self.collect_events()
        since = self.known[key].since
        return any(k == key and kind in LOST for k, kind in self.events[since:])

    def may_be_absent(self, key: bytes) -> None:
        """An acknowledged block that is gone must have an event; then it is forgotten."""
        if key in self.known:
            assert self.explained(key), f"{key.hex()[:16]} is gone and no event says why"
            del self.known[key]
        self.possible.pop(key, None)

    def is_served(self, key: bytes, content: bytes) -> None:
        """Served bytes are those that were stored."""
        allowed = [content for content, _ in self.possible.get(key, [])]
        if key in self.known:
            allowed.append(self.known[key].content)
        assert content in allowed, f"{key.hex()[:16]} is served with bytes never stored under it"

    def was_put(self, key: bytes, content: bytes, computed: str, status: str, before: int) -> None:
        """Takes in how a put of one key ended."""
        if status == "stored":
            old = self.known.get(key)
            if old is not None and not (old.computed == "decode" and computed == "prefill"):
                assert self.explained(key), f"{key.hex()[:16]} was stored over a block still there"
            self.known[key] = Known(content, computed, before)
            self.possible.pop(key, None)
        elif status == "exists":
            assert key in self.known or key in self.possible

    @rule(chain=chains, start=starts, length=lengths, seed=seeds, computed=computed_by)
    def put(
        self,
        chain: int,
        start: int,
        length: int,
        seed: int,
        computed: Literal["prefill", "decode"],
    ) -> None:
        packed, parent, keys = self.keys(chain, start, length)
        contents = api.blocks(len(keys), seed)
        before = self.collect_events()
        call = self.store.put(self.ns(chain), packed, contents, parent=parent, computed=computed)
        for key, content, status in zip(keys, contents, self.run(call).statuses, strict=True):
            self.was_put(key, content, computed, status, before)

    @rule(chain=chains, start=starts, length=lengths, seed=seeds)
    def cancelled_put(self, chain: int, start: int, length: int, seed: int) -> None:
        packed, parent, keys = self.keys(chain, start, length)
        contents = api.blocks(len(keys), seed)
        before = self.collect_events()
        report = self.run(_cancel(self.store.put(self.ns(chain), packed, contents, parent=parent)))
        for index, (key, content) in enumerate(zip(keys, contents, strict=True)):
            if report is not None:
                self.was_put(key, content, "prefill", report.statuses[index], before)
            else:
                self.possible.setdefault(key, []).append((content, "prefill"))

    @rule(chain=chains, start=starts, length=lengths, hold=st.booleans())
    def get(self, chain: int, start: int, length: int, hold: bool) -> None:
        packed, _, keys = self.keys(chain, start, length)
        leases = self.run(self.store.get(self.ns(chain), packed))
        contents = api.contents(leases)
        for key, content, reason in zip(keys, contents, leases.reasons, strict=True):
            self.was_got(key, content, reason)
        if hold and leases.hits:
            self.held.append((leases, contents))
        else:
            leases.release()

    def was_got(self, key: bytes, content: bytes | None, reason: str | None) -> None:
        if content is not None:
            self.is_served(key, content)
        elif reason not in PASSING:
            self.may_be_absent(key)

    @rule(chain=chains, start=starts, length=lengths)
    def get_into(self, chain: int, start: int, length: int) -> None:
        packed, _, keys = self.keys(chain, start, length)
        out = [bytearray(api.BLOCK_BYTES) for _ in keys]
        report = self.run(self.store.get_into(self.ns(chain), packed, out))
        for key, content, reason in zip(keys, out, report.items, strict=True):
            self.was_got(key, bytes(content) if reason is None else None, reason)

    @rule(chain=chains, into=st.booleans())
    def cancelled_get(self, chain: int, into: bool) -> None:
        packed, _, keys = self.keys(chain, 0, DEPTH)
        out = bytearray(len(keys) * api.BLOCK_BYTES)
        if into:
            self.run(_cancel(self.store.get_into(self.ns(chain), packed, out)))
        else:
            self.run(_cancel(self.store.get(self.ns(chain), packed)))
        out.clear()

    @rule(chain=chains, start=starts, length=lengths, mode=st.sampled_from(["prefix", "each"]))
    def lookup(self, chain: int, start: int, length: int, mode: Literal["prefix", "each"]) -> None:
        packed, _, keys = self.keys(chain, start, length)
        found = self.store.lookup(self.ns(chain), packed, mode)
        leading = next((i for i, tier in enumerate(found.tiers) if tier in (0, 255)), len(keys))
        assert found.hits == leading
        for index, (key, tier) in enumerate(zip(keys, found.tiers, strict=True)):
            if tier:
                assert key in self.known or key in self.possible
            elif mode == "each" or index == leading:
                self.may_be_absent(key)

    @rule()
    def flush(self) -> None:
        report = self.run(self.store.flush())
        assert report.pending == 0
        assert not report.no_durable_tier

    def was_deleted(self, keys: list[bytes], report: _core.DeleteReport) -> None:
        """Takes in that keys are gone; whatever is found of them from here on is a fault."""
        assert report.durable
        there = [key for key in keys if key in self.known or key in self.possible]
        assert report.removed <= len(there), "more was deleted than was ever stored"
        self.collect_events()
        certain = [key for key in there if key in self.known and not self.explained(key)]
        assert report.removed >= len(certain), "an acknowledged block was not there to be deleted"
        for key in keys:
            self.known.pop(key, None)
            self.possible.pop(key, None)

    @rule(chain=chains, start=starts, length=lengths)
    def delete(self, chain: int, start: int, length: int) -> None:
        packed, _, keys = self.keys(chain, start, length)
        self.was_deleted(keys, self.run(self.store.delete(self.ns(chain), packed)))
        assert self.store.lookup(self.ns(chain), packed, "each").tiers == bytes(len(keys))

    @rule(space=spaces, how=st.sampled_from(["epoch", "namespace", "old", "nothing that old"]))
    def delete_many(self, space: int, how: str) -> None:
        ns, store = self.namespaces[space], self.store
        if how == "nothing that old":
            report = self.run(store.delete_older_than(ns, 3600))
            assert (report.removed, report.durable) == (0, True)
            return
        calls = {
            "epoch": store.new_epoch,
            "namespace": store.delete_namespace,
            "old": lambda ns: store.delete_older_than(ns, 0),
        }
        self.was_deleted(
            [k for k, s in self.space_of.items() if s == space], self.run(calls[how](ns))
        )

    @rule(backend=backends)
    def restart(self, backend: str) -> None:
        self.close()
        self.backend = backend
        self.open()

    @rule(chain=chains)
    def fill(self, chain: int) -> None:
        """Whole chains at once, so that both tiers have to evict."""
        for number in range(chain, chain + 8):
            self.put(number % CHAINS, 0, DEPTH, number, "prefill")
            self.flush()

    @rule(place=st.floats(0.5, 0.999), byte=st.integers(1, 255))
    def damage(self, place: float, byte: int) -> None:
        """Changes payloads on the drive of a closed store; headers lie in the first half."""
        self.close()
        for path in self.directory.rglob("segment-*.tkv"):
            with path.open("r+b") as file:
                file.seek(int(place * path.stat().st_size))
                old = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([old ^ byte]))
        self.open()

    def close(self) -> None:
        self.reserved.clear()
        report = self.run(self.store.close())
        assert report.dropped == 0
        self.collect_events()
        for leases, contents in self.held:
            assert api.contents(leases) == contents, "a lease changed when its store closed"
        self.held.clear()

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        leases, contents = self.held.pop(0)
        assert api.contents(leases) == contents, "a lease changed while it was held"
        leases.release()

    @precondition(lambda self: len(self.reserved) < 2)
    @rule(chain=chains, start=starts, seed=seeds)
    def reserve(self, chain: int, start: int, seed: int) -> None:
        packed, parent, keys = self.keys(chain, start, 2)
        contents = api.blocks(len(keys), seed)
        reservation = self.store.reserve(self.ns(chain), packed, parent=parent)
        for index, (content, status) in enumerate(zip(contents, reservation.statuses, strict=True)):
            view = reservation[index]
            assert (view is None) == (status is not None)
            if view is not None:
                view[:] = content
                view.release()
        self.reserved.append((reservation, keys, contents))

    @precondition(lambda self: self.reserved)
    @rule(publish=st.booleans())
    def publish(self, publish: bool) -> None:
        reservation, keys, contents = self.reserved.pop(0)
        if not publish:
            reservation.abandon()
            return
        before = self.collect_events()
        refused = reservation.statuses
        report = self.run(self.store.publish(reservation))
        for index, (key, content) in enumerate(zip(keys, contents, strict=True)):
            # What was refused then may be anything by now.
            if refused[index] is None:
                self.was_put(key, content, "prefill", report.statuses[index], before)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        if not hasattr(self, "store"):
            return
        # Writes in the background hold what they write until they have ended.
        for attempt in range(2000):
            audit, stats = self.store.audit(), self.store.stats()
            assert audit["faults"] == []
            assert audit["dram_used_bytes"] >= audit["dram_block_bytes"]
            hits = stats["dram"]["hits"] + stats["nvme"]["hits"]
            if (
                (audit["dram_used_bytes"] == audit["dram_block_bytes"] or self.is_held())
                and audit["nvme_used_bytes"] == audit["nvme_block_bytes"]
                and stats["calls"] == 0
                and hits + sum(stats["misses"].values()) == stats["requested"]
            ):
                return
            time.sleep(0 if attempt < 100 else 0.005)
        raise AssertionError(f"the books do not close: {audit} {stats}")

    def is_held(self) -> bool:
        return bool(self.held or self.reserved)


async def _opened(config: dict[str, Any]) -> TieredStore:
    return await TieredStore.open(**config)


async def _cancel(call: Awaitable[Any]) -> Any:
    """Cancels a call as soon as it waits; its result where it never waited, else None."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS_PER_EXAMPLE, deadline=None, print_blob=True
)
