"""Opening a store of a million blocks: after a clean close, and after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiered_kv.blocking import TieredStore

from ._rows import Row, absolute, progress
from .copies import namespace

BLOCKS = 1_000_000
BLOCK_BYTES = 4096
BATCH = 4096


def config(directory: Path) -> dict[str, Any]:
    """A store whose drive holds all blocks."""
    return {
        "dram_capacity": "256MiB",
        "nvme_paths": [directory],
        "nvme_capacity": BLOCKS * (BLOCK_BYTES + 512) * 5 // 4,
        "dirty_high_fraction": 0.9,
    }


def fill(directory: Path) -> None:
    """Stores the blocks and ends without closing."""
    store = TieredStore.open(**config(directory))
    ns = namespace(store, BLOCK_BYTES)
    data = os.urandom(BATCH * BLOCK_BYTES)
    for at in range(0, BLOCKS, BATCH):
        n = min(BATCH, BLOCKS - at)
        packed = b"".join(number.to_bytes(8, "little") for number in range(at, at + n))
        keys = ns.keys_from_opaque(packed, 8)
        report = store.put(ns, keys, data[: n * BLOCK_BYTES], chain=False, wait=30.0)
        assert report.stored == n, set(report.statuses)
    assert store.flush(120.0).all_durable
    os._exit(0)


def rows(rounds: int, where: Path | None = None) -> list[Row]:
    """Seconds of recovery; the memory's own population is not in it."""
    times: dict[str, list[float]] = {"clean": [], "crash": []}
    with tempfile.TemporaryDirectory(prefix="tiered-kv-bench-", dir=where) as name:
        directory = Path(name) / "kv"
        progress(f"a store of {BLOCKS} blocks")
        command = [sys.executable, "-m", "limits.opening", str(directory)]
        subprocess.run(command, check=True, cwd=Path(__file__).parent.parent)
        for number in range(2 * rounds):
            progress(f"opening {number + 1} of {2 * rounds}")
            # Killed at first and after every clean opening.
            end = "exit" if number % 2 else "close"
            done = subprocess.run(
                [*command, end],
                check=True,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parent.parent,
            )
            blocks, seconds = done.stdout.split()
            assert int(blocks) == BLOCKS, blocks
            times["clean" if number % 2 else "crash"].append(float(seconds))
    return [
        absolute(f"open {BLOCKS} blocks after a clean close", "s", times["clean"], 1.0),
        absolute(f"open {BLOCKS} blocks after a crash", "s", times["crash"], 10.0),
    ]


def reopen(directory: Path, end: str) -> None:
    """Opens the store, says what it found and how long that took, and ends as told."""
    store = TieredStore.open(**config(directory))
    times = store.open_times
    seconds = times["total_s"] - times["populate_s"]
    print(store.stats()["nvme"]["blocks"], seconds, flush=True)
    if end == "exit":
        os._exit(0)
    store.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        reopen(Path(sys.argv[1]), sys.argv[2])
    else:
        fill(Path(sys.argv[1]))
