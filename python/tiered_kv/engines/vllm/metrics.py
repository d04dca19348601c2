"""What the stores of all ranks count, in vLLM's own `/metrics` and log."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tiered_kv.metrics.names import COUNTERS, GAUGES, counted, told

# vLLM takes metrics of this prefix out of the registry when an engine starts anew in a process.
PREFIX = "vllm:tiered_kv_"

HISTOGRAMS: dict[str, str] = {
    "load_seconds": "From the step that asked for a load to the step that found it ended.",
    "save_seconds": "Copying of what a step has computed, before the next one begins.",
}

BUCKETS_S = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
# Often enough for every scrape, and nothing beside the work of a step.
_EVERY_S = 0.25


class Stats(KVConnectorStats):  # type: ignore[misc]  # vLLM's classes are Any here
    """What has been counted since the last report, by rank.

    `data` has for each rank, by its number as text, and for the scheduler: `counters` that grew,
    `gauges` as they are, and `seconds`, a list for each histogram.
    """

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, dict[str, Any]] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: Stats) -> Stats:
        """Adds what other ranks, or later steps, have counted."""
        for rank, more in other.data.items():
            have = self.data.get(rank)
            if have is None:
                self.data[rank] = more
                continue
            for name, count in more["counters"].items():
                have["counters"][name] = have["counters"].get(name, 0) + count
            have["gauges"] = more["gauges"]
            for name, seconds in more["seconds"].items():
                have["seconds"].setdefault(name, []).extend(seconds)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line of vLLM's log, over all ranks."""
        summed: dict[str, float] = {}
        for part in self.data.values():
            for name, count in part["counters"].items():
                summed[name] = summed.get(name, 0) + count
        missed = sum(count for name, count in summed.items() if name.startswith("misses/"))
        return {
            "tiered-kv blocks from memory": summed.get("hits/dram", 0),
            "from the drive": summed.get("hits/nvme", 0),
            "missed": missed,
            "stored": summed.get("events/put_stored", 0),
            "throttled": summed.get("events/throttled", 0),
            "written": summed.get("events/offloaded", 0),
        }


def of_scheduler(counters: dict[str, int]) -> Stats:
    """What the scheduler's side has counted: of no rank."""
    return Stats({"scheduler": {"counters": counters, "gauges": {}, "seconds": {}}})


class Reporter:
    """Makes a rank's `Stats` of what its store counts.

    Args:
        rank: The rank.
        stats: What has been counted so far, which is nobody's traffic.
    """

    def __init__(self, rank: int, stats: Mapping[str, Any]) -> None:
        self._rank = str(rank)
        self._last = counted(stats)
        self._seconds: dict[str, list[float]] = {}
        self._next_s = 0.0

    def took(self, name: str, seconds: float) -> None:
        """Notes a duration of one of `HISTOGRAMS`."""
        self._seconds.setdefault(name, []).append(seconds)

    def due(self) -> bool:
        """Whether the last report is some time ago."""
        return monotonic() >= self._next_s

    def report(self, stats: Mapping[str, Any]) -> Stats:
        """What has come since the last report.

        Args:
            stats: What `WorkerSide.stats` has.
        """
        self._next_s = monotonic() + _EVERY_S
        now = counted(stats)
        grown = {name: count - self._last.get(name, 0) for name, count in now.items()}
        self._last = now
        seconds, self._seconds = self._seconds, {}
        part = {
            "counters": {name: count for name, count in grown.items() if count},
            "gauges": told(stats),
            "seconds": seconds,
        }
        return Stats({self._rank: part})


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM's classes are Any here
    """The same in vLLM's Prometheus registry, with the rank as a label."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = [*labelnames, "rank"]
        self._counters = {
            name: self._counter_cls(
                name=PREFIX + name, documentation=text, labelnames=[*self._labels, *labels]
            )
            for name, (labels, text) in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=PREFIX + name,
                documentation=text,
                labelnames=[*self._labels, *labels],
                multiprocess_mode="mostrecent",
            )
            for name, (labels, text) in GAUGES.items()
        }
        self._histograms = {
            name: self._histogram_cls(
                name=PREFIX + name,
                documentation=text,
                labelnames=self._labels,
                buckets=BUCKETS_S,
            )
            for name, text in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds a report."""
        for rank, part in transfer_stats_data.items():
            values = [*self.per_engine_labelvalues[engine_idx], rank]
            for name, count in part["counters"].items():
                metric, *more = name.split("/")
                self._counters[metric].labels(*values, *more).inc(count)
            for name, level in part["gauges"].items():
                metric, *more = name.split("/")
                self._gauges[metric].labels(*values, *more).set(level)
            for name, seconds in part["seconds"].items():
                histogram = self._histograms[name].labels(*values)
                for one in seconds:
                    histogram.observe(one)
