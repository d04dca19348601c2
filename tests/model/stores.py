"""The stores side by side, and what is compared after every rule."""

from __future__ import annotations

import collections
import copy
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import api
from model.oracle import EVER, Oracle, Version
from model.side import (
    CHAINS,
    DEPTH,
    DRIVES,
    LAYOUTS,
    PATIENCE_S,
    SPACES,
    Side,
    Span,
    contents_of,
    drive_of,
)
from tiered_kv import Hold, Leases, Reservation, _core

Result = TypeVar("Result")
Uncertain = Mapping[bytes, Sequence[Version]]
"""Keys whose block is one of these, or the known one, or none."""

URING, WHY_NOT = _core.probe_io_uring()
BACKENDS = ["io_uring", "blocking"] if URING else ["blocking"]
# They tell of batches, which form as the drives are quick.
OF_THE_MOMENT = {"groups", "tombstones_retired", "lookups", "metadata_bytes", "latencies"}


GIVEN_UP = b""
"""In place of the bytes of a block that could not be read, for want of memory: it was deleted."""


class Put(NamedTuple):
    """How the put of one key ended."""

    key: bytes
    version: Version
    status: str


class Kept(NamedTuple):
    """Leases that are kept over several steps, one batch a side."""

    space: int
    leases: list[Leases]
    contents: list[bytes | None]


class Reserved(NamedTuple):
    """A reservation that is not published yet, one a side."""

    span: Span
    reservations: list[Reservation]
    contents: list[bytes]
    refused: list[str | None]
    epoch: int
    made: list[tuple[float, float]]
    """Time of the clock before and after, for each side."""


