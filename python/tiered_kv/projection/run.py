"""The replays behind a projection, and the document that it makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiered_kv.planner.plan import Batch
from tiered_kv.planner.report import figure_of
from tiered_kv.projection import paper
from tiered_kv.projection.model import (
    UNCHANGED,
    Factors,
    Projection,
    decode_efficiency,
    projected,
)
from tiered_kv.replay.deployment import Deployment, Rates
from tiered_kv.replay.node import SERVICE, replayed

NONE, DRAM, LRU, OURS = "no offload", "DRAM only, LRU", "all tiers, LRU", "all tiers, ours"
CONFIGURATIONS = (NONE, DRAM, LRU, OURS)
"""What is projected: HBM alone, DRAM below it by recency, all tiers by recency, and as we do."""
_HALF, _DOUBLE = 0.5, 2.0
_MOST_SHARE = 0.9
"""A cache that takes more of HBM than this leaves nothing for requests."""
_RATES = (
    Rates(),
    *(Rates(prefill=factor) for factor in (_HALF, _DOUBLE)),
    *(Rates(read=factor) for factor in (_HALF, _DOUBLE)),
    *(Rates(latency=factor) for factor in (_HALF, _DOUBLE)),
)
MODEL = (
    "an instance decodes as many requests at a time as the memory for KV beside the cache holds; a "
    "step reads the weights and the cache of each once, or computes a token of each, whichever "
    "takes longer; a request takes a GPU for its prompt and for its part of the steps; throughput "
    "is what the busiest of GPUs and tiers allows, with the requests of the trace over and over"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What a projection needs of a trace beside its replays.

    Attributes:
        name: Its name.
        requests: Requests.
        seconds: From the first to the last.
        block_size: Tokens of a block.
        block_accesses: Accesses to blocks of prompts.
        unique_blocks: Different blocks of prompts.
        ceiling: Percent of hits if nothing ever leaves.
        input_tokens: Of all prompts.
        output_tokens: Of all outputs.
    """

    name: str
    requests: int
    seconds: float
    block_size: int
    block_accesses: int
    unique_blocks: int
    ceiling: float
    input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, trace: Any, *, outputs: bool = False) -> Facts:
        """The facts of a `tiered_kv.replay.Trace`."""
        return cls(
            trace.name,
            trace.requests,
            trace.seconds,
            trace.block_size,
            trace.block_accesses,
            trace.unique_blocks,
            trace.ceiling_pct(outputs),
            *trace.tokens(),
        )

    def tokens(self) -> tuple[int, int]:
        """Tokens of all prompts, and of all outputs."""
        return self.input_tokens, self.output_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A replay that a projection needs: a configuration, with something changed or not."""

    configuration: str
    share: float = 1.0
    scale: float = 1.0

    @property
    def name(self) -> str:
        """Its name among the replays of a document."""
        changed = [
            f"{what} x {factor:g}"
            for what, factor in (("cache in HBM", self.share), ("capacity", self.scale))
            if factor != 1
        ]
        return ", ".join([self.configuration, *changed])


def runs() -> list[Run]:
    """All replays of a projection: the configurations, and what a sensitivity needs besides."""
    changed = [
        *(Run(OURS, scale=factor) for factor in (_HALF, _DOUBLE)),
        *(Run(which, share=factor) for which in (NONE, OURS) for factor in (_HALF, _DOUBLE)),
    ]
    return [*(Run(name) for name in CONFIGURATIONS), *changed]


def share_of(deployment: Deployment, run: Run) -> float:
    """The part of HBM's memory for KV that is cache in a replay."""
    share = deployment.kv_cache_share.value
    return share if run.share == 1 else min(_MOST_SHARE, share * run.share)


def describe(deployment: Deployment, policy: str = "beta", budget: float = 0.05) -> dict[str, Any]:
    """The description of each replay that a projection needs, by its name.

    Args:
        deployment: The model on the node.
        policy: Ours.
        budget: Part of what is moved up that may be moved in vain.

    Raises:
        InvalidArgumentError: A tier holds no block, or the node lacks a figure.
    """
    tiers: dict[str, Sequence[str] | None] = {NONE: (), DRAM: ("dram",), LRU: None, OURS: None}
    return {
        run.name: deployment.described(
            policy if run.configuration == OURS else "lru",
            tiers=tiers[run.configuration],
            rates=_RATES,
            share=share_of(deployment, run),
            scale=run.scale,
            waste_budget=budget,
        )
        for run in runs()
    }


