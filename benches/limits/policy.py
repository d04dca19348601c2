"""The predictor: with ten million blocks, and a whole request of the public traces at 2 %."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

from tiered_kv import replay

from ._rows import Row, absolute, at_least, compare, progress

ROOT = Path(__file__).parents[2]
BLOCKS = 10_000_000
TRACES = Path(os.environ.get("TIERED_KV_TRACES", ROOT.parent / "shared/traces"))
SHAREGPT, CLAUDE_CODE = "sharegpt_dev_qwen16", "claudecode_v8_dev_64"
CAPACITY = 2.0


def table(rounds: int) -> list[Row]:
    """A store's table of very many blocks, beside the order of use."""
    command = ["cargo", "bench", "--locked", "-q", "-p", "tiered-kv-policy"]
    command += ["--bench", "table", "--", str(BLOCKS)]
    found: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for number in range(rounds):
        progress(f"a table of {BLOCKS} blocks, {number + 1} of {rounds}")
        ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        for line in filter(lambda line: line.startswith("{"), ran.stdout.splitlines()):
            row = json.loads(line)
            ours, theirs = found.setdefault((row["name"], row["unit"]), ([], []))
            ours.append(row["beta"])
            theirs.append(row["lru"])
    name = f"predictor, {BLOCKS // 1_000_000} M blocks"
    return [compare(f"{name}: {what}", unit, "lru", pairs) for (what, unit), pairs in found.items()]


def of_trace(name: str, rounds: int) -> tuple[list[float], int, int]:
    """Nanoseconds a block access of each run on one thread; requests and accesses of the trace."""
    trace = replay.read(TRACES / f"{name}.rle.jsonl.gz")
    spent = []
    for number in range(rounds + 1):
        progress(f"{name}, {number} of {rounds}")
        report = replay.replay(trace, [CAPACITY], ["beta"], seeds=1, threads=1)
        results = [row for row in report["results"] if row["policy"] == "beta"]
        spent.append(statistics.mean(row["ns_per_block"] for row in results))
    # The first has read the trace into the caches.
    return spent[1:], report["requests"], report["block_accesses"]


def rows(rounds: int) -> list[Row]:
    """What the predictor costs."""
    all_rows = table(min(rounds, 3))
    if not (TRACES / f"{SHAREGPT}.rle.jsonl.gz").exists():
        progress("no public traces: set TIERED_KV_TRACES")
        return all_rows
    spent, _, _ = of_trace(SHAREGPT, rounds)
    rate = [1e9 / ns for ns in spent]
    all_rows.append(absolute("predictor, sharegpt at 2 %", "ns/block", spent, 150.0))
    all_rows.append(at_least("replay, sharegpt at 2 %", "blocks/s", rate, 1e6))
    spent, requests, accesses = of_trace(CLAUDE_CODE, rounds)
    each = [ns * accesses / requests / 1e3 for ns in spent]
    all_rows.append(absolute("predictor, claude code at 2 %", "us/request", each, 60.0))
    return all_rows
