"""Replays and posteriors as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def heading(found: Mapping[str, Any]) -> str:
    """The line that says what the trace is."""
    return (
        f"{found['trace']}: {found['requests']} requests, {found['block_accesses']} accesses to "
        f"{found['unique_blocks']} blocks of {found['block_size']} tokens, "
        f"ceiling {found['ceiling_pct']:.1f} %"
    )


def means(found: Mapping[str, Any], value: str) -> dict[str, dict[float, float]]:
    """Means over the seeds of a value of the results, by policy and capacity in percent."""
    values: dict[str, dict[float, list[float]]] = {}
    for result in found["results"]:
        of_policy = values.setdefault(result["policy"], {})
        of_policy.setdefault(result["capacity_pct"], []).append(result[value])
    return {
        policy: {pct: sum(each) / len(each) for pct, each in cells.items()}
        for policy, cells in values.items()
    }


def markdown(head: Sequence[str]) -> Table:
    """An empty table as Markdown has them, the first column to the left."""
    from rich.box import MARKDOWN
    from rich.table import Table

    table = Table(box=MARKDOWN, header_style="", pad_edge=True)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def table(found: Mapping[str, Any]) -> Table:
    """Hits in percent by policy and capacity, means over the seeds, the ceiling last.

    Args:
        found: What `tiered_kv.replay.replay` returned.
    """
    hits, costs = means(found, "hit_pct"), means(found, "ns_per_block")
    capacities = sorted({result["capacity_pct"] for result in found["results"]})
    made = markdown(["hit %", *(f"{pct:g} %" for pct in capacities), "ns/block"])
    for policy, cells in hits.items():
        cost = list(costs[policy].values())
        made.add_row(
            policy,
            *(f"{cells[pct]:.2f}" for pct in capacities),
            f"{sum(cost) / len(cost):.0f}",
        )
    made.add_row("ceiling", *(f"{found['ceiling_pct']:.2f}" for _ in capacities), "")
    return made


PREFETCH_ROWS = 5
"""Windows that `tiered_kv.replay.prefetch` tries."""


def prefetch_table(found: Mapping[str, Any]) -> Table:
    """What each window moved ahead, and what of it for nothing.

    Args:
        found: What `tiered_kv.replay.prefetch` returned.
    """
    head = ["prefetch", "fast", "slow", "fast hits %", "slow hits %", "covered %", "moved"]
    made = markdown([*head, "waste %"])
    for row in found["prefetch"]:
        budget = row["budget_pct"]
        window = f"window {row['window']}"
        made.add_row(
            window if budget is None else f"budget {budget:g} %, in the end {window}",
            f"{row['fast_pct']:g} %",
            f"{row['slow_pct']:g} %",
            f"{row['fast_hit_pct']:.1f}",
            f"{row['slow_hit_pct']:.1f}",
            f"{row['covered_pct']:.1f}",
            str(row["moved_blocks"]),
            f"{row['waste_pct']:.1f}",
        )
    return made


def posterior_table(found: Mapping[str, Any]) -> Table:
    """The pairs of a posterior: the chance of reuse, its interval, and the evidence.

    Args:
        found: What `tiered_kv.replay.posterior` returned.
    """
    made = markdown(["block", "transition", "reused", "90 % interval", "lives", "reuses"])
    for pair in found["pairs"]:
        made.add_row(
            pair["block_type"],
            pair["transition"],
            f"{pair['mean']:.3f}",
            f"{pair['low']:.3f} to {pair['high']:.3f}",
            f"{pair['lives']:.0f}",
            f"{pair['reuses']:.0f}",
        )
    return made


def describe(trace: Any, source: str) -> dict[str, Any]:
    """What there is to say of a trace.

    Args:
        trace: A `tiered_kv.replay.Trace`.
        source: The format that it was in.

    Returns:
        `trace` (its name), `format`, `requests`, `sessions` (0 where none is told), `seconds` from
        the first request to the last, `input_tokens`, `output_tokens`, `block_size` (tokens),
        `block_accesses`, `unique_blocks`, `ceiling_pct`, `ceiling_outputs_pct` (None without
        blocks of outputs), `unchained` (blocks that came behind another one than before).
    """
    input_tokens, output_tokens = trace.tokens()
    return {
        "trace": trace.name,
        "format": source,
        "requests": trace.requests,
        "sessions": trace.sessions,
        "seconds": trace.seconds,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "block_size": trace.block_size,
        "block_accesses": trace.block_accesses,
        "unique_blocks": trace.unique_blocks,
        "ceiling_pct": trace.ceiling_pct(False),
        "ceiling_outputs_pct": trace.ceiling_pct(True) if trace.has_outputs else None,
        "unchained": trace.unchained,
    }


_UNCHAINED = "blocks came behind another one than before: ids do not stand for prefixes there"


def unchained_line(trace: Any) -> str | None:
    """A warning where a trace's ids do not stand for prefixes, else None."""
    return f"{trace.unchained} {_UNCHAINED}" if trace.unchained else None


def lines(found: Mapping[str, Any]) -> list[str]:
    """A description of a trace as lines for people."""
    sessions = found["sessions"] or "not told"
    made = [
        f"{found['trace']} ({found['format']})",
        f"requests:  {found['requests']:,} over {found['seconds']:,.0f} s",
        f"sessions:  {sessions if isinstance(sessions, str) else f'{sessions:,}'}",
        f"tokens:    {found['input_tokens']:,} in prompts, {found['output_tokens']:,} in outputs",
        f"blocks:    {found['unique_blocks']:,} of {found['block_size']} tokens, "
        f"{found['block_accesses']:,} accesses",
        f"ceiling:   {found['ceiling_pct']:.1f} % of the accesses hit if nothing ever leaves",
    ]
    if found["ceiling_outputs_pct"] is not None:
        made.append(f"           {found['ceiling_outputs_pct']:.1f} % with the blocks of outputs")
    if found["unchained"]:
        made.append(f"warning:   {found['unchained']} {_UNCHAINED}")
    return made
