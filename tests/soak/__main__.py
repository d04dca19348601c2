"""`make soak`: loads, puts, deletes, leases, cancellations and damaged files, and what they leave.

The store's memory is populated when it opens, and everything else that it keeps is bounded, so
after a warm-up resident memory, descriptors, mappings and shared memory stay as they are, and when
the load pauses nothing is pinned. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiered_kv import KvLayout, Namespace, NamespaceSpec, TieredStore

BLOCK_BYTES = (20_000, 65_536)
TOKENS = 4
CHAINS, DEPTH = 200, 6
TASKS = 6
SAMPLE_S = 5.0
WARM_UP = 1 / 6
"""Part of the run after which nothing may grow: five minutes of thirty."""
SLACK = 0.01


def content(key: bytes, size: int) -> bytes:
    """The bytes of a block: they follow from its key."""
    return random.Random(key).randbytes(size)


def resident_bytes() -> int:
    """Memory of this process that is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SHARED = ("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero")  # noqa: S108 - looked at only


def shm_bytes() -> int:
    """Bytes of shared memory, whatever it is made of, that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(" ", 5)
        if name.strip().startswith(SHARED):
            begin, end = place.split("-")
            total += int(end, 16) - int(begin, 16)
    return total


@dataclass
class Sample:
    """What the process holds while the load pauses."""

    at_s: float
    resident_bytes: int
    descriptors: int
    mappings: int
    shm_bytes: int
    leased_bytes: int
    held_bytes: int
    loading_bytes: int


def descriptors() -> int:
    """Open descriptors but those of segments, whose files are made when first needed."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(path.readlink().name)
    return sum(not name.startswith("segment-") for name in names)


def look(stats: dict[str, Any], at_s: float) -> Sample:
    """What this process holds now."""
    return Sample(
        at_s=at_s,
        resident_bytes=resident_bytes(),
        descriptors=descriptors(),
        mappings=len(Path("/proc/self/maps").read_text().splitlines()),
        shm_bytes=shm_bytes(),
        leased_bytes=stats["leased_bytes"],
        held_bytes=stats["held_bytes"],
        loading_bytes=stats["loading_bytes"],
    )


@dataclass
class Soak:
    """The load, and what it saw."""

    store: TieredStore
    spaces: list[Namespace]
    directory: Path
    rng: random.Random
    running: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    wrong: int = 0

    def count(self, name: str, n: int = 1) -> None:
        """Counts something that happened."""
        self.counts[name] = self.counts.get(name, 0) + n

    def chain(self) -> tuple[Namespace, bytes, list[bytes]]:
        """A namespace and the keys of a chain in it, packed and single."""
        ns = self.rng.choice(self.spaces)
        number, depth = self.rng.randrange(CHAINS), self.rng.randint(1, DEPTH)
        packed = ns.keys_from_tokens([number] * (depth * TOKENS))
        return ns, packed, [packed[at : at + 32] for at in range(0, len(packed), 32)]

    async def put(self) -> None:
        """Stores a chain."""
        ns, packed, keys = self.chain()
        blocks = [content(key, ns.block_bytes) for key in keys]
        report = await self.store.put(ns, packed, blocks, wait=0.1)
        self.count("stored", report.stored)

    async def lease(self) -> None:
        """Leases a chain, looks at it for a while, and compares."""
        ns, packed, keys = self.chain()
        with await self.store.get(ns, packed) as leases:
            await asyncio.sleep(self.rng.uniform(0, 0.01))
            for index, key in enumerate(keys):
                view = leases[index]
                if view is not None:
                    self.count("hits")
                    self.wrong += bytes(view) != content(key, ns.block_bytes)
                    view.release()

    async def copy(self) -> None:
        """Copies a chain out, often cancelled on the way."""
        ns, packed, keys = self.chain()
        buffers = [bytearray(ns.block_bytes) for _ in keys]
        call = asyncio.ensure_future(self.store.get_into(ns, packed, buffers))
        if self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.uniform(0, 0.002))
            call.cancel()
        try:
            report = await call
        except asyncio.CancelledError:
            self.count("cancelled")
            return
        for key, buffer, reason in zip(keys, buffers, report.items, strict=True):
            if reason is None:
                self.wrong += bytes(buffer) != content(key, ns.block_bytes)

    async def hold(self) -> None:
        """Holds a chain, and forgets the hold now and then."""
        ns, packed, _ = self.chain()
        held = self.store.hold(ns, packed, 0.5)
        await asyncio.sleep(self.rng.uniform(0, 0.01))
        if self.rng.random() < 0.5:
            held.release()

    async def delete(self) -> None:
        """Deletes a chain."""
        ns, packed, _ = self.chain()
        self.count("deleted", (await self.store.delete(ns, packed)).removed)

    async def damage(self) -> None:
        """Flips a byte of a segment, in its payloads or in its headers."""
        segments = sorted(self.directory.glob("segment-*.tkv"))
        if segments:
            path = self.rng.choice(segments)
            at = self.rng.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(at)
                old = file.read(1)
                file.seek(at)
                file.write(bytes([old[0] ^ 0x55]))
            self.count("damaged")

    async def work(self) -> None:
        """One task of the load."""
        steps = [self.put] * 4 + [self.lease] * 4 + [self.copy] * 4 + [self.hold, self.delete]
        while not self.stopped:
            await self.running.wait()
            step = self.damage if self.rng.random() < 0.002 else self.rng.choice(steps)
            await step()
            self.count("steps")

    async def sample(self, begin: float) -> Sample:
        """Pauses the load, waits until nothing is in flight, and looks."""
        self.running.clear()
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            stats = self.store.stats()
            if not (stats["calls"] or stats["leased_bytes"] or stats["holds"]):
                break
            await asyncio.sleep(0.05)
        gc.collect()
        sample = look(self.store.stats(), time.monotonic() - begin)
        self.running.set()
        return sample


