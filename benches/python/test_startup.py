"""What a user waits for before anything happens."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.parametrize(
    "args",
    [
        ["-c", "pass"],
        ["-c", "import tiered_kv"],
        ["-c", "from tiered_kv import TieredStore"],
        ["-m", "tiered_kv", "--help"],
        ["-m", "tiered_kv", "size", "deepseek-v3"],
        ["-m", "tiered_kv", "plan", "--node", "dgx-h100", "--model", "llama-3-70b"],
    ],
    ids=["interpreter alone", "import tiered_kv", "the store", "--help", "size", "plan"],
)
def test_startup(benchmark: BenchmarkFixture, args: list[str]) -> None:
    command = [sys.executable, *args]
    benchmark(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
