"""`tiered-kv project`: what follows from a replay and printed inputs, and that it says so."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tiered_kv import cli, replay
from tiered_kv.errors import InvalidArgumentError
from tiered_kv.planner.node import parse_node
from tiered_kv.planner.weights import published
from tiered_kv.projection import CONFIGURATIONS, Factors, Facts, project
from tiered_kv.projection.model import HOURS_A_MONTH, decoding, usd_per_hour
from tiered_kv.projection.run import Projector, Run, describe, replay_all
from tiered_kv.replay.deployment import deploy
from tiered_kv.sizing.read import read_config

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "node.toml"
MODEL = "llama-3-8b"
# HBM keeps so little that the tiers below matter to a short trace.
SMALL = EXAMPLE.read_text("utf-8").replace("value = 0.5, source", "value = 0.001, source")
SCALE = 0.0005
NONE, DRAM, LRU, OURS = CONFIGURATIONS


def deployed(trace: Any, text: str | None = None, **options: Any) -> Any:
    node = parse_node(text or EXAMPLE.read_text("utf-8"), "node")
    return deploy(node, read_config(MODEL), published(MODEL), trace, **options)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """A projection of a trace that is made up, on tiers small enough to matter."""
    trace = replay.generate("chat", 600, 7)
    deployment = deployed(trace, SMALL, scale=SCALE)
    replays = replay_all(trace, describe(deployment))
    facts = Facts.of(trace)
    return {
        "deployment": deployment,
        "facts": facts,
        "replays": replays,
        "document": project(deployment, facts, replays),
        "projector": Projector(deployment, facts, replays),
    }


def test_throughput_is_what_prompts_and_steps_leave(found: dict[str, Any]) -> None:
    deployment, facts = found["deployment"], found["facts"]
    one = found["projector"].of(Run(NONE))
    served = found["projector"].served(Run(NONE))
    batch = deployment.batch(0.001)
    # A step by hand: 16 GB of weights and each request's cache, at 60 % of eight times 3.35 TB/s.
    context = round((facts.input_tokens + facts.output_tokens) / facts.requests)
    blocks = -(-context // facts.block_size)
    cache = blocks * facts.block_size * 131_072
    memory = (16e9 + batch.largest * cache) / (8 * 3.35e12 * 0.6)
    compute = batch.largest * (2 * 8e9 + 4 * 32 * 32 * 128 * context) / (8 * 989e12 * 0.4)
    step = max(memory, compute)
    assert one.decoding.step_s == pytest.approx(step)
    seconds = served["compute_s"] + facts.output_tokens * step / batch.largest
    assert one.binds == "GPUs"
    assert one.requests_per_s == pytest.approx(facts.requests / seconds)
    assert one.output_tokens_per_s_per_gpu == pytest.approx(facts.output_tokens / seconds / 8)
    assert one.usd_per_million_output_tokens == pytest.approx(
        39.33 / 3600 * seconds / facts.output_tokens * 1e6
    )
    assert one.usd_per_million_tokens < one.usd_per_million_output_tokens


def test_hits_make_all_gains(found: dict[str, Any]) -> None:
    none, dram, lru, ours = found["document"]["results"]
    assert none["hit_pct"] < dram["hit_pct"] < lru["hit_pct"]
    assert none["ttft_s"]["mean"] > dram["ttft_s"]["mean"] > lru["ttft_s"]["mean"]
    assert none["requests_per_s"] < dram["requests_per_s"] < lru["requests_per_s"]
    assert ours["policy"] == "beta"
    assert ours["hit_pct"] > none["hit_pct"]


def test_what_binds_is_the_busiest(found: dict[str, Any]) -> None:
    text = SMALL.replace('"24 GB/s"', '"1 kB/s"')
    trace = replay.generate("chat", 600, 7)
    slow = Projector(deployed(trace, text, scale=SCALE), found["facts"], found["replays"])
    one = slow.of(Run(OURS))
    assert one.binds == "writes of nvme"
    assert one.requests_per_s < found["projector"].of(Run(OURS)).requests_per_s / 100
    assert slow.of(Run(NONE)).binds == "GPUs"


def test_prices_are_of_what_is_used(found: dict[str, Any]) -> None:
    trace = replay.generate("chat", 50, 7)
    whole = deployed(trace)
    assert usd_per_hour(whole, [], Factors()) == pytest.approx(39.33)
    assert usd_per_hour(whole, ["dram", "cxl"], Factors()) == pytest.approx(39.33 + 0.78)
    pfs = 0.14 * 2000 / HOURS_A_MONTH
    assert usd_per_hour(whole, ["pfs"], Factors(tier_usd=2)) == pytest.approx(39.33 + 2 * pfs)
    half = deployed(trace, gpus=4)
    assert usd_per_hour(half, [], Factors(node_usd=2)) == pytest.approx(39.33)
    assert found["document"]["results"][0]["usd_per_hour"] == pytest.approx(39.33)


@pytest.mark.parametrize(
    ("old", "fault"),
    [
        ("usd_per_hour = { value = 39.33", "`usd_per_hour` of the node is missing: give it"),
        ("usd_per_hour = { value = 0.78", "`tiers.cxl.usd_per_hour` is missing: give it or"),
        ("usd_per_gb_month", "`tiers.pfs.usd_per_hour` is missing: give it or `usd_per_gb_month`"),
    ],
)
def test_a_price_that_is_missing_is_asked_for(old: str, fault: str) -> None:
    lines = EXAMPLE.read_text("utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(old))
    deployment = deployed(replay.generate("chat", 50, 7), text)
    with pytest.raises(InvalidArgumentError) as raised:
        usd_per_hour(deployment, [tier.name for tier in deployment.node.tiers], Factors())
    assert fault in str(raised.value)


def test_a_model_that_leaves_no_room_is_refused() -> None:
    trace = replay.generate("chat", 50, 7)
    node = parse_node(EXAMPLE.read_text("utf-8"), "node")
    large = deploy(node, read_config("llama-3.1-405b"), published("llama-3.1-405b"), trace)
    with pytest.raises(InvalidArgumentError, match="`model` does not fit on the node"):
        large.batch(0.5)
    small = deployed(trace)
    with pytest.raises(InvalidArgumentError, match="no usual request fits"):
        decoding(small, small.batch(1.0), Factors())


def test_each_input_moves_what_it_should(found: dict[str, Any]) -> None:
    rows = {row["input"]: row for row in found["document"]["sensitivity"]}
    gains = found["document"]["gains"]
    assert len(rows) == 10
    faster, slower = (rows["read bandwidth of the tiers"][way] for way in ("doubled", "halved"))
    assert faster["ttft_x"] >= gains["ttft_x"] >= slower["ttft_x"]
    assert faster["ttft_x"] > slower["ttft_x"]
    larger, smaller = (rows["capacity of the tiers"][way] for way in ("doubled", "halved"))
    assert larger["ttft_x"] > smaller["ttft_x"]
    output = rows["tokens of an output"]
    assert output["halved"]["throughput_x"] > gains["throughput_x"]
    assert output["halved"]["throughput_x"] > output["doubled"]["throughput_x"]
    assert output["halved"]["ttft_x"] == output["doubled"]["ttft_x"] == gains["ttft_x"]
    price = rows["price of the node"]
    assert price["doubled"]["cost_less_pct"] > price["halved"]["cost_less_pct"]
    assert price["doubled"]["throughput_x"] == gains["throughput_x"]
    tiers = rows["price of the tiers"]
    assert tiers["halved"]["cost_less_pct"] > tiers["doubled"]["cost_less_pct"]
    assert all(row["source"] for row in rows.values())


def test_the_papers_figures_are_reproduced_or_an_input_is_named(found: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in found["document"]["paper"]}
    assert len(rows) == 8
    for row in rows.values():
        assert row["reproduced"] == (not row["needed"])
    # The price that would give the paper's figure does give it.
    row = rows["usd_per_million_tokens"]
    if row["needed"]:
        assert "price of the node x " in row["needed"]
        factor = float(row["needed"].partition("price of the node x ")[2].split(",")[0])
        changed = found["projector"].of(Run(OURS), Factors(node_usd=factor))
        assert changed.usd_per_million_tokens == pytest.approx(0.43, rel=0.01)


def test_rows_are_in_the_form_of_the_other_reports(found: dict[str, Any]) -> None:
    rows = found["document"]["rows"]
    fields = [
        "name",
        "value",
        "unit",
        "reference",
        "reference_value",
        "ratio",
        "spread",
        "runs",
        "bar",
        "met",
    ]
    assert [list(row) for row in rows] == [fields] * 3
    for row in rows:
        assert row["name"].startswith("projection: ")
        low, high = row["spread"]
        assert low <= row["value"] <= high
    json.dumps(rows)


COMMAND = ["project", "generate:chat:300:7", "--node", str(EXAMPLE), "--model", MODEL]


def test_every_output_says_that_it_is_a_projection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(COMMAND) == 0
    text = capsys.readouterr().out
    path = Path("build/reports/project.json")
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    assert "projection" in document["projection"]
    tables = [block for block in text.split("\n\n") if "|---" in block]
    heads = [line for line in text.splitlines() if line.startswith("| projection")]
    assert len(heads) == 3
    assert len(tables) <= 3
    assert text.startswith("This is a projection")
    for figure in document["figures"]:
        assert f"{figure['name']} = {figure['written']}" in text, "every input is printed"
    for configuration in CONFIGURATIONS:
        assert configuration in text


def test_a_plot_says_so_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "project.svg"
    report = str(tmp_path / "p.json")
    assert cli.main([*COMMAND, "--scale", "0.001", "--json", report, "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


def test_an_earlier_document_serves_in_place_of_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert cli.main([*COMMAND, "--json", str(first)]) == 0
    node = tmp_path / "node.toml"
    node.write_text(EXAMPLE.read_text("utf-8").replace("39.33", "78.66"))
    again = ["project", "--replay", str(first), "--model", MODEL]
    assert cli.main([*again, "--node", str(node), "--json", str(second)]) == 0
    before, after = (json.loads(path.read_text())["results"][0] for path in (first, second))
    assert after["usd_per_hour"] == pytest.approx(2 * before["usd_per_hour"])
    assert after["ttft_s"] == before["ttft_s"]
    node.write_text(EXAMPLE.read_text("utf-8").replace('"52 GB/s"', '"26 GB/s"'))
    capsys.readouterr()
    assert cli.main([*again, "--node", str(node)]) == 2
    assert "has another services for" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["trace", "replays", "outcome", "text"])
def test_a_damaged_document_is_refused(
    damage: str, found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = copy.deepcopy(found["document"])
    if damage == "trace":
        document["trace"] = {"name": "chat"}
    elif damage == "replays":
        del document["replays"]
    elif damage == "outcome":
        document["replays"][NONE]["outcome"] = {}
    path = tmp_path / "damaged.json"
    path.write_text("{" if damage == "text" else json.dumps(document))
    node = tmp_path / "node.toml"
    node.write_text(SMALL)
    arguments = ["project", "--replay", str(path), "--node", str(node), "--model", MODEL]
    assert cli.main([*arguments, "--scale", str(SCALE)]) == 2
    assert "project: `replay` " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["project"], "give a trace, or --replay"),
        ([*COMMAND, "--tiers", "dram"], "--tiers: the configurations say"),
        ([*COMMAND[:2], "--model", MODEL], "`node` is missing: give --node"),
        (["project", "generate:chat:50", "--node", "dgx-h100", "--model", MODEL],
         "`usd_per_hour` of the node is missing"),
    ],
)  # fmt: skip
def test_wrong_usage_is_refused(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert fault in capsys.readouterr().err
