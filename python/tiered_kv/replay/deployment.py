"""A model on a node: how many blocks each tier holds, and how long things take there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tiered_kv.errors import InvalidArgumentError
from tiered_kv.planner.node import Figure, Node, Tier
from tiered_kv.planner.plan import Batch, Load, plan
from tiered_kv.planner.weights import Weights
from tiered_kv.sizing.checks import cut
from tiered_kv.sizing.parallel import Parallel
from tiered_kv.sizing.spec import Kind, KvSpec

HBM = "hbm"
_DURABLE = ("nvme", "pfs")
"""Tiers that outlive the process: the first that is there is written behind every put."""
_SHARE = 0.5
LEAST_SCALE, MOST_SCALE = 1e-6, 1e6
"""Factors on capacities; beyond them one is a mistake."""
_LATENT = (Kind.RECURRENT, Kind.LINEAR, Kind.CONV)


def fault(message: str, op: str = "replay") -> InvalidArgumentError:
    """The error of a description that a replay cannot use."""
    return InvalidArgumentError(f"{op}: {cut(message)}", op=op)


def figure_or(figure: Figure[float] | None, name: str, value: float, why: str) -> Figure[float]:
    """A figure, or the assumption that stands in for one that is not given."""
    return figure or Figure(name, value, f"{value:g}", f"assumed: {why}")


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Factors on what the node is described to do, to see what depends on it.

    Attributes:
        prefill: On the rate of computing prompts.
        read: On the rate of reading from all tiers below HBM.
        latency: On the latency of all of them.
    """

    prefill: float = 1.0
    read: float = 1.0
    latency: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """A model on a node.

    Attributes:
        node: The node.
        spec: The model's cache.
        weights: The model's weights.
        gpus: GPUs that are used.
        tp: Tensor-parallel ranks; GPUs beyond them hold more instances.
        block_tokens: Tokens of a block.
        context: Tokens of a usual request with its output.
        kv_cache_share: Part of HBM's memory for KV that keeps what requests left behind.
        scale: Factor on the capacity of all tiers below HBM.
    """

    node: Node
    spec: KvSpec
    weights: Weights
    gpus: int
    tp: int
    block_tokens: int
    context: int
    kv_cache_share: Figure[float]
    scale: float = 1.0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys and values of its tokens in all layers; states are left out.

        Raises:
            InvalidArgumentError: The model keeps nothing that grows with the tokens.
        """
        exact = self.spec.filling_bytes_per_token * self.block_tokens
        if exact == 0:
            raise fault("`model` keeps nothing for each token: give one with attention")
        return math.ceil(exact)

    @property
    def instances(self) -> int:
        """Instances of the model."""
        return self.gpus // self.tp

    @property
    def prefill_flops(self) -> float:
        """Operations a second that an instance reaches when it computes prompts.

        Raises:
            InvalidArgumentError: The node does not say.
        """
        gpu = self.node.gpu
        if gpu.flops is None:
            raise fault("`gpu.flops` is missing: give it with its source")
        if gpu.prefill_efficiency is None:
            raise fault("`gpu.prefill_efficiency` is missing: give it with its source")
        return self.tp * gpu.flops.value * gpu.prefill_efficiency.value

    @property
    def pair_flops(self) -> int:
        """Operations of a token's attention to one token: keys and values, two each."""
        shape = self.spec.as_if
        return 0 if shape is None else 4 * shape.layers * shape.heads * shape.head_dim

    def head(self) -> dict[str, Any]:
        """What documents say first of the model and the node."""
        return {
            "node": self.node.name,
            "title": self.node.title,
            "model": self.spec.name,
            "kv_dtype": self.spec.kv_dtype.name,
            "gpus": self.gpus,
            "instances": self.instances,
            "block_bytes": self.block_bytes,
        }

    def batch(self, share: float) -> Batch:
        """The largest batch beside a cache that has `share` of the memory for KV.

        Raises:
            InvalidArgumentError: The weights do not fit.
        """
        spread = Parallel(tp=self.tp)
        load = Load(context=self.context, block_size=self.block_tokens)
        found = plan(self.node, self.spec, load, self.weights, spread, self.gpus).batch
        if found.kv_bytes < 0:
            raise fault(f"`model` does not fit on the node: {found.why}")
        kept = self.node.gpu.reserve.value + int(share * found.kv_bytes)
        return plan(self.node, self.spec, load, self.weights, spread, self.gpus, kept).batch

    def hbm_bytes(self, share: float) -> int:
        """Bytes of HBM, over all instances, that keep what requests left behind, each once."""
        batch = self.batch(0.0)
        return int(share * batch.kv_bytes * self.tp * self.instances / max(1.0, batch.copies))

    def tiers(self, names: Sequence[str] | None = None) -> list[Tier]:
        """The node's tiers below HBM, or those of these names.

        Raises:
            InvalidArgumentError: The node has none of a name.
        """
        known = {tier.name: tier for tier in self.node.tiers}
        for name in names or ():
            if name not in known:
                raise fault(f"`tiers` names {name}: give one or more of {', '.join(known)}")
        return [tier for tier in self.node.tiers if names is None or tier.name in names]

    def blocks(self, names: Sequence[str] | None, share: float, scale: float) -> dict[str, int]:
        """Blocks that HBM and each tier of these names hold; those that hold none are left out."""
        sizes = {HBM: self.hbm_bytes(share)} if share else {}
        sizes |= {tier.name: int(scale * self.scale * tier.kv_bytes) for tier in self.tiers(names)}
        found = {name: size // self.block_bytes for name, size in sizes.items()}
        return {name: count for name, count in found.items() if count}

    def service(self, tiers: Sequence[str], rates: Rates) -> dict[str, Any]:
        """The service model of the replay: seconds of a block, a token, and a token's attention."""
        of = {tier.name: tier for tier in self.node.tiers}
        below = [of.get(name) for name in tiers]
        size, flops = self.block_bytes, self.prefill_flops * rates.prefill
        reads = [size / (tier.bandwidth.value * rates.read) if tier else 0.0 for tier in below]
        return {
            "read_s": reads,
            "latency_s": [tier.latency.value * rates.latency if tier else 0.0 for tier in below],
            "token_s": self.weights.flops_per_token / flops,
            "pair_s": self.pair_flops / flops,
            "instances": self.instances,
        }

    def described(
        self,
        policy: str,
        *,
        tiers: Sequence[str] | None = None,
        rates: Sequence[Rates] = (Rates(),),
        share: float | None = None,
        scale: float = 1.0,
        waste_budget: float = 0.05,
        seed: int = 0,
    ) -> dict[str, Any]:
        """What `Trace.nodes` is given.

        Args:
            policy: Of the store.
            tiers: Names of the tiers below HBM that are used; all by default.
            rates: A service model for each; what moves follows from the first.
            share: In place of `kv_cache_share`.
            scale: A further factor on the capacity of all tiers below HBM.
            waste_budget: Part of what is moved up that may be moved in vain; 0 for no window.
            seed: Of the policy's draws.

        Raises:
            InvalidArgumentError: No tier holds a block, or the node lacks a figure.
        """
        part = self.kv_cache_share.value if share is None else share
        blocks = self.blocks(tiers, part, scale)
        if not blocks:
            raise fault("`tiers` hold no block: give larger ones")
        behind = next((name for name in _DURABLE if name in blocks), None)
        first = next((name for name in blocks if name != HBM), None)
        puts = (HBM, first, behind)
        return {
            "policy": policy,
            "seed": seed,
            "block_bytes": self.block_bytes,
            "waste_budget": waste_budget,
            "tiers": [
                {"tier": name, "blocks": count, "filled": "puts" if name in puts else "victims"}
                for name, count in blocks.items()
            ],
            "services": [self.service(list(blocks), each) for each in rates],
        }

    def assumptions(self, *, prices: bool = False) -> list[str]:
        """What was assumed, in sentences; `prices` among it or not."""
        weights, gpu = self.weights, self.node.gpu
        many = f", on {self.instances} instances" if self.instances > 1 else ""
        told = [
            f"weights: {weights.params:,} parameters ({weights.source}) as {weights.dtype}, spread "
            f"evenly over {self.tp} ranks{many}",
            f"{self.pair_flops:,} operations for each token and each token before it: 4 x layers x "
            "query heads x head dimension of the configuration, as if all layers attended to all",
        ]
        if self.scale != 1:
            told.append(f"the tiers below HBM have {self.scale:g} x the capacity of the node's")
        if any(group.kind in _LATENT for group in self.spec.groups):
            told.append("states of recurrent layers are not stored: hits of this model are fewer")
        figures = [*self.node.figures()]
        if gpu.kv_cache_share is None:
            figures.append(self.kv_cache_share)
        told += [
            f"{figure.name} = {figure.written}: {figure.source.partition(':')[2].strip()}"
            for figure in figures
            if figure.assumed and (prices or "usd_" not in figure.name)
        ]
        told += [
            f"tiers.{tier.name}.write_bandwidth = {tier.bandwidth.written}: as it reads"
            for tier in self.node.tiers
            if tier.write_bandwidth is None
        ]
        return told


def deploy(
    node: Node,
    spec: KvSpec,
    weights: Weights,
    trace: Any,
    *,
    gpus: int | None = None,
    tp: int | None = None,
    scale: float = 1.0,
) -> Deployment:
    """A model on a node, for the requests of a trace.

    Args:
        node: The node.
        spec: The model's cache.
        weights: Its weights.
        trace: A `tiered_kv.replay.Trace`, which says how large blocks and requests are.
        gpus: GPUs to use; all by default.
        tp: Tensor-parallel ranks of an instance; all GPUs used by default.
        scale: Factor on the capacity of all tiers below HBM.

    Raises:
        InvalidArgumentError: There are not as many GPUs, or the ranks do not divide them.
    """
    used = node.gpu.count.value if gpus is None else gpus
    if not 1 <= used <= node.gpu.count.value:
        raise fault(f"`gpus` is {used}: give 1 to the {node.gpu.count.value} of the node")
    ranks = used if tp is None else tp
    if ranks < 1 or used % ranks:
        raise fault(f"`tp` is {ranks}: give a divisor of the {used} GPUs that are used")
    tokens = sum(trace.tokens())
    share = figure_or(
        node.gpu.kv_cache_share,
        "gpu.kv_cache_share",
        _SHARE,
        "half of the memory for KV; the rest holds running requests",
    )
    context = max(1, round(tokens / max(1, trace.requests)))
    return Deployment(node, spec, weights, used, ranks, trace.block_size, context, share, scale)


def written(found: Mapping[str, Any], tier: str) -> int:
    """Blocks that a replay wrote to a tier."""
    return sum(one["blocks"] for one in found["moved"] if one["to"] == tier)