class Stores:
    """Several stores, one oracle. Each has its own directories and I/O backend."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="tiered-kv-model-"))
        self.sides = [Side(self.root / f"side{n}", b) for n, b in enumerate(BACKENDS)]
        self.oracle = Oracle()
        self.lost: int | None = None
        self.kept: list[Kept] = []
        self.reserved: list[Reserved] = []
        self.holds: list[list[Hold]] = []
        """In the order of the oracle's."""
        self.marks: list[float] = []
        self.epochs = [0] * SPACES
        self.keys: list[list[list[bytes]]] = []
        self.base: list[collections.Counter[str]] = []

    # What the rules say of keys and contents.

    def all_keys(self, space: int) -> list[bytes]:
        return list(dict.fromkeys(key for chain in self.keys[space] for key in chain))

    def span_keys(self, span: Span) -> list[bytes]:
        return self.keys[span.space][span.chain][span.start : span.start + span.length]

    def parent(self, span: Span) -> bytes | None:
        return self.keys[span.space][span.chain][span.start - 1] if span.start else None

    def new_contents(self, span: Span, seed: int) -> list[bytes]:
        return api.blocks(len(self.span_keys(span)), seed, LAYOUTS[span.space].block_bytes)

    def present(self) -> list[int]:
        return [drive for drive in range(DRIVES) if drive != self.lost]

    def home(self, key: bytes) -> int:
        return drive_of(key, self.present())

    # Calls.

    def both(self, call: Callable[[Side], Result]) -> Result:
        """The result of a call, which has to be the same on all sides."""
        return self.same([call(side) for side in self.sides])

    def same(self, results: Sequence[Result]) -> Result:
        for side, result in zip(self.sides, results, strict=True):
            assert result == results[0], f"{side.backend} differs: {results}"
        return results[0]

    def put_all(
        self, span: Span, seed: int, computed: str, call: Callable[[Side, list[bytes]], Any]
    ) -> list[Put]:
        """Puts on every side; statuses have to be the same."""
        contents = self.new_contents(span, seed)
        begun = time.time()
        statuses = self.both(lambda side: list(call(side, contents)))
        return self.puts(span, contents, computed, begun, statuses)

    def puts(
        self,
        span: Span,
        contents: list[bytes],
        computed: str,
        begun: float,
        statuses: Sequence[str | None],
    ) -> list[Put]:
        ended = time.time()
        return [
            Put(key, Version(content, computed, begun, ended), status)
            for key, content, status in zip(self.span_keys(span), contents, statuses, strict=True)
            if status is not None
        ]

    # Holds.

    def make_room_for_a_hold(self) -> None:
        if len(self.holds) == 3:
            for handle in self.forget_hold():
                handle.release()

    def make_hold(self, span: Span, expired: bool) -> None:
        packed = b"".join(self.span_keys(span))
        there = [key in self.oracle.known for key in self.span_keys(span)]
        ttl = 0.0 if expired else PATIENCE_S * 60
        handles = [side.store.hold(side.spaces[span.space], packed, ttl) for side in self.sides]
        for handle in handles:
            assert handle.held == there, "a hold keeps what is there, and nothing else"
        if not expired:
            kept = {key for key, held in zip(self.span_keys(span), there, strict=True) if held}
            self.holds.append(handles)
            self.oracle.holds.append(kept)
        self.meet()

    def forget_hold(self) -> list[Hold]:
        self.oracle.holds.pop(0)
        return self.holds.pop(0)

    # What is compared.

    def leased_bytes(self) -> int:
        return sum(len(c) for kept in self.kept for c in kept.contents if c is not None)

    def settle(self) -> list[dict[str, Any]]:
        held = bool(self.kept or self.reserved)
        return [side.settle(self.leased_bytes(), held) for side in self.sides]

    def meet(self, touched: Span | None = None, puts: Sequence[Put] = ()) -> None:
        """Waits until all is quiet and compares everything: with the oracle and side by side."""
        settled = self.settle()
        self.touch(touched)
        events = [side.events() for side in self.sides]
        self.same([essence(rows) for rows in events])
        counters = [flat(stats) for stats in settled]
        changes = [now - base for now, base in zip(counters, self.base, strict=True)]
        for row in changes[1:]:
            assert row == changes[0], f"differ: {set(row.items()) ^ set(changes[0].items())}"
        assert settled[0]["holds"] == len(self.holds)
        self.oracle.take_events(events[0])
        for put in puts:
            self.oracle.was_put(put.key, put.version, put.status, self.home(put.key), events[0])
        self.oracle.flushed()
        for space in range(SPACES):
            keys = self.all_keys(space)
            tiers = [side.tiers(space, keys) for side in self.sides]
            self.check_tiers(self.oracle, keys, self.same(tiers))

    def touch(self, span: Span | None) -> None:
        if span is not None:
            packed = b"".join(self.span_keys(span))
            for side in self.sides:
                side.touch(span.space, packed)

    def check_tiers(self, oracle: Oracle, keys: list[bytes], tiers: bytes) -> None:
        for key, tier in zip(keys, tiers, strict=True):
            assert tier in {0, 1, 3}
            if tier:
                oracle.is_there(key)
            else:
                oracle.is_absent(key)

    def meet_loosely(self, uncertain: Uncertain, doubtful: Collection[bytes] = ()) -> None:
        """As `meet`, after calls whose order or outcome is up to the moment.

        Each side has to be right; where they differ, all go on from the state of the first.
        `doubtful` keys may be gone without an event.
        """
        for key, versions in uncertain.items():
            past = self.oracle.past.setdefault(key, [])
            past.extend(version for version in versions if version not in past)
        self.settle()
        found = [self.read_uncertain(side, uncertain) for side in self.sides]
        settled = self.settle()
        for space in range(SPACES):
            for chain in range(CHAINS):
                self.touch(Span(space, chain, 0, DEPTH))
        events = [side.events() for side in self.sides]
        oracles = [copy.deepcopy(self.oracle) for _ in self.sides]
        states = []
        for number, (side, oracle) in enumerate(zip(self.sides, oracles, strict=True)):
            oracle.take_events(events[number])
            self.adopt(oracle, found[number], uncertain, doubtful, events[number])
            oracle.flushed()
            tiers = []
            for space in range(SPACES):
                keys = self.all_keys(space)
                tiers.append(side.tiers(space, keys))
                self.check_tiers(oracle, keys, tiers[-1])
            gauges = [settled[number][tier] for tier in ("dram", "nvme")]
            rows = [(row["blocks"], row["used_bytes"]) for row in gauges]
            states.append((tiers, found[number], essence(events[number]), rows))
        self.oracle = oracles[0]
        self.base = [flat(stats) for stats in settled]
        if any(state != states[0] for state in states):
            EVER["resynced"] += 1
            self.shut()
            for side in self.sides[1:]:
                side.take_over(self.sides[0])
            self.open_all()

    def read_uncertain(self, side: Side, uncertain: Uncertain) -> dict[bytes, bytes | None]:
        found: dict[bytes, bytes | None] = {}
        for space in range(SPACES):
            keys = [key for key in self.all_keys(space) if key in uncertain]
            for key in keys:
                found[key] = side.read(space, key)
            # One that found no room in memory cannot be told: it has to go.
            for key, tier in zip(keys, side.tiers(space, keys), strict=True):
                if tier and found[key] is None:
                    side.calls.delete(side.spaces[space], key, None if self.lost is None else 0.2)
                    found[key] = GIVEN_UP
        return found

    def adopt(
        self,
        oracle: Oracle,
        found: Mapping[bytes, bytes | None],
        uncertain: Uncertain,
        doubtful: Collection[bytes],
        events: list[dict[str, Any]],
    ) -> None:
        """Takes what a side holds of uncertain keys into its oracle, where it may be."""
        for key in doubtful:
            if found.get(key) is None:
                oracle.known.pop(key, None)
                oracle.forget_holds(key)
        for key, content in found.items():
            known = oracle.known.get(key)
            if content == GIVEN_UP:
                oracle.given_up(key)
            elif content is None:
                oracle.is_absent(key)
            elif known is None or known.version.content != content:
                versions = [v for v in uncertain[key] if v.content == content]
                assert versions, f"{key.hex()[:16]} holds what cannot be there"
                oracle.known.pop(key, None)
                oracle.was_put(key, versions[0], "stored", self.home(key), events)

    # Opening and closing.

    def open_all(
        self, uncertain: Uncertain | None = None, doubtful: Collection[bytes] = ()
    ) -> None:
        for side in self.sides:
            side.open()
        self.base = [collections.Counter() for _ in self.sides]
        if not self.keys:
            self.keys = [
                [self.chain_keys(space, chain) for chain in range(CHAINS)]
                for space in range(SPACES)
            ]
        for drive in self.sides[0].store.health()["drives"]:
            is_lost = drive["path"] == str(self.sides[0].root / f"mount{self.lost}" / "drive")
            assert drive["state"] == ("lost" if is_lost else "working")
        if uncertain:
            self.meet_loosely(uncertain, doubtful)
            for key in uncertain:
                if key in self.oracle.known:
                    self.oracle.known[key].home = None
        else:
            self.meet()
        self.oracle.reopened()

    def chain_keys(self, space: int, chain: int) -> list[bytes]:
        shared = api.tokens(2, chain // 2 * 1000)
        own = api.tokens(DEPTH - 2, 100_000 + chain * 1000)
        return api.split(self.both(lambda side: side.spaces[space].keys_from_tokens(shared + own)))

    def shut(self, close: Callable[[Side], Any] = Side.close) -> None:
        """Closes all sides. Leases outlive that, and holds and reservations do no harm."""
        self.reserved.clear()
        for side in self.sides:
            close(side)
        for kept in self.kept:
            self.check_kept(kept)
        self.kept.clear()
        self.holds.clear()
        self.oracle.restarted()

    def check_kept(self, kept: Kept) -> None:
        for leases in kept.leases:
            assert contents_of(leases, kept.space) == kept.contents, "a lease changed"

    def end(self) -> None:
        self.reserved.clear()
        for side in self.sides:
            side.end()
        self.kept.clear()
        self.holds.clear()
        shutil.rmtree(self.root)

    def crash_leftovers(self) -> dict[bytes, list[Version]]:
        """What may be found after a crash of all that need not be found: forgets it."""
        left: dict[bytes, list[Version]] = {}
        for key in set(self.oracle.past) | set(self.oracle.known):
            if not self.oracle.must_be_back(key):
                left[key] = self.oracle.allowed(key)
                self.oracle.known.pop(key, None)
        return {key: versions for key, versions in left.items() if versions}


def essence(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Events without numbers, times and order."""
    return sorted(
        (row["kind"], row["key"].hex()[:16], str(row["tier"]), str(row["reason"])) for row in events
    )


class _Flat(collections.Counter[str]):
    """Counters whose difference keeps what is not positive."""

    def __sub__(self, other: collections.Counter[str]) -> _Flat:
        return _Flat({name: self[name] - other[name] for name in self})


def flat(stats: Mapping[str, Any]) -> _Flat:
    """Statistics as one row of numbers."""
    row = _Flat()
    for name, value in stats.items():
        if isinstance(value, list) or name in OF_THE_MOMENT:
            continue  # Of rows, what they add up to is there too.
        if isinstance(value, Mapping):
            row.update({f"{name}.{key}": n for key, n in value.items() if key not in OF_THE_MOMENT})
        else:
            row[name] = value
    return row
