"""Rules with several calls under way at once: their order is up to the moment."""

from __future__ import annotations

import dataclasses
import math
import time

import hypothesis.strategies as st

from model.counting import any_spans, counted, seeds
from model.oracle import EVER, Version
from model.reads import Canary
from model.side import LAYOUTS, PATIENCE_S, Side, Span
from model.stores import Stores
from tiered_kv import Channel, Completion

Submission = tuple[str, Span]
submissions = st.lists(
    st.tuples(st.sampled_from(["put", "put", "get", "get", "exists", "delete"]), any_spans),
    min_size=2,
    max_size=6,
)


class Burst:
    """What was submitted to the channel of one side, and what may come back."""

    def __init__(self, stores: Stores, seed: int) -> None:
        self.stores = stores
        self.seed = seed
        self.possible: dict[bytes, set[bytes]] = {}
        """Contents that a get submitted now may find."""
        self.stored: dict[bytes, list[Version]] = {}
        self.deleted: set[bytes] = set()
        self.reads: dict[int, tuple[Span, Canary, list[set[bytes]]]] = {}
        self.buffers: list[list[bytearray]] = []
        self.numbers: list[int] = []

    def may_find(self, key: bytes) -> set[bytes]:
        known = self.stores.oracle.known.get(key)
        there = {known.version.content} if known is not None else set()
        return self.possible.setdefault(key, there)

    def submit(self, side: Side, channel: Channel, kind: str, span: Span) -> None:
        keys = self.stores.span_keys(span)
        ns, packed = side.spaces[span.space], b"".join(keys)
        if kind == "put":
            contents = self.stores.new_contents(span, self.seed + len(self.numbers))
            blocks = [bytearray(content) for content in contents]
            now = time.time()
            number = channel.submit_put(ns, packed, blocks, parent=self.stores.parent(span))
            self.buffers.append(blocks)
            for key, content in zip(keys, contents, strict=True):
                self.may_find(key).add(content)
                version = Version(content, "prefill", now, math.inf)
                self.stored.setdefault(key, []).append(version)
        elif kind == "get":
            out = Canary(len(keys), LAYOUTS[span.space].block_bytes)
            number = channel.submit_get_into(ns, packed, out.buffers)
            self.reads[number] = (span, out, [set(self.may_find(key)) for key in keys])
        elif kind == "exists":
            number = channel.submit_exists(ns, packed)
        else:
            number = channel.submit_delete(ns, packed)
            for key in keys:
                # Puts that are still copying may become visible after it.
                self.possible[key] = {version.content for version in self.stored.get(key, [])}
                self.deleted.add(key)
        self.numbers.append(number)

    def drain(self, channel: Channel) -> None:
        assert channel.quiesce(PATIENCE_S)
        assert channel.pending() == 0
        done: list[Completion] = channel.drain()
        assert sorted(one.id for one in done) == self.numbers, "each call ends once"
        assert channel.drain() == []
        for one in done:
            if one.id in self.reads:
                self.check_read(one)

    def check_read(self, done: Completion) -> None:
        _, out, allowed = self.reads[done.id]
        out.check()
        for index, (buffer, contents) in enumerate(zip(out.buffers, allowed, strict=True)):
            if done.done(index):
                EVER["hit in a burst"] += 1
                assert bytes(buffer) in contents, "a get found what it may not"

    def give_back(self) -> list[Canary]:
        """The memory is the caller's again: it is overwritten, and nobody else writes to it."""
        outs = [out for _, out, _ in self.reads.values()]
        for out in outs:
            for buffer in out.buffers:
                buffer[:] = b"\xa5" * len(buffer)
        for blocks in self.buffers:
            for block in blocks:
                block.clear()
        return outs


class Bursts(Stores):
    """Rules that do not wait for one call before they make the next."""

    @counted(calls=submissions, seed=seeds, capacity=st.sampled_from([1024, 3]))
    def burst(self, calls: list[Submission], seed: int, capacity: int) -> None:
        """A channel with several calls under way; beyond its capacity they fail at once."""
        bursts = []
        for side in self.sides:
            burst = Burst(self, seed)
            with side.store.channel(capacity) as channel:
                for kind, span in calls:
                    burst.submit(side, channel, kind, span)
                burst.drain(channel)
            bursts.append(burst)
        self.after(bursts)

    @counted(calls=submissions, seed=seeds)
    def close_in_flight(self, calls: list[Submission], seed: int) -> None:
        """A channel is closed with work in flight: its end is the end of all of that."""
        bursts = []
        for side in self.sides:
            burst = Burst(self, seed)
            channel = side.store.channel()
            for kind, span in calls:
                burst.submit(side, channel, kind, span)
            channel.close()
            assert (channel.closed, channel.pending(), channel.drain()) == (True, 0, [])
            bursts.append(burst)
        self.after(bursts)

    def after(self, bursts: list[Burst]) -> None:
        outs = [out for burst in bursts for out in burst.give_back()]
        first = bursts[0]
        now = time.time()
        for key, versions in first.stored.items():
            first.stored[key] = [dataclasses.replace(version, ended=now) for version in versions]
        doubtful: set[bytes] = set()
        # A delete that found no room in the queue was not made.
        for key in first.deleted:
            if key in self.oracle.away:
                self.oracle.away[key].doubtful = True
            known = self.oracle.known.get(key)
            if known is not None:
                first.stored.setdefault(key, []).insert(0, known.version)
                doubtful.add(key)
        for key, versions in first.stored.items():
            known = self.oracle.known.get(key)
            doubtful |= {key} if known and known.version.computed == "decode" else set()
            self.oracle.past.setdefault(key, []).extend(versions)
        self.meet_loosely(first.stored, doubtful)
        for out in outs:
            assert out.memory == b"\xa5" * len(out.memory), "written after the end"
