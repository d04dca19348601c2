"""Jobs for an engine in an environment of its own, and what came of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiered_kv

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BLOCK = 32
LIMIT_S = 600


def _python_of(engine: str, name: str) -> Path:
    """The interpreter that has an engine; the test is skipped where there is none."""
    told = os.environ.get(f"TIERED_KV_{engine.upper()}_PYTHON")
    python = Path(told) if told else ROOT / f"build/engines/{engine}/bin/python"
    if not python.exists():
        pytest.skip(f"no {name} at {python}: run `make engines`")
    return python


def vllm_python() -> Path:
    """The interpreter that has vLLM; the test is skipped where there is none."""
    return _python_of("vllm", "vLLM")


def lmcache_python() -> Path:
    """The interpreter that has LMCache; the test is skipped where there is none."""
    return _python_of("lmcache", "LMCache")


@dataclasses.dataclass(frozen=True)
class Round:
    """What came of a round: of each prompt, and of all together."""

    outputs: list[list[int]]
    reasons: list[str]
    cached: list[int]
    external: int
    preemptions: int
    reset: bool | None
    dropped: int


def environment() -> dict[str, str]:
    """The variables of a process that uses the package that this one does, and no network."""
    ours = {
        "PYTHONPATH": str(Path(tiered_kv.__file__).parents[1]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERED_KV")}
    return {"OMP_NUM_THREADS": "1", **kept, **ours}


def make(what: str, python: Path, directory: Path, seed: int = 0) -> Path:
    """A tiny "model" in a directory, one with "windows" or "states", or an "adapter"."""
    command = [str(python), str(HERE / "model.py"), what, str(directory), str(seed)]
    subprocess.run(command, check=True, env=environment(), timeout=LIMIT_S, capture_output=True)
    return directory


def transfer(path: Path, policy: str = "recompute", **options: Any) -> dict[str, Any]:
    """The value of `--kv-transfer-config`."""
    store = {"path": str(path), "dram_capacity": "64MiB", "nvme_capacity": "256MiB"}
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {**store, **options},
    }


@dataclasses.dataclass(frozen=True)
class Answers:
    """What came of a job: its rounds, what the store had counted at the end, and the log."""

    rounds: list[Round]
    stats: dict[str, Any]
    log: str


def run(python: Path, job: Path, *, env: dict[str, str] | None = None, **fields: Any) -> Answers:
    """Runs a job, described in the file `job`, and expects it to end well."""
    job.write_text(json.dumps(fields))
    done = subprocess.run(
        [python, HERE / "offline.py", job],
        env=environment() | (env or {}),
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    found = json.loads(Path(f"{job}.out").read_text())
    return Answers([Round(**one) for one in found["rounds"]], found["stats"], log)
