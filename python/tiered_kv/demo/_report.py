"""Medians, comparisons, the table and the JSON report."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_kv.demo._runs import Run

SCHEMA = 1
WIDE_COLUMNS = 130


@dataclass(frozen=True)
class Row:
    """One turn; times and counts are medians over its runs.

    Attributes:
        turn: Its name.
        source: Where the reused prefix came from.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Tokens that were not computed.
        computed_tokens: Tokens that were.
        ttft_s: Seconds to the first token.
        ttft_min_s: The fastest run.
        ttft_max_s: The slowest run.
        restore_s: Seconds of `ttft_s` spent in loading.
        speedup: Times faster than the fastest cold way.
        identical: Whether every answer is the one computed without a cache, in one go.
        runs: Number of runs.
        source_bytes: Bytes restored in a run, by tier.
        device_bytes: Bytes that the process read from the device in a run.
        open_s: Seconds that the store took to open before a run; not part of `ttft_s`.
        ttft_runs_s: Every run.
    """

    turn: str
    source: str
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    restore_s: float
    speedup: float
    identical: bool
    runs: int
    source_bytes: dict[str, int]
    device_bytes: int
    open_s: float
    ttft_runs_s: list[float]


@dataclass(frozen=True)
class Report:
    """All rows and what they were measured on.

    Attributes:
        rows: One for each turn.
        identical: Whether all answers are those computed without a cache.
        cold_s: Seconds to the first token of the fastest way without a cache.
        limit_s: The same with the prefix already in the model's own cache.
        facts: Model, document, threads, versions.
        process: Seconds that the first process took to import, load and open.
        restarted: The same for the second process.
        answers: Question, and the answer without a cache.
    """

    rows: list[Row]
    identical: bool
    cold_s: float
    limit_s: float
    facts: dict[str, Any]
    process: dict[str, float]
    restarted: dict[str, float]
    answers: dict[str, str]


def make_report(
    runs: Sequence[Run],
    *,
    cold: tuple[str, str],
    limit: str,
    facts: Mapping[str, Any],
    process: Mapping[str, float],
    restarted: Mapping[str, float],
    answer_text: Callable[[list[int]], str],
) -> Report:
    """Sums up runs.

    Args:
        runs: All runs, in order.
        cold: Turns that reuse nothing; the first one's answers are the reference.
        limit: The turn whose prefix was in the model's own cache.
        facts: See `Report`.
        process: See `Report`.
        restarted: See `Report`.
        answer_text: Turns tokens into text.
    """
    by_turn: dict[str, list[Run]] = {}
    for run in runs:
        by_turn.setdefault(run.turn, []).append(run)
    # The fastest cold way is the honest one to compare with, whichever it is on this machine.
    cold_s = min(_median(by_turn[turn]) for turn in cold if turn in by_turn)
    reference = {run.question: run.tokens for run in by_turn[cold[0]]}
    rows = [_row(turn, of_turn, cold_s, reference) for turn, of_turn in by_turn.items()]
    return Report(
        rows=rows,
        identical=all(row.identical for row in rows),
        cold_s=cold_s,
        limit_s=_median(by_turn[limit]),
        facts=dict(facts),
        process=dict(process),
        restarted=dict(restarted),
        answers={question: answer_text(tokens) for question, tokens in reference.items()},
    )


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(run.ttft_s for run in runs)


def _row(turn: str, runs: Sequence[Run], cold_s: float, reference: Mapping[str, list[int]]) -> Row:
    times = [run.ttft_s for run in runs]
    typical = sorted(runs, key=lambda run: run.ttft_s)[len(runs) // 2]
    return Row(
        turn=turn,
        source=_source(typical),
        prompt_tokens=typical.prompt_tokens,
        reused_tokens=typical.reused_tokens,
        computed_tokens=typical.prompt_tokens - typical.reused_tokens,
        ttft_s=statistics.median(times),
        ttft_min_s=min(times),
        ttft_max_s=max(times),
        restore_s=statistics.median(run.restore_s for run in runs),
        speedup=cold_s / statistics.median(times),
        identical=all(run.tokens == reference[run.question] for run in runs),
        runs=len(runs),
        source_bytes=typical.source_bytes,
        device_bytes=typical.device_bytes,
        open_s=statistics.median(run.open_s for run in runs),
        ttft_runs_s=times,
    )


def _source(run: Run) -> str:
    if run.source_bytes:
        return "+".join(sorted(run.source_bytes))
    return "model" if run.reused_tokens else "none"


def print_table(report: Report, console: Console | None = None) -> None:
    """Prints the rows on standard output; where that is narrow, without the less telling columns.

    Args:
        report: What to print.
        console: Where to print; by default standard output, as wide as needed if it is a file.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE_COLUMNS)
    wide = console.width >= WIDE_COLUMNS
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown = [name for name in _COLUMNS if wide or name not in _LESS_TELLING]
    for name in shown:
        table.add_column(name, justify="left" if name == "turn" else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*(_COLUMNS[name](row) for name in shown))
    console.print(table)
    for line in _footnotes(report):
        console.print(line)


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "turn": lambda row: row.turn,
    "first token": lambda row: f"{row.ttft_s:.3f} s",
    "spread": lambda row: f"{row.ttft_min_s:.2f}-{row.ttft_max_s:.2f}",
    "faster": lambda row: f"{row.speedup:.1f}x" if row.reused_tokens else "",
    "reused": lambda row: str(row.reused_tokens),
    "computed": lambda row: str(row.computed_tokens),
    "restored": lambda row: ", ".join(
        f"{_mib(size)} {tier}" for tier, size in row.source_bytes.items()
    ),
    "from device": lambda row: _mib(row.device_bytes) if row.device_bytes else "",
    "store open": lambda row: f"{row.open_s:.2f} s" if row.open_s else "",
    "answer": lambda row: "same" if row.identical else "DIFFER",
}
_LESS_TELLING = {"spread", "computed", "from device", "store open"}


def _footnotes(report: Report) -> Iterator[str]:
    facts = report.facts
    yield (
        f"{facts['document_tokens']} tokens of document, {facts['threads']} threads, medians of "
        f"{facts['repeats']}; cold is {report.cold_s:.2f} s, the limit {report.limit_s:.3f} s."
    )
    first, second = report.process, report.restarted
    yield (
        f"Apart from these: import {first['import_s']:.1f} s, model {first['model_load_s']:.1f} s, "
        f"store {first['open_s']:.2f} s; after the restart import {second['import_s']:.1f} s, "
        f"model {second['model_load_s']:.1f} s."
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def write_json(report: Report, path: Path) -> None:
    """Writes the report, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, **asdict(report)}
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".demo-", encoding="utf-8", delete=False
    ) as file:
        json.dump(document, file, indent=2, sort_keys=True)
        file.write("\n")
    Path(file.name).replace(path)
