"""Rules that read: gets, lookups, holds, prefetches."""

from __future__ import annotations

import time
from typing import Any

import hypothesis.strategies as st

from model.counting import any_spans, counted, faces, naps, spans
from model.oracle import EVER
from model.side import CHAINS, LAYOUTS, PATIENCE_S, Side, Span, cancelled, contents_of, next_of
from model.stores import Kept, Stores
from tiered_kv import Hold, Leases

CANARY = 0xA5
MARGIN = 64


class Canary:
    """Buffers of blocks in one piece of memory, with margins that nobody may write to."""

    def __init__(self, blocks: int, size: int) -> None:
        self.memory = bytearray([CANARY]) * (MARGIN + blocks * (size + MARGIN))
        view = memoryview(self.memory)
        places = [MARGIN + block * (size + MARGIN) for block in range(blocks)]
        self.buffers = [view[place : place + size] for place in places]
        self.size = size

    def check(self) -> None:
        left = bytearray(self.memory)
        for block in range(len(self.buffers)):
            place = MARGIN + block * (self.size + MARGIN)
            left[place : place + self.size] = bytes([CANARY]) * self.size
        assert left == bytes([CANARY]) * len(left), "the core wrote beside a buffer"


class Reads(Stores):
    """Rules that change nothing but where blocks are."""

    def ask(self, side: Side, face: str, span: Span, **options: Any) -> Leases:
        ns, packed = side.spaces[span.space], b"".join(self.span_keys(span))
        if face == "asyncio":
            leases = side.run(side.store.get(ns, packed, **options))
            assert isinstance(leases, Leases)
            return leases
        return side.calls.get(ns, packed, **options)

    @counted(face=st.sampled_from(["asyncio", "blocking"]), span=any_spans, keep=st.booleans())
    def get(self, face: str, span: Span, keep: bool) -> None:
        leases = [self.ask(side, face, span) for side in self.sides]
        self.got(span, leases, keep)

    def got(self, span: Span, leases: list[Leases], keep: bool) -> None:
        both = iter(leases)
        found = self.both(lambda _: self.seen(next(both), span))
        contents, reasons = found[0], found[1]
        for key, content, reason in zip(self.span_keys(span), contents, reasons, strict=True):
            self.oracle.was_got(key, content, reason)
        if keep and len(self.kept) < 3 and any(reason is None for reason in reasons):
            self.kept.append(Kept(span.space, leases, contents))
        else:
            for batch in leases:
                batch.release()
        self.meet(span)

    def seen(self, leases: Leases, span: Span) -> tuple[list[bytes | None], list[str | None], Any]:
        reasons = leases.reasons
        hits = next((i for i, reason in enumerate(reasons) if reason is not None), len(reasons))
        assert leases.hits == hits
        return contents_of(leases, span.space), reasons, (leases.sources, leases.flags)

    # What is kept, held and reserved ends when the sides are made equal again, which no draw
    # decides: so a rule that needs one makes it, and has no precondition.

    @counted(number=st.integers(0, 2), span=any_spans)
    def release(self, number: int, span: Span) -> None:
        if not self.kept:
            self.get("blocking", span, True)
        if not self.kept:
            return
        kept = self.kept.pop(number % len(self.kept))
        self.check_kept(kept)
        for leases in kept.leases:
            leases.release()
        self.meet()

    @counted(face=faces, span=any_spans)
    def get_into(self, face: str, span: Span) -> None:
        self.read_into(face, span)

    def read_into(self, face: str, span: Span, holds: list[Hold] | None = None) -> None:
        ended = iter(holds or [])

        def call(side: Side) -> list[tuple[bytes | None, str | None]]:
            out = Canary(len(self.span_keys(span)), LAYOUTS[span.space].block_bytes)
            options: dict[str, Any] = {"hold": next(ended)} if holds else {}
            reasons = self.into(side, face, span, out, options)
            out.check()
            rows = zip(out.buffers, reasons, strict=True)
            return [(bytes(b) if reason is None else None, reason) for b, reason in rows]

        found = self.both(call)
        for key, (content, reason) in zip(self.span_keys(span), found, strict=True):
            self.oracle.was_got(key, content, reason)
        self.meet(span)

    def into(
        self, side: Side, face: str, span: Span, out: Canary, options: dict[str, Any]
    ) -> list[str | None]:
        ns, packed = side.spaces[span.space], b"".join(self.span_keys(span))
        if face == "channel":
            with side.channel() as channel:
                number = channel.submit_get_into(ns, packed, out.buffers, **options)
                done = next_of(channel)
            assert (done.id, done.ok) == (number, True)
            filled = [done.done(index) for index in range(len(out.buffers))]
            assert done.bytes == sum(filled) * out.size
            # A channel tells no reasons; what is there but finds no room is missed as well.
            return [None if hit else "untold" for hit in filled]
        if face == "asyncio":
            return list(side.run(side.store.get_into(ns, packed, out.buffers, **options)).items)
        return list(side.calls.get_into(ns, packed, out.buffers, **options).items)

    @counted(span=any_spans, into=st.booleans())
    def get_too_late(self, span: Span, into: bool) -> None:
        """A deadline that is over: what is in memory is served, the rest is a miss."""
        if not into:
            self.got(
                span, [self.ask(side, "blocking", span, timeout=0.0) for side in self.sides], False
            )
            return

        def call(side: Side) -> tuple[list[str | None], Canary]:
            out = Canary(len(self.span_keys(span)), LAYOUTS[span.space].block_bytes)
            return self.into(side, "blocking", span, out, {"timeout": 0.0}), out

        self.nobody_writes_after_the_end(span, [call(side) for side in self.sides])

    @counted(span=any_spans, into=st.booleans(), naps=naps)
    def cancelled_get(self, span: Span, into: bool, naps: int) -> None:
        packed = b"".join(self.span_keys(span))
        rows = []
        for side in self.sides:
            ns = side.spaces[span.space]
            out = Canary(len(self.span_keys(span)), LAYOUTS[span.space].block_bytes)
            if into:
                call = cancelled(side.store.get_into(ns, packed, out.buffers), naps)
                report = side.run(call)
                EVER["cancelled get_into"] += report is None
                rows.append((None if report is None else list(report.items), out))
            else:
                leases = side.run(cancelled(side.store.get(ns, packed), naps))
                EVER["cancelled get"] += leases is None
                if leases is not None:
                    contents = contents_of(leases, span.space)
                    for key, content in zip(self.span_keys(span), contents, strict=True):
                        if content is not None:
                            self.oracle.is_served(key, content)
                    leases.release()
        self.nobody_writes_after_the_end(span, rows)

    def nobody_writes_after_the_end(
        self, span: Span, rows: list[tuple[list[str | None] | None, Canary]]
    ) -> None:
        """The memory of a call that has ended is the caller's alone, however it ended."""
        for reasons, out in rows:
            out.check()
            ended = reasons or ["cancelled"] * len(out.buffers)
            for key, buffer, reason in zip(self.span_keys(span), out.buffers, ended, strict=True):
                if reason is None:
                    self.oracle.is_served(key, bytes(buffer))
            for buffer in out.buffers:
                buffer[:] = bytes([CANARY]) * len(buffer)
        self.meet_loosely({})
        for _, out in rows:
            assert out.memory == bytes([CANARY]) * len(out.memory), "written after the end"

    @counted(span=any_spans)
    def lookup(self, span: Span) -> None:
        keys = self.span_keys(span)
        there = [key in self.oracle.known for key in keys]
        leading = there.index(False) if False in there else len(there)
        packed = b"".join(keys)
        each = self.both(lambda side: self.found(side, span, packed, "each"))
        assert (each[0], [tier > 0 for tier in each[1]]) == (leading, there)
        prefix = self.both(lambda side: self.found(side, span, packed, "prefix"))
        assert prefix[0] == leading
        assert prefix[1][:leading] == each[1][:leading]
        assert set(prefix[1][leading:]) <= {0}
        for key, is_there in zip(keys, there, strict=True):
            contained = [s.store.contains(s.spaces[span.space], key) for s in self.sides]
            assert self.same(contained) == is_there
        for key, flags in zip(keys, each[2], strict=True):
            if key in self.oracle.known:
                decoded = self.oracle.known[key].version.computed == "decode"
                assert bool(flags & 2) == decoded, "computed by the other"

        def exists(side: Side) -> tuple[bool, bytes]:
            with side.channel() as channel:
                channel.submit_exists(side.spaces[span.space], packed)
                done = next_of(channel)
            return done.ok, done.bitmap

        bits = sum(is_there << number for number, is_there in enumerate(there))
        assert self.both(exists) == (True, bits.to_bytes(-(-len(there) // 8), "little"))
        self.meet()

    def found(self, side: Side, span: Span, packed: bytes, mode: Any) -> tuple[int, bytes, bytes]:
        lookup = side.store.lookup(side.spaces[span.space], packed, mode)
        return lookup.hits, lookup.tiers, lookup.flags

    @counted(span=spans, chains=st.tuples(*[st.integers(0, CHAINS - 1)] * 2), n=st.integers(1, 4))
    def lookup_hybrid(self, span: Span, chains: tuple[int, int], n: int) -> None:
        """Layers with full attention, with a window and with recurrent state."""
        groups = [self.keys[span.space][chain] for chain in (span.chain, *chains)]
        there = [[key in self.oracle.known for key in group] for group in groups]

        def valid(at: int) -> bool:
            full, window, state = there
            return all(full[:at]) and all(window[max(0, at - n) : at]) and all(state[at - 1 : at])

        wanted = max(at for at in range(len(groups[0]) + 1) if at == 0 or valid(at))
        packed = [b"".join(group) for group in groups]
        rules: list[Any] = ["all", ("window", n), "last"]
        asked = list(zip(packed, rules, strict=True))
        got = self.both(lambda side: side.store.lookup_hybrid(side.spaces[span.space], asked))
        assert got == wanted
        self.meet()

    @counted(span=any_spans)
    def prefetch(self, span: Span) -> None:
        packed = b"".join(self.span_keys(span))
        for side in self.sides:
            side.store.prefetch(side.spaces[span.space], packed)
        self.meet(span)

    @counted(span=any_spans, expired=st.booleans())
    def hold(self, span: Span, expired: bool) -> None:
        self.make_room_for_a_hold()
        self.make_hold(span, expired)

    @counted(how=st.sampled_from(["release", "drop", "get", "get_into"]), span=any_spans)
    def end_hold(self, how: str, span: Span) -> None:
        if not self.holds:
            self.make_hold(span, False)
        handles = self.forget_hold()
        if how == "get":
            pairs = zip(self.sides, handles, strict=True)
            self.got(span, [self.ask(side, "asyncio", span, hold=h) for side, h in pairs], False)
        elif how == "get_into":
            self.read_into("blocking", span, handles)
        else:
            if how == "release":
                for handle in handles:
                    handle.release()
            else:
                handles.clear()
            self.meet()

    @counted(span=any_spans)
    def hold_expires(self, span: Span) -> None:
        """The time of a hold is over, and no call is needed for it to end."""
        packed = b"".join(self.span_keys(span))
        handles = [side.store.hold(side.spaces[span.space], packed, 0.003) for side in self.sides]
        end = time.monotonic() + PATIENCE_S
        while any(side.store.stats()["holds"] > len(self.holds) for side in self.sides):
            assert time.monotonic() < end, "a hold never ends"
            time.sleep(0.001)
        for handle in handles:
            handle.release()
        self.meet()
