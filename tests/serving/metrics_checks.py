"""Checks of what the vLLM adapter counts and records."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.checks import TOKENS, Request, output, served
from serving.limits_checks import blocks_of, worker_of
from tiered_kv import IoFaultError
from tiered_kv.attached import BlockingAttachedStore
from tiered_kv.engines._record import Recorder
from tiered_kv.engines.vllm.connector import TieredKVConnector
from tiered_kv.engines.vllm.messages import Step
from tiered_kv.engines.vllm.metrics import HISTOGRAMS, PREFIX, PromMetrics, Stats, of_scheduler
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.metrics.names import COUNTERS, GAUGES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _kinds(registry: CollectorRegistry) -> dict[Any, Any]:
    """The classes of metrics, on a registry that is not the process's own."""

    def on(kind: Any) -> Any:
        return lambda **fields: kind(**fields, registry=registry)

    return {kind: on(kind) for kind in (Counter, Gauge, Histogram)}


def check_what_a_step_does_is_in_the_metrics() -> None:
    paged = PagedCache({"a": torch.zeros(4, 32, 32)}, 4)
    registry = CollectorRegistry()
    config = SimpleNamespace(kv_transfer_config=None)
    prom = TieredKVConnector.build_prom_metrics(
        config, _kinds(registry), ["engine"], {3: ["3"], 4: ["4"]}
    )
    assert isinstance(prom, PromMetrics)

    def value(name: str, **labels: str) -> float | None:
        labels = {"engine": "3", "rank": "0", **labels}
        found: float | None = registry.get_sample_value(PREFIX + name, labels)
        return found

    with worker_of(paged) as worker:
        worker.save(Step(saves=[blocks_of(2)]))
        worker.start(Step(loads=[blocks_of(2)]))
        while not worker.ended():
            pass
        worker.finished(["r"])
        report = worker.report()
        assert report is not None
        # As it goes to the process of the server, and a second time with nothing new.
        prom.observe(json.loads(json.dumps(report.to_dict())), 3)
        worker.finished(["s"])
        again = worker.report()
        assert again is not None
        prom.observe(again.to_dict(), 3)
        # Nothing has ended, and a moment ago all was told.
        assert worker.report() is None
    assert value("events_total", event="put_stored") == 2
    assert value("hits_total", tier="dram") == 2
    assert value("hit_bytes_total", tier="dram") == 2 * paged.block_bytes
    assert value("event_bytes_total", event="put") == 2 * paged.block_bytes
    assert value("transferred_bytes_total", tier="dram", direction="in") == 2 * paged.block_bytes
    assert value("resident_blocks", tier="dram") == 2
    assert value("load_seconds_count") == 1
    assert value("save_seconds_count") == 1
    assert value("capacity_bytes", tier="dram") == 4 << 20
    # What the store's own test did is nobody's traffic.
    assert value("events_total", event="deleted") is None


def check_reports_add_up_over_ranks_and_steps() -> None:
    def report(rank: str, hits: int, used: int) -> Stats:
        part = {
            "counters": {"hits/dram": hits, "misses/absent": 1},
            "gauges": {"used_bytes/dram": used},
            "seconds": {"load_seconds": [0.5]},
        }
        return Stats({rank: part})

    summed = report("0", 1, 7).aggregate(report("1", 2, 8)).aggregate(report("0", 4, 9))
    summed = summed.aggregate(of_scheduler({"events/lookup_faults": 1}))
    assert summed.data["0"]["counters"] == {"hits/dram": 5, "misses/absent": 2}
    assert summed.data["0"]["gauges"] == {"used_bytes/dram": 9}
    assert summed.data["0"]["seconds"] == {"load_seconds": [0.5, 0.5]}
    assert summed.data["1"]["gauges"] == {"used_bytes/dram": 8}
    told = summed.reduce()
    assert (told["tiered-kv blocks from memory"], told["missed"]) == (7, 3)
    assert TieredKVConnector.build_kv_connector_stats().is_empty()
    assert TieredKVConnector.build_kv_connector_stats(summed.data).data == summed.data


def check_the_page_and_the_dashboard_tell_of_these_metrics() -> None:
    made = {*COUNTERS, *GAUGES, *HISTOGRAMS}
    for page in ("vllm.md", "vllm-dashboard.json"):
        text = (DOCS / page).read_text("utf-8")
        told = re.findall(rf"{PREFIX}([a-z_]+)", text)
        assert {re.sub("_(total|bucket)$", "", name) for name in told} == made, page


def check_a_lookup_that_fails_is_counted_once() -> None:
    gone = IoFaultError("gone", op="hold")
    with (
        served(1) as (side, _),
        mock.patch.object(BlockingAttachedStore, "hold", side_effect=gone),
    ):
        assert side.report() is None
        assert side.matched(Request("r", 3 * TOKENS), 0) == 0
        report = side.report()
        assert report is not None
        assert report.data["scheduler"]["counters"]["events/lookup_faults"] == 1
        assert side.report() is None


def check_what_was_asked_is_recorded() -> None:
    with tempfile.TemporaryDirectory() as path, served(1) as (side, _):
        recorder = side.recorder = Recorder(Path(path), "dp0", TOKENS)
        told = {"tiered_kv": {"session": "s", "kind": "agent"}}
        request = Request("r", 2 * TOKENS + 3, kv_transfer_params=told)
        side.matched(request, 0)
        side.step(output({"r": 2 * TOKENS + 3}))
        # Its answer fills the third block, and one more token: of the last, there are no keys.
        request.all_token_ids += list(range(TOKENS, 2 * TOKENS - 2))
        request.num_tokens = len(request.all_token_ids)
        side.finished("r")
        unfit = Request("image", 2 * TOKENS, mm_features=[object()])
        side.matched(unfit, 0)
        side.finished("image")
        side.close()
        (line,) = [json.loads(one) for one in recorder.path.read_text().splitlines()]
    assert (line["session_id"], line["type"]) == ("s", "agent")
    assert (line["input_length"], line["output_length"]) == (2 * TOKENS + 3, TOKENS - 2)
    assert (len(line["hash_runs"]), len(line["out_hash_runs"])) == (2, 1)
