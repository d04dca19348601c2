"""What fits where: from a node, a model's cache and a load to a plan."""

from __future__ import annotations

import dataclasses

from tiered_kv.errors import InvalidArgumentError
from tiered_kv.planner.node import Node, Tier
from tiered_kv.planner.units import bad, fault
from tiered_kv.planner.weights import Weights
from tiered_kv.sizing.checks import count
from tiered_kv.sizing.layers import full, grouped
from tiered_kv.sizing.parallel import Parallel, rank_bytes
from tiered_kv.sizing.spec import KvSpec

HBM = "hbm"
LEAST_RATE, MOST_RATE = 1e-3, 1e15
"""Tokens a second that a plan is made for; beyond them a figure is a mistake."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the node.

    Attributes:
        context: Tokens of a request.
        conversation: Tokens of a conversation as it is stored; 0 for those of a request.
        block_size: Tokens of a block.
        tokens_per_s: New tokens a second that the node is given; 0 if not known.
        prefill_tokens_per_s: Tokens a second that the node recomputes; 0 to derive it from the
            GPUs and the parameters.
        request_bytes: Bytes that a request needs on each GPU beside its KV.
    """

    context: int
    conversation: int = 0
    block_size: int = 1
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    request_bytes: int = 0

    def __post_init__(self) -> None:
        count("context", self.context, least=1)
        count("conversation", self.conversation)
        count("block_size", self.block_size, least=1)
        count("request_bytes", self.request_bytes)
        for name in ("tokens_per_s", "prefill_tokens_per_s"):
            value = getattr(self, name)
            if value != 0 and not LEAST_RATE <= value <= MOST_RATE:
                raise bad(name, value, f"0, or a rate from {LEAST_RATE:g} to {MOST_RATE:g}")


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The largest batch in HBM.

    Attributes:
        kv_bytes: Bytes of each GPU that are left for KV; negative if the weights do not fit.
        weight_bytes: Bytes of weights on each GPU.
        request_bytes: Bytes of one request on the GPU that holds most of it.
        largest: Most requests of one instance of the model; None for any number.
        instances: Instances of the model on the node.
        copies: How often the ranks of an instance hold the cache, together.
        without_copies: Most requests of an instance if no rank held a copy of another's.
        as_mha: The batch that sizing the cache as MHA gives; None where that cannot be done.
        binds: What bounds it: `weights`, `request`, `replication`, `memory` or `nothing`.
        why: The same in a sentence.
    """

    kv_bytes: int
    weight_bytes: int
    request_bytes: int
    largest: int | None
    instances: int
    copies: float
    without_copies: int | None
    as_mha: int | None
    binds: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class TierPlan:
    """What a tier holds.

    Attributes:
        name: The tier.
        kv_bytes: Bytes for KV, copies among them.
        requests: Whole requests; None for any number.
        conversations: Whole conversations; None for any number.
        tokens: Tokens, in whole requests and the beginning of another; None for any number.
        minutes: Minutes of traffic until it is full; None if the traffic is not known.
        recompute_seconds: Seconds of the whole node to compute those tokens again; None if the
            rate is not known.
        load_seconds: Seconds to read one request from it; None for HBM, where it is.
        faster: Whether that is faster than computing it again; None if not known.
        usd: Price of its capacity; None if not given.
    """

    name: str
    kv_bytes: int
    requests: int | None
    conversations: int | None
    tokens: int | None
    minutes: float | None
    recompute_seconds: float | None
    load_seconds: float | None = None
    faster: bool | None = None
    usd: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A plan.

    Attributes:
        node: The node.
        spec: The model's cache.
        parallel: How the model is spread.
        load: What was asked.
        weights: The model's weights.
        gpus: GPUs that are used.
        batch: The largest batch.
        tiers: What each tier holds, HBM first.
        prefill_tokens_per_s: Rate at which the node recomputes; None if not known.
        recompute_request_seconds: Seconds to compute one request again on one instance.
    """

    node: Node
    spec: KvSpec
    parallel: Parallel
    load: Load
    weights: Weights
    gpus: int
    batch: Batch
    tiers: tuple[TierPlan, ...]
    prefill_tokens_per_s: float | None
    recompute_request_seconds: float | None

    @property
    def total_bytes(self) -> int:
        """Bytes for KV in all tiers."""
        return sum(tier.kv_bytes for tier in self.tiers)


