"""Where the commands take their traces from: a file, or one that is made up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tiered_kv.cli.options import Parser
from tiered_kv.cli.output import error_line

GENERATE = "generate:"
TRACE = (
    "a file of requests (runs of ids, Mooncake, Qwen-Bailian, LMCache's lookups or ShareGPT), or "
    "generate:KIND[:REQUESTS[:SEED]]"
)


def add_source_options(parser: Parser) -> None:
    """Adds what a trace of text needs to be read."""
    parser.add_argument(
        "--tokenizer", help="For ShareGPT: a tokenizer.json, or a model's name on the hub."
    )
    parser.add_argument(
        "--block-size", type=int, default=16, help="Tokens of a block of ShareGPT. [default: 16]"
    )


def open_trace(options: argparse.Namespace) -> tuple[Any, str]:
    """The trace that `options.trace` names, and its format; a warning if its chains are broken.

    Raises:
        TieredKvError: It cannot be read, or there is no such kind.
    """
    from tiered_kv import replay
    from tiered_kv.replay import report, sharegpt

    if options.trace.startswith(GENERATE):
        kind, *numbers = options.trace.removeprefix(GENERATE).split(":")
        requests, seed = (_number(name, numbers, at) for at, name in enumerate(_NUMBERS))
        return replay.generate(kind, requests, seed), "generated"
    path = Path(options.trace)
    text = sharegpt.is_sharegpt(path)
    trace = replay.read(path, tokenizer=options.tokenizer, block_size=options.block_size)
    warning = report.unchained_line(trace)
    if warning is not None:
        error_line(f"warning: {warning}")
    return trace, "sharegpt" if text else trace.format


_NUMBERS = {"requests": 30_000, "seed": 0}


def _number(name: str, numbers: list[str], at: int) -> int:
    from tiered_kv.errors import InvalidArgumentError
    from tiered_kv.sizing.checks import shown

    if len(numbers) <= at:
        return _NUMBERS[name]
    text = numbers[at]
    if len(numbers) > len(_NUMBERS) or not (text.isascii() and text.isdigit() and len(text) < 19):
        message = f"trace: `{name}` is {shown(text)}: give generate:KIND[:REQUESTS[:SEED]]"
        raise InvalidArgumentError(message, op="trace")
    return int(text)
