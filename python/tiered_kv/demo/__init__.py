"""The main job: a language model answers questions about a long document, with and without a store.

`tiered-kv demo` and `python -m tiered_kv.demo` run it. Nothing heavy is imported before it starts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

__all__ = ["run_from_cli"]

REPORTS = Path("build") / "reports"


def run_from_cli(
    *,
    model: str | None = None,
    document: Path | None = None,
    store_dir: Path | None = None,
    cache_dir: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    repeats: int = 3,
    threads: int | None = None,
    dram_capacity: str = "512MiB",
    nvme_capacity: str = "4GiB",
    max_new_tokens: int = 24,
) -> int:
    """Runs the demo, prints its table and writes its report.

    Args:
        model: Directory or hub id of a model; by default SmolLM2-135M-Instruct, converted once.
        document: UTF-8 text to ask about; by default the one that comes with the package.
        store_dir: Directory of the NVMe tier; by default a fresh one, removed afterwards.
        cache_dir: Where the converted model is kept; by default the user's cache directory.
        json: Where to write the report; `build/reports/demo.json` by default.
        plot: Where to write the plot; `build/reports/demo.png` by default.
        repeats: Runs of each turn; the table shows medians.
        threads: Threads of torch; torch's own choice by default.
        dram_capacity: Capacity of the DRAM tier.
        nvme_capacity: Capacity of the NVMe tier.
        max_new_tokens: Tokens of an answer at most.

    Returns:
        0, or 1 where an answer differs from the one computed without a cache.
    """
    began = time.perf_counter()
    # Threads that wait for others by spinning make a busy machine four times slower, and an idle
    # one hardly faster. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tiered_kv.demo._progress import Progress

    with Progress() as progress:
        progress.step("importing torch and transformers")
        from tiered_kv.demo import _measure
        from tiered_kv.demo._plot import draw
        from tiered_kv.demo._report import print_table, write_json

        settings = _measure.Settings(
            model=model,
            document=document,
            store_dir=store_dir,
            cache_dir=cache_dir,
            repeats=repeats,
            threads=threads,
            dram_capacity=dram_capacity,
            nvme_capacity=nvme_capacity,
            max_new_tokens=max_new_tokens,
            import_s=time.perf_counter() - began,
        )
        report = asyncio.run(_measure.measure(settings, progress))
    json = json or REPORTS / "demo.json"
    plot = plot or REPORTS / "demo.png"
    print_table(report)
    write_json(report, json)
    draw(report, plot)
    sys.stderr.write(f"report: {json}\nplot: {plot}\n")
    return 0 if report.identical else 1
