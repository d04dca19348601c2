"""`tiered-kv project`: time to first token, throughput and cost, projected from a replay."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.node import add_node_options, deployed
from tiered_kv.cli.options import Parser
from tiered_kv.cli.output import bar, people, print_lines, write_document
from tiered_kv.cli.traces import TRACE, add_source_options, open_trace

_ABOUT = (
    "Project time to first token, throughput and cost of a model on a node, from a replay: without "
    "offload, with DRAM, with all tiers by recency, and with all tiers as we do. A projection is "
    "no measurement: every input is printed with its source."
)
T = TypeVar("T")
_REPORT = Path("build/reports/project.json")
_MOST_BYTES = 64 << 20


def _parser() -> Parser:
    parser = Parser("tiered-kv project", _ABOUT)
    parser.add_argument("trace", nargs="?", help=TRACE)
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="In place of a trace: an earlier document of this command, whose replays are used.",
    )
    parser.add_argument("--policy", default="beta", help="Ours: beta or a variant. [default: beta]")
    parser.add_argument("--outputs", action="store_true", help="Store blocks of outputs, too.")
    parser.add_argument(
        "--no-labels", action="store_true", help="Tell no sessions nor kinds of requests."
    )
    parser.add_argument("--threads", type=int, help="Runs at a time. [default: the processors]")
    add_source_options(parser)
    add_node_options(parser)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        default=_REPORT,
        help=f"The document; - for stdout. [default: {_REPORT}]",
    )
    parser.add_argument("--plot", type=Path, help="Also draw it: a .png or .svg file.")
    return parser


def run(args: Sequence[str]) -> int:
    """Answers, or raises what `tiered_kv.cli.entry` turns into one line.

    Args:
        args: The arguments after `project`.

    Returns:
        The exit status, an `ExitCode`.
    """
    parser = _parser()
    options = parser.read(args)
    if isinstance(options, ExitCode):
        return options
    if (options.trace is None) == (options.replay is None):
        return parser.refuse("give a trace, or --replay with an earlier document")
    if options.tiers is not None:
        return parser.refuse("--tiers: the configurations say which tiers are used")
    if options.plot is not None:
        from tiered_kv.replay import plot

        plot.check(options.plot)
    found = _projected(options)
    _show(options, found)
    return ExitCode.OK


def _projected(options: argparse.Namespace) -> dict[str, Any]:
    from tiered_kv.projection.model import UNCHANGED, usd_per_hour
    from tiered_kv.projection.run import Facts, describe, project, replay_all

    earlier = None if options.replay is None else _earlier(options.replay)
    trace = None if earlier else open_trace(options)[0]
    if earlier is None:
        facts = Facts.of(trace, outputs=options.outputs)
    else:
        facts = _sound(options.replay, lambda: Facts(**earlier["trace"]))
    deployment = deployed(options, facts)
    # What is missing is told before the replays, not behind them.
    usd_per_hour(deployment, [tier.name for tier in deployment.node.tiers], UNCHANGED)
    described = describe(deployment, options.policy, options.waste_budget / 100)
    if earlier:
        replays = _same(earlier, described)
        return _sound(options.replay, lambda: project(deployment, facts, replays))
    with bar(len(described) * facts.requests, "replaying") as progress:
        replays = replay_all(
            trace,
            described,
            outputs=options.outputs,
            labels=not options.no_labels,
            threads=options.threads,
            progress=progress,
        )
    return project(deployment, facts, replays)


def _earlier(path: Path) -> dict[str, Any]:
    """An earlier document of this command.

    Raises:
        InvalidArgumentError: It is none.
        OSError: It cannot be read.
    """
    from tiered_kv.projection.model import OP
    from tiered_kv.replay.deployment import fault

    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    try:
        found = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"trace", "replays"} <= found.keys():
        raise fault(f"`replay` {path} is no document of `tiered-kv project`: give one", OP)
    return found


def _sound(path: Path, make: Callable[[], T]) -> T:
    """What `make` makes of an earlier document.

    Raises:
        InvalidArgumentError: The document is not as this command wrote it.
    """
    from tiered_kv.errors import TieredKvError
    from tiered_kv.projection.model import OP
    from tiered_kv.replay.deployment import fault

    try:
        return make()
    except TieredKvError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise fault(f"`replay` {path} is damaged: give the trace, to replay it", OP) from None


def _same(earlier: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """The replays of an earlier document, if they are those that are needed now.

    Raises:
        InvalidArgumentError: One is missing, or is of another node or model.
    """
    from tiered_kv.projection.model import OP
    from tiered_kv.replay.deployment import fault

    for name, one in described.items():
        before = earlier["replays"].get(name, {}).get("described")
        # As it is read back: what was written has no tuples.
        if before != json.loads(json.dumps(one)):
            fields = [field for field in one if (before or {}).get(field) != one[field]]
            shown = ", ".join(fields)
            raise fault(
                f"`replay` has another {shown} for {name!r}: give the trace, to replay it", OP
            )
    replays: dict[str, Any] = earlier["replays"]
    return replays


def _show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    from tiered_kv.projection import plot, report

    if options.plot is not None:
        plot.draw(found, options.plot)
    if options.json == _REPORT:
        _REPORT.parent.mkdir(parents=True, exist_ok=True)
    if write_document(options.json, found):
        return
    print_lines(report.head_lines(found))
    for table in report.tables(found):
        print_lines([""])
        people(as_json=False).print(table)
    print_lines(["", *report.foot_lines(found)])
