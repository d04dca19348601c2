"""What a killed process leaves: a few rounds of the crash harness, and that it sees what is wrong.

Promises: nothing durable is lost (failure case 12), the quota holds after a restart (case 35), and
what is on disk is counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import api
from crash.__main__ import History, Totals
from tiered_kv.blocking import TieredStore

ROUNDS = int(os.environ.get("TIERED_KV_CRASH_ROUNDS", "4"))
TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize("sent", ["kill", "mixed"])
def test_killed_at_random_nothing_committed_is_lost(tmp_path: Path, sent: str) -> None:
    command = [sys.executable, "-m", "crash", "--rounds", str(ROUNDS), "--dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--seed", "7", "--signal", sent],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["rounds"] == ROUNDS
    assert report["found"] == report["expected"] > 0


def history(home: Path, work: list[dict[str, object]], events: list[dict[str, object]]) -> History:
    (home / "work.jsonl").write_text("".join(json.dumps(line) + "\n" for line in work))
    (home / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return History(home, ["n"])


def seen(found: dict[str, int]) -> dict[str, object]:
    return {
        "found": [found],
        "wrong": [],
        "unread": {},
        "faults": [],
        "orphan_bytes": 0,
        "over_bytes": 0,
        "damaged_headers": 0,
        "recover_s": 0.0,
        "open_s": 0.0,
    }


def test_the_event_file_tells_of_evictions_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with TieredStore.open(**api.config(tmp_path / "kv", event_file=path)) as store:
        ns = store.namespace(api.spec())
        for chain in range(80):
            keys = ns.keys_from_tokens(api.tokens(8, chain * 1000))
            store.put(ns, keys, api.blocks(8, chain), wait=5.0)
            store.flush()
        told = [json.loads(line) for line in path.read_text().splitlines()]
        kept = {event["seq"]: event for event in store.events()}
        last = bytes.fromhex(told[-1]["key"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert [event["seq"] for event in told] == list(range(len(told)))
    assert {(event["kind"], event["tier"]) for event in told} >= {
        ("evicted", "dram"),
        ("evicted", "nvme"),
    }
    assert all(event["namespace"] == ns.id for event in told)
    assert kept[told[-1]["seq"]]["key"] == last


STORED = {"do": "stored", "t": 12, "space": 0, "keys": ["a", "b"], "version": 10}
DURABLE = {"do": "durable", "t": 14, "space": 0, "keys": ["a", "b"], "version": 10}
DELETE = {"do": "delete", "t": 20, "space": 0, "keys": ["a"], "begun": 20}
DELETED = DELETE | {"do": "deleted", "t": 22, "durable": True}
EVICTED = {"kind": "evicted", "tier": "nvme", "namespace": "n", "key": "b", "unix_ns": 30}


def test_the_harness_misses_a_lost_block(tmp_path: Path) -> None:
    totals = Totals()
    totals.add(history(tmp_path, [STORED, DURABLE], []), seen({"a": 10}))
    assert totals.sums["expected"] == 2
    assert totals.sums["found"] == 1
    assert not totals.good


def test_the_harness_expects_neither_the_deleted_nor_the_evicted(tmp_path: Path) -> None:
    logs = history(tmp_path, [STORED, DURABLE, DELETE, DELETED], [EVICTED])
    assert logs.expected() == {}


def test_the_harness_sees_a_block_come_back(tmp_path: Path) -> None:
    totals = Totals()
    logs = history(tmp_path, [STORED, DURABLE, DELETE, DELETED], [])
    totals.add(logs, seen({"a": 10, "b": 10}))
    assert totals.sums["resurrected"] == 1
    assert not totals.good
