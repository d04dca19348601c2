"""What one dictionary knows of a store: which blocks must be there, may be, and must not be."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

PASSING = {"no_space", "lease_cap", "load_cap", "deadline", "cancelled", "closed", "untold"}
"""Reasons that speak of the moment, not of the block: it is still there afterwards."""

EVER: collections.Counter[str] = collections.Counter()
"""How often something worth seeing was seen, in all examples."""


@dataclasses.dataclass(frozen=True)
class Version:
    """Bytes that were once stored under a key."""

    content: bytes = dataclasses.field(repr=False)
    computed: str
    begun: float
    """Time of the clock on the wall before and after the put."""
    ended: float


@dataclasses.dataclass
class Known:
    """A block that is there."""

    version: Version
    home: int | None
    """The drive that it goes to, where that is known."""
    durable: bool = False
    off_drive: bool = False
    """It left the drive, or never came there: nothing but memory has it, if at all."""
    off_memory: bool = False
    """It left memory at some time."""
    doubtful: bool = False
    """A delete of it did not become durable while it was away."""

    @property
    def may_be_gone(self) -> bool:
        """Whether what the event log said explains that it is nowhere."""
        return self.off_drive and self.off_memory


class Oracle:
    """The keys of all namespaces, with what is known of each."""

    def __init__(self) -> None:
        self.known: dict[bytes, Known] = {}
        self.away: dict[bytes, Known] = {}
        """What lies on a drive that is lost."""
        self.past: dict[bytes, list[Version]] = {}
        """All that was stored under a key since it was last deleted for good: after a crash an
        older version may be found where the newest is gone.
        """
        self.holds: list[set[bytes]] = []
        """Keys of each hold in force: none of them may be evicted from its last tier."""

    def take_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Takes in what the event log says became of blocks that were there before."""
        for event in events:
            self._note(self.known.get(event["key"]), event)

    def _note(self, known: Known | None, event: Mapping[str, Any]) -> None:
        kind, tier = event["kind"], event["tier"]
        if kind in {"evicted", "fault", "undurable"}:
            EVER[f"{kind} {tier}"] += 1
        if known is None:
            return
        if kind in {"evicted", "fault"} and tier == "dram":
            known.off_memory = True
        if kind in {"evicted", "fault", "undurable"} and tier == "nvme":
            known.off_drive = True

    def was_put(
        self,
        key: bytes,
        version: Version,
        status: str,
        home: int | None,
        events: Iterable[Mapping[str, Any]],
    ) -> None:
        """Takes in how the put of one key ended; `events` are those of the step."""
        EVER[f"put {status}"] += 1
        old = self.known.get(key)
        supersedes = (
            old is not None and old.version.computed == "decode" and version.computed == "prefill"
        )
        if status == "exists":
            assert old is not None, f"{name(key)} is said to exist and was never stored"
            assert not supersedes, f"{name(key)}: what prefill computed did not supersede decode's"
        elif status == "stored":
            if old is not None and not supersedes:
                assert old.may_be_gone, f"{name(key)} was stored over a block still there"
            EVER["superseded"] += supersedes
            self.forget_holds(key)
            self.known[key] = new = Known(version, home)
            self.past.setdefault(key, []).append(version)
            for event in events:
                if event["key"] == key:
                    self._note(new, event)

    def forget_holds(self, key: bytes) -> None:
        """The block of a key is no longer the one that was held."""
        for hold in self.holds:
            hold.discard(key)

    def deleted(
        self,
        is_meant: Callable[[bytes, Version], bool],
        durable: bool,
    ) -> int:
        """Takes in a delete; returns how many blocks it must have removed, and could have."""
        gone = [key for key, known in self.known.items() if is_meant(key, known.version)]
        for key in gone:
            del self.known[key]
            self.forget_holds(key)
        for key in [key for key, known in self.away.items() if is_meant(key, known.version)]:
            if durable:
                del self.away[key]
            else:
                self.away[key].doubtful = True
        if durable:
            for key, versions in self.past.items():
                self.past[key] = [v for v in versions if not is_meant(key, v)]
        return len(gone)

    def given_up(self, key: bytes) -> None:
        """A block was deleted, durably or not."""
        self.known.pop(key, None)
        self.forget_holds(key)
        if key in self.away:
            self.away[key].doubtful = True

    def is_there(self, key: bytes) -> None:
        """A lookup finds the key."""
        assert key in self.known, f"{name(key)} is found, and was never stored or is deleted"

    def is_absent(self, key: bytes) -> None:
        """A lookup does not find the key; it is forgotten until it is stored again."""
        known = self.known.get(key)
        if known is None:
            return
        assert known.may_be_gone, f"{name(key)} is gone, and no event says why: {known}"
        held = any(key in hold for hold in self.holds)
        assert not held, f"{name(key)} is gone while a hold keeps it: {known}"
        del self.known[key]

    def is_served(self, key: bytes, content: bytes) -> None:
        """Served bytes are those stored last."""
        assert key in self.known, f"{name(key)} is served, and was never stored or is deleted"
        same = self.known[key].version.content == content
        assert same, f"{name(key)} is served with other bytes than were stored"

    def was_got(self, key: bytes, content: bytes | None, reason: str | None) -> None:
        """One block of a get: a hit with its bytes, or a miss with its reason."""
        EVER["hit" if content is not None else f"miss {reason}"] += 1
        if content is not None:
            assert reason is None
            self.is_served(key, content)
        else:
            assert reason, "a miss has no reason"
            assert key not in self.known or reason in PASSING, f"{name(key)}: {reason}"

    def flushed(self) -> None:
        """Everything is durable but what events speak of."""
        for known in self.known.values():
            known.durable |= not known.off_drive

    def restarted(self) -> None:
        """What was in memory only is gone."""
        self.holds.clear()
        for known in self.known.values():
            known.off_memory = True

    def reopened(self) -> None:
        """What is there now has come from a drive."""
        for known in self.known.values():
            known.durable, known.off_drive = True, False

    def must_be_back(self, key: bytes) -> bool:
        """Whether a block has to be found however the store ended."""
        known = self.known.get(key)
        return known is not None and known.durable and not known.off_drive

    def allowed(self, key: bytes) -> list[Version]:
        """What may be found under a key after a crash where the newest is gone."""
        return list(reversed(self.past.get(key, [])))


def name(key: bytes) -> str:
    """A key, short."""
    return key.hex()[:16]
