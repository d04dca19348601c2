"""A picture of a projection, which says that it is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiered_kv.errors import one_line
from tiered_kv.replay.plot import check

_OURS, _OTHERS = "#b22222", "#999999"
_PANELS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("mean seconds to the first token", ".3g", lambda one: float(one["ttft_s"]["mean"])),
    ("tokens a second, in and out", ",.0f", lambda one: float(one["tokens_per_s"])),
    ("USD a million tokens", ".3f", lambda one: float(one["usd_per_million_tokens"])),
)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draws time to first token, throughput and cost of each configuration.

    Args:
        found: What `tiered_kv.projection.project` returned.
        path: Where to write; its ending decides the format.

    Raises:
        InvalidArgumentError: The ending is neither `.png` nor `.svg`.
        OSError: It cannot be written.
    """
    check(path)
    from matplotlib.figure import Figure

    results = found["results"]
    names = [one["configuration"] for one in results]
    colours = [_OURS if one is results[-1] else _OTHERS for one in results]
    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, (title, form, value) in zip(figure.subplots(1, 3, sharey=True), _PANELS, strict=True):
        values = [value(one) for one in results]
        bars = axes.barh(names, values, color=colours)
        axes.bar_label(bars, [format(one, form) for one in values], padding=3)
        axes.set_xlim(0, 1.25 * max(values, default=1.0) or 1.0)
        axes.set_xlabel(title)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    title = f"Projection: {found['trace']['name']}, {found['model']} on {found['node']}"
    figure.suptitle(one_line(title), x=0.01, ha="left", parse_math=False)
    figure.savefig(path, dpi=150)
