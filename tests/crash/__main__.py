"""`make crash`: rounds of load, kill, reopen and check; prints one line of JSON.

committed: blocks that the store had reported durable. expected: those of them that were not
evicted, lost to a fault or deleted since. found: those of the expected that are there, with the
very bytes.
resurrected: blocks that are there although a durable delete took them.
unread: blocks that are known and could not be read, none of them expected; unread_for says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiered_kv import _core

TESTS = Path(__file__).resolve().parent.parent
SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM}
START_S = 60.0
SAID_CHARS = 8000
"""Of what a load that hangs says of its threads."""
CHECK_S = 300.0
FRESH_EVERY = 20
"""Rounds after which a directory is given up for a new one."""


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of JSON; one that a kill cut short is none."""
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


class History:
    """What the logs of a directory say of each block."""

    def __init__(self, home: Path, namespaces: list[str]) -> None:
        self.durable: dict[tuple[int, str], int] = {}
        self.stored: dict[tuple[int, str, int], int] = {}
        self.lost: dict[tuple[int, str], int] = {}
        self.deletes: dict[int, dict[str, Any]] = {}
        self.wrong = 0
        self.over = 0
        for path in (home / "events.jsonl.1", home / "events.jsonl"):
            self._read_events(path, namespaces)
        for line in lines(home / "work.jsonl"):
            self._read_work(line)

    def _read_events(self, path: Path, namespaces: list[str]) -> None:
        for event in lines(path):
            from_drive = event["kind"] == "evicted" and event["tier"] == "nvme"
            if from_drive or event["kind"] in ("fault", "undurable"):
                key = (namespaces.index(event["namespace"]), event["key"])
                self.lost[key] = max(event["unix_ns"], self.lost.get(key, 0))

    def _read_work(self, line: dict[str, Any]) -> None:
        match line["do"]:
            case "stored":
                for key in line["keys"]:
                    self.stored[line["space"], key, line["version"]] = line["t"]
            case "durable":
                for key in line["keys"]:
                    at = (line["space"], key)
                    self.durable[at] = max(line["version"], self.durable.get(at, 0))
            case "delete" | "deleted":
                self.deletes[line["begun"]] = line
            case "opened":
                # What the process before was deleting ended with it.
                for delete in self.deletes.values():
                    if delete["do"] == "delete":
                        delete |= {"do": "deleted", "t": line["t"], "durable": False}
            case "wrong":
                self.wrong += 1
            case "over":
                self.over += 1

    def expected(self) -> dict[tuple[int, str], int]:
        """Blocks that must be there, with their versions."""

        def gone(at: tuple[int, str], version: int) -> bool:
            if self.lost.get(at, 0) >= version:
                return True
            # A delete takes what was stored at any moment of it; one that has not ended may.
            return any(
                delete["do"] == "delete" or delete["t"] >= version for delete in self._of(*at)
            )

        return {at: version for at, version in self.durable.items() if not gone(at, version)}

    def resurrected(self, space: int, key: str, version: int) -> bool:
        """Whether a durable delete began after this very put had ended."""
        ended = self.stored.get((space, key, version))
        return ended is not None and any(
            delete["begun"] > ended and delete.get("durable", False)
            for delete in self._of(space, key)
        )

    def _of(self, space: int, key: str) -> Iterator[dict[str, Any]]:
        """The deletes that a block fell under."""
        for delete in self.deletes.values():
            if delete["space"] == space and (delete["keys"] is None or key in delete["keys"]):
                yield delete


def run_module(name: str, *args: str) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-m", f"crash.{name}", *args]


