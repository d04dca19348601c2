"""Hit rates of cache policies on traces: `python -m serving.policy_rates OUT TRACE...`.

Each trace is replayed through vLLM's own manager of host memory under its own policies, LRU and
ARC, and under ours, with what requests tell of their sessions and without; beside them the
predictor alone, as `tiered-kv replay` has it. `KIND:REQUESTS` in place of a file makes a trace up.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tiered_kv import replay
from tiered_kv._core import Trace

CAPACITIES_PCT = (2, 5, 10)
BATCH = 64
"""Most blocks of one store, as the chunks of a prefill."""
MOST = 8000
"""Requests of a trace."""
OURS = {"cache_policy": "TieredKVPolicy", "cache_policy_module_path": "tiered_kv.engines.vllm"}
POLICIES: dict[str, dict[str, str]] = {
    "lru": {"cache_policy": "lru"},
    "arc": {"cache_policy": "arc"},
    "tiered_kv": OURS,
    "tiered_kv_without_labels": OURS,
}

Row = dict[str, Any]


def requests(source: str) -> list[Row]:
    """The first requests of a trace."""
    if ":" not in source:
        with gzip.open(source, "rt") as file:
            return [json.loads(line) for line in islice(file, MOST)]
    kind, count = source.split(":")
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "made.jsonl")
        Trace.generate(kind, int(count), 1).write(path)
        return [json.loads(line) for line in path.read_text().splitlines()][:MOST]


def blocks(runs: list[list[int]]) -> list[int]:
    """Numbers of blocks."""
    return [number for first, count in runs for number in range(first, first + count)]


class Replay:
    """A trace through vLLM's manager.

    Args:
        policy: Arguments that name its policy.
        capacity: Blocks of its tier.
        labels: Whether requests tell their sessions.
    """

    def __init__(self, policy: dict[str, str], capacity: int, *, labels: bool) -> None:
        self._manager = CPUOffloadingManager(capacity, **policy)
        self._labels = labels
        self._keys: dict[int, Any] = {}
        self._now_ns = 0
        self.hits = self.accesses = 0
        if hasattr(self._manager._policy, "clock_ns"):
            self._manager._policy.clock_ns = lambda: self._now_ns

    def request(self, number: int, row: Row) -> None:
        """Looks a prompt up, loads what is there, computes the rest and the answer."""
        self._now_ns = int(row["timestamp"] * 1e9) + 1
        context = ReqContext(str(number), self._params(row))
        tokens = row["block_size"]
        self._manager.on_new_request(context)
        prompt = list(self._announced(context, blocks(row["hash_runs"]), 0, tokens))
        hits = 0
        for key in prompt:
            if self._manager.lookup(key, context) is not LookupResult.HIT:
                break
            hits += 1
        self.accesses += len(prompt)
        self.hits += hits
        if hits:
            self._manager.prepare_load(prompt[:hits], context)
        self._store(context, prompt)
        if hits:
            self._manager.complete_load(prompt[:hits], context)
        answer = blocks(row.get("out_hash_runs", []))
        self._store(context, list(self._announced(context, answer, len(prompt), tokens)))
        self._manager.on_request_finished(context)

    def _params(self, row: Row) -> Row | None:
        if not self._labels or "session_id" not in row:
            return None
        told = {"session": str(row["session_id"]), "turn": row.get("turn", 0)}
        return {"tiered_kv": {**told, "kind": row.get("type", "")}}

    def _announced(
        self, context: ReqContext, numbers: list[int], first: int, tokens: int
    ) -> Iterator[Any]:
        for at, number in enumerate(numbers, first + 1):
            key = self._keys.get(number)
            if key is None:
                key = make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)
                self._keys[number] = key
            context.set_offload_key_position(key, at * tokens)
            yield key

    def _store(self, context: ReqContext, keys: list[Any]) -> None:
        for at in range(0, len(keys), BATCH):
            output = self._manager.prepare_store(keys[at : at + BATCH], context)
            if output is not None and output.keys_to_store:
                self._manager.complete_store(output.keys_to_store, context)


def rates(source: str) -> Row:
    """Hit rates of all policies on one trace, in percent, by capacity."""
    rows = requests(source)
    unique = len({one for row in rows for one in blocks(row["hash_runs"])})
    found: Row = {"requests": len(rows), "unique_blocks": unique}
    alone = predicted(rows)
    for pct in CAPACITIES_PCT:
        capacity = max(BATCH, unique * pct // 100)
        told: Row = {"blocks": capacity}
        for name, policy in POLICIES.items():
            one = Replay(policy, capacity, labels=not name.endswith("labels"))
            begun_s = time.process_time()
            for number, row in enumerate(rows):
                one.request(number, row)
            spent_s = time.process_time() - begun_s
            told[name] = round(100 * one.hits / one.accesses, 2)
            told[f"{name}_us_a_block"] = round(1e6 * spent_s / one.accesses, 2)
            # A run takes minutes: whoever waits sees where it is.
            print(f"{source} {pct}% {name}: {told[name]} % in {spent_s:.0f} s", flush=True)
        found[f"{pct}%"] = {**told, "beta_of_replay": alone[pct]}
    return found


def predicted(rows: list[Row]) -> dict[int, float]:
    """Hit rates of the predictor without vLLM's manager, in percent, by capacity."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "cut.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        trace = replay.read(path)
    found = replay.replay(trace, capacities=CAPACITIES_PCT, policies=["beta"], outputs=True)
    return {
        int(one["capacity_pct"]): round(one["hit_pct"], 2)
        for one in found["results"]
        if one["policy"] == "beta"
    }


def main() -> None:
    """Traces in their order.

    The policy holds where it loses nothing of what the predictor makes of the same trace, or does
    as LRU does.
    """
    found = {Path(source).name.split(".")[0]: rates(source) for source in sys.argv[2:]}
    rows = [trace[f"{pct}%"] for trace in found.values() for pct in CAPACITIES_PCT]
    at_least = [row["tiered_kv"] >= min(row["lru"], row["beta_of_replay"]) - 0.5 for row in rows]
    of_lru = [round(row["tiered_kv"] - row["lru"], 2) for row in rows]
    told = {"holds": all(at_least), "points_over_lru": of_lru, "hit_pct": found}
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
