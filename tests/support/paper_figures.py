"""Runs the commands of a document and puts what they print under them.

A block of ```` ```console ```` is a line `$ COMMAND` and its output. `make paper-figures` runs this
on docs/paper-figures.md; the test runs it too, and compares.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)


def commands(text: str) -> list[str]:
    """The commands of a document."""
    return [match["command"] for match in _BLOCK.finditer(text)]


def printed(command: str) -> str:
    """What a command prints, on this interpreter.

    Raises:
        ValueError: It is neither `tiered-kv` nor `python`.
        CalledProcessError: It failed.
    """
    program, *arguments = shlex.split(command)
    start = {"tiered-kv": [sys.executable, "-m", "tiered_kv"], "python": [sys.executable]}
    if program not in start:
        raise ValueError(f"{program} is not run here")
    ran = subprocess.run(
        [*start[program], *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    return ran.stdout


def renewed(text: str) -> str:
    """The document with every output as it is now."""

    def block(match: re.Match[str]) -> str:
        return f"```console\n$ {match['command']}\n{printed(match['command'])}```"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renewed(page.read_text("utf-8")), encoding="utf-8")
