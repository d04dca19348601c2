"""What this machine offers, and what a store in a directory would use: tried, not guessed."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiered_kv import _core
from tiered_kv.blocking import BlockingStore
from tiered_kv.errors import TieredKvError
from tiered_kv.spec import KvLayout, NamespaceSpec

MIB = 1 << 20
TEST_BLOCKS = 16
TEST_BLOCK_BYTES = MIB
TEST_CAPACITY = 64 * MIB
COPY_MIB = 64

# File systems that are memory: a store there ends with the machine.
VOLATILE = {"tmpfs", "ramfs", "devtmpfs"}
NETWORKED = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs"}


def examine(directory: Path, *, fast: bool = False) -> dict[str, Any]:
    """Looks at the machine and lets a small store in `directory` write, read and verify.

    The test uses a subdirectory that is removed afterwards. A directory that does not exist is not
    made: its parent stands for it, as a store would make it there.

    Args:
        directory: Where a store would be.
        fast: Measure nothing: the self-test is as small as it can be.

    Returns:
        `verdict`: "works"; "memory only" where a store can have no drive there; "fails" where it
        cannot even have memory, or does not give back what it took; `io_uring`, `memory`,
        `directory` and `store` with the findings; `advice`, what to change.
    """
    uring, reason = _core.probe_io_uring()
    found: dict[str, Any] = {
        "version": _core.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "io_uring": {"available": uring, "reason": reason},
        "memory": _memory(),
        "directory": _directory(directory),
    }
    found["memory"] |= {} if fast else {"copy_gb_s": _copy_gb_s()}
    found["store"] = _store(directory, found["directory"], 1 if fast else TEST_BLOCKS)
    found["verdict"] = _verdict(found["store"], found["memory"])
    found["advice"] = _advice(found)
    return found


def _memory() -> dict[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found: dict[str, Any] = {
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "transparent_huge_pages": _thp(),
    }
    try:
        found |= _core.probe_memory()
    except TieredKvError as error:
        found |= {"tried_bytes": 0, "huge_bytes": 0, "error": str(error)}
    return found


def _copy_gb_s() -> float:
    """How fast one thread copies memory that is not in its cache, the best of three."""
    source = bytearray(os.urandom(MIB) * COPY_MIB)
    target = bytearray(len(source))
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - begin)
    return len(source) / min(seconds) / 1e9


def _thp() -> str | None:
    """The kernel's setting of transparent huge pages: always, madvise or never."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _base(directory: Path) -> Path:
    return directory if directory.exists() else directory.absolute().parent


def _directory(directory: Path) -> dict[str, Any]:
    base = _base(directory)
    found: dict[str, Any] = {"path": os.fspath(directory), "exists": directory.exists()}
    found["filesystem"] = filesystem(base) if base.exists() else None
    try:
        found["free_bytes"] = shutil.disk_usage(base).free
    except OSError:
        found["free_bytes"] = None
    return found


def filesystem(path: Path) -> str | None:
    """The type of the file system that `path` is on, None where it cannot be told."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        real = path.resolve()
    except OSError:
        return None
    kind, depth = None, -1
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        # Blanks in a path are written in octal.
        point = Path(mount.split()[4].replace("\\040", " "))
        # The last of several mounts on one point hides the others.
        if real.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = source.split()[0], len(point.parts)
    return kind


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    made = tempfile.mkdtemp(prefix="tiered-kv-doctor-", dir=_base(directory))
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _store(directory: Path, about: dict[str, Any], blocks: int) -> dict[str, Any]:
    """What a store in the directory does; `error` where there can be none."""
    try:
        with _scratch(directory) as scratch:
            about |= _core.probe_directory(scratch)
            return _self_test(scratch, blocks)
    except (OSError, TieredKvError) as error:
        return {"opens": False, "verified": False, "error": str(error)}


def _self_test(scratch: Path, blocks: int) -> dict[str, Any]:
    """Writes through one store and reads through the next, from the drive, not from memory.

    Nothing is measured with one block alone.
    """
    config: dict[str, Any] = {
        "dram_capacity": TEST_CAPACITY // 2,
        "nvme_paths": [scratch],
        "nvme_capacity": TEST_CAPACITY,
    }
    spec = NamespaceSpec("doctor", "doctor", "uint8", KvLayout(1, TEST_BLOCK_BYTES))
    content = os.urandom(blocks * TEST_BLOCK_BYTES)
    with BlockingStore.open(**config) as store:
        health = store.health()
        ns = store.namespace(spec)
        keys = ns.keys_from_tokens(range(blocks))
        begin = time.perf_counter()
        stored = store.put(ns, keys, content).stored
        durable = store.flush().all_durable
        warnings = store.health()["warnings"]
        write_s = time.perf_counter() - begin
    out = bytearray(len(content))
    with BlockingStore.open(**config) as store:
        begin = time.perf_counter()
        report = store.get_into(store.namespace(spec), keys, out)
        read_s = time.perf_counter() - begin
        scrubbed = store.scrub()
        faults = store.audit()["faults"]
    complete = stored == blocks == report.hits == scrubbed.blocks and durable
    found = {
        name: health[name] for name in ("backend", "backend_reason", "direct", "direct_reason")
    }
    found["warnings"] = warnings
    found |= {
        "opens": True,
        "verified": complete and out == content and not faults,
        "durable": durable,
    }
    if blocks == 1:
        return found
    return found | {
        "quick_look": "not a benchmark",
        "write_gb_s": len(content) / write_s / 1e9,
        "read_gb_s": len(content) / read_s / 1e9,
    }


def _verdict(store: dict[str, Any], memory: dict[str, Any]) -> str:
    if not store["opens"]:
        return "fails" if "error" in memory else "memory only"
    return "works" if store["verified"] else "fails"


def _advice(found: dict[str, Any]) -> list[str]:
    """What to change, the gravest first."""
    store, memory, about = found["store"], found["memory"], found["directory"]
    advice = []
    if not store["opens"]:
        advice.append(f"no store opens in {about['path']}: {store['error']}")
    elif not store["verified"]:
        advice.append("the self-test did not get back what it stored: check the drive and dmesg")
    if about["filesystem"] in VOLATILE:
        text = "is memory: a store there is lost with the machine and takes memory twice; name a "
        advice.append(f"{about['path']} ({about['filesystem']}) {text}directory on a drive")
    elif about["filesystem"] in NETWORKED:
        text = "is a network file system: name a directory on a local drive"
        advice.append(f"{about['path']} ({about['filesystem']}) {text}")
    elif about.get("direct") is False:
        text = "files go through the page cache, which takes memory beside the store's; name a "
        advice.append(f"{about['reason']}: {text}directory on ext4 or xfs")
    if not found["io_uring"]["available"]:
        text = "threads that block serve the drives instead; in a container allow io_uring_setup, "
        remedy = "io_uring_enter and io_uring_register in its seccomp profile"
        advice.append(f"{found['io_uring']['reason']}: {text}{remedy}")
    elif "not registered" in store.get("backend_reason", ""):
        advice.append(f"{store['backend_reason']}")
    if health_warnings := store.get("warnings"):
        advice += health_warnings
    if memory["huge_bytes"] == 0:
        text = "no huge pages: set /sys/kernel/mm/transparent_hugepage/enabled to madvise"
        advice.append(f"{text} (it is {memory['transparent_huge_pages'] or 'not there'})")
    if "error" in memory:
        advice.append(f"not even a small arena could be had: {memory['error']}")
    return advice
