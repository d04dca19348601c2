"""Pictures of a replay and of what the predictor has learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered_kv.errors import InvalidArgumentError, one_line
from tiered_kv.planner.plot import TIER_COLOURS
from tiered_kv.replay.report import means
from tiered_kv.sizing.checks import shown

FORMATS = (".png", ".svg")
_OURS = "#b22222"
_LEAST_LIVES = 1.0
"""Less evidence than this of a pair is none: its curve would be its prior."""


def check(path: Path) -> None:
    """Refuses a file that cannot be a plot, before anything is computed.

    Raises:
        InvalidArgumentError: Its name ends neither in `.png` nor in `.svg`.
    """
    if path.suffix.lower() not in FORMATS:
        message = f"replay: `plot` is {shown(str(path))}: give a path that ends in .png or .svg"
        raise InvalidArgumentError(message, op="replay")
    import matplotlib

    matplotlib.use("agg")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draws the hits of each policy over the capacities, below the ceiling.

    Args:
        found: What `tiered_kv.replay.replay` returned.
        path: Where to write; its ending decides the format.

    Raises:
        InvalidArgumentError: The ending is not one of `FORMATS`.
        OSError: It cannot be written.
    """
    check(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(found["ceiling_pct"], color="black", linestyle=":", label="ceiling")
    colours = mpl.colormaps["tab20"]
    for number, (policy, cells) in enumerate(means(found, "hit_pct").items()):
        capacities = sorted(cells)
        ours = policy.startswith("beta")
        axes.plot(
            capacities,
            [cells[pct] for pct in capacities],
            label=policy,
            marker="o",
            markersize=3,
            linewidth=2.2 if ours else 1.2,
            linestyle="--" if policy == "min" else "-",
            color={"min": "black", "beta": _OURS}.get(policy, colours(number % 20)),
        )
    ticks = sorted({result["capacity_pct"] for result in found["results"]})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("capacity, % of the trace's unique blocks")
    axes.set_ylabel("hits, % of the accesses")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    # Names are no formulas, whatever signs they have.
    title = f"{found['trace']}, {found['requests']:,} requests"
    axes.set_title(one_line(title), loc="left", parse_math=False)
    figure.savefig(path, dpi=150)


def draw_posterior(found: Mapping[str, Any], path: Path) -> None:
    """Draws the hazard curves of the pairs that there is evidence of, a panel for each block type.

    Args:
        found: What `tiered_kv.replay.posterior` returned.
        path: Where to write; its ending decides the format.

    Raises:
        InvalidArgumentError: The ending is not one of `FORMATS`.
        OSError: It cannot be written.
    """
    check(path)
    from matplotlib.figure import Figure

    # The first bucket starts at no age at all, which a logarithmic axis does not have.
    ages = [max(age, found["age_starts_s"][1] / 2) for age in found["age_starts_s"]]
    kinds = list(dict.fromkeys(pair["block_type"] for pair in found["pairs"]))
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, kind in zip(panels, kinds, strict=True):
        for pair in found["pairs"]:
            if pair["block_type"] == kind and pair["lives"] >= _LEAST_LIVES:
                label = f"{pair['transition']}: {pair['mean']:.2f} of {pair['lives']:.0f}"
                axes.step(ages, pair["hazard"], where="post", label=label)
        axes.set_title(kind, loc="left")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(1e-4, 1.0)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_lines():
            axes.legend(frameon=False, fontsize="small")
    figure.supxlabel("seconds since the last access")
    figure.supylabel("chance to be reused in the bucket, if not before")
    title = f"{found['trace']}, {found['policy']} at {found['capacity_pct']:g} %"
    figure.suptitle(one_line(title), x=0.01, ha="left", parse_math=False)
    figure.savefig(path, dpi=150)


def draw_node(found: Mapping[str, Any], path: Path) -> None:
    """Draws the hits of each tier, and the time to the first token, for each policy.

    Args:
        found: What `tiered_kv.replay.node.run` returned.
        path: Where to write; its ending decides the format.

    Raises:
        InvalidArgumentError: The ending is not one of `FORMATS`.
        OSError: It cannot be written.
    """
    check(path)
    from matplotlib.figure import Figure

    results = found["results"]
    names = [one["policy"] for one in results]
    figure = Figure(figsize=(10, 1.8 + 0.6 * len(results)), layout="constrained")
    hits, times = figure.subplots(1, 2)
    left = [0.0] * len(results)
    for at, tier in enumerate(results[0]["tiers"]):
        widths = [one["tiers"][at]["hit_pct"] for one in results]
        hits.barh(names, widths, left=left, label=tier["tier"], color=TIER_COLOURS[tier["tier"]])
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    hits.axvline(found["ceiling_pct"], color="black", linestyle=":", label="ceiling")
    hits.set_xlabel("hits, % of the accesses")
    for name, colour in (("p99", "#cccccc"), ("p90", "#999999"), ("p50", "#444444")):
        widths = [one["ttft_s"][name] for one in results]
        times.barh(names, widths, label=name, color=colour)
    times.set_xlabel("seconds to the first token, without queues")
    for axes in (hits, times):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    title = f"{found['trace']} on {found['node']}, {found['model']}"
    figure.suptitle(one_line(title), x=0.01, ha="left", parse_math=False)
    figure.savefig(path, dpi=150)
