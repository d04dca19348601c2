"""Compares every architecture of the installed transformers: `make sizing-truth`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers

from sizing_truth import build, listed, measure, published

HEAD = f"{'model':28} {'contexts':>8} {'held':>12} {'said':>12} {'spare':>9} equal classes"


def line(one: measure.Measured) -> str:
    """An architecture: contexts, bytes at the longest, whether all is equal, and the classes."""
    row = one.rows[-1]
    return (
        f"{one.model_type:28} {len(one.rows):8} {row.held:12} {row.said:12} {row.spare:9} "
        f"{'yes' if one.equal else 'NO':5} {', '.join(one.classes)}"
    )


def told(
    title: str, names: Sequence[str], take: Callable[[str], measure.Measured]
) -> list[measure.Measured]:
    """Compares one after the other, and says how each went as soon as it has: it takes minutes."""
    if not names:
        return []
    print(f"\n{title}: {len(names)} to compare\n{HEAD}", flush=True)
    found = []
    for name in names:
        found.append(take(name))
        print(line(found[-1]), flush=True)
    return found


def main() -> int:
    """Compares, says how each went while it runs, and writes the report."""
    parser = argparse.ArgumentParser(prog="sizing_truth", description=__doc__)
    parser.add_argument("--report", type=Path, help="also write all rows to this file")
    parser.add_argument("--only", nargs="*", help="these architectures or catalogue models alone")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    left_out = listed.NOT_RUN | listed.REFUSED
    wanted = args.only or [name for name in build.model_types() if name not in left_out]
    known = set(build.model_types())
    whole = args.only is None
    dynamic = told(
        "tiny models",
        [name for name in wanted if name in known],
        lambda name: measure.measure(name, measure.CONTEXTS),
    )
    static = told(
        f"a fixed length of {measure.STATIC_LENGTH} tokens",
        sorted(set(listed.STATIC_WITNESSES.values())) if whole else [],
        measure.measure_static,
    )
    real = told(
        "the catalogue at its real size",
        [name for name in published.names() if whole or name in args.only],
        published.measure,
    )
    stale = [name for name in sorted(listed.NOT_RUN) if whole and _runs(name)]
    everything = dynamic + static + real
    wrong = [one.model_type for one in everything if not one.equal]
    print(f"\n{len(everything) - len(wrong)} of {len(everything)} equal; not equal: {wrong}")
    if stale:
        print(f"listed as not to be run, but they run: {stale}")
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(_report(dynamic, static, real), indent=1) + "\n")
    return 1 if stale or set(wrong) - set(listed.EXCEPTIONS) else 0


def _runs(model_type: str) -> bool:
    try:
        measure.measure(model_type)
    except Exception:  # noqa: BLE001 - each fails in its own way
        return False
    return True


def _report(
    dynamic: list[measure.Measured], static: list[measure.Measured], real: list[measure.Measured]
) -> dict[str, Any]:
    def rows(found: list[measure.Measured]) -> list[dict[str, Any]]:
        return [{**dataclasses.asdict(one), "equal": one.equal} for one in found]

    return {
        "transformers": transformers.__version__,
        "dynamic": rows(dynamic),
        "static": rows(static),
        "catalogue": rows(real),
        "exceptions": listed.EXCEPTIONS,
        "not_run": listed.NOT_RUN,
        "refused": listed.REFUSED,
    }


if __name__ == "__main__":
    sys.exit(main())
