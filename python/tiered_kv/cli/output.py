"""What commands print: one JSON document, or text for people."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_kv.errors import one_line

if TYPE_CHECKING:
    from rich.console import Console


_PIPE_COLUMNS = 240


def people(*, as_json: bool) -> Console:
    """The console for people: stdout, or stderr where stdout carries JSON."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        """A console to which names are names: neither markup nor commands to the terminal."""

        def render_str(self, text: str, **options: Any) -> Text:
            lines = "\n".join(one_line(line) for line in text.split("\n"))
            return super().render_str(lines, **options)

    console = Plain(stderr=as_json, highlight=False, markup=False, emoji=False)
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
    line = one_line(" ".join(message.split()))
    sys.stderr.write(f"error: {line}\n")


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines for people on stdout; what they quote stays on its line."""
    for line in lines:
        sys.stdout.write(one_line(line) + "\n")
    sys.stdout.flush()


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


def write_document(path: Path | None, document: Mapping[str, object]) -> bool:
    """Writes a document to a file, mode 0600, or to stdout where the path is `-`.

    Returns:
        Whether it is on stdout, where nothing else belongs then.
    """
    if path is None:
        return False
    text = json.dumps(document, indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return True
    made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(made, "w", encoding="utf-8") as file:
        file.write(text)
    return False


@contextlib.contextmanager
def bar(total: int, what: str) -> Iterator[Callable[[int], object] | None]:
    """A bar on stderr where that is a terminal; what tells it how many requests were applied."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.update(task, completed=done)
