"""A short soak: pinned bytes return to zero and no descriptor is lost (failure case 16)."""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path

from soak.__main__ import is_good, run, shm_bytes

MINUTES = 0.1


def test_nothing_stays_pinned_open_or_wrong_under_faults_and_cancellations(tmp_path: Path) -> None:
    report = asyncio.run(run(MINUTES, 3, tmp_path / "kv"))
    assert report["counts"]["cancelled"] > 0
    assert report["counts"]["hits"] > 0
    assert report["pinned_bytes"] == 0
    # Growth is judged over a long run only: the allocator warms up in this one.
    assert is_good(report | {"resident_growth": 0.0}), report


def test_what_grows_is_noticed(tmp_path: Path) -> None:
    report = asyncio.run(run(0.02, 3, tmp_path / "kv")) | {"resident_growth": 0.0}
    assert is_good(report)
    for fault in ({"resident_growth": 0.02}, {"descriptors": [9, 10]}, {"pinned_bytes": 1}):
        assert not is_good(report | fault)


def test_shared_memory_is_counted_of_this_process_alone(tmp_path: Path) -> None:
    before = shm_bytes()
    file = os.memfd_create("not of a store")
    try:
        os.ftruncate(file, 1 << 20)
        assert shm_bytes() == before
        with mmap.mmap(file, 1 << 20):
            assert shm_bytes() == before + (1 << 20)
    finally:
        os.close(file)
    with (tmp_path / "on a disk").open("w+b") as on_disk:
        on_disk.truncate(1 << 20)
        with mmap.mmap(on_disk.fileno(), 1 << 20):
            assert shm_bytes() == before
