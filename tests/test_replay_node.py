"""`tiered-kv replay --node`: the tiers of a node, a described model, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiered_kv import cli, replay
from tiered_kv.errors import InvalidArgumentError
from tiered_kv.planner.node import load_node, parse_node
from tiered_kv.planner.weights import published
from tiered_kv.replay import node
from tiered_kv.replay.deployment import Rates, deploy
from tiered_kv.sizing.read import read_config

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "node.toml"
MODEL = "llama-3-8b"
SCALE = "0.001"


def deployed(text: str | None = None, **options: Any) -> Any:
    described = load_node(EXAMPLE) if text is None else parse_node(text, "changed")
    trace = replay.generate("chat", 400, 7)
    return deploy(described, read_config(MODEL), published(MODEL), trace, **options), trace


def described_with(old: str, new: str) -> str:
    text = EXAMPLE.read_text("utf-8")
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


def test_blocks_and_seconds_are_those_of_model_and_node() -> None:
    found, trace = deployed()
    # 32 layers x 8 heads x 128 x 2 x 2 B, keys and values, 16 tokens a block.
    assert found.block_bytes == 131_072 * trace.block_size == 2_097_152
    spec = found.described("lru")
    tiers = {tier["tier"]: tier for tier in spec["tiers"]}
    assert tiers["nvme"]["blocks"] == 30_720_000_000_000 // 2_097_152
    puts = {name for name, tier in tiers.items() if tier["filled"] == "puts"}
    assert puts == {"hbm", "dram", "nvme"}
    service = spec["services"][0]
    at = list(tiers).index("nvme")
    assert service["read_s"][at] == pytest.approx(2_097_152 / 52e9)
    assert service["latency_s"][at] == pytest.approx(100e-6)
    assert service["read_s"][0] == service["latency_s"][0] == 0
    flops = 8 * 989e12 * 0.4
    assert service["token_s"] == pytest.approx(2 * 8e9 / flops)
    assert service["pair_s"] == pytest.approx(4 * 32 * 32 * 128 / flops)
    # Half of what weights and reserve leave of eight times 80 GB.
    hbm = 0.5 * (8 * (80e9 - 8e9) - 16e9)
    assert tiers["hbm"]["blocks"] == pytest.approx(hbm / 2_097_152, abs=1)


def test_rates_are_factors_on_what_the_node_does() -> None:
    found, _trace = deployed()
    rates = (Rates(), Rates(prefill=2), Rates(read=2), Rates(latency=2))
    base, prefill, read, latency = found.described("lru", rates=rates)["services"]
    assert prefill["token_s"] == base["token_s"] / 2
    assert prefill["read_s"] == base["read_s"]
    assert read["read_s"] == [each / 2 for each in base["read_s"]]
    assert latency["latency_s"] == [each * 2 for each in base["latency_s"]]


def test_gpus_beyond_the_ranks_hold_more_instances() -> None:
    found, _trace = deployed(tp=2)
    assert found.described("lru")["services"][0]["instances"] == 4
    with pytest.raises(InvalidArgumentError, match="`tp` is 3: give a divisor of the 8"):
        deployed(tp=3)
    with pytest.raises(InvalidArgumentError, match="`gpus` is 9: give 1 to the 8"):
        deployed(gpus=9)


def test_hits_moves_and_times_agree_with_each_other() -> None:
    found, trace = deployed(scale=float(SCALE))
    document = node.run(trace, found, ["beta", "lru"])
    assert [one["policy"] for one in document["results"]] == ["beta", "lru"]
    for one in document["results"]:
        hits = sum(tier["hits"] for tier in one["tiers"])
        assert hits + one["misses"] == document["block_accesses"]
        assert one["hit_pct"] <= document["ceiling_pct"] + 1e-9
        moved = {(m["from"], m["to"], m["why"]): m for m in one["moved"]}
        put = moved["gpu", "dram", "put"]
        assert put["bytes"] == put["blocks"] * document["block_bytes"]
        # Whatever was written behind had been put.
        assert 0 < moved["dram", "nvme", "write_behind"]["blocks"] <= put["blocks"]
        assert one["ttft_s"]["p50"] <= one["ttft_s"]["p90"] <= one["ttft_s"]["p99"]
        assert one["queued_ttft_s"]["mean"] >= one["ttft_s"]["mean"]


SMALL_HBM = ("kv_cache_share = { value = 0.5", "kv_cache_share = { value = 0.001")


def test_more_tiers_serve_more_and_sooner() -> None:
    found, trace = deployed(described_with(*SMALL_HBM), scale=float(SCALE))
    (alone,) = node.run(trace, found, ["lru"], tiers=())["results"]
    (two,) = node.run(trace, found, ["lru"], tiers=("dram", "nvme"))["results"]
    assert [tier["tier"] for tier in alone["tiers"]] == ["hbm"]
    assert [tier["tier"] for tier in two["tiers"]] == ["hbm", "dram", "nvme"]
    assert two["hit_pct"] > alone["hit_pct"]
    assert two["ttft_s"]["mean"] < alone["ttft_s"]["mean"]
    with pytest.raises(InvalidArgumentError, match="`tiers` names tape: give one or more of dram"):
        node.run(trace, found, ["lru"], tiers=("tape",))


def test_a_drive_slower_than_the_gpus_is_not_loaded_from() -> None:
    text = described_with(*SMALL_HBM).replace('"52 GB/s"', '"1 MB/s"')
    found, trace = deployed(text, scale=float(SCALE))
    (one,) = node.run(trace, found, ["lru"])["results"]
    nvme = next(tier for tier in one["tiers"] if tier["tier"] == "nvme")
    assert nvme["hits"] == nvme["recomputed"] > 0
    assert nvme["read_blocks"] == 0


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("usd_per_gb_month", "usd_per_week", "`tiers.pfs.usd_per_week` is not known: give"),
        ('"512 GB/s"', '"-512 GB/s"', r"`tiers.dram.bandwidth.value` is '-512 GB/s': give"),
        ("value = 39.33", "value = -1.0", r"`usd_per_hour.value` is -1.0: give"),
        ("value = 0.6, source", "value = 6.0, source", "`gpu.decode_efficiency.value` is 6.0"),
        ("value = 0.5, source", "value = 0.5, from", "`gpu.kv_cache_share.from` is not known"),
        (
            'latency = { value = "10 us", source = "assumed: a copy over PCIe" }\n',
            "",
            "`tiers.dram.latency` is missing: give it",
        ),
        ("usd_per_gb_month =", 'usd_per_hour = { value = 1, source = "pfs" }\nusd_per_gb_month =',
         "`tiers.pfs` has `usd_per_hour` and `usd_per_gb_month`: give one"),
        ('write_bandwidth = { value = "24 GB/s"', 'write_bandwidth = { value = 0',
         "`tiers.nvme.write_bandwidth` is 0: give more than 0"),
    ],
)  # fmt: skip
def test_a_fault_of_the_file_names_field_and_remedy(old: str, new: str, fault: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        deployed(described_with(old, new))
    assert fault in str(raised.value)


@pytest.mark.parametrize("field", ["flops", "prefill_efficiency"])
def test_a_node_that_says_no_rate_of_its_gpus_is_refused(field: str) -> None:
    lines = EXAMPLE.read_text("utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(f"{field} ="))
    found, _trace = deployed(text)
    with pytest.raises(InvalidArgumentError, match=f"`gpu.{field}` is missing: give it"):
        found.described("lru")


def test_what_is_not_given_is_assumed_and_said() -> None:
    lines = EXAMPLE.read_text("utf-8").splitlines(keepends=True)
    dropped = ("kv_cache_share", "write_bandwidth")
    found, _trace = deployed("".join(line for line in lines if not line.startswith(dropped)))
    told = "\n".join(found.assumptions())
    assert "gpu.kv_cache_share = 0.5" in told
    assert "tiers.nvme.write_bandwidth = 52 GB/s: as it reads" in told


COMMAND = ["replay", "generate:chat:400:7", "--node", str(EXAMPLE), "--model", MODEL]


def test_the_text_is_what_the_document_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    assert cli.main([*COMMAND, "--scale", SCALE, "--json", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    found = json.loads(path.read_text())
    text = capsys.readouterr().out
    for one in found["results"]:
        assert f"{one['hit_pct']:.2f}" in text
        for move in one["moved"]:
            assert f"{move['blocks']:,}" in text
        assert f"{one['ahead']['waste_pct']:.2f}" in text
    for figure in found["figures"]:
        if not figure["name"].startswith("usd") and "usd_" not in figure["name"]:
            assert figure["name"] in text
    assert "as many blocks are loaded as make that the shortest" in text


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "tiers.png"
    assert cli.main([*COMMAND, "--scale", SCALE, "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--capacity", "1"], "replay: `capacity` is '1': give none with --node"),
        (["--policies", "arc"], '`policy` is "arc": give lru, beta or a variant'),
        (["--waste-budget", "101"], "`waste_budget` is 101: give 0 to 100"),
        (["--scale", "0"], "`scale` is 0: give"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*COMMAND, *options]) == 2
    assert fault in capsys.readouterr().err


def test_tiers_that_hold_no_block_are_left_out() -> None:
    found, _trace = deployed(scale=1e-6)
    # A millionth of 30.72 TB are 14 blocks; of the others less than one.
    assert [tier["tier"] for tier in found.described("lru")["tiers"]] == ["hbm", "nvme"]


def test_a_model_alone_is_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "generate:chat:50", "--model", MODEL]) == 2
    assert "`node` is missing: give --node" in capsys.readouterr().err
