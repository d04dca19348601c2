"""What each tier of a node would have served of a trace, and the time to the first token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiered_kv.planner.node import TIERS
from tiered_kv.planner.report import figure_of
from tiered_kv.replay import _head
from tiered_kv.replay.deployment import HBM, Deployment, written

_PLACES = ("gpu", *TIERS)
SERVICE = (
    "a request's tiers read at the same time, each latency + bytes / bandwidth, then the rest of "
    "the prompt is computed; as many blocks are loaded as make that the shortest; decoding and "
    "stores take nothing from it; with queues, each tier and each instance serves one request at a "
    "time in the order of the trace"
)


def run(
    trace: Any,
    deployment: Deployment,
    policies: Sequence[str] = ("beta", "lru"),
    *,
    tiers: Sequence[str] | None = None,
    waste_budget: float = 0.05,
    outputs: bool = False,
    labels: bool = True,
    threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Replays a trace over the tiers of a node, by the rules of the store's mover.

    Args:
        trace: The trace.
        deployment: The model on the node.
        policies: `beta` and its variants, or `lru`.
        tiers: Names of the tiers below HBM that are used; all by default.
        waste_budget: Part of what is moved up that may be moved in vain; 0 for no window ahead.
        outputs: Blocks of outputs are stored, too.
        labels: Sessions and kinds of requests are told.
        threads: Runs at a time; as many as there are processors by default.
        progress: Hears how many requests were applied, over all runs.

    Returns:
        The document of `tiered-kv replay --node`; `docs/replay.md` describes its fields.

    Raises:
        InvalidArgumentError: The description does not serve, or there is no such policy.
        KeyboardInterrupt: It was interrupted.
    """
    specs = [
        deployment.described(policy, tiers=tiers, waste_budget=waste_budget) for policy in policies
    ]
    found = replayed(
        trace, specs, outputs=outputs, labels=labels, threads=threads, progress=progress
    )
    return {
        **_head(trace, outputs=outputs),
        "seconds": trace.seconds,
        **deployment.head(),
        "service": SERVICE,
        "results": [_result(trace, deployment, one) for one in found],
        "assumptions": deployment.assumptions(),
        "figures": [figure_of(figure) for figure in deployment.node.figures()],
        "sources": list(deployment.spec.sources),
    }


def replayed(
    trace: Any,
    specs: Sequence[dict[str, Any]],
    *,
    outputs: bool,
    labels: bool,
    threads: int | None,
    progress: Callable[[int], object] | None,
) -> list[dict[str, Any]]:
    """What the core makes of descriptions of `Deployment.described`, one outcome each."""
    text = trace.nodes(
        json.dumps(list(specs)), outputs=outputs, labels=labels, threads=threads, progress=progress
    )
    found: list[dict[str, Any]] = json.loads(text)
    return found


def _result(trace: Any, deployment: Deployment, found: dict[str, Any]) -> dict[str, Any]:
    size, seconds = deployment.block_bytes, trace.seconds
    served = found["services"][0]
    tiers = [
        tier
        | {
            "capacity_bytes": tier["capacity_blocks"] * size,
            "read_blocks": served["read_blocks"][at],
            "read_busy_pct": _busy(served["read_s"][at], seconds),
            "write_busy_pct": _busy(write_s(deployment, found, tier["tier"]), seconds),
        }
        for at, tier in enumerate(found["tiers"])
    ]
    ahead = found["ahead"]
    wasted = ahead["guessed"] - ahead["guessed_read"]
    return {
        "policy": found["policy"],
        "hit_pct": found["hit_pct"],
        "misses": found["misses"],
        "recomputed_blocks": served["recomputed_blocks"],
        "tiers": tiers,
        "moved": sorted(
            (one | {"bytes": one["blocks"] * size} for one in found["moved"]),
            key=lambda one: (_PLACES.index(one["from"]), _PLACES.index(one["to"]), one["why"]),
        ),
        "ahead": ahead | {"wasted_blocks": wasted, "wasted_bytes": wasted * size},
        "ttft_s": served["ttft_s"],
        "queued_ttft_s": served["queued_ttft_s"],
        "compute_s": served["compute_s"],
        "load_s": served["load_s"],
        "computed_tokens": served["computed_tokens"],
        "gpu_busy_pct": _busy(served["compute_s"] / deployment.instances, seconds),
    }


def _busy(busy: float, seconds: float) -> float | None:
    """Percent of the trace's time; None where all of it comes at once."""
    return 100 * busy / seconds if seconds > 0 else None


def write_s(deployment: Deployment, found: Mapping[str, Any], name: str) -> float:
    """Seconds that a tier takes for what was written to it; none for HBM, where it is computed."""
    if name == HBM:
        return 0.0
    tier = next(tier for tier in deployment.node.tiers if tier.name == name)
    rate = tier.write_bandwidth or tier.bandwidth
    return written(found, name) * deployment.block_bytes / rate.value
