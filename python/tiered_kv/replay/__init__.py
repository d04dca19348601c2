"""What each eviction policy would have done on a trace of requests.

```python
from tiered_kv import replay

trace = replay.read("requests.jsonl.gz")
found = replay.replay(trace, capacities=[1, 5], policies=["lru", "beta", "min"])
for result in found["results"]:
    print(result["policy"], result["capacity_pct"], result["hit_pct"], found["ceiling_pct"])
```

A trace has ids of blocks, times and lengths, and no text: `docs/replay.md` shows the formats. A
block is a hit if it and all before it are resident when the request comes; every cache starts
empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tiered_kv import _core
from tiered_kv._core import Trace

__all__ = [
    "CAPACITIES",
    "Trace",
    "generate",
    "kinds",
    "policies",
    "posterior",
    "prefetch",
    "read",
    "replay",
]

CAPACITIES = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
"""Capacities in percent of a trace's unique prompt blocks, where none are asked for."""


def policies() -> dict[str, list[str]]:
    """The names of policies.

    Returns:
        The names that "all", "ablation", "steps" and "tried" stand for. `beta` is the predictor, by
        which the store does not evict yet; `min` is Belady's optimum.
    """
    return _core.replay_policies()


def kinds() -> dict[str, str]:
    """The kinds of traces that `generate` makes, and what each is about."""
    return _core.trace_kinds()


def read(
    path: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    block_size: int = 16,
    seed: int = 0,
) -> Trace:
    """Reads a trace: runs of ids, Mooncake, Qwen-Bailian, LMCache's lookups, or ShareGPT.

    Args:
        path: A file, packed with gzip or not; the format shows in it.
        tokenizer: For ShareGPT, whose conversations are text: the path of a `tokenizer.json`, or
            the name of a model on the hub.
        block_size: Tokens of a block of ShareGPT, 1 to 65536; the other formats say it.
        seed: For ShareGPT, which has no times: of the times that are made up.

    Raises:
        NotFoundError: The file is not there; it may also be an `IoFaultError` of the system.
        InvalidArgumentError: A line is no request of a known format, or out of order; ShareGPT
            without a tokenizer.
        UnsupportedError: The package tokenizers is not installed.
    """
    from tiered_kv.replay import sharegpt

    path = Path(path)
    if sharegpt.is_sharegpt(path):
        return sharegpt.read(path, tokenizer=tokenizer, block_size=block_size, seed=seed)
    return Trace.read(path)


def generate(kind: str, requests: int = 30_000, seed: int = 0) -> Trace:
    """Makes a trace up; equal arguments make equal traces.

    Args:
        kind: One of `kinds`.
        requests: How many, at most a million.
        seed: From 0 on.

    Raises:
        InvalidArgumentError: No such kind, or a number out of range.
    """
    return Trace.generate(kind, requests, seed)


def replay(
    trace: Trace,
    capacities: Iterable[float] = CAPACITIES,
    policies: Sequence[str] = ("all",),
    *,
    seeds: int = 1,
    outputs: bool = False,
    labels: bool = True,
    threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Runs policies over a trace, at each capacity, several runs at a time without the GIL.

    Args:
        trace: The trace.
        capacities: In percent of the trace's unique prompt blocks, above 0 and at most 100.
        policies: Names out of `policies()`, or "all", "ablation", "steps" or "tried".
        seeds: Runs of each policy in which draws decide, 1 to 1000; others run once.
        outputs: Blocks of outputs are inserted, too.
        labels: Sessions and kinds of requests are told; else the policies infer them.
        threads: Runs at a time, 1 to 256. By default as many as there are processors.
        progress: Hears about ten times a second how many requests were applied, over all runs. What
            it raises ends the replay.

    Returns:
        `trace` (its name), `block_size` (tokens), `requests`, `block_accesses`, `unique_blocks`,
        `ceiling_pct` (hits if nothing ever leaves) and `results`: for each run `capacity_pct`,
        `capacity_blocks`, `policy`, `seed`, `hit_pct` (percent of the accesses), `cost_saved_pct`
        (percent of the work of all prompts) and `ns_per_block` (processor time an access).

    Raises:
        InvalidArgumentError: A capacity, a name or a number is none that there is.
        KeyboardInterrupt: It was interrupted; all threads end soon.
    """
    results = trace.replay(
        capacities,
        list(policies),
        seeds=seeds,
        outputs=outputs,
        labels=labels,
        threads=threads,
        progress=progress,
    )
    return {**_head(trace, outputs=outputs), "results": results}


def prefetch(
    trace: Trace,
    fast: float,
    slow: float,
    *,
    outputs: bool = False,
    labels: bool = True,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Prefetches along stored chains between two tiers that the predictor governs.

    Args:
        trace: The trace.
        fast: Capacity of the fast tier, in percent of the trace's unique prompt blocks.
        slow: Of the slow tier, which holds what the fast one does.
        outputs: As in `replay`.
        labels: As in `replay`.
        progress: As in `replay`.

    Returns:
        The fields of `replay` up to `ceiling_pct`, and `prefetch`: for windows of 0, 4, 16 and 64
        blocks, and for one that adapts to a budget, `fast_pct`, `slow_pct`, `window` (blocks; in
        the end, where it adapts), `budget_pct` (percent of the moved blocks that may be wasted, or
        None), `fast_hit_pct` and `slow_hit_pct` (hits in the fast tier, and in the slow one only,
        in percent of the accesses), `covered_pct` (percent of the slow tier's hits that were moved
        before their own demand), `moved_blocks` (ahead or on demand) and `waste_pct` (percent of
        these that their request did not read).

    Raises:
        InvalidArgumentError: A capacity is out of range, or `slow` is less than `fast`.
        KeyboardInterrupt: It was interrupted.
    """
    rows = trace.prefetch(fast, slow, outputs=outputs, labels=labels, progress=progress)
    return {**_head(trace, outputs=outputs), "prefetch": rows}


def posterior(
    trace: Trace,
    capacity: float = 2.0,
    policy: str = "beta",
    *,
    outputs: bool = False,
    labels: bool = True,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """What the predictor has learned of each pair of a block type and a transition.

    Args:
        trace: The trace.
        capacity: Of the cache that it runs, in percent of the trace's unique prompt blocks.
        policy: `beta`, or a variant of it.
        outputs: As in `replay`.
        labels: As in `replay`.
        progress: As in `replay`.

    Returns:
        The fields of `replay` up to `ceiling_pct`, `capacity_pct`, `capacity_blocks`, `policy`,
        `age_starts_s` (where each bucket of ages starts, in seconds; the last is open) and `pairs`:
        for each of the 16 `block_type`, `transition`, `mean` (of the Beta posterior of the chance
        that a block is reused at all), `low` and `high` (its central 90 %), `lives` and `reuses`
        (the evidence that has not faded) and `hazard` (for each age bucket, the chance to be reused
        in it if not before).

    Raises:
        InvalidArgumentError: The capacity is out of range, or the policy learns no pairs.
        KeyboardInterrupt: It was interrupted.
    """
    found = trace.posterior(capacity, policy, outputs=outputs, labels=labels, progress=progress)
    return {**_head(trace, outputs=outputs), **found}


def _head(trace: Trace, *, outputs: bool) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "block_size": trace.block_size,
        "requests": trace.requests,
        "block_accesses": trace.block_accesses,
        "unique_blocks": trace.unique_blocks,
        "ceiling_pct": trace.ceiling_pct(outputs),
    }
