"""Leases: pinned as long as something views them, read-only whatever is done to them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import Namespace
from tiered_kv.blocking import BlockingStore


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with BlockingStore.open(**api.config()) as opened:
        yield opened


def _stored(store: BlockingStore, n: int = 2) -> tuple[Namespace, bytes, list[bytes]]:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(n))
    stored = api.blocks(n)
    assert store.put(ns, keys, stored).stored == n
    return ns, keys, stored


def _leased_blocks(store: BlockingStore) -> float:
    return float(store.stats()["leased_bytes"]) / api.BLOCK_BYTES


def test_a_view_keeps_its_block_and_no_other(store: BlockingStore) -> None:
    ns, keys, stored = _stored(store, 3)
    leases = store.get(ns, keys)
    assert _leased_blocks(store) == 3
    first, again = leases[0], leases[0]
    assert first is not None
    assert again is not None
    assert _leased_blocks(store) == 3, "views of a lease are not leases of their own"
    leases.release()
    assert _leased_blocks(store) == 1
    part = first[100:200]
    first.release()
    again.release()
    assert part == stored[0][100:200]
    assert _leased_blocks(store) == 1
    part.release()
    assert _leased_blocks(store) == 0


def test_released_leases_say_so(store: BlockingStore) -> None:
    ns, keys, _ = _stored(store)
    other = ns.keys_from_tokens(api.tokens(1, 100))
    with store.get(ns, keys + other) as leases:
        pass
    with pytest.raises(BufferError, match="released"):
        leases[0]
    with pytest.raises(BufferError, match="released"):
        leases.dlpack(1)
    assert leases[2] is None
    assert leases.hits == 2
    assert leases.reasons == [None, None, "absent"]
    leases.release()


def test_indices_are_checked(store: BlockingStore) -> None:
    ns, keys, stored = _stored(store)
    leases = store.get(ns, keys)
    assert api.contents(leases) == stored
    for index in (2, -3, 1 << 40):
        with pytest.raises(IndexError, match="batch of 2"):
            leases[index]


def test_beyond_the_cap_a_get_misses() -> None:
    with BlockingStore.open(**api.config(max_leased_fraction=0.02)) as store:
        ns, keys, _ = _stored(store, 8)
        leases = store.get(ns, keys)
        assert leases.hits == 4, "2 % of 1 MiB are four blocks"
        assert set(leases.reasons[4:]) == {"lease_cap"}
        leases.release()
        assert store.get(ns, keys[4 * 32 :]).hits == 4


def test_a_loaded_block_beyond_the_cap_counts_once(tmp_path: Path) -> None:
    """A block that was loaded and then not leased is a miss, not a hit as well."""
    config = api.config(tmp_path, max_leased_fraction=0.02)
    with BlockingStore.open(**config) as store:
        _, keys, _ = _stored(store, 8)
    with BlockingStore.open(**config) as store:
        leases = store.get(store.namespace(api.spec()), keys)
        assert leases.reasons.count("lease_cap") == 4
        stats = store.stats()
        assert (stats["nvme"]["hits"], stats["misses"]["lease_cap"]) == (4, 4)
        assert stats["nvme"]["hit_bytes"] == 4 * api.BLOCK_BYTES
        assert stats["requested"] == 8


def test_leased_blocks_are_not_evicted() -> None:
    with BlockingStore.open(**api.config(dram_capacity="64KiB")) as store:
        ns, keys, stored = _stored(store, 2)
        leases = store.get(ns, keys)
        statuses: set[str] = set()
        for number in range(1, 20):
            more = ns.keys_from_tokens(api.tokens(2, number * 100))
            statuses.update(store.put(ns, more, api.blocks(2, seed=number)).statuses)
        assert any(event["kind"] == "evicted" for event in store.events())
        assert "stored" in statuses
        assert api.contents(leases) == stored


def test_leases_outlive_the_store(tmp_path: Path) -> None:
    store = BlockingStore.open(**api.config(tmp_path))
    ns, keys, stored = _stored(store)
    leases = store.get(ns, keys)
    view = leases[1]
    assert view is not None
    store.close()
    del store, ns
    gc.collect()
    with BlockingStore.open(**api.config(tmp_path)) as other:
        assert other.lookup(other.namespace(api.spec()), keys).hits == 2
    assert view == stored[1]
    assert api.contents(leases) == stored
    del leases
    assert view == stored[1]


def test_views_are_read_only(store: BlockingStore) -> None:
    ns, keys, _ = _stored(store)
    view = store.get(ns, keys)[0]
    assert view is not None
    assert (view.readonly, view.format, view.shape) == (True, "B", (api.BLOCK_BYTES,))
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_char * api.BLOCK_BYTES).from_buffer(view)


WRITE = """
import ctypes, os, signal, sys
import api
from tiered_kv.blocking import BlockingStore
store = BlockingStore.open(**api.config(sys.argv[1]))
ns = store.namespace(api.spec())
keys = ns.keys_from_tokens(api.tokens(1))
stored = api.blocks(1)
store.put(ns, keys, stored)
store.flush()
leases = store.get(ns, keys)
address = {address}
child = os.fork()
if child == 0:
    ctypes.memset(address, 0xFF, 16)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status), status
