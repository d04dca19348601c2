"""One of the stores that are driven side by side: its directories, its faces, its loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import api
from tiered_kv import Channel, Completion, KvLayout, Leases, Namespace, NamespaceSpec, TieredStore
from tiered_kv.blocking import BlockingStore

DRIVES = 2
SPACES = 2
CHAINS, DEPTH = 8, 8
"""Of each namespace. Every chain shares its first two blocks with its neighbour, so that the keys
make a tree. Both namespaces have the same tokens.
"""
RESERVATION_TTL_S = 0.5
PATIENCE_S = 60.0
"""After which something hangs. Nothing is timed."""

LAYOUTS = [
    KvLayout(api.TOKENS, api.BLOCK_BYTES),
    KvLayout(api.TOKENS, layer_groups=2, slab_bytes=(3000, 8000)),
]
"""One slab a block, and two: the smaller is of a size class of its own."""

_SOCKETS = shutil.ignore_patterns("*.sock")
_Row = dict[str, Any]


class Span(NamedTuple):
    """A part of a chain of one namespace."""

    space: int
    chain: int
    start: int
    length: int


def spec(space: int) -> NamespaceSpec:
    """The specification of a namespace."""
    return api.spec(salt=f"space {space}", layout=LAYOUTS[space])


def drive_of(key: bytes, present: list[int]) -> int:
    """The drive on which the block of a key goes, of those that are there."""
    return present[int.from_bytes(key[8:16], "little") % len(present)]


def contents_of(leases: Leases, space: int) -> list[bytes | None]:
    """Copies of all blocks, None for a miss."""
    slabs = len(LAYOUTS[space].slab_bytes)
    found: list[bytes | None] = []
    for index in range(len(leases)):
        views = [leases.slab(index, slab) for slab in range(slabs)]
        there = [bytes(view) for view in views if view is not None]
        assert len(there) in {0, slabs}, "half a block is leased"
        found.append(b"".join(there) if there else None)
    return found


class Side:
    """A store with one I/O backend, on two drives."""

    def __init__(self, root: Path, backend: str) -> None:
        self.root = root
        self.backend = backend
        self.loop = asyncio.new_event_loop()
        self.next_event = 0
        for drive in range(DRIVES):
            (root / f"mount{drive}").mkdir(parents=True)

    def config(self) -> dict[str, Any]:
        return api.config(
            None,
            nvme_paths=[self.root / f"mount{drive}" / "drive" for drive in range(DRIVES)],
            io_backend=self.backend,
            # Draws and times would let two stores evict different blocks.
            policy="lru",
            dram_capacity="192KiB",
            nvme_capacity="512KiB",
            max_leased_fraction=0.4,
            reservation_ttl_s=RESERVATION_TTL_S,
            event_log_entries=1 << 16,
        )

    def run(self, call: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(call, PATIENCE_S)

        return self.loop.run_until_complete(bounded())

    def open(self) -> None:
        self.store: TieredStore = self.run(_opened(self.config()))
        self.calls = BlockingStore(self.store._core)
        self.next_event = 0
        health = self.store.health()
        assert {drive["backend"].split(":")[0] for drive in health["drives"]} <= {self.backend, ""}
        assert health["backend"] == self.backend
        self.spaces: list[Namespace] = [
            self.store.namespace(spec(space)) for space in range(SPACES)
        ]

    def close(self) -> None:
        assert self.run(self.store.close()).dropped == 0
        assert self.store.closed

    def end(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.close())
        self.loop.close()

    def events(self) -> list[_Row]:
        """What happened since they were last asked for."""
        rows = self.store.events(self.next_event)
        if rows:
            self.next_event = rows[-1]["seq"] + 1
        return rows

    def tiers(self, space: int, keys: list[bytes]) -> bytes:
        return self.store.lookup(self.spaces[space], b"".join(keys), "each").tiers

    def read(self, space: int, key: bytes) -> bytes | None:
        """The bytes of one block, apart from what is compared."""
        out = bytearray(LAYOUTS[space].block_bytes)
        report = self.calls.get_into(self.spaces[space], key, out)
        return None if report.items[0] else bytes(out)

    def settle(self, leased: int, memory_held: bool) -> _Row:
        """Waits until nothing is under way; checks the books, and returns statistics.

        `leased` are the bytes that leases of the caller pin; `memory_held` says that memory may be
        used by more than blocks.
        """
        report = self.calls.flush()
        self.store.predictor()
        assert report.pending == 0
        assert not report.failed or self.store.stats()["counters"]["undurable"]
        assert not report.no_durable_tier
        end = time.monotonic() + PATIENCE_S
        while True:
            # Results of cancelled calls keep their leases until the loop has dropped them.
            self.loop.run_until_complete(asyncio.sleep(0))
            audit, stats = self.store.audit(), self.store.stats()
            assert audit["faults"] == []
            assert audit["dram_used_bytes"] >= audit["dram_block_bytes"]
            hits = stats["dram"]["hits"] + stats["nvme"]["hits"]
            if (
                audit["drives_idle"]
                and audit["nvme_used_bytes"] == audit["nvme_block_bytes"]
                and (memory_held or audit["dram_used_bytes"] == audit["dram_block_bytes"])
                and audit["dram_owned_bytes"] == audit["dram_used_bytes"]
                and hits + sum(stats["misses"].values()) == stats["requested"]
                and (stats["calls"], stats["loading_bytes"], stats["dirty_bytes"]) == (0, 0, 0)
                and stats["leased_bytes"] == leased
            ):
                return stats
            assert time.monotonic() < end, f"the books do not close: {audit} {stats} {leased}"
            time.sleep(0.0002)

    def touch(self, space: int, packed: bytes) -> None:
        """Makes the order of blocks in the policy's eyes follow from the calls alone.

        That of loads and of writes which are under way at once does not.
        """
        request = self.store.begin_request()
        request.observe(self.spaces[space], packed)
        request.finish()
        self.store.predictor()  # Takes it in at once.

    def copy_open(self, copied: Callable[[Side], None]) -> None:
        """Takes the drives as they are now, and goes on with these once the store is closed."""
        for mount in self.mounts():
            shutil.copytree(mount, self.root / f"copy of {mount.name}", ignore=_SOCKETS)
        copied(self)
        self.close()
        for mount in self.mounts():
            copy = self.root / f"copy of {mount.name}"
            away = mount.name.startswith("away")
            assert away or not (copy / "drive" / "checkpoint.tkv").exists()
            shutil.rmtree(mount)
            copy.rename(mount)

    def mounts(self) -> list[Path]:
        """Where drives lie: those that are there, and one that is away."""
        return sorted(path for path in self.root.iterdir() if "copy" not in path.name)

    def take_over(self, other: Side) -> None:
        """Makes the drives of this closed store equal to those of another."""
        shutil.rmtree(self.root)
        shutil.copytree(other.root, self.root, ignore=_SOCKETS)

    def in_child(self, body: Callable[[int], None]) -> tuple[int, bytes]:
        """Runs `body` in a forked child; how it ended, and what it wrote to its descriptor."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reading)
                signal.alarm(int(PATIENCE_S))
                body(writing)
                code = 0
            except BaseException as error:  # noqa: BLE001 - told by the parent
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

    @contextlib.contextmanager
    def channel(self) -> Iterator[Channel]:
        with self.store.channel() as channel:
            yield channel


def next_of(channel: Channel) -> Completion:
    """Waits for one completion with poll(2), as an engine does."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000), "the channel is silent"
    (done,) = channel.drain()
    return done


async def _opened(config: dict[str, Any]) -> TieredStore:
    return await TieredStore.open(**config)


async def cancelled(call: Coroutine[Any, Any, Any], naps: int) -> Any:
    """Cancels a call when it has waited for so many turns of the loop; its result, or None."""
    task = asyncio.ensure_future(call)
    for _ in range(naps + 1):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None
