"""Live progress on stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """A bar with the step at hand, and a line for each step that is done."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
        )
        self._bars = Bars(*columns, console=self.console, transient=True)
        self._task = self._bars.add_task("starting", total=None)
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def expect(self, steps: int) -> None:
        """Says how many runs there will be."""
        self._bars.update(self._task, total=steps)

    def step(self, what: str) -> None:
        """Shows what is being done now."""
        self._bars.update(self._task, description=escape(what))

    def done(self, what: str) -> None:
        """Counts a run and leaves a line for it."""
        self._bars.advance(self._task)
        self.note(what)

    def note(self, what: str) -> None:
        """Leaves a line."""
        seconds = time.perf_counter() - self._began
        self.console.print(f"[dim]{seconds:6.1f} s[/dim]  {escape(what)}")
