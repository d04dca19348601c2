"""Hosts that lack something, or lose it under load, on the real thing.

What a host lacks costs speed and is said in `health()`; what it loses is misses. Where this machine
cannot stage a host (no root, no mounts), the test says so and is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import _core
from tiered_kv.blocking import BlockingStore
from tiered_kv.config import resolve

HERE = Path(__file__).parent
MIB = 1 << 20
BLOCKS = 40
CONTENTS = api.blocks(BLOCKS)
SHM = Path("/dev/shm")  # noqa: S108 - what is looked at is whether anything is left there

# Stores, opens anew, reads back; prints what health says.
CHILD = """
import json, sys
import api
from tiered_kv.blocking import BlockingStore

fields = api.config(sys.argv[1])
contents = api.blocks(16)
with BlockingStore.open(**fields) as store:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(16))
    assert store.put(ns, keys, contents).throttled == 0
    assert store.flush().all_durable
with BlockingStore.open(**fields) as store:
    ns = store.namespace(api.spec())
    with store.get(ns, keys) as leases:
        assert api.contents(leases) == contents
    assert store.stats()["nvme"]["hits"] == 16
    print(json.dumps(store.health()))
"""


def child(directory: Path, *before: str) -> dict[str, Any]:
    """Health of a store in a process of its own, begun by `before`."""
    command = [*before, "-c", CHILD, str(directory)]
    env = os.environ | {"PYTHONPATH": str(HERE)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    assert told["drives"][0]["state"] == "working"
    assert told["warnings"] == []
    return told


def call(*command: str) -> bool:
    """Runs a command of the system; whether it could."""
    try:
        run = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return run.returncode == 0


@contextlib.contextmanager
def mounted(point: Path, *args: str) -> Iterator[Path]:
    point.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or not call("mount", *args, str(point)):
        pytest.skip(f"cannot mount {' '.join(args)} here")
    try:
        yield point
    finally:
        call("umount", "--lazy", str(point))


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB on a loop device."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(24 * MIB)
    if not call("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)):
        pytest.skip("no mkfs.ext4 here")
    with mounted(tmp_path / "mount", "-o", "loop,errors=remount-ro", str(image)) as point:
        yield point


def config(directory: Path, **fields: Any) -> dict[str, Any]:
    """A drive of which host memory holds a part; it is tried again soon after faults."""
    small = {"dram_capacity": "256KiB", "segment_bytes": "256KiB", "drive_retry_s": 0.1}
    return api.config(directory) | small | fields


def put(store: BlockingStore, chain: int = 0) -> bytes:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(BLOCKS, chain * 10_000))
    for at in range(0, BLOCKS, 4):
        store.put(ns, keys[32 * at : 32 * (at + 4)], CONTENTS[at : at + 4], wait=0.2)
    return keys


def served(store: BlockingStore, keys: bytes) -> int:
    """How many blocks are there; each is what was stored."""
    ns = store.namespace(api.spec())
    hits = 0
    for key, content in zip(api.split(keys), CONTENTS, strict=True):
        out = bytearray(api.BLOCK_BYTES)
        if store.get_into(ns, key, out).items[0] is None:
            assert bytes(out) == content, "wrong bytes were served"
            hits += 1
    return hits


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"never came: {what}")


def usage_is_exact(store: BlockingStore) -> None:
    audit = store.audit()
    assert audit["faults"] == []
    assert audit["nvme_used_bytes"] == audit["nvme_block_bytes"]
    assert audit["nvme_used_bytes"] == store.stats()["nvme"]["used_bytes"]


def allocated(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


# Case 19: what a host lacks.


def test_case_19_without_io_uring(tmp_path: Path) -> None:
    health = child(tmp_path / "kv", sys.executable, str(HERE / "seccomp.py"))
    assert health["backend"] == "blocking"
    assert "seccomp" in health["backend_reason"]


def test_case_19_on_tmpfs(tmp_path: Path) -> None:
    with mounted(tmp_path / "mount", "-t", "tmpfs", "-o", "size=16m", "none") as point:
        health = child(point / "kv", sys.executable)
        assert not health["direct"] or "tmpfs" in health["direct_reason"]
        assert health["direct_reason"]


def test_case_19_on_overlayfs(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    with mounted(tmp_path / "mount", "-t", "overlay", "-o", options, "overlay") as point:
        health = child(point / "kv", sys.executable)
        assert health["direct_reason"]


@pytest.mark.skipif(not _core.probe_io_uring()[0], reason="nothing is registered without io_uring")
def test_case_19_with_64_kib_of_locked_memory(tmp_path: Path) -> None:
    drop = ["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"]
    limit = ["prlimit", "--memlock=65536:65536"]
    if not call(*drop, *limit, "true"):
        pytest.skip("cannot drop CAP_IPC_LOCK here")
    health = child(tmp_path / "kv", *drop, *limit, sys.executable)
    # What rings of the same user take counts too, for a moment also of those that have ended: where
    # it leaves no room for a ring, the backend is another one.
    reason = health["backend_reason"]
    assert "not registered" in reason or "raise the limit of locked memory" in reason, "said"


# Case 13: a full disk.


def test_case_13_a_full_disk_loses_nothing_and_heals(ext4: Path) -> None:
    directory, ballast = ext4 / "kv", ext4 / "ballast"
    with BlockingStore.open(**config(directory)) as store:
        first = put(store)
        assert store.flush().all_durable
        ballast.write_bytes(bytes(shutil.disk_usage(ext4).free - 64 * 1024))
        for chain in range(1, 9):
            last = put(store, chain)
        report = store.flush(5.0)
        assert report.pending == 0, "nothing waits for ever"
        assert store.stats()["counters"]["segment_faults"] > 0, "the disk was full"
        served(store, last)
        served(store, first)
        usage_is_exact(store)
    with BlockingStore.open(**config(directory)) as store:
        assert served(store, first) + served(store, last) > 0, "a full disk can be read"
        usage_is_exact(store)
        ballast.unlink()

        def writes() -> bool:
            ns = store.namespace(api.spec())
            keys = ns.keys_from_tokens(api.tokens(4, 900_000))
            store.delete(ns, keys)
            return store.put(ns, keys, CONTENTS[:4]).stored == 4 and store.flush().all_durable

        wait_until("writing goes on", writes)
        for chain in range(20, 30):
            put(store, chain)
        assert store.flush().all_durable
        assert store.health()["drives"][0]["state"] == "working"
        usage_is_exact(store)
        assert allocated(directory) <= 2 * MIB, "the quota holds"


# Case 14: what a host takes away.


def test_case_14_a_file_system_that_turns_read_only_under_load(ext4: Path) -> None:
    with BlockingStore.open(**config(ext4 / "kv")) as store:
        first = put(store)
        assert store.flush().all_durable
        if not call("mount", "-o", "remount,abort", str(ext4)):
            pytest.skip("this file system cannot be made read-only under load")
        for chain in range(1, 20):
            last = put(store, chain)
        store.flush(5.0)
        assert served(store, last) > 0, "memory goes on"
        health = store.health()
        assert health["drives"][0]["state"] != "working"
        assert "the last error was" in health["drives"][0]["fault"]
        served(store, first)
        usage_is_exact(store)


@pytest.mark.parametrize("backend", ["auto", "blocking"])
def test_case_14_a_directory_deleted_under_load(tmp_path: Path, backend: str) -> None:
    directory = tmp_path / "kv"
    with BlockingStore.open(**config(directory, io_backend=backend)) as store:
        first = put(store)
        failed: list[BaseException] = []
        stop = threading.Event()

        def load(chain: int) -> None:
            try:
                while not stop.is_set():
                    served(store, put(store, chain))
                    chain += 10
            except BaseException as error:  # noqa: BLE001 - handed to the test
                failed.append(error)

        workers = [threading.Thread(target=load, args=(chain,)) for chain in (1, 2)]
        for worker in workers:
            worker.start()
        wait_until("load", lambda: store.stats()["counters"]["put_stored"] > 200)
        shutil.rmtree(directory)
        seen = store.stats()["counters"]["put_stored"]
        wait_until("more load", lambda: store.stats()["counters"]["put_stored"] > seen + 400)
        stop.set()
        for worker in workers:
            worker.join()
        assert failed == []
        served(store, first)
        usage_is_exact(store)
    with BlockingStore.open(**config(directory)) as store:
        assert served(store, first) == 0
        put(store)
        assert store.flush().all_durable


def test_case_14_a_file_cut_short_under_load(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    with BlockingStore.open(**config(directory)) as store:
        keys = put(store)
        assert store.flush().all_durable
        for path in directory.glob("segment-*.tkv"):
            os.truncate(path, 0)
        there = served(store, keys)
        assert there < BLOCKS
        assert store.stats()["counters"]["corrupt_nvme"] == BLOCKS - there
        assert store.health()["drives"][0]["state"] == "working", "the file is bad, not the drive"
        # The copies of what memory still served are bad too: a scrub finds them.
        assert store.scrub().corrupt > 0
        put(store)
        assert store.flush().all_durable
        assert served(store, keys) == BLOCKS, "healed"
        usage_is_exact(store)


# Case 15: a device that does not answer.


def test_case_15_a_frozen_file_system_stalls_writing_only(ext4: Path) -> None:
    with BlockingStore.open(**config(ext4 / "kv", close_timeout_s=1.0)) as store:
        first = put(store)
        assert store.flush().all_durable
        if not call("fsfreeze", "--freeze", str(ext4)):
            pytest.skip("this file system cannot be frozen")
        try:
            second = store.namespace(api.spec()).keys_from_tokens(api.tokens(4, 50_000))
            ns = store.namespace(api.spec())
            assert store.put(ns, second, CONTENTS[:4]).stored == 4
            assert store.flush(0.2).pending == 4, "the wait has a bound, and says what waits"
            assert all(store.contains(ns, key) for key in api.split(second))
            assert served(store, first) == BLOCKS, "case 36: loads go past what is stuck"
        finally:
            assert call("fsfreeze", "--unfreeze", str(ext4))
        assert store.flush(60.0).all_durable
        usage_is_exact(store)


@contextlib.contextmanager
def opened(gate: Any) -> Iterator[None]:
    """Opens the gate in the end, without which nothing closes."""
    try:
        yield
    finally:
        gate.open()


@pytest.mark.skipif(not hasattr(_core, "StallGate"), reason="a release build has no gate")
def test_case_15_the_circuit_opens_and_closes_and_health_says_why(tmp_path: Path) -> None:
    fields = config(tmp_path / "kv", dram_capacity="1MiB", drive_stall_s=0.1)
    with BlockingStore.open(**fields) as store:
        keys = put(store)
        assert store.flush().all_durable
    gate = _core.StallGate()
    with BlockingStore(gate.open_store(resolve(None, fields))) as store, opened(gate):
        ns = store.namespace(api.spec())
        gate.shut()
        out = bytearray(BLOCKS * api.BLOCK_BYTES)
        report = store.get_into(ns, keys, out, timeout=600.0)
        assert set(report.items) == {"circuit_open"}, "long before its deadline"
        out[:] = b"\xc5" * len(out)
        drive = store.health()["drives"][0]
        assert drive["state"] == "circuit_open"
        assert "no read was answered for 0.1 s" in drive["fault"]
        found = store.lookup(ns, keys)
        assert (found.hits, set(store.lookup(ns, keys, mode="each").tiers)) == (0, {253})
        first = store.explain(ns, keys)["keys"][0]
        assert (first["residency"], first["cause"]) == ("circuit_open", "circuit_open")
        assert "not asked until it answers" in first["why"]
        assert store.stats()["misses"]["circuit_open"] == BLOCKS
        gate.open()
        wait_until("recovery", lambda: store.health()["drives"][0]["state"] == "working")
        assert served(store, keys) == BLOCKS
        assert out == b"\xc5" * len(out), "what was given up never came"
        counters = store.stats()["counters"]
        assert (counters["circuits_opened"], counters["circuits_closed"]) == (1, 1)


# Case 17: a process that is killed.


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm here")
def test_case_17_killed_processes_leave_no_memory_behind(tmp_path: Path) -> None:
    script = CHILD.replace(
        "print(json.dumps(store.health()))",
        'print("here", flush=True)\n    import time; time.sleep(600)',
    )
    places = SHM, Path(tempfile.gettempdir())
    before = {path for place in places for path in place.iterdir()}
    env = os.environ | {"PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", script, str(tmp_path / "kv")]
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            links = Path(f"/proc/{process.pid}/map_files")
            named = [link.readlink() for link in links.iterdir()] if os.geteuid() == 0 else []
            process.send_signal(signal.SIGKILL)
        assert not any(name.is_relative_to(SHM) for name in named)
    left = {path for place in places for path in place.iterdir()} - before
    assert not any("tiered" in path.name or "tkv" in path.name for path in left), left


# Case 35: what is on disk counts from the first moment.


def test_case_35_usage_after_a_restart_is_what_is_used(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    with BlockingStore.open(**config(directory)) as store:
        for chain in range(12):
            put(store, chain)
        assert store.flush().all_durable
        used = store.stats()["nvme"]["used_bytes"]
        assert used > MIB, "the tier is well filled"
    (directory / "checkpoint.tkv").unlink()
    with BlockingStore.open(**config(directory)) as store:
        assert store.stats()["nvme"]["used_bytes"] == used
        usage_is_exact(store)
        for chain in range(20, 32):
            put(store, chain)
            assert allocated(directory) <= 2 * MIB, "the quota holds from the first write"
        usage_is_exact(store)
