"""The drive: loads and stores, checksums and group commit included, beside fio."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tiered_kv import _core
from tiered_kv.blocking import TieredStore

from ._rows import Row, compare, interleave, progress
from .copies import gbps, namespace, noise

VOLUME = 512 << 20
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
GROUP_BYTES = 64 << 20
"""What the store commits together: fio syncs as often."""
CALL_BYTES = 16 << 20
"""Bytes of one put."""
READ_DEPTH, WRITE_DEPTH, WRITE_BYTES = 128, 64, 32 << 20
"""Operations, and bytes of writes, that the store's ring hands to the kernel at once."""
READ_BYTES = 256 << 20
"""Of reads no more: fio has memory of its own for each."""
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


@contextlib.contextmanager
def huge_pages(count: int = 160) -> Iterator[bool]:
    """Reserves huge pages for fio, where that is allowed, and gives them back."""
    try:
        before = HUGE_PAGES.read_text()
        HUGE_PAGES.write_text(str(int(before) + count))
        enough = int(HUGE_PAGES.read_text()) >= int(before) + count
    except OSError:
        yield False
        return
    try:
        yield enough
    finally:
        HUGE_PAGES.write_text(before)


class Fio:
    """fio on one preallocated file that was written once.

    Writes through a ring are told one by one in a log, each group followed by its sync: where
    buffers are registered, fio 3.33 hands the kernel syncs that it refuses, and goes on; where they
    are not, `fdatasync=` hands it some twenty for one.
    """

    def __init__(self, directory: Path) -> None:
        self.file = directory / "fio.bin"
        self.log = directory / "fio.log"
        self.run("write", 1 << 20, "io_uring", synced=False)

    def write_log(self, block_bytes: int) -> None:
        """Tells each write and each sync, for fio to replay."""
        lines = ["fio version 2 iolog", f"{self.file} add", f"{self.file} open"]
        for at in range(0, VOLUME, block_bytes):
            lines.append(f"{self.file} write {at} {block_bytes}")
            if (at + block_bytes) % GROUP_BYTES == 0:
                lines.append(f"{self.file} datasync 0 0")
        self.log.write_text("\n".join([*lines, f"{self.file} close"]) + "\n")

    def run(
        self, do: str, block_bytes: int, engine: str, threads: int = 1, synced: bool = True
    ) -> float:
        """Reads or writes the whole file; GB/s."""
        ring = engine == "io_uring"
        with huge_pages() as huge:
            command = ["fio", "--name=x", f"--filename={self.file}", f"--rw={do}", "--direct=1"]
            command += [
                f"--bs={block_bytes}",
                f"--size={VOLUME // threads}",
                "--output-format=json",
            ]
            command += ["--fallocate=posix", "--allow_file_create=1", "--group_reporting"]
            command += [f"--ioengine={engine}", f"--iomem={'mmaphuge' if huge else 'mmap'}"]
            command += [f"--numjobs={threads}", f"--offset_increment={VOLUME // threads}"]
            if ring:
                writes = min(WRITE_DEPTH, WRITE_BYTES // block_bytes)
                reads = min(READ_DEPTH, READ_BYTES // block_bytes)
                command += [f"--iodepth={writes if do == 'write' else reads}"]
            if ring and do == "write" and synced:
                self.write_log(block_bytes)
                command += [f"--read_iolog={self.log}"]
            elif ring:
                command += ["--fixedbufs=1", "--registerfiles=1"]
            elif do == "write":
                command += [f"--fdatasync={GROUP_BYTES // block_bytes}", "--end_fsync=1"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        job = json.loads(done.stdout)["jobs"][0]
        return gbps(job["job_runtime"] / 1e3 / threads, job[do]["io_bytes"])


class Plain:
    """The blocking calls alone, by as many threads, between fio's file and as much memory as ours.

    fio's threads read into one buffer each and write out of it, which stays in the processor's
    cache: where a drive is emulated, and its transfers are copies, that alone makes them faster.
    """

    def __init__(self, fio: Fio) -> None:
        self.file = fio.file
        self.memory = mmap.mmap(-1, VOLUME)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory.write(noise(VOLUME))

    def run(self, do: str, block_bytes: int) -> float:
        """Reads or writes the whole file, in order; GB/s."""
        file = os.open(self.file, os.O_RDWR | os.O_DIRECT)
        places = iter(range(0, VOLUME, block_bytes))
        # Threads take the next place in turn, as the store's do.
        taking = threading.Lock()

        def transfer() -> None:
            with memoryview(self.memory) as whole:
                while True:
                    with taking:
                        at = next(places, None)
                    if at is None:
                        return
                    with whole[at : at + block_bytes] as part:
                        if do == "read":
                            done = os.preadv(file, [part], at)
                        else:
                            done = os.pwritev(file, [part], at)
                            if (at + block_bytes) % GROUP_BYTES == 0:
                                os.fdatasync(file)
                    assert done == block_bytes

        threads = [threading.Thread(target=transfer) for _ in range(2)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        os.close(file)
        return gbps(seconds, VOLUME)


class Drive:
    """A store on a directory of its own, opened anew for each load."""

    def __init__(self, directory: Path, block_bytes: int, backend: str) -> None:
        self.config: dict[str, Any] = {
            "dram_capacity": VOLUME * 3 // 2,
            "nvme_paths": [directory],
            "nvme_capacity": VOLUME * 2,
            "max_leased_fraction": 1.0,
            "dirty_high_fraction": 1.0,
            "io_backend": backend,
            "load_threads": 2,
            "store_threads": 2,
        }
        self.block_bytes = block_bytes
        self.round = 0
        self.source = noise(VOLUME)

    def keys(self, store: TieredStore) -> tuple[Any, bytes]:
        """The namespace and the keys of this round."""
        ns = namespace(store, self.block_bytes)
        n = VOLUME // self.block_bytes
        return ns, ns.keys_from_tokens(range(self.round * n, self.round * n + n))

    def store(self) -> float:
        """Puts the volume and waits until it is durable; GB/s."""
        self.round += 1
        with TieredStore.open(**self.config) as store:
            ns, keys = self.keys(store)
            source = memoryview(self.source)
            n = CALL_BYTES // self.block_bytes
            stored = 0
            begin = time.perf_counter()
            for at in range(0, VOLUME // self.block_bytes, n):
                some = source[at * self.block_bytes : (at + n) * self.block_bytes]
                stored += store.put(ns, keys[at * 32 : (at + n) * 32], some, chain=False).stored
            flushed = store.flush()
            seconds = time.perf_counter() - begin
            assert stored == VOLUME // self.block_bytes
            assert flushed.all_durable
        return gbps(seconds, VOLUME)

    def load(self) -> float:
        """Leases the volume, all of it from the drive; GB/s."""
        with TieredStore.open(**self.config) as store:
            ns, keys = self.keys(store)
            begin = time.perf_counter()
            with store.get(ns, keys) as leases:
                seconds = time.perf_counter() - begin
                assert leases.hits == VOLUME // self.block_bytes, set(leases.reasons)
                assert set(leases.sources) == {3}
        return gbps(seconds, VOLUME)


def of_backend(
    home: Path, fio: Fio, plain: Plain, label: str, backend: str, rounds: int
) -> list[Row]:
    """Loads and stores of one size of block with one backend."""
    progress(f"{backend}, blocks of {label}")
    size = SIZES[label]
    engine, threads = ("io_uring", 1) if backend == "io_uring" else ("psync", 2)
    beside = f"fio {engine}" + (f", {threads} threads" if threads > 1 else "")
    directory = home / f"{backend}-{size}"
    drive = Drive(directory, size, backend)
    first = drive.store()
    for _ in range(3):
        drive.store()
    limit = partial(fio.run, block_bytes=size, engine=engine, threads=threads)
    out = []
    for do, name, measure in (("write", "store", drive.store), ("read", "load", drive.load)):
        pairs = interleave(measure, partial(limit, do), rounds)
        title = f"NVMe {name}, {backend}, {label}"
        out.append(compare(title, "GB/s", beside, pairs, least=0.9))
        if backend == "blocking":
            pairs = interleave(measure, partial(plain.run, do, size), rounds)
            beside_calls = f"p{do}, 2 threads, as much memory"
            out.append(compare(f"{title}, plain calls", "GB/s", beside_calls, pairs))
    if backend == "io_uring":
        unsynced = partial(limit, "write", synced=False)
        pairs = interleave(drive.store, unsynced, rounds)
        title = f"NVMe store, {backend}, {label}, fio without a sync"
        out.append(compare(title, "GB/s", f"{beside}, registered buffers", pairs))
    title = f"NVMe store, {backend}, {label}, first write"
    once = ([first], [out[0].reference_value])
    out.append(compare(title, "GB/s", f"{beside}, overwriting", once))
    shutil.rmtree(directory)
    return out


def rows(rounds: int, where: Path | None = None, only: str = "") -> list[Row]:
    """Loads and stores with both backends, for each size of block whose rows' names have `only`."""
    if shutil.which("fio") is None:
        raise SystemExit("bench: fio is not installed: apt-get install fio, or leave out `drive`")
    backends = ["io_uring", "blocking"] if _core.probe_io_uring()[0] else ["blocking"]
    with tempfile.TemporaryDirectory(prefix="tiered-kv-bench-", dir=where) as name:
        home = Path(name)
        fio = Fio(home)
        plain = Plain(fio)
        return [
            row
            for label in SIZES
            for backend in backends
            if only in f"{backend}, {label}"
            for row in of_backend(home, fio, plain, label, backend, rounds)
        ]
