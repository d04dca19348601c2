"""`tiered-kv doctor`: what this machine offers and what a store here would use."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.output import people, print_json


def _default_dir() -> Path:
    """The first configured directory, or else that of temporary files."""
    from tiered_kv.config import StoreConfig

    paths = StoreConfig.from_env().nvme_paths
    first = paths if isinstance(paths, str) else next(iter(paths), None)  # type: ignore[arg-type]
    return Path(first or tempfile.gettempdir())


def _size(value: int | None, absent: str = "unknown") -> str:
    if value is None:
        return absent
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} bytes"


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was found, in words."""
    uring, memory, about, store = (
        found[name] for name in ("io_uring", "memory", "directory", "store")
    )
    yield "tiered-kv", found["version"]
    yield "kernel", f"{found['kernel']} {found['machine']}"
    yield "io_uring", f"{'yes' if uring['available'] else 'no'}: {uring['reason']}"
    limit, free = (_size(memory.get(name)) for name in ("limit_bytes", "available_bytes"))
    yield "memory limit", f"{limit}, of which {free} can be had now"
    yield "locked memory", _size(memory["memlock_bytes"], "no limit")
    huge, tried = _size(memory["huge_bytes"]), _size(memory["tried_bytes"])
    thp = memory["transparent_huge_pages"] or "not there"
    yield "huge pages", f"{huge} of {tried} tried (transparent huge pages: {thp})"
    new = "" if about["exists"] else ", to be made"
    yield "directory", f"{about['path']} ({about['filesystem'] or 'unknown file system'}{new})"
    yield "free space", _size(about["free_bytes"])
    if "direct" in about:
        yield "direct I/O", f"{'yes' if about['direct'] else 'no'}: {about['reason']}"
        units = about["memory_alignment"], about["offset_alignment"]
        yield "alignment", f"{units[0]} bytes in memory, {units[1]} in files"
    if not store["opens"]:
        yield "a store here", f"cannot be opened: {store['error']}"
        return
    yield "a store here", store["backend_reason"]
    yield "self-test", "what was stored came back" if store["verified"] else "FAILED"
    if "write_gb_s" in store:
        speeds = f"wrote {store['write_gb_s']:.2f} GB/s, read {store['read_gb_s']:.2f} GB/s"
        copied = f"one thread copies memory at {memory['copy_gb_s']:.1f} GB/s"
        yield "quick look", f"{speeds}; {copied}: not a benchmark"


def doctor(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Where a store would be. [default: as configured, else for temporaries]"
        ),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Measure nothing, write as little as can be.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Say what this machine offers, what a store would use and what to change.

    Ends with 0 where a store works in the directory, and with 1 where it is memory only or fails.
    """
    from tiered_kv.doctor import examine

    found = examine(directory or _default_dir(), fast=fast)
    if as_json:
        print_json(found)
    else:
        from rich.table import Table

        table = Table(box=None, show_header=False)
        for label, text in _rows(found):
            table.add_row(label, text)
        console = people(as_json=False)
        console.print(table, markup=False)
        for text in found["advice"]:
            console.print(f"- {text}", markup=False)
        console.print(f"verdict: {found['verdict']}")
    if found["verdict"] != "works":
        raise typer.Exit(ExitCode.FAILED)
