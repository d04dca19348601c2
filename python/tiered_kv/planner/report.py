"""What `tiered-kv plan` says: one document, as JSON or as lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tiered_kv.planner.plan import HBM, Plan
from tiered_kv.planner.units import large

_HEAD = (
    "tier",
    "for KV",
    "tokens",
    "requests",
    "conversations",
    "minutes",
    "recompute",
    "load",
    "beats recompute",
)


def document(found: Plan, batch: int | None = None) -> dict[str, Any]:
    """The document of `tiered-kv plan --json`; docs/planning.md describes its fields.

    Args:
        found: The plan.
        batch: Requests of which the document says whether they fit.
    """
    largest = found.batch.largest
    return {
        "node": found.node.name,
        "title": found.node.title,
        "model": found.spec.name,
        "kv_dtype": found.spec.kv_dtype.name,
        "gpus": found.gpus,
        "parallel": dataclasses.asdict(found.parallel),
        "load": dataclasses.asdict(found.load),
        "weights": dataclasses.asdict(found.weights) | {"bytes": found.weights.bytes},
        "bytes_per_request": found.spec.bytes(found.load.context, 1, found.load.block_size),
        "batch": dataclasses.asdict(found.batch)
        | {
            "on_node": None if largest is None else largest * found.batch.instances,
            "asked": batch,
            "asked_fits": None if batch is None else _fits(found, batch),
        },
        "tiers": [dataclasses.asdict(tier) for tier in found.tiers],
        "total_bytes": found.total_bytes,
        "times_hbm": _times(found),
        "prefill_tokens_per_s": found.prefill_tokens_per_s,
        "recompute_request_seconds": found.recompute_request_seconds,
        "assumptions": _assumptions(found),
        "figures": [figure_of(figure) for figure in found.node.figures()],
        "sources": list(found.spec.sources),
    }


def _fits(found: Plan, batch: int) -> bool:
    largest = found.batch.largest
    return largest is None or batch <= largest * found.batch.instances


def _times(found: Plan) -> float | None:
    hbm = found.tiers[0].kv_bytes
    return round(found.total_bytes / hbm, 4) if hbm else None


def figure_of(figure: Any) -> dict[str, Any]:
    """A `Figure` as documents have it."""
    return dataclasses.asdict(figure) | {"assumed": figure.assumed}


def _assumptions(found: Plan) -> list[str]:
    weights, load = found.weights, found.load
    told = [
        f"weights: {weights.params:,} parameters ({weights.source}) as {weights.dtype}, "
        f"{large(weights.bytes)}, spread evenly over tp x pp"
    ]
    if load.request_bytes:
        told.append(f"each request needs {load.request_bytes:,} B on each GPU beside its KV")
    if load.prefill_tokens_per_s:
        told.append(f"the node prefills {load.prefill_tokens_per_s:,.0f} tokens/s (given)")
    elif found.prefill_tokens_per_s is not None:
        gpu = found.node.gpu
        flops, part = gpu.flops, gpu.prefill_efficiency
        if flops is not None and part is not None:
            told.append(
                f"projected: the node prefills {found.prefill_tokens_per_s:,.0f} tokens/s = "
                f"{found.gpus} GPUs x {flops.written} x {part.value:g} / "
                f"(2 x {weights.active or weights.params:,} parameters); attention is left out"
            )
    told += [
        f"{figure.name} = {figure.written}: {figure.source.partition(':')[2].strip()}"
        for figure in found.node.figures()
        if figure.assumed and figure.name != "gpu.reserve"
    ]
    kept = found.node.gpu.memory.value - found.batch.kv_bytes - found.batch.weight_bytes
    own = kept == found.node.gpu.reserve.value
    why = found.node.gpu.reserve.source.removeprefix("assumed: ") if own else "given"
    told.append(f"reserved on each GPU: {large(kept)} ({why})")
    return told


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The document in lines for people."""
    yield f"{found['node']}: {found['title']}"
    spread = ", ".join(f"{name} {size}" for name, size in found["parallel"].items() if size != 1)
    gpus = f"{found['gpus']} GPU" + ("s" if found["gpus"] != 1 else "")
    yield (
        f"{found['model']} on {gpus}{f' ({spread})' if spread else ''}, KV in {found['kv_dtype']}, "
        f"{found['load']['context']:,} tokens a request: {found['bytes_per_request']:,} B"
    )
    yield from _batch(found["batch"])
    yield from _table(found["tiers"])
    times = "" if found["times_hbm"] is None else f", {found['times_hbm']:,.1f} x that of HBM"
    yield f"all tiers: {large(found['total_bytes'])} for KV{times}"
    for assumption in found["assumptions"]:
        yield f"assumed: {assumption}"
    yield from source_lines(found)


def _batch(batch: Mapping[str, Any]) -> Iterator[str]:
    if batch["kv_bytes"] >= 0:
        yield (
            f"each GPU: {large(batch['weight_bytes'])} of weights, {large(batch['kv_bytes'])} "
            f"for KV, {batch['request_bytes']:,} B a request"
        )
    largest = batch["largest"]
    many = (
        f", {batch['on_node']:,} on {batch['instances']} instances of the model"
        if (largest is not None and batch["instances"] > 1)
        else ""
    )
    yield f"largest batch: {'any' if largest is None else f'{largest:,}'}{many}"
    if batch["as_mha"] is not None and batch["as_mha"] != largest:
        yield f"  sized as MHA it would be {batch['as_mha']:,}"
    yield f"  bound by {batch['binds']}: {batch['why']}"
    if batch["asked"] is not None:
        yield f"  {batch['asked']:,} requests {'fit' if batch['asked_fits'] else 'do not fit'}"


def source_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each source of the `figures` and of the model's cache, its `sources`."""
    seen: dict[str, list[str]] = {}
    for figure in found["figures"]:
        if not figure["assumed"]:
            seen.setdefault(figure["source"], []).append(figure["name"])
    for source, names in seen.items():
        yield f"source: {source}: {', '.join(names)}"
    for source in found["sources"]:
        yield f"source: {source}: the model's cache"


def _table(tiers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [_HEAD, *(_row(tier) for tier in tiers)]
    # A column that says nothing is left out.
    kept = [
        column
        for column in range(len(_HEAD))
        if any(row[column] not in ("", "-") for row in rows[1:])
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        cells = [
            row[column].ljust(widths[column]) if column == 0 else row[column].rjust(widths[column])
            for column in kept
        ]
        yield "  " + "  ".join(cells).rstrip()


def _row(tier: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        tier["name"],
        large(tier["kv_bytes"]),
        _number(tier["tokens"]),
        _number(tier["requests"]),
        _number(tier["conversations"]),
        "-" if tier["minutes"] is None else f"{tier['minutes']:,.1f}",
        "-" if tier["recompute_seconds"] is None else f"{tier['recompute_seconds']:,.0f} s",
        "-" if tier["load_seconds"] is None else f"{1e3 * tier['load_seconds']:,.1f} ms",
        "" if tier["name"] == HBM or tier["faster"] is None else "yes" if tier["faster"] else "no",
    )


def _number(value: int | None) -> str:
    return "any" if value is None else f"{value:,}"
