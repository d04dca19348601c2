"""`tiered-kv metrics`: the statistics of a live store for Prometheus."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_kv.cli.output import print_json
from tiered_kv.cli.stores import Dirs, directories, plain
from tiered_kv.errors import one_line

if TYPE_CHECKING:
    from tiered_kv.attached import BlockingAttachedStore

_DEFAULT = "127.0.0.1:9400"
_TIMEOUT_S = 2.0
"""How long one question may wait for the store's owner: well within a scrape's own time-out."""


def _attach(dirs: list[Path]) -> BlockingAttachedStore:
    """The store that a process has open on the directories.

    Raises:
        NotFoundError: No process has it open.
    """
    from tiered_kv import NotFoundError
    from tiered_kv.blocking import BlockingStore

    *others, last = dirs
    for path in others:
        with contextlib.suppress(NotFoundError):
            return BlockingStore.attach(path, timeout=_TIMEOUT_S)
    return BlockingStore.attach(last, timeout=_TIMEOUT_S)


def metrics(
    dirs: Dirs = None,
    listen: Annotated[
        str, typer.Option(help="IP address and port to listen on; not a loopback one: with a token")
    ] = _DEFAULT,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file, mode 0600, with the token that scrapes have to bring."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the metrics and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print statistics and health as JSON, and end.")
    ] = False,
) -> None:
    """Serve the statistics of a live store to Prometheus at /metrics, until interrupted."""
    from tiered_kv.metrics import render, serve
    from tiered_kv.metrics.render import client

    if not as_json:
        client()  # where it is missing, that is said before anything is done
    with _attach(directories(dirs)) as store:
        if as_json:
            print_json(plain({"stats": store.stats(), "health": store.health()}))
            return
        if once:
            sys.stdout.write(render(store.stats(), store.health()))
            return
        with serve(store, listen, token_file) as server:
            where = f"metrics of {store.path} at http://{server.address}/metrics"
            sys.stderr.write(f"{one_line(where)}\n")
            sys.stderr.flush()
            server.wait()
