"""From what a replay found to tokens a second and dollars a million tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tiered_kv.planner.node import Figure
from tiered_kv.planner.plan import Batch
from tiered_kv.replay.deployment import HBM, Deployment, fault, figure_or
from tiered_kv.replay.node import write_s

HOURS_A_MONTH = 730.5
_DECODE = 0.6
OP = "project"


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the inputs that no replay depends on.

    Attributes:
        prefill: On the rate of computing prompts, and of what decoding computes.
        decode: On the rate at which decoding reads memory.
        batch: On the requests that are decoded at a time.
        output: On the tokens of each output.
        node_usd: On the price of the node.
        tier_usd: On the prices of the tiers that have one of their own.
        prompts: On the seconds that prompts take, as by a smaller model or fewer new tokens.
    """

    prefill: float = 1.0
    decode: float = 1.0
    batch: float = 1.0
    output: float = 1.0
    node_usd: float = 1.0
    tier_usd: float = 1.0
    prompts: float = 1.0


UNCHANGED = Factors()


@dataclasses.dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding at the largest batch.

    Attributes:
        batch: Requests that an instance decodes at a time.
        step_s: Seconds of a step, which gives each of them a token.
        binds: `memory` or `compute`: what a step waits for.
    """

    batch: float
    step_s: float
    binds: str


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
    """What is projected of a configuration.

    Attributes:
        requests_per_s: Requests that the node ends a second.
        output_tokens_per_s: Tokens of outputs a second.
        output_tokens_per_s_per_gpu: The same of a GPU.
        tokens_per_s: Tokens of prompts, hits among them, and of outputs a second.
        tokens_per_s_per_gpu: The same of a GPU.
        usd_per_hour: Price of the GPUs and tiers that are used.
        usd_per_million_output_tokens: Price of a million tokens of outputs.
        usd_per_million_tokens: Price of a million tokens of prompts and outputs.
        gpu_s: Seconds of the GPUs for the requests of the trace.
        prefill_pct: Part of these that goes into prompts.
        binds: What bounds the throughput: `GPUs`, or reads or writes of a tier.
        decoding: How it decodes.
    """

    requests_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    usd_per_hour: float
    usd_per_million_output_tokens: float
    usd_per_million_tokens: float
    gpu_s: float
    prefill_pct: float
    binds: str
    decoding: Decoding


def decode_efficiency(deployment: Deployment) -> Figure[float]:
    """The node's figure, or the assumption in its place."""
    given = deployment.node.gpu.decode_efficiency
    return figure_or(given, "gpu.decode_efficiency", _DECODE, "60 % of the memory's rate")


def decoding(deployment: Deployment, found: Batch, factors: Factors) -> Decoding:
    """How an instance decodes with as many requests as the memory for KV holds, a `Batch`.

    A step reads all weights that its tokens pass through, and the cache of each request; it
    computes a token of each. It takes the longer of both.

    Raises:
        InvalidArgumentError: Not even one request fits.
    """
    if not found.largest:
        raise fault("`model`: no usual request fits beside the cache: give a smaller one", OP)
    batch = max(1.0, found.largest * factors.batch)
    spec, weights, gpu = deployment.spec, deployment.weights, deployment.node.gpu
    context = deployment.context
    # Each request takes its own experts, until together they take them all.
    part = min(1.0, batch * (weights.active or weights.params) / weights.params)
    cache = spec.bytes(context, 1, deployment.block_tokens) * max(1.0, found.copies)
    rate = deployment.tp * gpu.bandwidth.value * decode_efficiency(deployment).value
    memory = (weights.bytes * part + batch * cache) / (rate * factors.decode)
    each = weights.flops_per_token + deployment.pair_flops * context
    compute = batch * each / (deployment.prefill_flops * factors.prefill)
    binds = "memory" if memory >= compute else "compute"
    return Decoding(batch, max(memory, compute), binds)


def usd_per_hour(deployment: Deployment, tiers: list[str], factors: Factors) -> float:
    """Price of an hour of the GPUs that are used, and of the tiers of these names.

    Raises:
        InvalidArgumentError: The node does not say a price.
    """
    node = deployment.node
    if node.usd_per_hour is None:
        raise fault("`usd_per_hour` of the node is missing: give it with its source", OP)
    part = deployment.gpus / node.gpu.count.value
    total = node.usd_per_hour.value * part * factors.node_usd
    for tier in deployment.tiers(tiers):
        hourly, monthly = tier.usd_per_hour, tier.usd_per_gb_month
        if hourly is not None:
            price = hourly.value
        elif monthly is not None:
            price = monthly.value * tier.capacity.value / 1e9 / HOURS_A_MONTH
        else:
            field = f"tiers.{tier.name}.usd_per_hour"
            want = "give it or `usd_per_gb_month`, 0 where the node's price has the tier in it"
            raise fault(f"`{field}` is missing: {want}", OP)
        total += price * deployment.scale * factors.tier_usd
    return total


def projected(
    deployment: Deployment,
    outcome: Mapping[str, Any],
    served: Mapping[str, Any],
    tokens: tuple[int, int],
    requests: int,
    batch: Batch,
    factors: Factors,
) -> Projection:
    """What a replay's outcome comes to, with every GPU and tier as busy as it can be.

    Args:
        deployment: The model on the node.
        outcome: Of the replay.
        served: Which of its service models.
        tokens: Of all prompts, and of all outputs.
        requests: How many were replayed.
        batch: The largest batch beside the cache in HBM.
        factors: On other inputs.

    Raises:
        InvalidArgumentError: The node lacks a price, or no request fits.
    """
    step = decoding(deployment, batch, factors)
    prompts, outputs = tokens[0], tokens[1] * factors.output
    prefill = served["compute_s"] * factors.prompts / deployment.instances
    decode = outputs * step.step_s / step.batch / deployment.instances
    names = [tier["tier"] for tier in outcome["tiers"]]
    busy = {"GPUs": prefill + decode}
    for at, name in enumerate(names):
        if name != HBM:
            busy[f"reads of {name}"] = served["read_s"][at]
            busy[f"writes of {name}"] = write_s(deployment, outcome, name)
    binds = max(busy, key=lambda name: busy[name])
    seconds = busy[binds]
    if seconds <= 0:
        raise fault("`trace` asks for nothing: give one with requests", OP)
    price = usd_per_hour(deployment, [name for name in names if name != HBM], factors)
    hourly = 3600 / seconds / 1e6
    return Projection(
        requests_per_s=requests / seconds,
        output_tokens_per_s=outputs / seconds,
        output_tokens_per_s_per_gpu=outputs / seconds / deployment.gpus,
        tokens_per_s=(prompts + outputs) / seconds,
        tokens_per_s_per_gpu=(prompts + outputs) / seconds / deployment.gpus,
        usd_per_hour=price,
        usd_per_million_output_tokens=price / (outputs * hourly) if outputs else 0.0,
        usd_per_million_tokens=price / ((prompts + outputs) * hourly),
        gpu_s=busy["GPUs"],
        prefill_pct=100 * prefill / busy["GPUs"] if busy["GPUs"] else 0.0,
        binds=binds,
        decoding=step,
    )
