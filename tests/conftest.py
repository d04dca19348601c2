"""Settings shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from serving import jobs

# A slow or shared machine is no fault of the code: no test is timed. A failure prints the blob with
# which `@reproduce_failure` replays it.
settings.register_profile(
    "dev", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# What CI says of a change is about the change: new examples are looked for by those who develop.
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=200, derandomize=True, database=None
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# What a shell starts in the background ignores interrupts, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter that has vLLM; without one the test is skipped."""
    return jobs.vllm_python()


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for vLLM, with full attention alone."""
    return jobs.make("model", python, tmp_path_factory.mktemp("model") / "tiny")