async def run(minutes: float, seed: int, directory: Path) -> dict[str, Any]:
    """Runs the load and judges what the samples say."""
    config: dict[str, Any] = {"dram_capacity": "16MiB", "nvme_capacity": "64MiB"}
    # Full within seconds, so that filling it is no growth.
    config["event_log_entries"] = 1000
    async with TieredStore.open(nvme_paths=[directory], huge_pages=False, **config) as store:
        layouts = [KvLayout(TOKENS, size) for size in BLOCK_BYTES]
        spaces = [store.namespace(NamespaceSpec("soak", "w", "uint8", one)) for one in layouts]
        soak = Soak(store, spaces, directory, random.Random(seed))
        soak.running.set()
        tasks = [asyncio.create_task(soak.work()) for _ in range(TASKS)]
        begin = time.monotonic()
        samples: list[Sample] = []
        while time.monotonic() - begin < minutes * 60:
            await asyncio.sleep(min(SAMPLE_S, minutes * 60 / 12))
            samples.append(await soak.sample(begin))
            if sys.stderr.isatty():
                done = samples[-1].at_s / (minutes * 60)
                print(f"\r{done:.0%}, {soak.counts.get('steps', 0)} steps", end="", file=sys.stderr)
        soak.stopped = True
        await asyncio.gather(*tasks)
        faults = store.audit()["faults"]
        corrupt = store.stats()["counters"]["corrupt_nvme"]
    return judge(samples, minutes) | {
        "minutes": minutes,
        "wrong": soak.wrong,
        "audit_faults": len(faults),
        "corrupt_found": corrupt,
        "counts": soak.counts,
    }


def judge(samples: list[Sample], minutes: float) -> dict[str, Any]:
    """Compares the samples after the warm-up with each other."""
    later = [sample for sample in samples if sample.at_s > minutes * 60 * WARM_UP]
    third = max(1, len(later) // 3)
    first, last = later[:third], later[-third:]
    before = statistics.median(sample.resident_bytes for sample in first)
    after = statistics.median(sample.resident_bytes for sample in last)
    return {
        "samples": len(later),
        "resident_growth": after / before - 1,
        "resident_bytes": after,
        "descriptors": sorted({sample.descriptors for sample in later}),
        "mappings_growth": last[-1].mappings - first[0].mappings,
        "shm_growth": last[-1].shm_bytes - first[0].shm_bytes,
        "pinned_bytes": max(
            sample.leased_bytes + sample.held_bytes + sample.loading_bytes for sample in later
        ),
    }


def is_good(report: dict[str, Any]) -> bool:
    """Whether nothing grew, nothing stayed pinned and nothing was wrong."""
    grown = report["resident_growth"] > SLACK or report["shm_growth"] > 0
    leaked = len(report["descriptors"]) != 1 or report["pinned_bytes"] > 0
    return not (grown or leaked or report["wrong"] or report["audit_faults"])


def main() -> int:
    """Runs the soak."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="also write the line to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiered-kv-soak-") as name:
        report = asyncio.run(run(args.minutes, args.seed, Path(name) / "kv"))
    line = json.dumps(report)
    print(line)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(line + "\n")
    return 0 if is_good(report) else 1


if __name__ == "__main__":
    sys.exit(main())
