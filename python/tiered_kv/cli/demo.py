"""`tiered-kv demo`: forwards its options to `tiered_kv.demo.run_from_cli`."""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.cli.output import print_json, stdout_to_stderr

_STDOUT = Path("-")


def bare_json(args: list[str]) -> list[str]:
    """Lets `demo --json` stand for `demo --json -`, as `--json` is a flag everywhere else.

    Args:
        args: The arguments of the process.

    Returns:
        The arguments, with a `--json` that no path follows made explicit.
    """
    if args[:1] != ["demo"]:
        return args
    out = []
    for index, arg in enumerate(args):
        following = args[index + 1 : index + 2]
        bare = arg == "--json" and (not following or following[0].startswith("--"))
        out.append("--json=-" if bare else arg)
    return out


def demo(
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub id. [default: the demo's own]")
    ] = None,
    document: Annotated[
        Path | None, typer.Option(help="Text file to ask about. [default: the demo's own]")
    ] = None,
    store_dir: Annotated[
        Path | None, typer.Option(help="Directory of the NVMe tier. [default: a fresh one]")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where the converted model is kept.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write the report here; alone or with `-`: on stdout."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot (PNG) here.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each turn; medians are shown.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch. [default: torch's own]")
    ] = None,
    dram_capacity: Annotated[
        str, typer.Option(help="Capacity of the DRAM tier, as in 512MiB.")
    ] = "512MiB",
    nvme_capacity: Annotated[
        str, typer.Option(help="Capacity of the NVMe tier, as in 4GiB.")
    ] = "4GiB",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
) -> None:
    """Answer questions about a long document, with and without the store."""
    options: dict[str, object] = {
        "model": model,
        "document": document,
        "store_dir": store_dir,
        "cache_dir": cache_dir,
        "plot": plot,
        "repeats": repeats,
        "threads": threads,
        "dram_capacity": dram_capacity,
        "nvme_capacity": nvme_capacity,
        "max_new_tokens": max_new_tokens,
    }
    raise typer.Exit(_run(options, json_path))


def _run(options: dict[str, object], json_path: Path | None) -> int:
    run_from_cli = importlib.import_module("tiered_kv.demo").run_from_cli
    if json_path != _STDOUT:
        return int(run_from_cli(json=json_path, **options))
    with tempfile.TemporaryDirectory(prefix="tiered-kv-") as scratch:
        report = Path(scratch) / "demo.json"
        with stdout_to_stderr():
            code = int(run_from_cli(json=report, **options))
        # A run that failed before its report says so by its status alone.
        with contextlib.suppress(FileNotFoundError):
            print_json(json.loads(report.read_text(encoding="utf-8")))
    return code
