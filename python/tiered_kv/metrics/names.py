"""What a store's statistics are called, and how they are labelled, wherever they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "hits": (("tier",), "Blocks that were given back, by the tier that had them."),
    "hit_bytes": (("tier",), "Bytes of blocks that were given back, by the tier that had them."),
    "misses": (("reason",), "Blocks that were asked for and not given back, by reason."),
    "transferred_bytes": (
        ("tier", "direction"),
        "Payload bytes that came into a tier, and that were read from it.",
    ),
    "evictions": (
        ("tier", "reason"),
        "Blocks that left a tier: for room, for a quota, for slots of another size, or as damaged.",
    ),
    "corrupt_slabs": (("tier",), "Copies that no longer had their checksum."),
    "reuses": (
        ("block_type", "transition"),
        "Reuses of the blocks that the predictor watches.",
    ),
    "predicted_reuses": (
        ("block_type", "transition"),
        "Reuses that the predictor expected of these, each before it could come.",
    ),
    "reuses_by_chance": (
        ("chance_at_least",),
        "Reuses of the blocks that the predictor watches, by the chance that it gave them.",
    ),
    "predicted_reuses_by_chance": (
        ("chance_at_least",),
        "Reuses that the predictor expected, by the chance that it gave them.",
    ),
    "events": (("event",), "What happened in a store, by the names of `stats()`."),
    "event_bytes": (("event",), "Bytes to which it happened."),
}
"""Counters: their labels and what they count."""

GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "used_bytes": (("tier",), "Bytes of a tier that are in use."),
    "capacity_bytes": (("tier",), "Bytes of a tier."),
    "resident_blocks": (("tier",), "Blocks in a tier."),
    "busy_bytes": (("state",), "Bytes of memory: dirty, leased, loading or held."),
    "metadata_bytes": ((), "Memory that the eviction policy takes up."),
}
"""Gauges: their labels and what they tell."""

LATENCIES: dict[str, tuple[str, str]] = {
    "drive_load_seconds": (
        "load",
        "Calls that had to wait for a drive, until they ended, however they did.",
    ),
    "commit_seconds": (
        "commit",
        "Groups of blocks written behind, until they were durable, or failed.",
    ),
}
"""Histograms that a store keeps: their names in `stats()`, and what they count."""

_TIERS = ("dram", "nvme")
_BYTES = "_bytes"


def counted(stats: Mapping[str, Any]) -> dict[str, float]:
    """Counters of a store's `stats()`, as "metric/label/label".

    Args:
        stats: What `stats()` has; `adapter` in it, where there is one, is an engine's adapter's.

    Returns:
        Their values by name, of metrics of `COUNTERS` alone.
    """
    counters: Mapping[str, int] = stats["counters"]
    rows: dict[str, float] = {f"hits/{tier}": stats[tier]["hits"] for tier in _TIERS}
    rows |= {f"hit_bytes/{tier}": stats[tier]["hit_bytes"] for tier in _TIERS}
    rows |= {f"misses/{reason}": count for reason, count in stats["misses"].items()}
    rows |= _transferred(stats)
    for tier, damaged in (("dram", "corrupt_dram"), ("nvme", "quarantined")):
        evicted = counters[f"evicted_{tier}"]
        special = {why: counters[f"evicted_{tier}_{why}"] for why in ("quota", "class")}
        rows[f"evictions/{tier}/room"] = evicted - sum(special.values())
        rows |= {f"evictions/{tier}/{why}": count for why, count in special.items()}
        rows[f"evictions/{tier}/damaged"] = counters[damaged]
        rows[f"corrupt_slabs/{tier}"] = counters[f"corrupt_{tier}"]
    rows |= _reuses(stats)
    for name, count in counters.items():
        label = name.removesuffix(_BYTES)
        rows[f"{'events' if label == name else 'event_bytes'}/{label}"] = count
    adapter: Mapping[str, int] = stats.get("adapter", {})
    return rows | {f"events/adapter_{name}": count for name, count in adapter.items()}


def told(stats: Mapping[str, Any]) -> dict[str, float]:
    """Gauges of a store's `stats()`, as "metric/label".

    Args:
        stats: What `stats()` has.

    Returns:
        Their values by name, of metrics of `GAUGES` alone.
    """
    rows: dict[str, float] = {f"used_bytes/{tier}": stats[tier]["used_bytes"] for tier in _TIERS}
    rows |= {f"capacity_bytes/{tier}": stats[tier]["capacity_bytes"] for tier in _TIERS}
    rows |= {f"resident_blocks/{tier}": stats[tier]["blocks"] for tier in _TIERS}
    states = ("dirty", "leased", "loading", "held")
    rows |= {f"busy_bytes/{state}": stats[f"{state}_bytes"] for state in states}
    return rows | {"metadata_bytes": stats["metadata_bytes"]}


def _transferred(stats: Mapping[str, Any]) -> dict[str, float]:
    counters = stats["counters"]
    # Without a tier in memory blocks only pass through it.
    there = bool(stats["dram"]["capacity_bytes"])
    read = counters["onboarded_bytes"] + counters["direct_bytes"] + counters["scrubbed_bytes"]
    put = counters["put_bytes"] + counters["onboarded_bytes"]
    return {
        "transferred_bytes/dram/in": put if there else 0,
        "transferred_bytes/dram/out": stats["dram"]["hit_bytes"],
        "transferred_bytes/nvme/in": counters["offloaded_bytes"],
        "transferred_bytes/nvme/out": read,
    }


def _reuses(stats: Mapping[str, Any]) -> dict[str, float]:
    rows: dict[str, float] = {}
    for row in stats["reuses_by_pair"]:
        pair = f"{row['block_type']}/{row['transition']}"
        rows[f"reuses/{pair}"] = row["reuses"]
        rows[f"predicted_reuses/{pair}"] = row["predicted"]
    for row in stats["reuses_by_chance"]:
        chance = f"{row['chance_at_least']:g}"
        rows[f"reuses_by_chance/{chance}"] = row["reuses"]
        rows[f"predicted_reuses_by_chance/{chance}"] = row["predicted"]
    return rows
