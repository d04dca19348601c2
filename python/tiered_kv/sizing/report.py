"""What `tiered-kv size` says: one document, as JSON or as lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from tiered_kv.sizing.compare import as_gqa, as_mha
from tiered_kv.sizing.parallel import Parallel, heads_of_rank, rank_bytes
from tiered_kv.sizing.parts import Part, SpanKind
from tiered_kv.sizing.spec import Comparison, KvSpec, LayerGroup, Role

if TYPE_CHECKING:
    from tiered_kv.sizing.engines import EngineReport

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def number(value: Fraction) -> int | float:
    """A fraction as JSON has it: an integer where it is one. Rates are dyadic, hence exact."""
    return int(value) if value.denominator == 1 else float(value)


def document(
    spec: KvSpec,
    *,
    context: int,
    batch: int,
    block_size: int,
    parallel: Parallel,
    engine: EngineReport | None = None,
) -> dict[str, Any]:
    """The document of `tiered-kv size --json`; docs/sizing.md describes its fields.

    Raises:
        InvalidArgumentError: A number is out of range, or the ranks do not divide.
    """
    total = spec.bytes(context, batch, block_size)
    sizes = spec.group_bytes(context, batch, block_size)
    found: dict[str, Any] = {
        "model": spec.name,
        "model_type": spec.model_type,
        "num_layers": spec.num_layers,
        "max_context": spec.max_context,
        "kv_dtype": spec.kv_dtype.name,
        "context": context,
        "batch": batch,
        "block_size": block_size,
        "encoder_len": spec.encoder_len,
        "bytes_per_token": number(spec.bytes_per_token),
        "bytes_per_token_filling": number(spec.filling_bytes_per_token),
        "bytes_fixed": spec.fixed_bytes,
        "bytes_per_request": spec.bytes(context, 1, block_size),
        "bytes_total": total,
        "waste_bytes": total - spec.bytes(context, batch),
        "groups": [
            _group(group, size, parallel.attention_tp)
            for group, size in zip(spec.groups, sizes, strict=True)
        ],
        "as_mha": _comparison(as_mha(spec, context, batch)),
        "as_gqa": _comparison(as_gqa(spec, context, batch)),
        "parallel": dataclasses.asdict(parallel)
        | {"bytes_per_rank": rank_bytes(spec, parallel, context, batch, block_size)},
        "inferred": spec.inferred,
        "notes": list(spec.notes),
        "sources": list(spec.sources),
    }
    if engine is not None:
        found["engine"] = dataclasses.asdict(engine) | {"bytes_total": engine.bytes_total}
    return found


def _group(group: LayerGroup, total: int, tp: int) -> dict[str, Any]:
    return {
        "kind": group.kind.value,
        "role": group.role.value,
        "layers": len(group.layers),
        "layer_indices": list(group.layers),
        "window": group.window,
        "bytes_per_token": number(group.bytes_per_token),
        "bytes_per_token_filling": number(group.filling_bytes_per_token),
        "bytes_fixed": group.fixed_bytes,
        "bytes_total": total,
        "parts": [_part(part, tp) for part in group.parts],
        "note": group.note,
    }


def _part(part: Part, tp: int) -> dict[str, Any]:
    mine = heads_of_rank(part, tp)
    return {
        "name": part.name,
        "heads": part.heads,
        "dim": part.dim,
        "dtype": part.dtype.name,
        "entry_bytes": part.entry_bytes,
        "entries": {"kind": part.span.kind.value, "size": part.span.size},
        "heads_per_rank": mine,
        "replication": mine * tp // part.heads,
    }


def _comparison(found: Comparison | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "bytes_per_token": found.bytes_per_token,
        "bytes_total": found.bytes_total,
        "ratio": round(float(found.ratio), 4) if found.exact else None,
        "why": found.why,
    }


def readable(size: float) -> str:
    """A number of bytes with a unit, for people."""
    for unit, scale in _UNITS:
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The document in lines for people."""
    kind = " (inferred)" if found["inferred"] else ""
    yield f"{found['model']}: {found['model_type']}{kind}, {found['num_layers']} layers, KV in " + (
        f"{found['kv_dtype']}"
    )
    yield from _table(found["groups"])
    growth = _rate(found["bytes_per_token"])
    if found["bytes_per_token_filling"] != found["bytes_per_token"]:
        filling = _rate(found["bytes_per_token_filling"])
        yield f"a token: {filling} B until the windows are full, then {growth} B"
    else:
        yield f"a token: {growth} B"
    if found["bytes_fixed"]:
        yield f"full windows and states: {_both(found['bytes_fixed'])} a request"
    yield f"a request of {found['context']:,} tokens: {_both(found['bytes_per_request'])}"
    if found["batch"] != 1:
        yield f"{found['batch']:,} requests: {_both(found['bytes_total'])}"
    if found["waste_bytes"]:
        part = found["waste_bytes"] / found["bytes_total"]
        yield (
            f"of which rounding to blocks of {found['block_size']:,}: "
            f"{_both(found['waste_bytes'])} ({part:.2%})"
        )
    for rule in ("mha", "gqa"):
        yield from _rule(rule, found[f"as_{rule}"])
    yield from _ranks(found)
    yield from _engine(found.get("engine"))
    for note in found["notes"]:
        yield f"note: {note}"
    for source in found["sources"]:
        yield f"source: {source}"