def replay_all(
    trace: Any,
    described: Mapping[str, dict[str, Any]],
    *,
    outputs: bool = False,
    labels: bool = True,
    threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Runs the replays that `describe` gave, and keeps what they were."""
    found = replayed(
        trace,
        list(described.values()),
        outputs=outputs,
        labels=labels,
        threads=threads,
        progress=progress,
    )
    return {
        name: {"described": described[name], "outcome": outcome}
        for name, outcome in zip(described, found, strict=True)
    }


def project(deployment: Deployment, facts: Facts, replays: Mapping[str, Any]) -> dict[str, Any]:
    """The document of `tiered-kv project`; `docs/project.md` describes its fields.

    Args:
        deployment: The model on the node.
        facts: Of the trace.
        replays: What `replay_all` returned for it.

    Raises:
        InvalidArgumentError: The node lacks a price, or no request fits.
    """
    projector = Projector(deployment, facts, replays)
    results = [_result(projector, name) for name in CONFIGURATIONS]
    sensitivity = [_sensitive(projector, *one) for one in _inputs(deployment, facts)]
    gains = projector.gains()
    document = {
        "schema": 1,
        "projection": "a projection from printed inputs, not a measurement",
        "trace": dataclasses.asdict(facts),
        **deployment.head(),
        "service": SERVICE,
        "throughput": MODEL,
        "results": results,
        "gains": gains,
        "sensitivity": sensitivity,
        "paper": paper.compare(projector, results),
        "assumptions": _assumptions(deployment),
        "figures": [figure_of(figure) for figure in deployment.node.figures()],
        "sources": list(deployment.spec.sources),
        "replays": dict(replays),
    }
    return {**document, "rows": _rows(document)}


class Projector:
    """Projections of the configurations, with inputs changed by factors."""

    def __init__(self, deployment: Deployment, facts: Facts, replays: Mapping[str, Any]) -> None:
        self.deployment = deployment
        self.facts = facts
        self._replays = replays
        self._batches: dict[float, Batch] = {}

    def outcome(self, run: Run) -> Mapping[str, Any]:
        """What a replay found."""
        found: Mapping[str, Any] = self._replays[run.name]["outcome"]
        return found

    def served(self, run: Run, rates: Rates = _RATES[0]) -> Mapping[str, Any]:
        """What a service model made of it."""
        found: Mapping[str, Any] = self.outcome(run)["services"][_RATES.index(rates)]
        return found

    def of(self, run: Run, factors: Factors = UNCHANGED, rates: Rates = _RATES[0]) -> Projection:
        """The projection of a replay."""
        return projected(
            self.deployment,
            self.outcome(run),
            self.served(run, rates),
            self.facts.tokens(),
            self.facts.requests,
            self.batch(share_of(self.deployment, run)),
            factors,
        )

    def batch(self, share: float) -> Batch:
        """The largest batch beside a cache of this part of the memory for KV."""
        if share not in self._batches:
            self._batches[share] = self.deployment.batch(share)
        return self._batches[share]

    def gains(
        self,
        factors: Factors = UNCHANGED,
        rates: Rates = _RATES[0],
        share: float = 1.0,
        scale: float = 1.0,
    ) -> dict[str, float]:
        """What ours gains over no offload: mean TTFT and throughput as ratios, cost in percent."""
        without, ours = Run(NONE, share=share), Run(OURS, share=share, scale=scale)
        before, after = self.of(without, factors, rates), self.of(ours, factors, rates)
        times = [self.served(run, rates)["ttft_s"]["mean"] for run in (without, ours)]
        price = after.usd_per_million_tokens / before.usd_per_million_tokens
        return {
            "ttft_x": times[0] / times[1] if times[1] else 1.0,
            "throughput_x": after.requests_per_s / before.requests_per_s,
            "cost_less_pct": 100 * (1 - price),
        }


def _result(projector: Projector, name: str) -> dict[str, Any]:
    run = Run(name)
    outcome, served = projector.outcome(run), projector.served(run)
    seconds = projector.facts.seconds
    busy = served["compute_s"] / projector.deployment.instances
    return {
        "configuration": name,
        "policy": outcome["policy"],
        "tiers": [tier["tier"] for tier in outcome["tiers"]],
        "hit_pct": outcome["hit_pct"],
        "ttft_s": served["ttft_s"],
        "queued_ttft_s": served["queued_ttft_s"],
        "prompts_busy_pct": 100 * busy / seconds if seconds > 0 else None,
        "waste_pct": outcome["ahead"]["waste_pct"],
        **dataclasses.asdict(projector.of(run)),
    }


def _inputs(deployment: Deployment, facts: Facts) -> list[tuple[str, str, str, Any]]:
    """Each main input: its name, its value, its source, and the arguments of `gains` for it."""
    gpu, node = deployment.node.gpu, deployment.node
    decode, share = decode_efficiency(deployment), deployment.kv_cache_share
    known = [figure for figure in (gpu.flops, gpu.prefill_efficiency) if figure is not None]
    requests = max(1, facts.requests)
    usd = node.usd_per_hour
    batch = deployment.batch(share.value).largest or 0
    tiers = "tiers.*, each as listed below"

    def factors(name: str) -> Callable[[float], dict[str, Any]]:
        return lambda factor: {"factors": Factors(**{name: factor})}

    def prefill(factor: float) -> dict[str, Any]:
        return {"rates": Rates(prefill=factor), "factors": Factors(prefill=factor)}

    rate = " x ".join([str(deployment.gpus), *(figure.written for figure in known)])
    reads = f"{deployment.gpus} x {gpu.bandwidth.written} x {decode.value:g}"
    return [
        ("prefill rate", rate, "; ".join(figure.source for figure in known), prefill),
        ("decode's memory rate", reads, f"{gpu.bandwidth.source}; {decode.source}",
         factors("decode")),
        ("read bandwidth of the tiers", "as described", tiers,
         lambda factor: {"rates": Rates(read=factor)}),
        ("latency of the tiers", "as described", tiers,
         lambda factor: {"rates": Rates(latency=factor)}),
        ("capacity of the tiers", "as described", tiers, lambda factor: {"scale": factor}),
        ("part of HBM's KV that is cache, up to 0.9", share.written, share.source,
         lambda factor: {"share": factor}),
        ("requests decoded at a time", f"{batch:,}", "what the rest of HBM holds",
         factors("batch")),
        ("tokens of an output", f"{facts.output_tokens / requests:,.0f}", "the trace's mean",
         factors("output")),
        ("price of the node", f"{usd.value:g} USD an hour" if usd else "-",
         usd.source if usd else "", factors("node_usd")),
        ("price of the tiers", "as described", tiers, factors("tier_usd")),
    ]  # fmt: skip


def _sensitive(
    projector: Projector,
    name: str,
    value: str,
    source: str,
    arguments: Callable[[float], dict[str, Any]],
) -> dict[str, Any]:
    return {
        "input": name,
        "value": value,
        "source": source,
        "halved": projector.gains(**arguments(_HALF)),
        "doubled": projector.gains(**arguments(_DOUBLE)),
    }


def _assumptions(deployment: Deployment) -> list[str]:
    told = deployment.assumptions(prices=True)
    if deployment.node.gpu.decode_efficiency is None:
        found = decode_efficiency(deployment)
        told.append(f"{found.name} = {found.written}: {found.source.partition(':')[2].strip()}")
    return told


_ROWS = (
    ("ttft_x", "mean time to first token", "x lower"),
    ("throughput_x", "throughput", "x higher"),
    ("cost_less_pct", "cost of a million tokens", "% lower"),
)


def _rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a gain, in the form of the other reports; its spread is that of the sensitivity."""
    found = {one["name"]: one for one in document["paper"]}
    rows = []
    for name, title, unit in _ROWS:
        one = found[name]
        each = [row[way][name] for row in document["sensitivity"] for way in ("halved", "doubled")]
        rows.append(
            {
                "name": f"projection: {title}, ours, {document['trace']['name']}",
                "value": one["found"],
                "unit": unit,
                "reference": NONE,
                "reference_value": 0.0 if name == "cost_less_pct" else 1.0,
                "ratio": one["found"],
                "spread": [min(each), max(each)],
                "runs": 1,
                "bar": f"the paper's projection: {one['paper']}",
                "met": one["reproduced"],
            }
        )
    return rows