def plan(
    node: Node,
    spec: KvSpec,
    load: Load,
    weights: Weights,
    parallel: Parallel | None = None,
    gpus: int | None = None,
    reserve: int | None = None,
) -> Plan:
    """Plans a node.

    Args:
        node: The node.
        spec: The model's cache.
        load: What is asked of it.
        weights: The model's weights.
        parallel: How the model is spread; by default over all GPUs, by their heads.
        gpus: GPUs of the node to use; all by default.
        reserve: Bytes of each GPU for neither weights nor KV; by default the node's figure.

    Raises:
        InvalidArgumentError: A number is out of range, or the ranks do not divide or are more
            than the GPUs.
    """
    used = count("gpus", node.gpu.count.value if gpus is None else gpus, least=1)
    if used > node.gpu.count.value:
        raise bad("gpus", used, f"at most the {node.gpu.count.value} of the node")
    spread = Parallel(tp=used) if parallel is None else parallel
    ranks = spread.tp * spread.pp * spread.cp
    if ranks > used:
        raise fault(f"`tp` x `pp` x `cp` is {ranks}, but {used} GPUs are used: give fewer ranks")
    kept = node.gpu.reserve.value if reserve is None else count("reserve", reserve)
    room = _Room(node.gpu.memory.value - kept, used // ranks, ranks)
    batch = _batch(spec, spread, load, weights, room)
    rate = _rate(node, load, weights, used)
    request = None if rate is None else load.context / (rate / room.instances)
    return Plan(
        node=node,
        spec=spec,
        parallel=spread,
        load=load,
        weights=weights,
        gpus=used,
        batch=batch,
        tiers=(
            _hbm(spec, spread, load, batch, rate, ranks),
            *(_tier(tier, spec, load, rate, request) for tier in node.tiers),
        ),
        prefill_tokens_per_s=rate,
        recompute_request_seconds=request,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of a GPU for weights and KV, instances of the model, and GPUs of an instance."""

    gpu_bytes: int
    instances: int
    ranks: int


def _rate(node: Node, load: Load, weights: Weights, gpus: int) -> float | None:
    """Tokens a second that the GPUs prefill; attention itself is left out."""
    if load.prefill_tokens_per_s:
        return load.prefill_tokens_per_s
    gpu = node.gpu
    if gpu.flops is None or gpu.prefill_efficiency is None:
        return None
    return gpus * gpu.flops.value * gpu.prefill_efficiency.value / weights.flops_per_token


def _fits(spec: KvSpec, spread: Parallel, load: Load, context: int, budget: int) -> int | None:
    """Most requests of an instance whose GPUs have `budget` bytes each; None for any number."""
    one = rank_bytes(spec, spread, context, 1, load.block_size) + load.request_bytes
    # The replicas of the attention deal the requests out among them.
    return spread.dp_attention * (max(0, budget) // one) if one else None


def _batch(spec: KvSpec, spread: Parallel, load: Load, weights: Weights, room: _Room) -> Batch:
    on_gpu = -(-weights.bytes // (spread.tp * spread.pp))
    budget = room.gpu_bytes - on_gpu
    one = rank_bytes(spec, spread, load.context, 1, load.block_size)
    whole = spec.bytes(load.context, 1, load.block_size)
    copies = room.ranks * one / (whole * spread.dp_attention) if whole else 1.0
    largest = _fits(spec, spread, load, load.context, budget)
    # What a request needs beside its KV is on the GPUs of its replica of the attention.
    shared = whole + room.ranks // spread.dp_attention * load.request_bytes
    without = max(0, budget) * room.ranks // shared if shared else None
    binds, why = _binds(budget, on_gpu, room, largest, copies, without)
    return Batch(
        kv_bytes=budget,
        weight_bytes=on_gpu,
        request_bytes=one,
        largest=largest,
        instances=room.instances,
        copies=copies,
        without_copies=without,
        as_mha=_as_mha(spec, spread, load, budget),
        binds=binds,
        why=why,
    )


def _binds(
    budget: int,
    on_gpu: int,
    room: _Room,
    largest: int | None,
    copies: float,
    without: int | None,
) -> tuple[str, str]:
    if budget < 0:
        least = -(-on_gpu * room.ranks // room.gpu_bytes) if room.gpu_bytes > 0 else 0
        need = f": they need {least} GPUs like these" if least else ""
        return "weights", f"the weights do not fit beside what is reserved{need}"
    if largest is None:
        return "nothing", "a request holds nothing"
    if largest == 0:
        return "request", "one request is larger than what a GPU has left"
    if copies > 1 and without is not None and without > largest:
        return "replication", (
            f"the memory of each GPU: together the ranks hold {copies:.2f} x the cache; without "
            f"copies {without:,} requests would fit"
        )
    return "memory", "the memory of the GPUs: no rank holds a copy of another's"


def _as_mha(spec: KvSpec, spread: Parallel, load: Load, budget: int) -> int | None:
    """The batch by the usual formula: a key and a value of each query head in every layer."""
    shape = spec.as_if
    if shape is None:
        return None
    keep = full(shape.heads, shape.head_dim, shape.head_dim, spec.kv_dtype)
    groups = grouped((layer, (keep,)) for layer in range(shape.layers))
    usual = dataclasses.replace(
        spec, groups=groups, num_layers=shape.layers, caches_per_layer=1, encoder_len=0
    )
    try:
        return _fits(usual, spread, load, load.context, budget)
    except InvalidArgumentError:  # the query heads do not divide
        return None


def _hbm(
    spec: KvSpec, spread: Parallel, load: Load, batch: Batch, rate: float | None, ranks: int
) -> TierPlan:
    budget = max(0, batch.kv_bytes)
    instances = batch.instances
    requests = tokens = None
    if batch.largest is not None:
        requests = instances * batch.largest
        left = budget - batch.largest // spread.dp_attention * (
            batch.request_bytes + load.request_bytes
        )
        tokens = instances * (
            batch.largest * load.context + spread.dp_attention * _begun(spec, spread, load, left)
        )
    talk = _fits(spec, spread, load, load.conversation or load.context, budget)
    return TierPlan(
        name=HBM,
        kv_bytes=budget * ranks * instances,
        requests=requests,
        conversations=None if talk is None else instances * talk,
        tokens=tokens,
        minutes=_minutes(tokens, load),
        recompute_seconds=_seconds(tokens, rate),
    )


def _begun(spec: KvSpec, spread: Parallel, load: Load, left: int) -> int:
    """Tokens of one more request that fits only in part."""
    low, high = 0, load.context
    while high - low > 1:
        middle = (low + high) // 2
        need = rank_bytes(spec, spread, middle, 1, load.block_size) + load.request_bytes
        low, high = (middle, high) if need <= left else (low, middle)
    return low


def _tier(
    tier: Tier, spec: KvSpec, load: Load, rate: float | None, recompute: float | None
) -> TierPlan:
    size = spec.bytes(load.context, 1, load.block_size)
    requests = spec.batch_in(tier.kv_bytes, load.context, load.block_size)
    talk = spec.batch_in(tier.kv_bytes, load.conversation or load.context, load.block_size)
    tokens = None
    if requests is not None:
        begun = spec.tokens_in(tier.kv_bytes - requests * size, 1, load.block_size)
        # What is left is less than a request, so that it cannot hold all of one.
        tokens = requests * load.context + min(begun or 0, load.context - 1)
    loading = tier.latency.value + size / tier.bandwidth.value
    price = tier.usd_per_gb
    return TierPlan(
        name=tier.name,
        kv_bytes=tier.kv_bytes,
        requests=requests,
        conversations=talk,
        tokens=tokens,
        minutes=_minutes(tokens, load),
        recompute_seconds=_seconds(tokens, rate),
        load_seconds=loading,
        faster=None if recompute is None else loading < recompute,
        usd=None if price is None else price.value * tier.capacity.value / 1e9,
    )


def _minutes(tokens: int | None, load: Load) -> float | None:
    return None if tokens is None or not load.tokens_per_s else tokens / load.tokens_per_s / 60


def _seconds(tokens: int | None, rate: float | None) -> float | None:
    return None if tokens is None or not rate else tokens / rate
