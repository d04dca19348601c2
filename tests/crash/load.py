"""The process that is killed: threads that put, read, flush and delete, and log what they did.

Every line of the log is one write to a file, so that what was logged outlives the process. A line
is written before what it announces, or after what it acknowledges.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tiered_kv import KvLayout, Namespace, NamespaceSpec
from tiered_kv.blocking import TieredStore

TOKENS = 4
BLOCK_BYTES = (20_000, 65_536)
"""Of the blocks of each namespace: two size classes, which take segments from each other."""
CHAINS, DEPTH = 60, 6
DRIVE_BYTES = 8 << 20
KEY_BYTES = 32
HEAD_BYTES = 16


def content(key: bytes, version: int, size: int) -> bytes:
    """The bytes of a block: what they are of stands in front, the rest follows from it."""
    head = version.to_bytes(8, "little") + key[:8]
    return head + random.Random(head).randbytes(size - HEAD_BYTES)


def version_of(block: bytes) -> int:
    """When the put of these bytes began, in ns since 1970."""
    return int.from_bytes(block[:8], "little")


def open_store(home: Path, backend: str, drives: int) -> TieredStore:
    """Opens the store of a harness directory."""
    return TieredStore.open(
        dram_capacity="4MiB",
        nvme_paths=[home / f"drive{number}" for number in range(drives)],
        nvme_capacity=DRIVE_BYTES,
        huge_pages=False,
        io_backend=backend,
        event_file=home / "events.jsonl",
        put_timeout_s=5.0,
    )


def namespaces(store: TieredStore) -> list[Namespace]:
    """The harness's namespaces, one for each size of block."""
    layouts = [KvLayout(TOKENS, size) for size in BLOCK_BYTES]
    return [store.namespace(NamespaceSpec("crash", "w", "uint8", layout)) for layout in layouts]


def chain_keys(ns: Namespace, chain: int, depth: int) -> bytes:
    """Packed keys of the first `depth` blocks of a chain; half of them are its neighbour's."""
    shared = [chain // 2] * (DEPTH // 2 * TOKENS)
    return ns.keys_from_tokens((shared + [1000 + chain] * (DEPTH * TOKENS))[: depth * TOKENS])


def split(packed: bytes) -> list[bytes]:
    """Packed keys as a list."""
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def allocated_bytes(home: Path) -> int:
    """Bytes that the drives' files take up on the file system."""
    files = (path for path in home.glob("drive*/*") if path.is_file())
    return sum(path.stat().st_blocks * 512 for path in files)


class Load:
    """The threads of the load, which run until the process is killed or told to stop."""

    def __init__(self, home: Path, backend: str, drives: int, seed: int) -> None:
        self.home = home
        self.drives = drives
        self.seed = seed
        self.log_file = os.open(home / "work.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.store = open_store(home, backend, drives)
        self.spaces = namespaces(self.store)
        self.stop = threading.Event()

    def log(self, do: str, **fields: Any) -> None:
        """Appends one line."""
        line = json.dumps({"do": do, "t": time.time_ns(), **fields}) + "\n"
        os.write(self.log_file, line.encode())

    def put(self, rng: random.Random) -> tuple[int, list[str], int]:
        """Puts the first blocks of a chain; returns which of them this put stored."""
        space = rng.randrange(len(self.spaces))
        ns = self.spaces[space]
        keys = chain_keys(ns, rng.randrange(CHAINS), rng.randint(1, DEPTH))
        version = time.time_ns()
        blocks = [content(key, version, BLOCK_BYTES[space]) for key in split(keys)]
        report = self.store.put(ns, keys, blocks, wait=0.2)
        done = zip(split(keys), report.statuses, strict=True)
        stored = [key.hex() for key, status in done if status == "stored"]
        self.log("stored", space=space, keys=stored, version=version)
        return space, stored, version

    def run_putter(self, number: int) -> None:
        """Puts and flushes; what a flush said is durable is committed."""
        rng = random.Random(self.seed * 31 + number)
        while not self.stop.is_set():
            puts = [self.put(rng) for _ in range(rng.randint(1, 4))]
            if not self.store.flush(10.0).all_durable:
                continue
            for space, keys, version in puts:
                self.log("durable", space=space, keys=keys, version=version)
            allocated = allocated_bytes(self.home)
            if allocated > self.drives * DRIVE_BYTES:
                self.log("over", allocated=allocated)

    def run_reader(self) -> None:
        """Reads chains, so that blocks are onboarded and memory is under pressure."""
        rng = random.Random(self.seed * 31 + 77)
        while not self.stop.is_set():
            space = rng.randrange(len(self.spaces))
            keys = chain_keys(self.spaces[space], rng.randrange(CHAINS), DEPTH)
            with self.store.get(self.spaces[space], keys) as leases:
                for index, key in enumerate(split(keys)):
                    view = leases[index]
                    if view is None:
                        continue
                    block = bytes(view)
                    if block != content(key, version_of(block), BLOCK_BYTES[space]):
                        self.log("wrong", space=space, key=key.hex())

    def run_deleter(self) -> None:
        """Deletes single keys and now and then a whole namespace."""
        rng = random.Random(self.seed * 31 + 99)
        while not self.stop.wait(rng.uniform(0.001, 0.02)):
            space = rng.randrange(len(self.spaces))
            ns = self.spaces[space]
            begun = time.time_ns()
            if rng.random() < 0.02:
                self.log("delete", space=space, keys=None, begun=begun)
                durable = self.store.delete_namespace(ns).durable
                keys = None
            else:
                chosen = split(chain_keys(ns, rng.randrange(CHAINS), DEPTH))
                packed = b"".join(rng.sample(chosen, rng.randint(1, 2)))
                keys = [key.hex() for key in split(packed)]
                self.log("delete", space=space, keys=keys, begun=begun)
                durable = self.store.delete(ns, packed).durable
            self.log("deleted", space=space, keys=keys, begun=begun, durable=durable)

    def run(self) -> None:
        """Runs until the process is killed, or interrupted and then closed."""
        threads = [threading.Thread(target=self.run_putter, args=(n,)) for n in range(2)]
        threads += [threading.Thread(target=self.run_reader)]
        threads += [threading.Thread(target=self.run_deleter)]
        try:
            for thread in threads:
                thread.start()
            self.log("opened")
            # Not for good: an interrupt just before a sleep begins does not end it. And not on the
            # event: an interrupt within its wait may leave its lock taken, for `set` to wait for.
            while True:
                time.sleep(0.1)
        except KeyboardInterrupt:
            self.stop.set()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            self.store.close()
            self.log("closed")


def main() -> None:
    """Runs the load: HOME BACKEND DRIVES SEED."""
    # Where it hangs, it is aborted, and says where all of its threads are.
    faulthandler.enable()
    home, backend, drives, seed = sys.argv[1:]
    Load(Path(home), backend, int(drives), int(seed)).run()


if __name__ == "__main__":
    main()
