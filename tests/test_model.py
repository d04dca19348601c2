"""The store against a dictionary, whatever is called in whatever order, on both I/O backends.

Two stores do the same side by side, one with io_uring and one with threads that block, and their
results are equal. An acknowledged block is served with its bytes unless an event for its key says
why not, what was deleted never comes back, and every byte is accounted for.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    run_state_machine_as_test,
)

from model.bursts import Bursts
from model.counting import COUNTS, RULES
from model.lifecycle import Lifecycle
from model.oracle import EVER
from model.reads import Reads
from model.stores import BACKENDS, URING, WHY_NOT
from model.writes import Writes

STEPS = int(os.environ.get("TIERED_KV_MODEL_STEPS", "400"))
"""Steps in all, at least."""
STEPS_PER_EXAMPLE = 50
"""Hypothesis bounds what one example may draw and discards a longer one: this stays well below."""
LONG_RUN = 2000
"""Steps from which on every rule has to have run."""
FULL_RUN = 10_000
"""Steps from which on all of this has to have been seen."""
TO_BE_SEEN = {
    *("put stored", "put exists", "put ended", "superseded", "publish too old", "expired"),
    *("hit", "miss absent", "miss deadline", "hit in a burst"),
    *("cancelled put", "cancelled get", "cancelled get_into"),
    *("evicted dram", "evicted nvme", "fault nvme", "new epoch", "deleted durably"),
    *("blocks lost with a drive", "blocks found with a drive", "found after a crash"),
}


class Model(Reads, Writes, Bursts, Lifecycle, RuleBasedStateMachine):
    """All rules, on one store for each backend that this machine has."""

    @initialize()
    def begin(self) -> None:
        self.open_all()

    def teardown(self) -> None:
        self.end()


@pytest.mark.parametrize("backends", [BACKENDS], ids="+".join)
def test_model(backends: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    COUNTS.clear()
    EVER.clear()
    # An example may end early or be discarded: then there are some more.
    while (left := STEPS - COUNTS.total()) > 0:
        run_state_machine_as_test(
            Model,
            settings=settings(
                max_examples=-(-left // STEPS_PER_EXAMPLE),
                stateful_step_count=STEPS_PER_EXAMPLE,
                deadline=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
    with capsys.disabled():
        print(f"\nmodel of {' and '.join(backends)}: {COUNTS.total()} steps")
        print("  rules:", ", ".join(f"{name} {n}" for name, n in sorted(COUNTS.items())))
        print("  seen:", ", ".join(f"{name} {n}" for name, n in sorted(EVER.items())))
    if STEPS >= LONG_RUN:
        assert set(COUNTS) == RULES, f"never ran: {RULES - set(COUNTS)}"
    if STEPS >= FULL_RUN:
        unseen = {name for name in TO_BE_SEEN if not EVER[name]}
        assert not unseen, f"never seen: {unseen}"


@pytest.mark.skipif(URING, reason="both backends are compared in test_model")
def test_model_of_both_backends() -> None:
    pytest.skip(f"no io_uring here, so only the blocking backend was driven: {WHY_NOT}")
