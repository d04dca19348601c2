"""The plot: what a first token costs, cold and warm, and what is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiered_kv.demo._report import Report, Row

_COMPUTE = "#4c78a8"
_RESTORE = "#f58518"
_COLD = "#9aa5b1"
_INK = "#1f2933"


def draw(report: Report, path: Path) -> None:
    """Draws the report as a PNG.

    Args:
        report: What to draw.
        path: Where to; its directory is made.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    warm = [row for row in report.rows if row.reused_tokens]
    heights = [len(report.rows) + 0.6, len(warm) + 0.6]
    style = {
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": "#cbd2d9",
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with mpl.rc_context(style):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, figsize=(10, 7), height_ratios=heights, layout="constrained"
        )
        _all_turns(upper, report)
        _warm_turns(lower, report, warm)
        figure.legend(loc="outside lower right", ncols=2, frameon=False)
        figure.get_layout_engine().set(hspace=0.06)
        figure.savefig(path, dpi=150, metadata={"Software": "tiered-kv"})
        pyplot.close(figure)


def _bare(axes: Any, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row.turn for row in rows])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _all_turns(axes: Any, report: Report) -> None:
    rows = report.rows
    facts = report.facts
    for position, row in enumerate(rows):
        axes.barh(position, row.ttft_s, color=_COMPUTE if row.reused_tokens else _COLD, height=0.62)
        label = f" {row.ttft_s:.2f} s"
        if row.reused_tokens:
            label += f"   {row.speedup:.0f}x faster"
        axes.text(row.ttft_s, position, label, va="center")
    _bare(axes, rows)
    axes.set_xlim(0, max(row.ttft_s for row in rows) * 1.12)
    axes.set_xlabel("seconds to the first token")
    same = "all answers identical" if report.identical else "ANSWERS DIFFER"
    axes.set_title(
        f"A question about a document of {facts['document_tokens']:,} tokens: {same}",
        loc="left",
        fontweight="bold",
    )


def _warm_turns(axes: Any, report: Report, rows: list[Row]) -> None:
    for position, row in enumerate(rows):
        compute = row.ttft_s - row.restore_s
        named = {"label": "compute the question"} if not position else {}
        axes.barh(position, compute, color=_COMPUTE, height=0.62, **named)
        named = {"label": "restore the document"} if not position else {}
        axes.barh(position, row.restore_s, left=compute, color=_RESTORE, height=0.62, **named)
        spread = [[row.ttft_s - row.ttft_min_s], [row.ttft_max_s - row.ttft_s]]
        axes.errorbar(row.ttft_s, position, xerr=spread, color=_INK, capsize=3, linewidth=1)
        axes.text(
            row.ttft_max_s,
            position,
            f"  {row.ttft_s / report.limit_s:.2f} of the limit",
            va="center",
        )
    axes.axvline(report.limit_s, color=_INK, linestyle=":", linewidth=1.2)
    _bare(axes, rows)
    axes.set_xlim(0, max(row.ttft_max_s for row in rows) * 1.22)
    axes.set_xlabel("seconds to the first token (bars: medians; whiskers: all runs)")
    axes.set_title("The same without the cold turns: what is left", loc="left", fontweight="bold")
