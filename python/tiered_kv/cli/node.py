"""Options of the commands that put a model on a node for the requests of a trace."""

from __future__ import annotations

import argparse
from typing import Any

from tiered_kv.cli.options import Parser

_TEXTS = (
    ("node", "A node's TOML file, or a built-in name, as in `tiered-kv plan`: replay its tiers."),
    ("model", "With --node: a name of the catalogue, a config.json, or a hub id (owner/name)."),
    ("kv-dtype", "With --node: type of keys and values. [default: the model's]"),
    ("params", "With --node: parameters, as in 70B. [default: as published, where known]"),
    ("active-params", "With --node: parameters that a token passes through. [default: all]"),
    ("weight-dtype", "With --node: fp32, bf16, fp16, fp8, int8, int4, nvfp4, mxfp4. [bf16]"),
    ("tiers", "With --node: names of the tiers below HBM that are used. [default: all]"),
)


def add_node_options(parser: Parser) -> None:
    """Adds the node, the model, and how that is spread."""
    for name, text in _TEXTS:
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument("--gpus", type=int, help="With --node: GPUs to use. [default: all]")
    parser.add_argument("--tp", type=int, help="With --node: tensor-parallel ranks. [the GPUs]")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="With --node: factor on the capacity of the tiers below HBM. [default: 1]",
    )
    parser.add_argument(
        "--waste-budget",
        type=float,
        default=5.0,
        help="With --node: percent of what is moved up that may be wasted; 0: no window. [5]",
    )


def deployed(options: argparse.Namespace, trace: Any) -> Any:
    """The `Deployment` that the options describe.

    Raises:
        InvalidArgumentError: An option is missing or does not serve.
    """
    from tiered_kv.cli.plan import weights_of
    from tiered_kv.planner.node import load_node
    from tiered_kv.replay.deployment import LEAST_SCALE, MOST_SCALE, deploy, fault
    from tiered_kv.sizing.read import read_config

    for name in ("node", "model"):
        if getattr(options, name) is None:
            raise fault(f"`{name}` is missing: give --{name}")
    if not 0 <= options.waste_budget <= 100:
        raise fault(f"`waste_budget` is {options.waste_budget:g}: give 0 to 100 percent")
    if not LEAST_SCALE <= options.scale <= MOST_SCALE:
        raise fault(f"`scale` is {options.scale:g}: give {LEAST_SCALE:g} to {MOST_SCALE:g}")
    node = load_node(options.node)
    spec = read_config(options.model, kv_dtype=options.kv_dtype)
    weights = weights_of(options, spec.name)
    return deploy(node, spec, weights, trace, gpus=options.gpus, tp=options.tp, scale=options.scale)


def named_tiers(options: argparse.Namespace) -> list[str] | None:
    """The names of `--tiers`; None for all."""
    return None if options.tiers is None else options.tiers.split(",")
