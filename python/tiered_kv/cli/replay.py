"""`tiered-kv replay`: what each policy would have done on a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.node import add_node_options, deployed, named_tiers
from tiered_kv.cli.options import Parser
from tiered_kv.cli.output import bar, people, print_lines, write_document
from tiered_kv.cli.traces import TRACE, add_source_options, open_trace

_ABOUT = "Say what each eviction policy would have done on a trace of requests."
_CAPACITIES = "0.5,1,2,3,5,10,20"
_POSTERIOR_CAPACITY = "2"
_OPTIMUM = "min"


def _parser() -> Parser:
    parser = Parser("tiered-kv replay", _ABOUT)
    parser.add_argument("trace", help=TRACE)
    parser.add_argument(
        "--capacity",
        help=f"Percents of the trace's unique prompt blocks. [default: {_CAPACITIES}; with "
        f"--posterior {_POSTERIOR_CAPACITY}]",
    )
    parser.add_argument(
        "--policies",
        help="Names, or all, ablation, steps or tried; min, the optimum, is always shown. "
        "[default: all; with --posterior beta]",
    )
    parser.add_argument("--outputs", action="store_true", help="Insert blocks of outputs, too.")
    parser.add_argument(
        "--no-labels", action="store_true", help="Tell no sessions nor kinds of requests."
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="Runs where draws decide; shows means. [default: 1]"
    )
    parser.add_argument("--threads", type=int, help="Runs at a time. [default: the processors]")
    parser.add_argument(
        "--posterior",
        action="store_true",
        help="Show what the predictor has learned of each pair, instead of hits.",
    )
    parser.add_argument(
        "--prefetch",
        metavar="FAST:SLOW",
        help="Prefetch between two tiers of these percents, instead of hits of one.",
    )
    add_source_options(parser)
    add_node_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write JSON; - for stdout.")
    parser.add_argument("--plot", type=Path, help="Also draw it: a .png or .svg file.")
    return parser


def run(args: Sequence[str]) -> int:
    """Answers, or raises what `tiered_kv.cli.entry` turns into one line.

    Args:
        args: The arguments after `replay`.

    Returns:
        The exit status, an `ExitCode`.
    """
    options = _parser().read(args)
    if isinstance(options, ExitCode):
        return options
    if options.plot is not None:
        from tiered_kv.replay import plot

        plot.check(options.plot)
    for field in ("json", "plot"):
        _check_directory(field, getattr(options, field))
    if options.node is not None or options.model is not None:
        _node(options)
    elif options.posterior:
        _posterior(options)
    elif options.prefetch is not None:
        _prefetch(options)
    else:
        _replay(options)
    return ExitCode.OK


def _bad(field: str, value: object, want: str) -> Exception:
    from tiered_kv.errors import InvalidArgumentError
    from tiered_kv.sizing.checks import shown

    return InvalidArgumentError(f"replay: `{field}` is {shown(value)}: give {want}", op="replay")


def _check_directory(field: str, path: Path | None) -> None:
    """Refuses a file that cannot be written before minutes are spent on what it is to hold."""
    if path is not None and not path.parent.is_dir():
        raise _bad(field, str(path), "a file in a directory that is there")


def _capacities(text: str) -> list[float]:
    found = []
    for part in text.split(","):
        try:
            pct = float(part)
        except ValueError:
            pct = 0.0
        if not 0.0 < pct <= 100.0:
            raise _bad("capacity", part, "percentages above 0 and up to 100, as in 0.5,1,5")
        found.append(pct)
    return found


def _names(text: str) -> list[str]:
    """The policies' names as the table shows them: each once, the optimum last."""
    from tiered_kv import replay

    groups = replay.policies()
    names = [name for part in text.split(",") for name in groups.get(part, [part])]
    known = {name for group in groups.values() for name in group}
    for name in names:
        if name not in known:
            every = ", ".join([*groups, *groups["all"]])
            raise _bad("policies", name, f"one or more of {every}")
    return [name for name in dict.fromkeys(names) if name != _OPTIMUM] + [_OPTIMUM]


