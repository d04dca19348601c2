"""`tiered-kv trace`: what is in a trace of requests, in another format, or made up."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.options import Parser
from tiered_kv.cli.output import print_json, print_lines
from tiered_kv.cli.traces import TRACE, add_source_options, open_trace

_OUT = "the file to write: runs of ids, one request a line; packed if it ends in .gz"


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON on stdout.")


def _tell(options: argparse.Namespace, trace: Any, source: str) -> None:
    """Says what was written, and of what."""
    if options.json:
        from tiered_kv.replay import report

        print_json({**report.describe(trace, source), "written": str(options.out)})
        return
    print_lines([f"{options.out}: {trace.requests} requests of {trace.name} ({source})"])


def _info(args: Sequence[str]) -> int:
    parser = Parser("tiered-kv trace info", "Say what a trace has, and what its ceiling is.")
    parser.add_argument("trace", help=TRACE)
    add_source_options(parser)
    _add_json(parser)
    options = parser.read(args)
    if isinstance(options, ExitCode):
        return options
    from tiered_kv.replay import report

    found = report.describe(*open_trace(options))
    if options.json:
        print_json(found)
    else:
        print_lines(report.lines(found))
    return ExitCode.OK


def _convert(args: Sequence[str]) -> int:
    parser = Parser(
        "tiered-kv trace convert",
        "Write a trace as runs of ids: numbers of blocks and sessions, times and lengths only.",
    )
    parser.add_argument("trace", help=TRACE)
    parser.add_argument("out", type=Path, help=_OUT)
    add_source_options(parser)
    _add_json(parser)
    options = parser.read(args)
    if isinstance(options, ExitCode):
        return options
    trace, source = open_trace(options)
    trace.write(options.out)
    _tell(options, trace, source)
    return ExitCode.OK


def _generate(args: Sequence[str]) -> int:
    parser = Parser("tiered-kv trace generate", "Make a trace up, and write it as runs of ids.")
    parser.add_argument("kind", nargs="?", help="What it is like; --list says what there is.")
    parser.add_argument("out", nargs="?", type=Path, help=_OUT)
    parser.add_argument("--requests", type=int, default=30_000, help="[default: 30000]")
    parser.add_argument("--seed", type=int, default=0, help="[default: 0]")
    parser.add_argument("--list", action="store_true", help="List the kinds.")
    _add_json(parser)
    options = parser.read(args)
    if isinstance(options, ExitCode):
        return options
    from tiered_kv import replay

    if options.list and options.json:
        print_json(replay.kinds())
        return ExitCode.OK
    if options.list:
        print_lines(f"{kind}: {about}" for kind, about in replay.kinds().items())
        return ExitCode.OK
    if options.out is None:
        return parser.refuse("a kind and a file to write are wanted")
    trace = replay.generate(options.kind, options.requests, options.seed)
    trace.write(options.out)
    _tell(options, trace, "generated")
    return ExitCode.OK


_VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "info": _info,
    "convert": _convert,
    "generate": _generate,
}


def run(args: Sequence[str]) -> int:
    """Does what the first argument says, or raises what `tiered_kv.cli.entry` makes one line of.

    Args:
        args: The arguments after `trace`.

    Returns:
        The exit status, an `ExitCode`.
    """
    if args and args[0] in _VERBS:
        return _VERBS[args[0]](args[1:])
    parser = Parser(
        "tiered-kv trace",
        "Look at traces of requests, convert them, make them up; all print JSON with --json.",
    )
    parser.add_argument(
        "verb", choices=list(_VERBS), help="`tiered-kv trace VERB --help` says more."
    )
    options = parser.read(args)
    return options if isinstance(options, ExitCode) else ExitCode.OK
