"""What commands print: one JSON document, or text for people."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


_PIPE_COLUMNS = 240


def people(*, as_json: bool) -> Console:
    """The console for people: stdout, or stderr where stdout carries JSON."""
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        # Whoever reads a file or a pipe has no width for which text would have to be cut.
        console.width = _PIPE_COLUMNS
    return console


def print_json(document: Mapping[str, object]) -> None:
    """Prints one JSON document and a newline on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, sort_keys=True, default=str) + "\n")
    sys.stdout.flush()


def error_line(message: str) -> None:
    """Prints an error on stderr as a single line, whatever it contains."""
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends everything that is written to descriptor 1 to stderr, child processes included."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
        sys.stdout.flush()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