def _replay(options: argparse.Namespace) -> None:
    from tiered_kv import replay
    from tiered_kv.replay import plot, report

    capacities = _capacities(options.capacity or _CAPACITIES)
    names = _names(options.policies or "all")
    trace, _format = open_trace(options)
    groups = sum(options.seeds if _is_seeded(name) else 1 for name in names)
    with bar(groups * len(capacities) * trace.requests, "replaying") as progress:
        found = replay.replay(
            trace,
            capacities,
            names,
            seeds=options.seeds,
            outputs=options.outputs,
            labels=not options.no_labels,
            threads=options.threads,
            progress=progress,
        )
    _show(options, found, report.table(found), plot.draw)


def _is_seeded(name: str) -> bool:
    return name.startswith("beta") or name == "lhd"


def _posterior(options: argparse.Namespace) -> None:
    from tiered_kv import replay
    from tiered_kv.replay import plot, report

    capacity = _capacities(options.capacity or _POSTERIOR_CAPACITY)
    policy = options.policies or "beta"
    if len(capacity) != 1 or "," in policy:
        raise _bad("posterior", f"{options.capacity} {policy}", "one capacity and one policy")
    trace, _format = open_trace(options)
    with bar(trace.requests, "learning") as progress:
        found = replay.posterior(
            trace,
            capacity[0],
            policy,
            outputs=options.outputs,
            labels=not options.no_labels,
            progress=progress,
        )
    _show(options, found, report.posterior_table(found), plot.draw_posterior)


def _prefetch(options: argparse.Namespace) -> None:
    from tiered_kv import replay
    from tiered_kv.replay import report

    if options.plot is not None:
        raise _bad("plot", str(options.plot), "none with --prefetch: it has a table only")
    tiers = _capacities(options.prefetch.replace(":", ","))
    if len(tiers) != 2 or tiers[0] > tiers[1]:
        raise _bad("prefetch", options.prefetch, "FAST:SLOW, the smaller percentage first")
    trace, _format = open_trace(options)
    with bar(report.PREFETCH_ROWS * trace.requests, "prefetching") as progress:
        found = replay.prefetch(
            trace,
            tiers[0],
            tiers[1],
            outputs=options.outputs,
            labels=not options.no_labels,
            progress=progress,
        )
    _show(options, found, report.prefetch_table(found), _no_plot)


def _node(options: argparse.Namespace) -> None:
    from tiered_kv.replay import node, node_report, plot

    for name in ("capacity", "prefetch", "posterior"):
        if getattr(options, name):
            raise _bad(name, getattr(options, name), "none with --node: the tiers have capacities")
    policies = [name for name in (options.policies or "beta,lru").split(",") if name]
    trace, _format = open_trace(options)
    deployment = deployed(options, trace)
    with bar(len(policies) * trace.requests, "replaying") as progress:
        found = node.run(
            trace,
            deployment,
            policies,
            tiers=named_tiers(options),
            waste_budget=options.waste_budget / 100,
            outputs=options.outputs,
            labels=not options.no_labels,
            threads=options.threads,
            progress=progress,
        )
    if options.plot is not None:
        plot.draw_node(found, options.plot)
    if write_document(options.json, found):
        return
    print_lines(node_report.head_lines(found))
    for table in node_report.tables(found):
        print_lines([""])
        people(as_json=False).print(table)
    print_lines(["", *node_report.foot_lines(found)])


def _no_plot(_found: Mapping[str, Any], _path: Path) -> None:
    raise AssertionError("--plot was refused")


def _show(
    options: argparse.Namespace,
    found: Mapping[str, Any],
    table: Any,
    draw: Callable[[Mapping[str, Any], Path], None],
) -> None:
    from tiered_kv.replay import report

    if options.plot is not None:
        draw(found, options.plot)
    if write_document(options.json, found):
        return
    print_lines([report.heading(found)])
    people(as_json=False).print(table)
