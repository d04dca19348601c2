"""The projection beside the ranges that the paper projects, and which input those would need."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiered_kv.projection.model import Factors

if TYPE_CHECKING:
    from tiered_kv.projection.run import Projector

_MOST = 64.0
"""Factors on an input beyond which it is another input."""
_STEPS = 60
_RANGES = (
    ("ttft_x", "mean time to first token, over no offload", 1.4, 2.1, "x lower"),
    ("throughput_x", "throughput, over no offload", 1.7, 2.9, "x higher"),
    ("cost_less_pct", "cost of a million tokens, under no offload", 47.0, 47.0, "% lower"),
    ("tokens_per_s_per_gpu", "tokens a second and GPU, in and out", 4150.0, 4150.0, ""),
    ("output_tokens_per_s_per_gpu", "tokens a second and GPU, out only", 4150.0, 4150.0, ""),
    ("usd_per_million_tokens", "USD a million tokens, in and out", 0.43, 0.43, ""),
    ("usd_per_million_output_tokens", "USD a million tokens, out only", 0.43, 0.43, ""),
)
"""The paper does not say which tokens it counts."""
_BASELINE = {
    "name": "tensorrt_llm_x",
    "title": "throughput, over TensorRT-LLM",
    "paper": "2 x higher",
    "found": None,
    "reproduced": False,
    "needed": "throughput of TensorRT-LLM on the same trace and node: no other engine is modelled",
}
_NEAR = 0.1
"""A single figure is reproduced within this part of it."""
_INPUTS = (
    ("prompts", "seconds of prompts"),
    ("output", "tokens of an output"),
    ("batch", "requests decoded at a time"),
    ("decode", "decode's memory rate"),
)
_PRICE = ("node_usd", "price of the node")


def compare(projector: Projector, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each figure of the paper: `name`, `title`, `paper`, `found`, `reproduced`, `needed`."""
    ours = results[-1]
    gains = projector.gains()
    rows = []
    for name, title, low, high, unit in _RANGES:
        found = gains[name] if name in gains else ours[name]
        slack = _NEAR * high if low == high else 0.0
        reproduced = low - slack <= found <= high + slack
        written = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        target = low if found < low else high
        rows.append(
            {
                "name": name,
                "title": title,
                "paper": f"{written} {unit}".strip(),
                "found": found,
                "reproduced": reproduced,
                "needed": "" if reproduced else _needed(projector, name, target, results),
            }
        )
    return [*rows, dict(_BASELINE)]


def _needed(
    projector: Projector, name: str, target: float, results: Sequence[Mapping[str, Any]]
) -> str:
    if name == "ttft_x":
        return _hits(target, results, projector.facts.ceiling)
    relative = name in ("throughput_x", "cost_less_pct")

    def value(factors: Factors) -> float:
        if relative:
            return projector.gains(factors)[name]
        from tiered_kv.projection.run import OURS, Run

        return float(getattr(projector.of(Run(OURS), factors), name))

    inputs = [*_INPUTS, _PRICE] if name.startswith("usd") else _INPUTS
    told = []
    for field, title in inputs:
        factor = _factor(functools.partial(_changed, value, field), target)
        if factor is not None:
            told.append(f"{title} x {factor:.3g}")
    if relative:
        told.append(_work(name, target, results))
    if not told:
        return f"no single input within x {_MOST:g} gives {target:g}"
    return f"{target:g} with " + ", or ".join(told)


def _changed(value: Callable[[Factors], float], field: str, factor: float) -> float:
    return value(Factors(**{field: factor}))


def _work(name: str, target: float, results: Sequence[Mapping[str, Any]]) -> str:
    """Which part of the GPUs' time would have to be saved."""
    before, after = results[0], results[-1]
    price = after["usd_per_hour"] / before["usd_per_hour"]
    gain = price / (1 - target / 100) if name == "cost_less_pct" else target
    saved = 100 * (1 - after["gpu_s"] / before["gpu_s"])
    return (
        f"{100 * (1 - 1 / gain):.0f} % of the GPUs' time saved, of which prompts take "
        f"{before['prefill_pct']:.0f} % without offload (here {saved:.0f} % is saved)"
    )


def _hits(target: float, results: Sequence[Mapping[str, Any]], ceiling: float) -> str:
    """Which part of the time to the first token would have to be saved."""
    before, after = results[0], results[-1]
    saved = 1 - after["ttft_s"]["mean"] / before["ttft_s"]["mean"]
    return (
        f"{target:g} with {100 * (1 - 1 / target):.0f} % of the mean time saved beyond what HBM "
        f"saves; here {100 * saved:.0f} %, as {after['hit_pct']:.1f} % of the accesses hit, not "
        f"{before['hit_pct']:.1f} % (the trace's ceiling is {ceiling:.1f} %): a trace with "
        f"{'more' if saved < 1 - 1 / target else 'less'} reuse"
    )


def _factor(value: Callable[[float], float], target: float) -> float | None:
    """The factor nearest to one that makes `value` the target, where one within bounds does."""
    found = []
    for end in (1 / _MOST, _MOST):
        low, high = 0.0, math.log(end)
        rising = value(end) > value(1.0)
        if not min(value(1.0), value(end)) <= target <= max(value(1.0), value(end)):
            continue
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if (value(math.exp(middle)) < target) == rising:
                low = middle
            else:
                high = middle
        found.append(math.exp((low + high) / 2))
    return min(found, key=lambda factor: abs(math.log(factor)), default=None)
