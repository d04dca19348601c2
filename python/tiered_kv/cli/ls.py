"""`tiered-kv ls` and `tiered-kv inspect`: what a store holds."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.output import people, print_json
from tiered_kv.cli.stores import (
    Dirs,
    Json,
    digits,
    directories,
    namespace_named,
    plain,
    reading,
    size,
    the_one,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tiered_kv import _core

SHORT = 16
"""Digits of a digest that tables show."""


def _short(digest: bytes | None) -> str:
    return "-" if digest is None else digest.hex()[:SHORT]


def about(core: _core.Operator, dirs: list[Path], *, is_live: bool) -> dict[str, Any]:
    """Which store it is, and how it was reached."""
    drives, missing = core.drives()
    return {
        "directories": [str(path) for path in dirs],
        "live": is_live,
        "drives": drives,
        "missing_drives": missing,
    }


def _headline(found: dict[str, Any]) -> str:
    state = "live" if found["live"] else "closed"
    text = f"{', '.join(found['directories'])}: {state}"
    for drive in found["drives"]:
        text += f", {drive['segments']} segments of {size(drive['segment_bytes'])}"
        text += f", checkpoint {drive['checkpoint']}"
    if found["missing_drives"]:
        text += f"; {len(found['missing_drives'])} directories of it are not named"
    return text


def _collect(core: _core.Operator) -> list[dict[str, Any]]:
    from tiered_kv.operator import namespaces, survey

    totals = survey(core)
    rows = []
    for row in namespaces(core):
        nothing = {"blocks": 0, "bytes": 0, "oldest_unix_ns": None, "newest_unix_ns": None}
        total = totals.get(row["namespace"], nothing | {"tenants": []})
        rows.append(row | total)
    rows.sort(key=lambda row: -row["bytes"])
    return rows


def _quota(row: dict[str, Any]) -> str:
    pair = (row["dram_quota_bytes"], row["nvme_quota_bytes"])
    return "-" if pair == (None, None) else " / ".join(size(one, "no limit") for one in pair)


def _namespaces_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from tiered_kv.operator import when

    table = Table(box=None)
    for name in ("namespace", "model", "kv_dtype", "blocks", "bytes", "dram", "nvme", "quota"):
        right = name not in ("namespace", "model", "kv_dtype")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for name in ("oldest", "newest", "tenants"):
        table.add_column(name, overflow="fold")
    for row in rows:
        fields = row["fields"] or {}
        tenants = [_short(tenant) for tenant in row["tenants"] if tenant is not None]
        table.add_row(
            _short(row["namespace"]),
            fields.get("model", "not known"),
            fields.get("kv_dtype", "-"),
            str(row["blocks"]),
            size(row["bytes"]),
            size(row["dram_bytes"]),
            size(row["nvme_bytes"]),
            _quota(row),
            when(row["oldest_unix_ns"]),
            when(row["newest_unix_ns"]),
            ", ".join(tenants) or "-",
        )
    return table


def _tiers(row: dict[str, Any]) -> str:
    found = ["dram"] if row["in_dram"] else []
    if row["nvme"] != "no":
        found.append("nvme" if row["nvme"] == "durable" else "nvme (being written)")
    return ", ".join(found) or "-"


def _blocks_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from tiered_kv.operator import when

    table = Table(box=None)
    for name in ("namespace", "key"):
        table.add_column(name, overflow="fold")
    for name in ("depth", "tokens", "bytes"):
        table.add_column(name, justify="right", overflow="fold")
    for name in ("tiers", "stored", "computed", "type", "tenant", "generation"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            _short(row["namespace"]),
            _short(row["key"]),
            str(row["depth"]),
            str(row["tokens"]),
            size(row["bytes"]),
            _tiers(row),
            when(row["stored_unix_ns"]),
            row["computed"],
            row["block_type"] or "-",
            _short(row["tenant"]),
            str(row["generation"]),
        )
    return table


def ls(
    dirs: Dirs = None,
    blocks: Annotated[bool, typer.Option("--blocks", help="List blocks, not namespaces.")] = False,
    namespace: Annotated[
        str | None, typer.Option(help="Only this namespace: digits of its digest.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="With --blocks, only this tenant's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most blocks that are listed.")] = 1000,
    as_json: Json = False,
) -> None:
    """List the namespaces of a store, or its blocks: a live one through its owner, a closed one by
    reading its directories."""  # noqa: D205, D209 - typer shows the whole text
    from tiered_kv import _core
    from tiered_kv import operator as ops

    paths = directories(dirs)
    with reading(paths) as (core, is_live):
        found = about(core, paths, is_live=is_live)
        chosen = namespace_named(core, namespace) if namespace else None
        if blocks or tenant is not None:
            payer = None if tenant is None else _core.tenant_digest(tenant)
            rows = list(islice(ops.blocks(core, chosen, payer), limit + 1))
            found |= {"blocks": rows[:limit], "truncated": len(rows) > limit}
        else:
            rows = [row for row in _collect(core) if chosen in (None, row["namespace"])]
            found |= {"namespaces": rows}
    if as_json:
        print_json(plain(found))
        return
    console = people(as_json=False)
    console.print(_headline(found), markup=False, soft_wrap=True)
    console.print(_blocks_table(rows[:limit]) if "blocks" in found else _namespaces_table(rows))
    if found.get("truncated"):
        console.print(f"the first {limit} blocks; --limit shows more")


def inspect(
    key: Annotated[str, typer.Argument(help="The key, or its first digits.")],
    dirs: Dirs = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only in this namespace: digits of its digest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show all that is known of one block. Ends with 1 where the store does not have it."""
    from tiered_kv.operator import blocks as all_blocks

    text = digits(key, "key")
    paths = directories(dirs)
    with reading(paths) as (core, is_live):
        chosen = namespace_named(core, namespace) if namespace else None
        if len(text) < 64:
            found = {row["key"] for row in all_blocks(core, chosen)}
            begun = [one for one in found if one.hex().startswith(text)]
            rows = core.inspect(the_one(begun, text, "key"), chosen) if begun else []
        else:
            rows = core.inspect(bytes.fromhex(text), chosen)
        document = about(core, paths, is_live=is_live) | {"key": text, "blocks": rows}
    if as_json:
        print_json(plain(document))
    else:
        console = people(as_json=False)
        for row in rows:
            console.print(_details(row))
        if not rows:
            console.print(f"{text} is not stored; `tiered-kv explain` may say why", markup=False)
    if not rows:
        raise typer.Exit(ExitCode.FAILED)


def _details(row: dict[str, Any]) -> Any:
    from rich.table import Table

    from tiered_kv.operator import when

    table = Table(box=None, show_header=False)
    shown = plain(row) | {
        "tiers": _tiers(row),
        "stored": when(row["stored_unix_ns"]),
        "bytes": f"{row['bytes']} ({size(row['bytes'])})",
    }
    for name in ("in_dram", "stored_unix_ns", "slabs"):
        del shown[name]
    for name, value in shown.items():
        table.add_row(name, "-" if value is None else str(value))
    for number, slab in enumerate(row["slabs"]):
        place = "" if slab["slot"] is None else f", segment {slab['segment']} slot {slab['slot']}"
        table.add_row(
            f"slab {number}", f"{slab['bytes']} bytes, crc32c {slab['crc32c']:08x}{place}"
        )
    return table
