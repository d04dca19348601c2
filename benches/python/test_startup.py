"""What a user waits for before anything happens."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.parametrize(
    "args",
    [["-c", "pass"], ["-c", "import tiered_kv"], ["-m", "tiered_kv", "--help"]],
    ids=["interpreter alone", "import tiered_kv", "tiered-kv --help"],
)
def test_startup(benchmark: BenchmarkFixture, args: list[str]) -> None:
    command = [sys.executable, *args]
    benchmark(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
