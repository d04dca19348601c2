"""LMCache's objects in a store: what the three adapters share.

An object is known by LMCache's whole key as text, and by what its bytes are: their number, and
their dtypes and shapes where the interface tells them. Each such kind is a namespace of the store,
so that an object is never read into a buffer of another length.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tiered_kv import (
    Hold,
    KvLayout,
    Namespace,
    NamespaceSpec,
    RequestContext,
    TieredKvError,
)
from tiered_kv._core import KEY_BYTES
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines._record import Recorder
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.lmcache.options import Options

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered_kv.channel import Channel

Do = Literal["get", "set", "exists", "delete"]

logger = logging.getLogger(__name__)

_ENGINE = "lmcache"
_SMALLEST = 4096
_TEST_BYTES = 64 << 10
# Tiers of a lookup in which a get finds a block: dram, nvme, loading.
_THERE = frozenset({1, 3, 254})
# Model, rank, group, hash, and a salt where there is one.
_KEY = re.compile(r"(.*@[0-9a-f]{8}@[0-9a-f]+)@[0-9a-f]+(?:@.*)?", re.DOTALL)
_CALLS = 1 << 16
"""Calls that may be under way: each is an object or more of LMCache's own memory."""


class Kind(NamedTuple):
    """What the bytes of an object are.

    Attributes:
        size: How many they are.
        dtypes: Their dtypes, empty where the interface does not tell them.
        shapes: Their shapes, empty where the interface does not tell them.
    """

    size: int
    dtypes: str = ""
    shapes: str = ""

    def spec(self, namespace: str) -> NamespaceSpec:
        """The namespace of the store that has the objects of this kind."""
        return NamespaceSpec(
            model=namespace,
            weights=namespace,
            kv_dtype=self.dtypes or "bytes",
            layout=KvLayout(1, self.size),
            parallel=self.shapes,
            engine=_ENGINE,
        )


class Ended(NamedTuple):
    """How a batch ended.

    Attributes:
        number: What its submission returned.
        do: What was to be done.
        done: For each key whether it was.
        ok: Whether all calls were made as asked; a miss is no failure.
        error: What was not, empty where `ok`.
    """

    number: int
    do: Do
    done: list[bool]
    ok: bool
    error: str


@dataclasses.dataclass
class _Batch:
    """A batch under way: `left` calls of it have not ended."""

    do: Do
    done: list[bool]
    left: int = 0
    error: str = ""


@dataclasses.dataclass
class _Call:
    """A call of the store for some places of a batch."""

    batch: int
    places: Sequence[int]


