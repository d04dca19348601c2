"""What the reuse predictor of a store has learned, and the configuration of the policy."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import (
    ClosedError,
    ConfigError,
    PairPosterior,
    Predictor,
    RequestContext,
    StoreConfig,
)
from tiered_kv.blocking import BlockingStore

PAIRS = {
    (block_type, transition)
    for block_type in ("system", "tool", "user", "reasoning")
    for transition in ("shared", "first", "continued", "left_behind")
}


def use(store: BlockingStore, times: int, **context: Any) -> None:
    """One request after another for the same four blocks."""
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(4))
    store.put(ns, keys, api.blocks(4))
    for _ in range(times):
        request = store.begin_request(RequestContext(**context))
        request.observe(ns, keys)
        request.finish(output_tokens=7)


def learned(store: BlockingStore) -> Predictor:
    found = store.predictor()
    assert found is not None
    return found


def test_all_pairs_are_shown_with_their_evidence() -> None:
    with BlockingStore.open(**api.config()) as store:
        before = learned(store)
        assert {(pair.block_type, pair.transition) for pair in before.pairs} == PAIRS
        assert all(pair.lives == 0 and pair.mean == 0.5 for pair in before.pairs)
        use(store, 40, session="one")
        after = learned(store)
    assert (after.policy, after.requests) == ("beta", 40)
    assert after.ages[0] == 0
    assert list(after.ages) == sorted(after.ages)
    used = after.pair("user", "continued")
    assert used.reuses > 30
    assert used.lives >= used.reuses
    assert 0.5 < used.interval[0] < used.mean < used.interval[1] <= 1
    width = before.pair("user", "continued").interval
    assert used.interval[1] - used.interval[0] < width[1] - width[0]
    for pair in after.pairs:
        assert isinstance(pair, PairPosterior)
        assert len(pair.hazard) == len(after.ages)
        assert all(0 <= chance <= 1 for chance in pair.hazard)
    with pytest.raises(KeyError):
        after.pair("user", "never")  # type: ignore[arg-type]


def test_a_request_tells_the_type_of_its_blocks() -> None:
    with BlockingStore.open(**api.config()) as store:
        use(store, 20, session="one", turn=3, block_type="tool")
        found = learned(store)
        assert found.pair("tool", "continued").reuses > 15
        assert found.pair("user", "continued").reuses == 0


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    config = api.config(tmp_path)
    with BlockingStore.open(**config) as store:
        use(store, 40, session="one")
        before = learned(store).pair("user", "continued")
    with BlockingStore.open(**config) as store:
        after = learned(store)
        assert after.requests == 40
        assert after.pair("user", "continued").mean == pytest.approx(before.mean)


def test_another_policy_predicts_nothing() -> None:
    with BlockingStore.open(**api.config(), policy="lru") as store:
        use(store, 3)
        assert store.predictor() is None
        assert store.stats()["metadata_bytes"] > 0
    with pytest.raises(ClosedError):
        store.predictor()
    with pytest.raises(ConfigError, match="policy"):
        BlockingStore.open(**api.config(), policy="mru")
    with pytest.raises(ConfigError, match="metadata_bytes"):
        BlockingStore.open(**api.config(), metadata_bytes="1MiB")


def test_memory_of_the_policy_is_bounded_and_counted() -> None:
    with BlockingStore.open(**api.config(), metadata_bytes="4MiB") as store:
        use(store, 3)
        assert 500_000 < store.stats()["metadata_bytes"] <= 4 << 20


def test_requests_are_recorded_for_a_replay(tmp_path: Path) -> None:
    assert StoreConfig().record is None
    record = tmp_path / "requests.jsonl"
    with BlockingStore.open(**api.config(), record=record) as store:
        use(store, 5, session="a name", kind="agent")
        learned(store)
    text = record.read_text()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 5
    assert "a name" not in text
    assert {line["type"] for line in lines} == {"agent"}
    assert all(len(line["hash_runs"]) == 4 and line["output_length"] == 7 for line in lines)
    replay = pytest.importorskip("tiered_kv.replay")
    found = replay.replay(replay.read(record), [100.0], ["beta", "lru"])
    assert {round(row["hit_pct"]) for row in found["results"]} == {80}