def _both(size: int) -> str:
    return f"{size:,} B ({readable(size)})" if size >= 1024 else f"{size:,} B"


def _rule(rule: str, found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is not None:
        ratio = "" if found["ratio"] is None else f", {found['ratio']:.2f} x"
        yield (
            f"as {rule.upper()}: {_rate(found['bytes_per_token'])} B a token, "
            f"{readable(found['bytes_total'])}{ratio}: {found['why']}"
        )


def _ranks(found: Mapping[str, Any]) -> Iterator[str]:
    parallel = found["parallel"]
    sizes = {name: value for name, value in parallel.items() if name != "bytes_per_rank"}
    if all(value == 1 for value in sizes.values()):
        return
    ranks = parallel["tp"] * parallel["pp"] * parallel["cp"]
    named = ", ".join(f"{name} {value}" for name, value in sizes.items() if value != 1)
    yield f"each rank of {named}: {_both(parallel['bytes_per_rank'])}"
    copies = (
        ranks * parallel["bytes_per_rank"] / found["bytes_total"] if found["bytes_total"] else 0
    )
    if copies > 1:
        yield f"all {ranks} ranks together: {copies:.2f} x the cache; a store keeps it once"


def _engine(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield f"held by {found['engine']}: {_both(found['bytes_total'])}"
    for group in found["groups"]:
        pages = f", {group['pages']:,} pages of {group['page_bytes']:,} B" if group["pages"] else ""
        waste = f", {_both(group['waste_bytes'])} waste" if group["waste_bytes"] else ""
        layers = f" x {group['layers']}" if group["layers"] else ""
        yield f"  {group['kind']}{layers}: {_both(group['bytes_total'])}{pages}{waste}"
    for note in found["notes"]:
        yield f"  {note}"


_HEAD = ("group", "layers", "kept a layer", "B a token", "fixed B", "total")


def _table(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [_HEAD, *(_row(group) for group in groups)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _row(group: Mapping[str, Any]) -> tuple[str, ...]:
    role = "" if group["role"] == Role.MODEL.value else f" ({group['role']})"
    window = f" of {group['window']:,}" if group["window"] else ""
    return (
        f"{group['kind']}{window}{role}",
        f"{group['layers']}",
        ", ".join(_kept(part) for part in group["parts"]) or "nothing",
        _rate(group["bytes_per_token"]),
        f"{group['bytes_fixed']:,}",
        readable(group["bytes_total"]),
    )


def _kept(part: Mapping[str, Any]) -> str:
    often = part["entries"]
    size = f"{part['heads']} x {part['dim']} {part['dtype']}"
    if often["kind"] == SpanKind.EVERY.value and often["size"] > 1:
        return f"{part['name']} {size} each {often['size']} tokens"
    return f"{part['name']} {size}"