def run_load(home: Path, backend: str, drives: int, seed: int, sent: signal.Signals) -> None:
    """Starts the load, waits for a random moment, and ends it."""
    rng = random.Random(seed)
    command = run_module("load", str(home), backend, str(drives), str(seed))
    opened = sum(line["do"] == "opened" for line in lines(home / "work.jsonl"))
    # Once in ten rounds the store is opening, or has hardly opened, when it is killed.
    early = rng.random() < 0.1
    # An interrupted import says so at length; what it says is kept beside the store.
    complaints = (home / "load.err").open("ab")
    with complaints, subprocess.Popen(command, cwd=TESTS, stderr=complaints) as process:
        until = time.monotonic() + START_S
        while not early and process.poll() is None:
            if sum(line["do"] == "opened" for line in lines(home / "work.jsonl")) > opened:
                break
            if time.monotonic() > until:
                process.kill()
                sys.exit(f"crash: the load did not open its store within {START_S:.0f} s")
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.4 if early else 0.8))
        if process.poll() is not None:
            sys.exit(f"crash: the load ended by itself, with status {process.returncode}")
        process.send_signal(sent)
        try:
            process.wait(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait()
            said = (home / "load.err").read_text(errors="replace")[-SAID_CHARS:]
            sys.exit(f"crash: the load did not end within {START_S:.0f} s of {sent.name}:\n{said}")


def run_check(home: Path, backend: str, drives: int, end: str) -> dict[str, Any]:
    """Opens the store in a process of its own and reads it through."""
    command = run_module("check", str(home), backend, str(drives), end)
    done = subprocess.run(
        command, cwd=TESTS, check=False, capture_output=True, text=True, timeout=CHECK_S
    )
    if done.returncode != 0:
        sys.exit(f"crash: the check of {home} ended with {done.returncode}:\n{done.stderr}")
    return dict(json.loads(done.stdout))


class Totals:
    """Sums over the rounds."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = dict.fromkeys(
            ("rounds", "committed", "expected", "found", "resurrected", "wrong", "orphan_bytes"), 0
        )
        self.sums |= dict.fromkeys(("unread", "over_quota", "audit_faults", "damaged_headers"), 0)
        self.unread: Counter[str] = Counter()
        self.recover_s: list[float] = []
        self.open_s: list[float] = []

    def add(self, history: History, seen: dict[str, Any]) -> None:
        """Judges one round."""
        expected = history.expected()
        found: list[dict[str, int]] = seen["found"]
        right = sum(found[space].get(key) == want for (space, key), want in expected.items())
        back = sum(
            history.resurrected(space, key, version)
            for space, there in enumerate(found)
            for key, version in there.items()
        )
        for name, value in {
            "rounds": 1,
            "committed": len(history.durable),
            "expected": len(expected),
            "found": right,
            "resurrected": back,
            "wrong": len(seen["wrong"]) + history.wrong,
            "unread": len(seen["unread"]),
            "orphan_bytes": seen["orphan_bytes"],
            "over_quota": history.over + (seen["over_bytes"] > 0),
            "audit_faults": len(seen["faults"]),
            "damaged_headers": seen["damaged_headers"],
        }.items():
            self.sums[name] += value
        self.unread.update(seen["unread"].values())
        self.recover_s.append(seen["recover_s"])
        self.open_s.append(seen["open_s"])

    def report(self) -> dict[str, Any]:
        """What is printed."""
        return self.sums | {
            "unread_for": dict(self.unread),
            "recovery_s": round(statistics.median(self.recover_s), 6),
            "recovery_s_max": round(max(self.recover_s), 6),
            "open_s": round(statistics.median(self.open_s), 6),
        }

    @property
    def good(self) -> bool:
        """Whether nothing was lost, came back or was wrong."""
        bad = ("resurrected", "wrong", "orphan_bytes", "over_quota", "audit_faults")
        enough = self.sums["expected"] > 0
        return (
            enough
            and self.sums["found"] == self.sums["expected"]
            and not any(self.sums[name] for name in bad)
        )


def run_rounds(rounds: int, seed: int, sent: str, where: Path) -> Totals:
    """Runs all rounds under `where`."""
    backends = ["io_uring", "blocking"] if _core.probe_io_uring()[0] else ["blocking"]
    totals = Totals()
    rng = random.Random(seed)
    for number in range(rounds):
        if number % FRESH_EVERY == 0:
            home = where / f"store{number}"
            home.mkdir()
            drives = 1 + number // FRESH_EVERY % 2
        backend = rng.choice(backends)
        chosen = rng.choice(list(SIGNALS)) if sent == "mixed" else sent
        run_load(home, backend, drives, seed + number, SIGNALS[chosen])
        seen = run_check(home, rng.choice(backends), drives, rng.choice(["clean", "kill"]))
        totals.add(History(home, seen["namespaces"]), seen)
        if sys.stderr.isatty():
            sums = totals.sums
            print(
                f"\r{sums['rounds']}/{rounds} rounds, {sums['found']} of {sums['expected']} "
                "expected blocks found",
                end="",
                file=sys.stderr,
            )
        if not totals.good and totals.sums["expected"]:
            print(f"crash: round {number} of seed {seed} failed: {home}\n{seen}", file=sys.stderr)
            break
    return totals


def main() -> int:
    """Runs the harness."""
    # What a shell starts in the background ignores interrupts, and so would the load.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signal", choices=[*SIGNALS, "mixed"], default="kill")
    parser.add_argument("--report", type=Path, help="also write the line to this file")
    parser.add_argument("--dir", type=Path, help="where the stores are made, and kept if they fail")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiered-kv-crash-", dir=args.dir) as where:
        totals = run_rounds(args.rounds, args.seed, args.signal, Path(where))
        if not totals.good and args.dir:
            shutil.copytree(where, args.dir / "failed", dirs_exist_ok=True)
    report = json.dumps(totals.report())
    print(report)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(report + "\n")
    return 0 if totals.good else 1


if __name__ == "__main__":
    sys.exit(main())
