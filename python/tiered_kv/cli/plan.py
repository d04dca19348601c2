"""`tiered-kv plan`: what a node's tiers hold of a model's KV cache, and the largest batch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.options import Parser
from tiered_kv.cli.output import print_json, print_lines

_ABOUT = "Plan a node: the tokens, requests and minutes of traffic of each tier, the largest batch."
_MODEL = "Model: a name of the catalogue, a path, or a hub id (owner/name)."
_COUNTS = (
    ("pp", "Pipeline stages."),
    ("cp", "Ranks that split the context."),
    ("ep", "Ranks that split the experts: no KV is split by them."),
    ("dp-attention", "Replicas of the attention inside the tensor-parallel ranks."),
    ("block-size", "Tokens of a block."),
)
_TEXTS = (
    ("kv-dtype", "Type of keys and values. [default: the model's]"),
    ("params", "Parameters, as in 70B. [default: as published, where that is known]"),
    ("active-params", "Parameters that a token passes through. [default: as published, else all]"),
    ("weight-dtype", "fp32, bf16, fp16, fp8, int8, int4, nvfp4 or mxfp4. [default: bf16]"),
    ("reserve", "Of each GPU, for neither weights nor KV, as in 8GB. [default: the node's]"),
    ("request-bytes", "Of each GPU, for a request beside its KV, as in 16MiB. [default: 0]"),
)


def _parser() -> Parser:
    parser = Parser("tiered-kv plan", _ABOUT)
    parser.add_argument("--node", help="TOML file, or a built-in name; --list-nodes shows them.")
    parser.add_argument("--model", help=_MODEL)
    parser.add_argument("--list-nodes", action="store_true", help="List the built-in nodes.")
    parser.add_argument("--context", type=int, default=8192, help="Tokens a request. [8192]")
    parser.add_argument("--batch", type=int, help="Say whether so many requests fit.")
    parser.add_argument("--conversation", type=int, default=0, help="Tokens. [those of a request]")
    parser.add_argument("--gpus", type=int, help="GPUs of the node to use. [all]")
    parser.add_argument("--tp", type=int, help="Tensor-parallel ranks. [all GPUs used]")
    for name, text in _COUNTS:
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{text} [1]")
    for name, text in _TEXTS:
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument(
        "--tokens-per-s", type=float, default=0.0, help="New tokens a second, for the minutes."
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        default=0.0,
        help="Tokens a second that the node recomputes. [projected from its GPUs]",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON on stdout.")
    parser.add_argument("--plot", type=Path, help="Also draw the tiers: a .png or .svg file.")
    return parser


def run(args: Sequence[str]) -> int:
    """Answers, or raises what `tiered_kv.cli.entry` turns into one line.

    Args:
        args: The arguments after `plan`.

    Returns:
        The exit status, an `ExitCode`: `FAILED` if `--batch` does not fit.
    """
    parser = _parser()
    options = parser.read(args)
    if isinstance(options, ExitCode):
        return options
    for name in ("node", "model"):
        if getattr(options, name) is None and not options.list_nodes:
            return parser.refuse(f"--{name} is missing")
    if options.list_nodes:
        return _list(as_json=options.json)
    return _answer(options)


def _list(*, as_json: bool) -> int:
    from tiered_kv.planner.node import builtin_nodes, load_node

    titles = {name: load_node(name).title for name in builtin_nodes()}
    if as_json:
        print_json(titles)
        return ExitCode.OK
    print_lines(f"{name}: {title}" for name, title in titles.items())
    return ExitCode.OK


def _answer(options: argparse.Namespace) -> int:
    from tiered_kv.planner.report import document, lines
    from tiered_kv.sizing.checks import count

    batch = None if options.batch is None else count("batch", options.batch)
    if options.plot is not None:
        from tiered_kv.planner import plot

        plot.check(options.plot)
    found = document(_plan(options), batch)
    if options.plot is not None:
        plot.draw(found, options.plot)
    if options.json:
        print_json(found)
    else:
        print_lines(lines(found))
    return ExitCode.FAILED if found["batch"]["asked_fits"] is False else ExitCode.OK


def _plan(options: argparse.Namespace) -> Any:
    from tiered_kv.planner import units
    from tiered_kv.planner.node import load_node
    from tiered_kv.planner.plan import Load, plan
    from tiered_kv.sizing.checks import count
    from tiered_kv.sizing.parallel import Parallel
    from tiered_kv.sizing.read import read_config

    node = load_node(options.node)
    spec = read_config(options.model, kv_dtype=options.kv_dtype)
    all_gpus = node.gpu.count.value
    gpus = count("gpus", all_gpus if options.gpus is None else options.gpus, least=1)
    others = count("pp", options.pp, least=1) * count("cp", options.cp, least=1)
    tp = max(1, gpus // others) if options.tp is None else options.tp
    extra = options.request_bytes
    return plan(
        node,
        spec,
        Load(
            context=options.context,
            conversation=options.conversation,
            block_size=options.block_size,
            tokens_per_s=options.tokens_per_s,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            request_bytes=0 if extra is None else units.size("request_bytes", extra),
        ),
        weights_of(options, spec.name),
        Parallel(tp, options.pp, options.cp, options.ep, options.dp_attention),
        gpus,
        None if options.reserve is None else units.size("reserve", options.reserve),
    )


def weights_of(options: argparse.Namespace, model: str) -> Any:
    """The `Weights` that `--params`, `--active-params` and `--weight-dtype` describe.

    Raises:
        InvalidArgumentError: They are not known, or are no numbers.
    """
    import dataclasses

    from tiered_kv.planner import units
    from tiered_kv.planner.weights import Weights, published

    dtype = options.weight_dtype or "bf16"
    active = options.active_params
    passed = None if active is None else units.count("active_params", active)
    if options.params is not None:
        return Weights(units.count("params", options.params), dtype, passed or 0)
    found = published(model, dtype)
    return found if passed is None else dataclasses.replace(found, active=passed)
