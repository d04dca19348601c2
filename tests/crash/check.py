"""After a kill: opens the store, reads everything that was ever put, and says what is there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tiered_kv import Namespace
from tiered_kv.blocking import TieredStore

from . import load

KNOWN_FILES = {
    "LOCK",
    "superblock.tkv",
    "journal.tkv",
    "checkpoint.tkv",
    "attach.sock",
    "namespaces.json",
    "learned.tkv",
    # Of the store that is open here: what a crash had left of it was removed by the open.
    ".tmp-namespaces.json",
}
PAGE_BYTES = 4096


def read_all(
    store: TieredStore, space: int, ns: Namespace, keys: list[bytes]
) -> tuple[dict[str, int], list[str], dict[str, str]]:
    """Keys that are there with their versions, those with wrong bytes, those that are no use.

    The last are known to the store and cannot be read, with the reason.
    """
    size = load.BLOCK_BYTES[space]
    found, wrong, unread = {}, [], {}
    for at in range(0, len(keys), 8):
        some = keys[at : at + 8]
        with store.get(ns, b"".join(some), 30.0) as leases:
            for index, key in enumerate(some):
                view = leases[index]
                if view is None:
                    reason = leases.reasons[index]
                    if reason is not None and reason != "absent":
                        unread[key.hex()] = reason
                    continue
                block = bytes(view)
                version = load.version_of(block)
                found[key.hex()] = version
                if block != load.content(key, version, size):
                    wrong.append(key.hex())
    return found, wrong, unread


def orphan_bytes(home: Path, drives: int, used: int, expected: int) -> int:
    """Bytes on disk that belong to no block and to no file of the format."""
    segments = load.DRIVE_BYTES // (load.DRIVE_BYTES // 8)
    known = KNOWN_FILES | {f"segment-{number:06}.tkv" for number in range(segments)}
    strangers = 0
    for number in range(drives):
        for path in (home / f"drive{number}").iterdir():
            if path.name not in known:
                strangers += path.stat().st_blocks * 512
    return strangers + abs(used - expected)


def check(home: Path, backend: str, drives: int) -> dict[str, Any]:
    """Opens the store and reads it through."""
    store = load.open_store(home, backend, drives)
    found: list[dict[str, int]] = []
    wrong: list[str] = []
    unread: dict[str, str] = {}
    slots = 0
    spaces = load.namespaces(store)
    for space, ns in enumerate(spaces):
        packed = (load.chain_keys(ns, chain, load.DEPTH) for chain in range(load.CHAINS))
        keys = sorted({key for chain in packed for key in load.split(chain)})
        there, bad, missed = read_all(store, space, ns, keys)
        unread |= missed
        found.append(there)
        wrong += bad
        slots += len(there) * -(-load.BLOCK_BYTES[space] // PAGE_BYTES) * PAGE_BYTES
    result = {
        "namespaces": [ns.id for ns in spaces],
        "found": found,
        "wrong": wrong,
        "unread": unread,
        "faults": store.audit()["faults"],
        "orphan_bytes": orphan_bytes(home, drives, store.stats()["nvme"]["used_bytes"], slots),
        "over_bytes": max(0, load.allocated_bytes(home) - drives * load.DRIVE_BYTES),
        "open_s": store.open_seconds,
        "recover_s": store.open_times["recover_s"],
        "damaged_headers": store.stats()["counters"]["damaged_headers"],
    }
    return result | {"store": store}


def run(home: Path, backend: str, drives: int, end: str, tell: Callable[[str], None]) -> None:
    """Checks, tells the result as one line of JSON, and ends clean or by a kill."""
    result = check(home, backend, drives)
    store = result.pop("store")
    tell(json.dumps(result))
    if end == "kill":
        os._exit(0)
    store.close()


def main() -> None:
    """Checks: HOME BACKEND DRIVES clean|kill. Prints one line of JSON; ends as it is told."""
    home, backend, drives, end = sys.argv[1:]
    run(Path(home), backend, int(drives), end, partial(print, flush=True))


if __name__ == "__main__":
    main()
