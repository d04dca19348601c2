"""Runs `lmcache bench l2` for each size of objects, and writes build/reports/lmcache.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from benches.limits.__main__ import machine
from benches.limits._rows import show, write

from . import l2


def main() -> None:
    """Runs and reports."""
    parser = argparse.ArgumentParser(prog="lmcache", description=__doc__)
    parser.add_argument("--only", choices=l2.LABELS, help="one size of objects")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="a directory on the drive to measure")
    parser.add_argument("--report", type=Path, default=Path("build/reports/lmcache.json"))
    args = parser.parse_args()
    rows = []
    lmcache = l2.LMCache()
    for label in [args.only] if args.only else l2.LABELS:
        rows += l2.rows(lmcache, label, args.rounds, args.dir)
        write(rows, machine(), args.report)
    lmcache.close()
    show(rows)


if __name__ == "__main__":
    main()