class Objects:
    """Objects of one namespace in one store. Any thread may call.

    Nothing waits but `close`, and nothing raises: what cannot be submitted ends as failed.

    Args:
        options: The options of the flag.

    Raises:
        ConfigError: The configuration is wrong.
        IoFaultError: What was written did not come back as it was.
        TieredKvError: The store cannot be opened.
        OSError: Its directory cannot be made.
    """

    def __init__(self, options: Options) -> None:
        self._namespace = options.namespace
        self._direct = options.direct_reads
        options.make_directory()
        self._store = BlockingStore.open(options.store)
        try:
            # Before it is used: bytes of the objects that are there, for a store may be full of it.
            self._kinds = self._stored_kinds()
            sizes = [kind.size for kind in self._kinds]
            self_test(self._store, min(sizes, default=_TEST_BYTES))
            self._channel: Channel = self._store.channel(_CALLS)
            # Of no object: calls without keys are made in it.
            self._nothing = self._store.namespace(Kind(_SMALLEST).spec(f"{_ENGINE}: nothing"))
            self._recorder: Recorder | None = None
            if options.record is not None:
                self._recorder = Recorder(options.record, _ENGINE, options.chunk_tokens)
        except BaseException:
            self._store.close()
            raise
        self._wait_s = options.store.put_timeout_s
        self._chunk_tokens = options.chunk_tokens
        # Guards what follows, and that a call is known before its end is taken.
        self._lock = threading.Lock()
        self._next = 0
        self._requests = 0
        self._batches: dict[int, _Batch] = {}
        self._calls: dict[int, _Call] = {}
        self._late: list[int] = []
        self._told: set[str] = set()
        self.faults = 0

    def fileno(self) -> int:
        """The descriptor that is readable while a batch has ended."""
        return self._channel.fileno()

    def get(
        self, keys: Sequence[str], buffers: Sequence[Buffer], kinds: Sequence[Kind] | None = None
    ) -> int:
        """Reads objects into buffers; of one that was not read, the bytes mean nothing.

        Args:
            keys: LMCache's keys.
            buffers: One a key, untouched by the caller until the batch has ended.
            kinds: What each is; by default as many bytes as its buffer has.

        Returns:
            The batch's number.
        """
        return self._submit("get", keys, buffers, kinds)

    def set(
        self, keys: Sequence[str], buffers: Sequence[Buffer], kinds: Sequence[Kind] | None = None
    ) -> int:
        """Stores objects; as `get`."""
        return self._submit("set", keys, buffers, kinds)

    def exists(self, keys: Sequence[str]) -> int:
        """Asks which objects are there, of whatever kind."""
        return self._submit("exists", keys)

    def delete(self, keys: Sequence[str]) -> int:
        """Deletes objects of whatever kind."""
        return self._submit("delete", keys)

    def asked(self, keys: Sequence[str]) -> None:
        """Records what LMCache looks up at once, which is the prompt of a request.

        Args:
            keys: Its chunks in their order: those of a rank and group, then those of the next.
        """
        if self._recorder is None or not keys:
            return
        first = _place(keys[0])
        row = [key for key in keys if _place(key) == first]
        tokens = len(row) * self._chunk_tokens
        try:
            packed = self._nothing.keys_from_opaque([key.encode() for key in row])
        except (TieredKvError, ValueError) as error:
            self._fault("exists", error)
            return
        with self._lock:
            self._requests += 1
            name = str(self._requests)
            self._recorder.begin(name, RequestContext(), tokens, packed)
            self._recorder.end(name, tokens, packed)

    def drain(self) -> list[Ended]:
        """Takes the batches that have ended, and gives their buffers back."""
        ends = [] if self._channel.closed else self._channel.drain()
        ended: list[int] = []
        with self._lock:
            for end in ends:
                call = self._calls.pop(end.id, None)
                if call is None:
                    continue
                batch = self._batches[call.batch]
                for index, place in enumerate(call.places):
                    both = (batch.done[place], end.done(index))
                    # Of several kinds: one that is there is enough, and all have to be gone.
                    batch.done[place] = all(both) if batch.do == "delete" else any(both)
                if not end.ok and not batch.error:
                    batch.error = f"{batch.do}: not done for all objects"
                batch.left -= 1
                if not batch.left:
                    ended.append(call.batch)
            ended += self._late
            self._late.clear()
            return [self._end(number) for number in ended]

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are there, at once; none where that cannot be told."""
        return self.look(keys) or [False] * len(keys)

    def look(self, keys: Sequence[str]) -> list[bool] | None:
        """Which objects are there, at once; None where that cannot be told."""
        found = [False] * len(keys)
        try:
            for _, ns in self._known():
                packed = ns.keys_from_opaque([key.encode() for key in keys])
                tiers = self._store.lookup(ns, packed, "each").tiers
                found = [old or new in _THERE for old, new in zip(found, tiers, strict=True)]
        except (TieredKvError, ValueError) as error:
            self._fault("exists", error)
            return None
        return found

    def hold(self, keys: Sequence[str], ttl: float) -> list[list[Hold]]:
        """Keeps objects on whatever tier they are, as between a lookup and its load.

        Args:
            keys: LMCache's keys.
            ttl: Seconds that a hold lasts at most.

        Returns:
            The holds of each object, none of one that is not there.
        """
        holds: list[list[Hold]] = [[] for _ in keys]
        try:
            for _, ns in self._known():
                packed = ns.keys_from_opaque([key.encode() for key in keys])
                tiers = self._store.lookup(ns, packed, "each").tiers
                for place, tier in enumerate(tiers):
                    if tier in _THERE:
                        key = packed[place * KEY_BYTES : (place + 1) * KEY_BYTES]
                        holds[place].append(self._store.hold(ns, key, ttl))
        except (TieredKvError, ValueError) as error:
            self._fault("exists", error)
        return holds

    def kind_of(self, key: str) -> Kind | None:
        """What an object is that is there; of several kinds, any."""
        try:
            for kind, ns in self._known():
                if self._store.contains(ns, ns.keys_from_opaque([key.encode()])):
                    return kind
        except (TieredKvError, ValueError) as error:
            self._fault("exists", error)
        return None

    def status(self) -> dict[str, Any]:
        """State of the store, for an operator."""
        health = self._store.health()
        drives = health["drives"]
        working = all(drive["state"] == "working" for drive in drives)
        return {
            "is_healthy": bool(health["open"]) and working,
            "drives": [{"path": d["path"], "state": d["state"]} for d in drives],
            "faults": self.faults,
            "namespace": self._namespace,
        } | self._recorded()

    def _recorded(self) -> dict[str, Any]:
        recorder = self._recorder
        if recorder is None:
            return {}
        path, lost = str(recorder.path), recorder.lost
        return {"record": {"path": path, "lost": lost, "fault": recorder.fault}}

    def used_bytes(self) -> tuple[int, int]:
        """Bytes used on the drives, and those that may be."""
        nvme = self._store.stats()["nvme"]
        return int(nvme["used_bytes"]), int(nvme["capacity_bytes"])

    def close(self) -> None:
        """Ends what is under way. It returns when the core touches no buffer any more."""
        self._channel.close()
        self._store.close()
        if self._recorder is not None:
            self._recorder.close()

    def _stored_kinds(self) -> dict[Kind, Namespace]:
        """The kinds of the objects that are there from before."""
        found = {}
        for row in self._store.namespaces():
            fields = row["fields"]
            if fields is None or fields.get("engine") != _ENGINE:
                continue
            kind = _kind_of(fields)
            if kind is None:
                continue
            ns = self._store.namespace(kind.spec(self._namespace))
            if ns.id == bytes(row["namespace"]).hex():
                found[kind] = ns
        return found

    def _known(self) -> Iterable[tuple[Kind, Namespace]]:
        with self._lock:
            return list(self._kinds.items())

    def _of(self, kind: Kind) -> Namespace:
        ns = self._kinds.get(kind)
        if ns is None:
            ns = self._kinds[kind] = self._store.namespace(kind.spec(self._namespace))
        return ns

    def _submit(
        self,
        do: Do,
        keys: Sequence[str],
        buffers: Sequence[Buffer] | None = None,
        kinds: Sequence[Kind] | None = None,
    ) -> int:
        # Under the lock nothing waits: calls of the store only begin.
        with self._lock:
            number = self._next
            self._next += 1
            batch = self._batches[number] = _Batch(do, [do == "delete"] * len(keys))
            try:
                if buffers is None:
                    self._ask(number, batch, keys)
                else:
                    self._move(number, batch, keys, buffers, kinds)
            except (TieredKvError, TypeError, ValueError) as error:
                batch.error = str(error)
                self._fault(do, error)
            if not batch.left:
                self._end_soon(number, batch)
        return number

    def _ask(self, number: int, batch: _Batch, keys: Sequence[str]) -> None:
        for ns in self._kinds.values() if keys else ():
            packed = ns.keys_from_opaque([key.encode() for key in keys])
            ask = (
                self._channel.submit_exists if batch.do == "exists" else self._channel.submit_delete
            )
            self._begun(ask(ns, packed), number, batch, range(len(keys)))

    def _move(
        self,
        number: int,
        batch: _Batch,
        keys: Sequence[str],
        buffers: Sequence[Buffer],
        kinds: Sequence[Kind] | None,
    ) -> None:
        if len(buffers) != len(keys):
            text = f"{batch.do}: {len(buffers)} buffers for {len(keys)} keys: give one a key"
            raise ValueError(text)
        of = kinds or [Kind(memoryview(buffer).nbytes) for buffer in buffers]
        groups: dict[Kind, list[int]] = {}
        for place, kind in enumerate(of):
            groups.setdefault(kind, []).append(place)
        for kind, places in groups.items():
            if batch.do == "get" and kind not in self._kinds:
                continue  # nothing of it was ever stored
            ns = self._of(kind)
            packed = ns.keys_from_opaque([keys[place].encode() for place in places])
            some = [buffers[place] for place in places]
            if batch.do == "get":
                into = self._store.lend(some) if self._direct else some
                call = self._channel.submit_get_into(ns, packed, into)
            else:
                call = self._channel.submit_put(ns, packed, some, chain=False, wait=self._wait_s)
            self._begun(call, number, batch, places)

    def _begun(self, call: int, number: int, batch: _Batch, places: Sequence[int]) -> None:
        self._calls[call] = _Call(number, places)
        batch.left += 1

    def _end_soon(self, number: int, batch: _Batch) -> None:
        """Ends a batch of which no call has begun through the descriptor, like any other."""
        try:
            self._begun(self._channel.submit_exists(self._nothing, b""), number, batch, ())
        except TieredKvError:
            # So many ends wait that the descriptor is readable; or all is closed.
            self._late.append(number)

    def _end(self, number: int) -> Ended:
        batch = self._batches.pop(number)
        if batch.error and batch.do == "delete":
            # LMCache goes by these alone: what may come back is not gone.
            batch.done = [False] * len(batch.done)
        return Ended(number, batch.do, batch.done, not batch.error, batch.error)

    def _fault(self, do: Do, error: Exception) -> None:
        """Counts what an engine must not see raised; each text is logged once."""
        self.faults += 1
        text = f"{do}: {error}"
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            logger.error("tiered-kv: %s", text)


def _place(key: str) -> str:
    """What a key says before the hash of its chunk: model, rank and group."""
    parts = _KEY.fullmatch(key)
    return parts[1] if parts else ""


def _kind_of(fields: dict[str, str]) -> Kind | None:
    """The kind that a stored namespace was made for."""
    size, dtypes = fields.get("layout.slab_bytes", ""), fields.get("kv_dtype", "")
    if not size.isdecimal():
        return None
    return Kind(int(size), "" if dtypes == "bytes" else dtypes, fields.get("parallel", ""))
