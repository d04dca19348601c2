"""Runs the parts that are named, all by default, and writes build/reports/bench.json."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from tiered_kv import _core

from . import calls, copies, drive, opening, policy
from ._rows import Row, markdown, progress, show, write

PARTS = ("copies", "calls", "drive", "opening", "policy")
ROUNDS, DRIVE_ROUNDS = 5, 15
"""A drive swings by a third from round to round, for which its bars are too narrow in few."""


def machine() -> dict[str, object]:
    """What the figures are of."""
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "io_uring": _core.probe_io_uring()[0],
        "build": "release" if _core.IS_RELEASE else "development",
    }


def run(part: str, rounds: int, where: Path | None, only: str) -> list[Row]:
    """The rows of one part."""
    match part:
        case "copies":
            return copies.rows(rounds)
        case "calls":
            return calls.rows(rounds)
        case "drive":
            return drive.rows(rounds, where, only)
        case "policy":
            return policy.rows(rounds)
        case _:
            return opening.rows(rounds, where)


def main() -> None:
    """Runs and reports."""
    parser = argparse.ArgumentParser(prog="limits", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure")
    parser.add_argument("--rounds", type=int, help=f"by default {ROUNDS}, drive {DRIVE_ROUNDS}")
    parser.add_argument("--dir", type=Path, help="a directory on the drive to measure")
    parser.add_argument("--only", default="", help="of the drive, as in 'io_uring, 1 MiB'")
    parser.add_argument("--report", type=Path, default=Path("build/reports/bench.json"))
    told = "print the report as the table of a document, and measure nothing"
    parser.add_argument("--markdown", action="store_true", help=told)
    args = parser.parse_args()
    if args.markdown:
        print(markdown(args.report))
        return
    if not _core.IS_RELEASE:
        progress("a development build, which checks more than what ships: use `make bench`")
    rows = []
    for part in args.parts or PARTS:
        rounds = DRIVE_ROUNDS if part == "drive" else ROUNDS
        rows += run(part, args.rounds or rounds, args.dir, args.only)
        write(rows, machine(), args.report)
    show(rows)


if __name__ == "__main__":
    main()
