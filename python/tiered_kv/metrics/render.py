"""A store's statistics as text for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Protocol

from tiered_kv.errors import UnsupportedError
from tiered_kv.metrics.names import COUNTERS, GAUGES, LATENCIES, counted, told

PREFIX = "tiered_kv_"

DRIVE_STATES = ("working", "paused", "circuit_open", "lost")
"""States of a drive, by the names of `health()`."""


class Source(Protocol):
    """What is asked at each scrape: a store, or one that is attached to, of the blocking faces."""

    def stats(self) -> dict[str, Any]:
        """As `tiered_kv.TieredStore.stats`."""
        ...

    def health(self) -> dict[str, Any]:
        """As `tiered_kv.TieredStore.health`."""
        ...


def client() -> Any:
    """The package prometheus_client.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        message = (
            "metrics need the package prometheus-client: install it with "
            "`pip install 'tiered-kv[metrics]'`"
        )
        raise UnsupportedError(message, op="metrics") from error
    return prometheus_client


class _Snapshot:
    """A registry of one store at one moment."""

    def __init__(self, stats: Mapping[str, Any], health: Mapping[str, Any] | None) -> None:
        self._stats = stats
        self._health = health

    def collect(self) -> Iterator[Any]:
        """All families of metrics, each with its samples."""
        client()
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield _build(GaugeMetricFamily)
        for made, named, rows in (
            (CounterMetricFamily, COUNTERS, counted(self._stats)),
            (GaugeMetricFamily, GAUGES, told(self._stats)),
        ):
            families = {
                name: made(PREFIX + name, text, labels=labels)
                for name, (labels, text) in named.items()
            }
            for row, value in rows.items():
                name, *labels = row.split("/")
                families[name].add_metric(labels, value)
            yield from families.values()
        yield from self._latencies()
        if self._health is not None:
            yield from _drives(GaugeMetricFamily, self._health)

    def _latencies(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily

        for name, (key, text) in LATENCIES.items():
            found = self._stats["latencies"][key]
            bounds = [*(f"{bound:g}" for bound in found["bounds_s"]), "+Inf"]
            counts = accumulate(found["counts"])
            buckets = list(zip(bounds, counts, strict=True))
            family = HistogramMetricFamily(PREFIX + name, text)
            family.add_metric([], buckets=buckets, sum_value=found["sum_s"])
            yield family


def _build(gauge: Callable[..., Any]) -> Any:
    from tiered_kv import _core

    family = gauge(PREFIX + "build_info", "The version in use.", labels=["version"])
    family.add_metric([_core.__version__], 1)
    return family


def _drives(gauge: Callable[..., Any], health: Mapping[str, Any]) -> Iterator[Any]:
    state = gauge(
        PREFIX + "drive_state",
        "1 for the state that a drive is in, 0 for the others; circuit_open: it is not asked.",
        labels=["drive", "state"],
    )
    speed = gauge(
        PREFIX + "drive_load_bytes_per_second",
        "At what speed a drive has read of late.",
        labels=["drive"],
    )
    for drive in health["drives"]:
        for one in DRIVE_STATES:
            state.add_metric([drive["path"], one], float(drive["state"] == one))
        if drive["load_bytes_per_s"] is not None:
            speed.add_metric([drive["path"]], drive["load_bytes_per_s"])
    yield state
    yield speed


def encoded(
    stats: Mapping[str, Any], health: Mapping[str, Any] | None, accept: str
) -> tuple[bytes, str]:
    """A scrape's answer.

    Args:
        stats: What `stats()` has.
        health: What `health()` has; None leaves the drives out.
        accept: The formats that are asked for, as in HTTP; the plain one where that is empty.

    Returns:
        The text, and its type.

    Raises:
        UnsupportedError: prometheus-client is not installed.
    """
    client()
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return encode(_Snapshot(stats, health)), content_type


def render(stats: Mapping[str, Any], health: Mapping[str, Any] | None = None) -> str:
    """A store's statistics in Prometheus' text format.

    Args:
        stats: What `stats()` has.
        health: What `health()` has; None leaves the drives out.

    Returns:
        The text.

    Raises:
        UnsupportedError: prometheus-client is not installed.
    """
    return encoded(stats, health, "")[0].decode()
