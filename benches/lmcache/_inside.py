"""Runs `lmcache bench l2` in LMCache's environment, as often as it is told on stdin.

A line of stdin is the arguments as a JSON list; a line of stdout says what each phase took. LMCache
takes ten times as long to start as to be measured, so that one process does all. The phases are
LMCache's own functions, around which the bytes are read that the kernel counts for this process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcache.cli import main as cli
from lmcache.cli.commands.bench.l2_adapter_bench import runner


def io_bytes() -> dict[str, int]:
    """What this process has read from drives and written to them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    rows = dict(line.split(": ") for line in lines)
    return {name: int(rows[name]) for name in ("read_bytes", "write_bytes")}


def watched(phase: Callable[..., Any], into: dict[str, Any]) -> Callable[..., Any]:
    """The phase, of which the rounds and the bytes are kept."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = io_bytes()
        result = phase(*args, **kwargs)
        after = io_bytes()
        into[result.operation] = {
            "seconds": list(result.round_durations),
            "done": sum(result.success_counts),
            "asked": result.total_keys,
            "payload_bytes": result.total_data_bytes,
            **{name: after[name] - before[name] for name in before},
        }
        return result

    return run


def bench(arguments: list[str]) -> dict[str, Any]:
    """What one call of the command measured, and what it said."""
    phases: dict[str, Any] = {}
    said = io.StringIO()
    sys.argv = ["lmcache", *arguments]
    names = ("bench_store", "bench_load")
    whole = {name: getattr(runner, name) for name in names}
    for name, phase in whole.items():
        setattr(runner, name, watched(phase, phases))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as end:
        said.write(f"\nended with {end.code}")
    finally:
        for name, phase in whole.items():
            setattr(runner, name, phase)
    return {"phases": phases, "said": said.getvalue()}


def main() -> None:
    """Answers until stdin ends."""
    # What LMCache logs must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(bench(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
