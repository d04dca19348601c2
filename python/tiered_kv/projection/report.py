"""A projection as text for people; every table and line of results says that it is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tiered_kv.planner.report import source_lines
from tiered_kv.replay.node_report import seconds
from tiered_kv.replay.report import markdown

if TYPE_CHECKING:
    from rich.table import Table


def head_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What was projected.

    Args:
        found: What `tiered_kv.projection.project` returned.
    """
    trace, gpus = found["trace"], found["gpus"]
    yield f"This is {found['projection']}."
    yield (
        f"{trace['name']}: {trace['requests']:,} requests, {trace['input_tokens']:,} tokens of "
        f"prompts, {trace['output_tokens']:,} of outputs, ceiling {trace['ceiling']:.1f} %"
    )
    yield (
        f"{found['node']}: {found['title']}; {found['model']} on {gpus} GPU"
        f"{'s' if gpus > 1 else ''}, KV in {found['kv_dtype']}"
    )


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """The configurations, what depends on which input, and the paper's figures."""
    yield _configurations(found)
    yield _sensitivity(found)
    yield _paper(found)


def foot_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """How it was projected, and every input with its source."""
    for one in found["paper"]:
        if one["needed"]:
            yield f"projection, needed for the paper's {one['title']}: {one['needed']}"
    yield f"projection, times: {found['service']}"
    yield f"projection, throughput: {found['throughput']}"
    gpu = found["results"][0]["decoding"]
    yield (
        f"projection, decoding: {gpu['batch']:,.0f} requests at a time, a step takes "
        f"{seconds(gpu['step_s'])}, bound by {gpu['binds']}"
    )
    if any((one["prompts_busy_pct"] or 0) > 100 for one in found["results"]):
        yield "projection, queues: in its time the trace asks for more than the GPUs compute"
    for one in found["sensitivity"]:
        yield f"input: {one['input']} = {one['value']} ({one['source']})"
    for assumption in found["assumptions"]:
        yield f"assumed: {assumption}"
    for figure in found["figures"]:
        if not figure["assumed"]:
            yield f"input: {figure['name']} = {figure['written']} ({figure['source']})"
    yield from source_lines({**found, "figures": []})


def _configurations(found: Mapping[str, Any]) -> Table:
    head = ["projection", "hits %", "TTFT mean", "p50", "p99", "tokens/s", "out tokens/s/GPU"]
    made = markdown([*head, "x", "USD/h", "USD/M tokens", "USD/M out", "prompts %", "bound by"])
    first = found["results"][0]
    for one in found["results"]:
        times = one["ttft_s"]
        made.add_row(
            one["configuration"],
            f"{one['hit_pct']:.1f}",
            *(seconds(times[name]) for name in ("mean", "p50", "p99")),
            f"{one['tokens_per_s']:,.0f}",
            f"{one['output_tokens_per_s_per_gpu']:,.0f}",
            f"{one['requests_per_s'] / first['requests_per_s']:.2f}",
            f"{one['usd_per_hour']:.2f}",
            f"{one['usd_per_million_tokens']:.3f}",
            f"{one['usd_per_million_output_tokens']:.3f}",
            f"{one['prefill_pct']:.0f}",
            one["binds"],
        )
    return made


_GAINS = (("ttft_x", "TTFT x lower", 2), ("throughput_x", "throughput x", 2),
          ("cost_less_pct", "cost % lower", 0))  # fmt: skip


def _sensitivity(found: Mapping[str, Any]) -> Table:
    columns = [f"{title}, {way}" for _, title, _ in _GAINS for way in ("input x 0.5", "x 2")]
    made = markdown(["projection, ours over no offload", "value", *columns])

    def cells(ways: list[Mapping[str, Any]]) -> list[str]:
        return [f"{way[name]:.{digits}f}" for name, _, digits in _GAINS for way in ways]

    made.add_row("as it is", "-", *cells([found["gains"], found["gains"]]))
    for one in found["sensitivity"]:
        made.add_row(one["input"], one["value"], *cells([one["halved"], one["doubled"]]))
    return made


def _paper(found: Mapping[str, Any]) -> Table:
    made = markdown(["projection beside the paper's", "paper", "here", "reproduced"])
    for one in found["paper"]:
        made.add_row(
            one["title"],
            one["paper"],
            "-" if one["found"] is None else f"{one['found']:,.2f}",
            "yes" if one["reproduced"] else "no",
        )
    return made
