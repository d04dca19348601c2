"""`tiered_kv.replay.prefetch` and `tiered-kv replay --prefetch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiered_kv import cli, replay
from tiered_kv.errors import InvalidArgumentError
from tiered_kv.replay import report


def test_wider_windows_cover_more_and_waste_more() -> None:
    trace = replay.generate("chat", 2000, 7)
    rows = replay.prefetch(trace, 1, 10)["prefetch"]
    assert len(rows) == report.PREFETCH_ROWS
    none, *fixed, adapting = rows
    assert (none["window"], none["covered_pct"], none["waste_pct"]) == (0, 0, 0)
    covered = [row["covered_pct"] for row in fixed]
    assert covered == sorted(covered)
    assert covered[-1] > 50
    assert adapting["budget_pct"] == 5
    assert adapting["waste_pct"] < 10
    assert {row["slow_hit_pct"] for row in rows} == {none["slow_hit_pct"]}


def test_the_table_is_what_the_document_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    arguments = ["replay", "generate:chat:500", "--prefetch", "1:10", "--json", str(path)]
    assert cli.main(arguments) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    found = json.loads(path.read_text())["prefetch"]
    for row, wanted in zip(rows[2:], found, strict=True):
        assert float(row[6]) == pytest.approx(wanted["covered_pct"], abs=0.06)
        assert int(row[7]) == wanted["moved_blocks"]


@pytest.mark.parametrize("tiers", ["1", "10:1", "0:5", "1:2:3", "a:b"])
def test_tiers_are_two_percentages(tiers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "generate:chat:50", "--prefetch", tiers]) != 0
    assert "replay: `" in capsys.readouterr().err


def test_the_slow_tier_is_not_the_smaller_one() -> None:
    trace = replay.generate("chat", 50, 7)
    with pytest.raises(InvalidArgumentError, match="`slow` is less than `fast`"):
        replay.prefetch(trace, 10, 1)
