"""A picture of a plan: what each tier holds, and how fast it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered_kv.errors import one_line
from tiered_kv.planner.units import bad, large

FORMATS = (".png", ".svg")
TIER_COLOURS = {
    "hbm": "#b22222",
    "dram": "#e07b39",
    "cxl": "#e0b339",
    "nvme": "#5a9367",
    "fabric": "#3a7ca5",
    "pfs": "#6a5d9e",
}


def check(path: Path) -> None:
    """Refuses a file that cannot be a plot, before anything is computed.

    Raises:
        InvalidArgumentError: Its name ends neither in `.png` nor in `.svg`.
    """
    if path.suffix.lower() not in FORMATS:
        raise bad("plot", str(path), "a path that ends in .png or .svg")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draws the tiers of a document of `tiered-kv plan`.

    Args:
        found: The document.
        path: Where to write; its ending decides the format.

    Raises:
        InvalidArgumentError: The ending is not one of `FORMATS`.
        OSError: It cannot be written.
    """
    check(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    tiers = [tier for tier in found["tiers"] if tier["kv_bytes"]]
    figure = Figure(figsize=(9, 1.4 + 0.55 * max(1, len(tiers))), layout="constrained")
    axes = figure.add_subplot()
    names = [tier["name"] for tier in tiers]
    axes.barh(
        names,
        [tier["kv_bytes"] for tier in tiers],
        color=[TIER_COLOURS[name] for name in names],
    )
    for place, tier in enumerate(tiers):
        axes.annotate(
            _label(tier), (tier["kv_bytes"], place), (6, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.set_xscale("log")
    if tiers:
        sizes = [tier["kv_bytes"] for tier in tiers]
        axes.set_xlim(min(sizes) / 4, max(sizes) * 400)
    axes.set_xlabel("bytes for KV")
    axes.xaxis.set_major_formatter(lambda value, _place: large(value))
    axes.spines[["top", "right"]].set_visible(False)
    context = found["load"]["context"]
    title = one_line(f"{found['model']} on {found['node']}, {context:,} tokens a request")
    # Names are no formulas, whatever signs they have.
    axes.set_title(title, loc="left", parse_math=False)
    figure.savefig(path, dpi=150)


def _label(tier: Mapping[str, Any]) -> str:
    held = "any" if tier["requests"] is None else f"{tier['requests']:,}"
    parts = [large(tier["kv_bytes"]), f"{held} requests"]
    if tier["recompute_seconds"] is not None:
        parts.append(f"{tier['recompute_seconds']:,.0f} s to recompute")
    return ", ".join(parts)
