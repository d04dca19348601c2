"""Rules around the life of a store: restarts, crashes, lost drives, forks, damage."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest

from model.counting import any_spans, counted, seeds
from model.oracle import EVER, Version
from model.side import CHAINS, DRIVES, LAYOUTS, SPACES, Side, Span, spec
from model.stores import Stores
from tiered_kv import ClosedError
from tiered_kv.blocking import BlockingStore


class Lifecycle(Stores):
    """Rules after which another process, or another set of drives, has the store."""

    @counted(swap=st.booleans())
    def restart(self, swap: bool) -> None:
        """A clean close; either backend opens what the other has written."""
        self.shut()
        if swap:
            backends = [side.backend for side in self.sides]
            for side, backend in zip(self.sides, reversed(backends), strict=True):
                side.backend = backend
        self.open_all()

    @counted(span=any_spans, seed=seeds, unsynced=st.integers(0, 3))
    def crash(self, span: Span, seed: int, unsynced: int) -> None:
        """Goes on from the drives as they were while the store was open.

        All that was durable is there; of what was put since, anything may be.
        """
        unclear = set()
        for number in range(unsynced):
            part = span._replace(chain=(span.chain + number) % CHAINS)
            contents = self.new_contents(part, seed + number)
            now = time.time()
            for side in self.sides:
                ns, packed = side.spaces[part.space], b"".join(self.span_keys(part))
                side.calls.put(ns, packed, contents, parent=self.parent(part))
            for put in self.puts(part, contents, "prefill", now, ["stored"] * len(contents)):
                self.oracle.past.setdefault(put.key, []).append(put.version)
                known = self.oracle.known.get(put.key)
                if known is not None and known.version.computed == "decode":
                    unclear.add(put.key)
        self.shut(self.crash_side)
        for key in unclear:
            self.oracle.known.pop(key)
        left = self.crash_leftovers()
        EVER["found after a crash"] += len(self.oracle.known)
        self.open_all(left)

    def crash_side(self, side: Side) -> None:
        side.copy_open(self.take_last_events)

    def take_last_events(self, side: Side) -> None:
        self.oracle.take_events(side.events())

    @counted(span=any_spans, other=any_spans, seed=seeds, delete=st.booleans())
    def killed(self, span: Span, other: Span, seed: int, delete: bool) -> None:
        """The process that owns the store is killed; what it had said is durable is there."""
        other = other._replace(space=0, length=1)
        first, last = self.new_contents(span, seed), self.new_contents(other, seed + 1)
        self.shut()
        begun = time.time()
        said = self.both(lambda side: self.victim(side, span, first, other, last, delete))
        events = [{**row, "key": bytes.fromhex(row["key"])} for row in said["events"]]
        self.oracle.take_events(events)
        for put in self.puts(span, first, "prefill", begun, said["first"]):
            self.oracle.was_put(put.key, put.version, put.status, self.home(put.key), events)
        self.oracle.flushed()
        if delete:
            keys = set(self.span_keys(span)[:2])
            self.oracle.deleted(lambda key, _: key in keys, said["durable"])
        self.oracle.restarted()
        uncertain = {}
        for put in self.puts(other, last, "prefill", begun, said["last"]):
            if put.status == "stored":
                self.oracle.known.pop(put.key, None)
                self.oracle.past.setdefault(put.key, []).append(put.version)
                uncertain[put.key] = self.oracle.allowed(put.key)
        self.open_all(uncertain | self.crash_leftovers())

    def victim(self, side: Side, *work: Any) -> dict[str, Any]:
        """What a process said of its work before it was killed."""
        span, first, other, last, delete = work

        def live(pipe: int) -> None:
            store = BlockingStore.open(**side.config())
            spaces = [store.namespace(spec(space)) for space in range(SPACES)]
            ns, packed = spaces[span.space], b"".join(self.span_keys(span))
            said: dict[str, Any] = {}
            said["first"] = list(store.put(ns, packed, first, parent=self.parent(span)).statuses)
            assert store.flush().pending == 0
            while not store.audit()["drives_idle"]:
                time.sleep(0.0002)
            if delete:
                timeout = None if self.lost is None else 0.2
                said["durable"] = store.delete(ns, packed[:64], timeout).durable
                while not store.audit()["drives_idle"]:
                    time.sleep(0.0002)
            ns, packed = spaces[other.space], b"".join(self.span_keys(other))
            said["last"] = list(store.put(ns, packed, last, parent=self.parent(other)).statuses)
            rows = store.events()
            keep = ("kind", "tier", "reason")
            said["events"] = [
                {**{name: row[name] for name in keep}, "key": row["key"].hex()} for row in rows
            ]
            os.write(pipe, json.dumps(said).encode())
            # Writes are under way or not, as it happens.
            time.sleep(last[0][0] / 100_000)
            os.kill(os.getpid(), signal.SIGKILL)

        code, said = side.in_child(live)
        assert code == -signal.SIGKILL, said
        answer: dict[str, Any] = json.loads(said)
        return answer

    @counted(drive=st.integers(0, DRIVES - 1))
    def lose_drive(self, drive: int) -> None:
        """A drive is away: what it holds is a miss, and all else is there."""
        if self.lost is not None:
            self.have_it_back()
        self.lose(drive)

    @counted(drive=st.integers(0, DRIVES - 1))
    def find_drive(self, drive: int) -> None:
        """The drive is back, and with it what was neither deleted nor stored anew meanwhile."""
        if self.lost is None:
            self.lose(drive)
        self.have_it_back()

    def lose(self, drive: int) -> None:
        self.shut()
        for side in self.sides:
            (side.root / f"mount{drive}").rename(side.root / f"away{drive}")
        self.lost = drive
        for known in self.oracle.known.values():
            known.off_drive |= known.home is None
        unclear = {key: known for key, known in self.oracle.known.items() if known.off_drive}
        for key, known in list(self.oracle.known.items()):
            if known.home == drive and not known.off_drive:
                self.oracle.away[key] = self.oracle.known.pop(key)
        EVER["blocks lost with a drive"] += len(self.oracle.away)
        self.open_all()
        for key, known in unclear.items():
            if key not in self.oracle.known:
                known.doubtful = True
                self.oracle.away[key] = known
            else:
                known.home = self.present()[0]

    def have_it_back(self) -> None:
        self.shut()
        for side in self.sides:
            (side.root / f"away{self.lost}").rename(side.root / f"mount{self.lost}")
        self.lost = None
        uncertain: dict[bytes, list[Version]] = {}
        for key, away in self.oracle.away.items():
            known = self.oracle.known.get(key)
            if known is not None and not known.off_drive:
                continue
            if known is None and not away.doubtful:
                away.off_memory = True
                self.oracle.known[key] = away
                EVER["blocks found with a drive"] += 1
            else:
                uncertain[key] = [away.version, *([known.version] if known else [])]
                self.oracle.known.pop(key, None)
        self.oracle.away.clear()
        self.open_all(uncertain)

    @counted(place=st.floats(0.5, 0.999), byte=st.integers(1, 255))
    def damage(self, place: float, byte: int) -> None:
        """Payloads change on the drives of a closed store: misses, and never other bytes."""
        self.shut()
        for side in self.sides:
            for mount in side.mounts():
                if mount.name.startswith("mount"):
                    for path in sorted(mount.rglob("segment-*.tkv")):
                        _flip(path, place, byte)
        unclear = {key: [known.version] for key, known in self.oracle.known.items()}
        self.open_all(unclear, unclear)

    @counted(span=any_spans)
    def fork(self, span: Span) -> None:
        """In a forked child every call raises and drops do nothing; the parent goes on."""
        code, said = self.sides[0].in_child(functools.partial(self.child, span))
        assert (code, said) == (0, b"")
        self.meet()

    def child(self, span: Span, _: int) -> None:
        for side in self.sides:
            self.child_calls(side, span)
        for kept in self.kept:
            for leases in kept.leases:
                leases.release()
        self.kept.clear()
        self.reserved.clear()
        self.holds.clear()
        for side in self.sides:
            side.calls.close()
            side.__dict__.clear()

    def child_calls(self, side: Side, span: Span) -> None:
        ns, packed = side.spaces[span.space], b"".join(self.span_keys(span))
        contents = self.new_contents(span, 1)
        out = [bytearray(LAYOUTS[span.space].block_bytes) for _ in contents]
        store = side.calls
        calls: list[Callable[[], Any]] = [
            lambda: store.put(ns, packed, contents),
            lambda: store.get(ns, packed),
            lambda: store.get_into(ns, packed, out),
            lambda: store.reserve(ns, packed),
            lambda: store.lookup(ns, packed),
            lambda: store.contains(ns, packed[:32]),
            lambda: store.lookup_hybrid(ns, [(packed, "all")]),
            lambda: store.hold(ns, packed, 1.0),
            lambda: store.prefetch(ns, packed),
            lambda: store.delete(ns, packed),
            lambda: store.new_epoch(ns),
            lambda: store.namespace(spec(0)),
            lambda: store.channel(),
            store.begin_request,
            store.flush,
            store.stats,
            store.health,
            store.audit,
            store.events,
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="forked from"):
                call()
        assert store.closed


def _flip(path: Path, place: float, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(int(place * path.stat().st_size))
        old = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old ^ byte]))