assert os.WTERMSIG(status) == signal.SIGSEGV, status
assert leases[0] == stored[0]
assert store.get(ns, keys)[0] == stored[0]
print("unchanged", flush=True)
ctypes.memset(address, 0xFF, 16)
print("written")
"""

BY_NUMPY = "__import__('numpy').frombuffer(leases[0], 'u1').ctypes.data"
BY_DLPACK = "__import__('numpy').from_dlpack(leases.dlpack(0)).ctypes.data"
BY_CTYPES = "address_of(leases)"
ADDRESS_OF = """
class PyBuffer(ctypes.Structure):
    _fields_ = [("buf", ctypes.c_void_p), ("rest", ctypes.c_char * 256)]

def address_of(leases):
    buffer = PyBuffer()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int]
    get(leases[0], ctypes.byref(buffer), 0)
    return buffer.buf
"""


@pytest.mark.parametrize("way", [BY_CTYPES, BY_NUMPY, BY_DLPACK], ids=["ctypes", "numpy", "dlpack"])
def test_writing_through_a_lease_traps(tmp_path: Path, way: str) -> None:
    if way is not BY_CTYPES:
        pytest.importorskip("numpy")
    code = WRITE.format(address=way).replace("import api\n", "import api\n" + ADDRESS_OF)
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == -signal.SIGSEGV, run.stderr
    assert run.stdout == "unchanged\n", run.stderr
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        leases = store.get(ns, ns.keys_from_tokens(api.tokens(1)))
        assert api.contents(leases) == api.blocks(1)


def test_dlpack_without_a_version_is_refused_or_a_copy(store: BlockingStore) -> None:
    ns, keys, stored = _stored(store)
    lease = store.get(ns, keys).dlpack(0)
    assert lease is not None
    assert (lease.nbytes, lease.__dlpack_device__()) == (api.BLOCK_BYTES, (1, 0))
    exporter: Any = lease
    assert bytes(memoryview(exporter)) == stored[0]
    with pytest.raises(BufferError, match="copy=True"):
        lease.__dlpack__()
    with pytest.raises(BufferError, match="copy=True"):
        lease.__dlpack__(max_version=(0, 8))
    with pytest.raises(BufferError, match="stream"):
        lease.__dlpack__(stream=1, max_version=(1, 0))
    with pytest.raises(BufferError, match="dl_device"):
        lease.__dlpack__(dl_device=(2, 0), max_version=(1, 0))
    assert '"dltensor" at' in repr(lease.__dlpack__(copy=True))
    assert '"dltensor_versioned" at' in repr(lease.__dlpack__(max_version=(1, 0)))
    del lease, exporter
    gc.collect()
    assert _leased_blocks(store) == 0, "capsules that nobody took free their lease"


def test_dlpack_shares_or_copies(store: BlockingStore) -> None:
    numpy = pytest.importorskip("numpy", minversion="2.1")
    ns, keys, stored = _stored(store)
    lease = store.get(ns, keys).dlpack(1)
    assert lease is not None
    exporter: Any = lease
    shared = numpy.from_dlpack(exporter)
    assert not shared.flags.writeable
    assert shared.tobytes() == stored[1]
    assert shared.ctypes.data == numpy.frombuffer(exporter, "u1").ctypes.data
    copied = numpy.from_dlpack(exporter, copy=True)
    assert copied.flags.writeable
    copied[:] = 0
    assert shared.tobytes() == stored[1]
    del lease, exporter
    gc.collect()
    assert _leased_blocks(store) == 1
    del shared
    gc.collect()
    assert _leased_blocks(store) == 0
