"""Checks of how long the vLLM adapter takes at most, and of the devices that it uses."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

from serving.checks import SPEC, TOKENS
from tiered_kv.engines.vllm import scheduler
from tiered_kv.engines.vllm.messages import Owner
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.scheduler import SchedulerSide


class _Slow:
    """Operators of stores of which each call takes some of the time that it was given."""

    def __init__(self, ranks: int) -> None:
        self.now_s = 0.0
        self.waits_s: list[float] = []
        self._together = threading.Barrier(ranks)
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now_s

    def attach(self, _directory: str, _timeout: float) -> Any:
        # All ranks are asked at once, or this breaks.
        self._together.wait(60)
        return SimpleNamespace(delete_before=self._delete, close=lambda: None)

    def _delete(self, _namespace: bytes, _before: None, timeout: float) -> tuple[int, bool]:
        with self._lock:
            self.waits_s.append(timeout)
            self.now_s += 10
        return 0, True


def check_a_reset_asks_all_ranks_at_once_and_ends_in_time() -> None:
    side = SchedulerSide(Options.parse({"path": "/kv", "nvme_capacity": "8MiB"}), TOKENS)
    owners = {(0, rank): Owner(f"/kv/{rank}", SPEC) for rank in range(2)}
    slow = _Slow(2)
    fields = scheduler.describe_spec(SPEC.canonical())[1]
    rows = [{"namespace": bytes(32), "fields": fields}] * 20
    with (
        mock.patch.object(scheduler.BlockingStore, "attach"),
        mock.patch.object(scheduler, "Operator", slow),
        mock.patch.object(scheduler, "namespaces", return_value=rows),
        mock.patch.object(scheduler, "monotonic", slow.clock),
    ):
        side.attach(owners)
        assert not side.reset(), "not all is forgotten"
    assert 3 <= len(slow.waits_s) <= 4
    assert max(slow.waits_s) <= 30
    assert min(slow.waits_s) > 0
