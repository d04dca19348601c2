"""`tiered-kv size`: the exact bytes of a model's KV cache.

It answers in a fraction of the time that typer takes to load, so it reads its own options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.options import Parser
from tiered_kv.cli.output import print_json, print_lines

_MOST_BY_DEFAULT = 131_072
_ABOUT = "Say how many bytes a model's KV cache takes, exactly, and what simpler rules would say."
_COUNTS = (
    ("batch", "Requests."),
    ("block-size", "Tokens of a block."),
    ("tp", "Tensor-parallel ranks."),
    ("pp", "Pipeline stages."),
    ("cp", "Ranks that split the context."),
    ("ep", "Ranks that split the experts: no KV is split by them."),
    ("dp-attention", "Replicas of the attention inside the tensor-parallel ranks."),
)


def _parser() -> Parser:
    parser = Parser("tiered-kv size", _ABOUT)
    parser.add_argument(
        "model",
        help="a name of the catalogue, the path of a config.json, of a directory or of a GGUF "
        "file, or a hub id (owner/name)",
    )
    parser.add_argument(
        "--context",
        type=int,
        help=f"Tokens of a request. [default: the model's most, at most {_MOST_BY_DEFAULT}]",
    )
    for name, text in _COUNTS:
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{text} [default: 1]")
    parser.add_argument("--kv-dtype", help="Type of keys and values. [default: the model's]")
    parser.add_argument(
        "--speculative",
        default="none",
        help="Layers for speculative decoding: none, mtp or eagle. [default: none]",
    )
    parser.add_argument("--encoder-len", type=int, help="Encoder tokens, for cross attention.")
    parser.add_argument(
        "--engine",
        default="none",
        help="Also what an engine holds: none or the engine's name. [default: none]",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON on stdout.")
    return parser


def run(args: Sequence[str]) -> int:
    """Answers, or raises what `tiered_kv.cli.entry` turns into one line.

    Args:
        args: The arguments after `size`.

    Returns:
        The exit status, an `ExitCode`.
    """
    options = _parser().read(args)
    if isinstance(options, ExitCode):
        return options
    _answer(options)
    return ExitCode.OK


def _answer(options: argparse.Namespace) -> None:
    from tiered_kv.sizing.dtypes import is_dtype
    from tiered_kv.sizing.parallel import Parallel
    from tiered_kv.sizing.read import read_config
    from tiered_kv.sizing.report import document, lines

    parallel = Parallel(options.tp, options.pp, options.cp, options.ep, options.dp_attention)
    engine = None
    if options.engine != "none":
        from tiered_kv.sizing.engines import EngineOptions, engine_named

        engine = engine_named(options.engine)
    # A type that only an engine knows, such as a packed one, is the engine's to apply.
    ours = engine is None or is_dtype(options.kv_dtype)
    spec = read_config(
        options.model,
        speculative=options.speculative,
        encoder_len=options.encoder_len,
        kv_dtype=options.kv_dtype if ours else None,
    )
    context = options.context
    if context is None:
        context = min(spec.max_context or _MOST_BY_DEFAULT, _MOST_BY_DEFAULT)
    held = None
    if engine is not None:
        block = options.block_size if options.block_size != 1 else None
        told = EngineOptions(parallel, block, options.kv_dtype)
        held = engine(spec, context, options.batch, told)
    found = document(
        spec,
        context=context,
        batch=options.batch,
        block_size=options.block_size,
        parallel=parallel,
        engine=held,
    )
    if options.json:
        print_json(found)
        return
    print_lines(lines(found))
