"""Runs of `lmcache bench l2`, and rows of them."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.limits._rows import Row, at_least, compare, progress
from benches.limits.drive import SIZES, VOLUME, Fio

import tiered_kv

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build/engines/lmcache/bin/python"
OURS = Path(tiered_kv.__file__).parents[1]
"""The package that is measured: the one that this process has."""
LABELS = ("1 MiB", "4 MiB")
ROUND_BYTES = 64 << 20
"""Bytes of one submission; a run makes one that does not count, then `ROUNDS`."""
ROUNDS = 4
LIMIT_S = 120
PHASES = {"Store": "write", "Load": "read"}
WHOLE = 0.99
"""Part of the payload that the drive itself has to move where memory is off."""


@dataclass(frozen=True)
class Run:
    """What one run measured: GB/s, and device bytes as a part of the payload, by phase."""

    gbps: dict[str, float]
    device: dict[str, float]


@dataclass
class Side:
    """An adapter on a directory of its own, whose runs are kept."""

    name: str
    directory: Path
    config: dict[str, Any]
    first: Run | None = None
    runs: list[Run] = field(default_factory=list)


def ours(name: str, directory: Path, **fields: Any) -> Side:
    """Our native plugin."""
    params = {"path": str(directory), "nvme_capacity": VOLUME * 2, **fields}
    config = {
        "type": "native_plugin",
        "module_path": "tiered_kv.engines.lmcache",
        "class_name": "TieredKVNativePlugin",
        "adapter_params": params,
    }
    return Side(name, directory, config)


def theirs(directory: Path) -> Side:
    """LMCache's own adapter for files, without the page cache."""
    config = {"type": "fs_native", "base_path": str(directory), "use_odirect": True}
    return Side("fs_native", directory, config)


class LMCache:
    """LMCache's own bench, in a process that does one run after the other."""

    def __init__(self) -> None:
        if not PYTHON.exists():
            raise SystemExit("bench: LMCache is not installed: run `make engines`")
        env = {**os.environ, "PYTHONPATH": str(OURS), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [str(PYTHON), str(Path(__file__).with_name("_inside.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def run(self, side: Side, label: str) -> Run:
        """One `lmcache bench l2`, of which LMCache verifies the last round."""
        config = dict(side.config)
        if "adapter_params" in config:
            # Other keys each time: what is there already would not be written again.
            namespace = f"bench/{len(side.runs)}/{side.first is not None}"
            config["adapter_params"] = {**config["adapter_params"], "namespace": namespace}
        else:
            # The keys are those of the run before, whose blocks of the drive are used again.
            shutil.rmtree(side.directory, ignore_errors=True)
        size = SIZES[label]
        command = ["bench", "l2", "--l2-adapter", json.dumps(config)]
        command += ["--num-keys", str(ROUND_BYTES // size), "--data-size-kb", str(size >> 10)]
        command += ["--l1-align-bytes", "4096", "--rounds", str(ROUNDS), "--warmup-rounds", "1"]
        command += ["--no-skip-verify"]
        found = self._ask(command)
        if "data verified OK" not in found["said"]:
            raise SystemExit(f"lmcache bench l2 failed:\n{found['said'][-6000:]}")
        phases = found["phases"]
        device = {
            name: phases[name][f"{do}_bytes"] / phases[name]["payload_bytes"]
            for name, do in PHASES.items()
        }
        return Run({name: _gbps(phases[name]) for name in PHASES}, device)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(timeout=LIMIT_S)

    def _ask(self, command: list[str]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise SystemExit("lmcache bench l2 ended: run `make engines`, and see docs/lmcache.md")
        found: dict[str, Any] = json.loads(answer)
        return found


def _gbps(phase: dict[str, Any]) -> float:
    """Of the rounds that count, the median."""
    assert phase["done"] == phase["asked"], phase
    assert len(phase["seconds"]) == ROUNDS + 1, phase
    seconds: float = statistics.median(phase["seconds"][1:])
    return ROUND_BYTES / seconds / 1e9


def rows(lmcache: LMCache, label: str, rounds: int, where: Path | None = None) -> list[Row]:
    """Both settings and all they stand beside, in turn, for one size of objects."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-bench-", dir=where) as name:
        home = Path(name)
        fio = Fio(home)
        sides = [
            ours("device", home / "device", dram_capacity=0),
            theirs(home / "fs"),
            ours("tiered", home / "tiered", dram_capacity=VOLUME * 3 // 2),
        ]
        progress(f"objects of {label}, first write")
        for side in sides:
            side.first = lmcache.run(side, label)
        limits: dict[str, list[float]] = {phase: [] for phase in PHASES}
        # The round that does not count fills what a store has room for: the next ones overwrite.
        for number in range(-1, rounds):
            progress(f"objects of {label}, round {number + 1} of {rounds}")
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                side.runs.append(lmcache.run(side, label))
            for phase, do in PHASES.items():
                limits[phase].append(fio.run(do, SIZES[label], "io_uring"))
    for side in sides:
        del side.runs[0]
    return [row for phase in PHASES for row in of_phase(label, phase, sides, limits[phase][1:])]


def of_phase(label: str, phase: str, sides: list[Side], fio: list[float]) -> list[Row]:
    """The rows of a phase."""
    device, fs, tiered = ([run.gbps[phase] for run in side.runs] for side in sides)
    least = [min(1.2 * a, 0.9 * b) for a, b in zip(fs, fio, strict=True)]
    name = f"lmcache {phase.lower()}, {label}"
    whole = [run.device[phase] for run in sides[0].runs]
    made = [
        compare(f"{name}, device", "GB/s", "min(1.2 fs_native, 0.9 fio)", (device, least), least=1),
        compare(f"{name}, device beside fs_native", "GB/s", "fs_native", (device, fs)),
        compare(f"{name}, device beside fio", "GB/s", "fio io_uring", (device, fio)),
        compare(f"{name}, tiered", "GB/s", "fs_native", (tiered, fs), least=1.2),
        at_least(f"{name}, device bytes", "of the payload", whole, WHOLE),
        compare(
            f"{name}, device bytes of fs_native",
            "of the payload",
            "ours",
            ([run.device[phase] for run in sides[1].runs], whole),
        ),
    ]
    first = [side.first for side in sides]
    if first[0] is not None and first[1] is not None:
        pair = ([first[0].gbps[phase]], [first[1].gbps[phase]])
        made.append(compare(f"{name}, device, first write", "GB/s", "fs_native, first write", pair))
    return made
