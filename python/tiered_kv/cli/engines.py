"""`tiered-kv engines`: the flags of the serving engines that are installed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.output import print_json, print_lines, stdout_to_stderr


def _lines(rows: list[dict[str, Any]], checked: dict[str, Any] | None) -> list[str]:
    lines = []
    for row in rows:
        name, version = row["engine"], row["version"]
        if version is None:
            lines.append(f"{name}: not installed in this environment; its flag would be")
        else:
            known = "a version that is tested" if row["tested"] else "a version that is NOT tested"
            lines.append(f"{name} {version}, {known}")
        lines.append(f"  {row['flag']}")
        if "tier_flag" in row:
            lines.append("or, below its own tier of host memory, which --dram is then")
            lines.append(f"  {row['tier_flag']}")
    if checked is not None:
        lines += [f"adapter of {name}: {text}" for name, text in checked["adapters"].items()]
        lines.append(f"blocks back after a restart of the store: {checked['blocks']}")
        lines.append(f"verdict: {checked['verdict']}")
    return lines


def engines(
    path: Annotated[
        Path, typer.Option("--path", help="Directory on the drive that keeps the blocks.")
    ] = Path("/mnt/nvme0/kv"),
    dram: Annotated[
        str | None,
        typer.Option("--dram", help="Host memory of the node. [default: the store's own]"),
    ] = None,
    nvme: Annotated[str, typer.Option("--nvme", help="Room on the drive.")] = "100GiB",
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Directory of the model's files, which LMCache needs named."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--kv-dtype", help="Type of the cache. [default: the model's own]"),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Load the adapters; write, read and verify under --path."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Print the flag with which each serving engine uses the store; --check tries it.

    Ends with 1 where --check finds what does not work.
    """
    from tiered_kv.engines import flags

    rows = flags.engines(path, dram, nvme, model, dtype)
    checked = None
    if check:
        with stdout_to_stderr():  # engines print as they load
            checked = flags.check(path, rows)
    if as_json:
        print_json({"engines": rows, "check": checked})
    else:
        print_lines(_lines(rows, checked))
    if checked is not None and checked["verdict"] != "works":
        raise typer.Exit(ExitCode.FAILED)
