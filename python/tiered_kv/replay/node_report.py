"""A replay over the tiers of a node as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tiered_kv.planner.report import source_lines
from tiered_kv.planner.units import large
from tiered_kv.replay.report import heading, markdown

if TYPE_CHECKING:
    from rich.table import Table


def head_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What was replayed on what.

    Args:
        found: What `tiered_kv.replay.node.run` returned.
    """
    yield heading(found)
    gpus, many = found["gpus"], found["instances"]
    on = f"{gpus} GPU{'s' if gpus > 1 else ''}" + (f", {many} instances" if many > 1 else "")
    yield (
        f"{found['node']}: {found['title']}; {found['model']} on {on}, "
        f"KV in {found['kv_dtype']}; a block is "
        f"{found['block_bytes']:,} B"
    )


def foot_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """How times are meant, what was assumed, and where figures are from."""
    yield f"times: {found['service']}"
    if any((one["gpu_busy_pct"] or 0) > 100 for one in found["results"]):
        yield "times with queues grow without bound here: the GPUs are asked for more than they do"
    for assumption in found["assumptions"]:
        yield f"assumed: {assumption}"
    yield from source_lines(found)


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Times and hits of each policy, what each tier did, what was moved, and what was wasted."""
    yield _times(found)
    yield _tiers(found)
    yield _moved(found)
    yield _ahead(found)


def seconds(value: float) -> str:
    """A time to the first token."""
    return f"{1e3 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _times(found: Mapping[str, Any]) -> Table:
    head = ["time to first token", "hits %", "computed again %", "mean", "p50", "p90", "p99"]
    made = markdown([*head, "GPUs busy %", "p50 with queues", "p99 with queues"])
    for one in found["results"]:
        alone, queued = one["ttft_s"], one["queued_ttft_s"]
        again = 100 * one["recomputed_blocks"] / max(1, found["block_accesses"])
        made.add_row(
            one["policy"],
            f"{one['hit_pct']:.2f}",
            f"{again:.2f}",
            *(seconds(alone[name]) for name in ("mean", "p50", "p90", "p99")),
            percent(one["gpu_busy_pct"]),
            seconds(queued["p50"]),
            seconds(queued["p99"]),
        )
    return made


def percent(value: float | None) -> str:
    """A part of the time, where there is any."""
    return "-" if value is None else f"{value:,.1f}"


def _tiers(found: Mapping[str, Any]) -> Table:
    head = ["tier", "policy", "capacity", "blocks", "full %", "hits %", "computed again"]
    made = markdown([*head, "reads busy %", "writes busy %"])
    for one in found["results"]:
        for tier in one["tiers"]:
            made.add_row(
                tier["tier"],
                one["policy"],
                large(tier["capacity_bytes"]),
                f"{tier['capacity_blocks']:,}",
                f"{100 * tier['resident_blocks'] / tier['capacity_blocks']:.0f}",
                f"{tier['hit_pct']:.2f}",
                f"{tier['recomputed']:,}",
                percent(tier["read_busy_pct"]),
                percent(tier["write_busy_pct"]),
            )
    return made


def _moved(found: Mapping[str, Any]) -> Table:
    made = markdown(["moved", "policy", "from", "to", "blocks", "bytes"])
    for one in found["results"]:
        for move in one["moved"]:
            why = move["why"].replace("_", " ")
            counts = (f"{move['blocks']:,}", large(move["bytes"]))
            made.add_row(why, one["policy"], move["from"], move["to"], *counts)
    return made


def _ahead(found: Mapping[str, Any]) -> Table:
    head = ["moved up", "window", "on demand", "ahead, read", "ahead, not read then"]
    made = markdown([*head, "read later", "wasted", "wasted bytes", "waste %"])
    for one in found["results"]:
        ahead = one["ahead"]
        made.add_row(
            one["policy"],
            str(ahead["window"]),
            *(f"{ahead[name]:,}" for name in ("demanded", "covered", "guessed", "guessed_read")),
            f"{ahead['wasted_blocks']:,}",
            large(ahead["wasted_bytes"]),
            f"{ahead['waste_pct']:.2f}",
        )
    return made
