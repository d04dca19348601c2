"""Pairs of measurements, interleaved, as rows of a table and of the report."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

REPORT = Path("build/reports/bench.json")


@dataclass(frozen=True)
class Row:
    """One figure beside its limit.

    Attributes:
        name: What was measured.
        value: The median.
        unit: Of `value` and `reference_value`.
        reference: What it stands beside.
        reference_value: Its median.
        ratio: Median over the rounds of value / reference.
        spread: The least and the greatest ratio of a round.
        runs: Rounds.
        bar: What is aimed at, as text.
        met: Whether the median reaches it.
    """

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float
    ratio: float
    spread: tuple[float, float]
    runs: int
    bar: str
    met: bool | None


def interleave(
    measure: Callable[[], float], reference: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Runs both in turn, in changing order, after one of each that does not count."""
    measure()
    reference()
    ours, theirs = [], []
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            if which == 0:
                ours.append(measure())
            else:
                theirs.append(reference())
    return ours, theirs


def compare(
    name: str,
    unit: str,
    reference: str,
    pairs: tuple[list[float], list[float]],
    *,
    least: float | None = None,
    most: float | None = None,
) -> Row:
    """A row from the rounds of both sides; `least` and `most` are the bar of the ratio."""
    ours, theirs = pairs
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    bar, met = "", None
    if least is not None:
        bar, met = f">= {least:g}", ratio >= least
    elif most is not None:
        bar, met = f"<= {most:g}", ratio <= most
    return Row(
        name=name,
        value=statistics.median(ours),
        unit=unit,
        reference=reference,
        reference_value=statistics.median(theirs),
        ratio=ratio,
        spread=(min(ratios), max(ratios)),
        runs=len(ours),
        bar=bar,
        met=met,
    )


def absolute(name: str, unit: str, values: list[float], limit: float) -> Row:
    """A row beside a fixed bar, which the value is to stay under."""
    value = statistics.median(values)
    return Row(
        name=name,
        value=value,
        unit=unit,
        reference="bar",
        reference_value=limit,
        ratio=value / limit,
        spread=(min(values) / limit, max(values) / limit),
        runs=len(values),
        bar="<= 1",
        met=value <= limit,
    )


def at_least(name: str, unit: str, values: list[float], limit: float) -> Row:
    """A row beside a fixed bar, which the value is to reach."""
    row = absolute(name, unit, values, limit)
    return Row(**(asdict(row) | {"bar": ">= 1", "met": row.value >= limit}))


def show(rows: Iterable[Row]) -> None:
    """Prints the table."""
    table = Table("what", "value", "beside", "reference", "ratio", "spread", "bar", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.4g} {row.unit}",
            row.reference,
            f"{row.reference_value:.4g} {row.unit}",
            f"{row.ratio:.3f}",
            f"{row.spread[0]:.2f}-{row.spread[1]:.2f}",
            row.bar if row.met is None else f"{row.bar} {'met' if row.met else 'MISSED'}",
        )
    Console(width=max(140, Console().width)).print(table)


def markdown(path: Path) -> str:
    """The rows of a report as the table of a document."""
    lines = ["| what | value | beside | ratio (spread) | bar |", "|---|---|---|---|---|"]
    for told in json.loads(path.read_text())["rows"]:
        row = Row(**told)
        value = f"{row.value:,.0f}" if row.value >= 1e4 else f"{row.value:.3g}"
        fixed = row.reference == "bar"
        beside = "" if fixed else f"{row.reference} {row.reference_value:.3g}"
        spread = "one run" if row.runs == 1 else f"{row.spread[0]:.2f}-{row.spread[1]:.2f}"
        limit = f"{row.reference_value:g}" if fixed else row.bar.split(" ")[-1]
        bar = "" if row.met is None else f"{limit}, {'met' if row.met else 'missed'}"
        lines.append(
            f"| {row.name} | {value} {row.unit} | {beside} | {row.ratio:.2f} ({spread}) | {bar} |"
        )
    return "\n".join(lines)


def write(rows: list[Row], machine: dict[str, object], path: Path = REPORT) -> None:
    """Writes the report; rows of parts that were not run this time are kept."""
    old = {}
    if path.exists():
        old = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    old |= {row.name: asdict(row) for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"schema": 1, "machine": machine, "rows": list(old.values())}
    path.write_text(json.dumps(report, indent=1) + "\n")


def progress(text: str) -> None:
    """Says what is being measured."""
    print(f".. {text}", file=sys.stderr, flush=True)
