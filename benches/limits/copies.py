"""Memory: checked copies in and out beside memcpy, one thread each."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

from tiered_kv import KvLayout, Namespace, NamespaceSpec
from tiered_kv._base import StoreBase
from tiered_kv.blocking import TieredStore

from ._rows import Row, compare, interleave, progress

VOLUME = 256 << 20
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}


def namespace(store: StoreBase, block_bytes: int) -> Namespace:
    """A namespace whose blocks have this size."""
    layout = KvLayout(tokens_per_block=1, block_bytes=block_bytes)
    return store.namespace(NamespaceSpec("bench", "w", "uint8", layout))


def gbps(seconds: float, volume: int = VOLUME) -> float:
    """Gigabytes (10^9) a second."""
    return volume / seconds / 1e9


def noise(volume: int) -> mmap.mmap:
    """Memory at a page's begin, all of it touched."""
    memory = mmap.mmap(-1, volume)
    for at in range(0, volume, 1 << 20):
        memory[at : at + (1 << 20)] = os.urandom(1 << 20)
    return memory


def address(memory: mmap.mmap) -> int:
    """Where it begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Memory:
    """A store in memory, a source and a target of the same volume."""

    def __init__(self, store: TieredStore, block_bytes: int) -> None:
        self.store = store
        self.block_bytes = block_bytes
        self.blocks = VOLUME // block_bytes
        self.ns = namespace(store, block_bytes)
        self.keys = self.ns.keys_from_tokens(range(self.blocks))
        self.source = noise(VOLUME)
        self.to = noise(VOLUME)

    def put(self) -> float:
        """Stores every block anew; GB/s."""
        self.store.delete_namespace(self.ns)
        begin = time.perf_counter()
        report = self.store.put(self.ns, self.keys, self.source)
        seconds = time.perf_counter() - begin
        assert report.stored == self.blocks, set(report.statuses)
        return gbps(seconds)

    def get_into(self) -> float:
        """Copies every block out; GB/s."""
        begin = time.perf_counter()
        report = self.store.get_into(self.ns, self.keys, self.to)
        seconds = time.perf_counter() - begin
        assert report.hits == self.blocks
        return gbps(seconds)

    def memcpy(self) -> float:
        """Copies block by block with the C library; GB/s."""
        to, source = address(self.to), address(self.source)
        begin = time.perf_counter()
        for at in range(0, VOLUME, self.block_bytes):
            ctypes.memmove(to + at, source + at, self.block_bytes)
        return gbps(time.perf_counter() - begin)


def rows(rounds: int) -> list[Row]:
    """`get_into` and `put` of a store in memory, for each size of block."""
    out = []
    for label, size in SIZES.items():
        progress(f"copies of {label}")
        with TieredStore.open(dram_capacity=VOLUME * 5 // 4, copy_threads=1) as store:
            memory = Memory(store, size)
            bar = 0.95 if size >= 1 << 20 else None
            for name, measure in (("put", memory.put), ("get_into", memory.get_into)):
                pairs = interleave(measure, memory.memcpy, rounds)
                title = f"DRAM {name}, checked, {label}"
                out.append(compare(title, "GB/s", "memcpy", pairs, least=bar))
            memory.get_into()
            assert memory.to[:] == memory.source[:]
    return out
