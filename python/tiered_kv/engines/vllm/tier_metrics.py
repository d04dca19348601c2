"""What the store of a secondary tier counts, through vLLM's hooks for tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from tiered_kv.engines.vllm.metrics import BUCKETS_S, HISTOGRAMS, PREFIX, Reporter
from tiered_kv.metrics.names import COUNTERS, GAUGES

_RANK = "rank"

EVERY_S = 1.0
"""Seconds between two counts, and after which nothing more is waited for."""


def definitions() -> dict[str, Any]:
    """The metrics of the connector, with the same names and labels."""
    found: dict[str, Any] = {
        PREFIX + name: OffloadingCounterMetadata(text, (_RANK, *labels))
        for name, (labels, text) in COUNTERS.items()
    }
    found |= {
        PREFIX + name: OffloadingGaugeMetadata(text, (_RANK, *labels))
        for name, (labels, text) in GAUGES.items()
    }
    return found | {
        PREFIX + name: OffloadingHistogramMetadata(text, (_RANK,), tuple(BUCKETS_S))
        for name, text in HISTOGRAMS.items()
    }


class TierStats:
    """Counts beside the scheduler's thread, which only takes away what is ready.

    Args:
        stats: What the store and the adapter have counted.
        before: What they had before there was any traffic.
    """

    def __init__(self, stats: Callable[[], dict[str, Any]], before: dict[str, Any]) -> None:
        self._stats = stats
        self._reporter = Reporter(0, before)
        # Guards what is ready: one thread counts, and another one takes.
        self._lock = threading.Lock()
        self._ready: OffloadingConnectorStats | None = None
        self._took: list[tuple[str, float]] = []
        self._next_s = 0.0
        self._told = True

    def took(self, name: str, seconds: float) -> None:
        """Notes a duration of one of `HISTOGRAMS`."""
        self._took.append((name, seconds))

    def take(self) -> OffloadingConnectorStats | None:
        """What has come since the last call, None for nothing."""
        if self._ready is None:
            return None
        with self._lock:
            ready, self._ready = self._ready, None
        return ready

    def look(self, *, idle: bool) -> None:
        """Counts where that is due.

        Args:
            idle: Nothing has come for a while, so that what is counted now is all there is.
        """
        if not idle:
            self._told = False
        if not self._told and (idle or monotonic() >= self._next_s):
            self._next_s = monotonic() + EVERY_S
            self._told = idle
            self.count()

    def count(self) -> None:
        """Counts now."""
        took, self._took = self._took, []
        for name, seconds in took:
            self._reporter.took(name, seconds)
        (part,) = self._reporter.report(self._stats()).data.values()
        told = OffloadingConnectorStats()
        for name, count in part["counters"].items():
            metric, *labels = name.split("/")
            told.increase_counter(PREFIX + metric, count, ("0", *labels))
        for name, level in part["gauges"].items():
            metric, *labels = name.split("/")
            told.set_gauge(PREFIX + metric, level, ("0", *labels))
        for name, durations in part["seconds"].items():
            for one in durations:
                told.observe_histogram(PREFIX + name, one, ("0",))
        with self._lock:
            if self._ready is not None:
                told = self._ready.aggregate(told)
            self._ready = told
