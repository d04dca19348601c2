"""The planner: what fits, what binds, what it refuses, and what the command prints."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.cli.entry import main
from tiered_kv.errors import InvalidArgumentError
from tiered_kv.planner import Load, Node, Plan, Weights, builtin_nodes, load_node, plan, published
from tiered_kv.planner.node import parse_node
from tiered_kv.sizing.catalogue import entries
from tiered_kv.sizing.parallel import Parallel, rank_bytes
from tiered_kv.sizing.read import read_config

_MODELS = ("llama-3-70b", "deepseek-v3", "gemma-3-27b", "qwen3-next-80b-a3b", "gpt-oss-120b")
_SPECS = {model: read_config(model) for model in _MODELS}
_NODE = load_node("six-tiers")
_TINY = """
title = "A test"
[gpu]
name = "A GPU"
count = { value = 2, source = "a" }
memory = { value = "10 GB", source = "a" }
bandwidth = { value = "1 TB/s", source = "a" }
reserve = { value = "1 GB", source = "assumed: a guess" }
[tiers.dram]
capacity = { value = "100 GB", source = "a" }
bandwidth = { value = "10 GB/s", source = "a" }
latency = { value = "10 us", source = "a" }
usd_per_gb = { value = 2.5, source = "assumed: a guess" }
[sources]
a = "https://example.com/data-sheet"
"""


def _with_memory(node: Node, memory: int) -> Node:
    figure = dataclasses.replace(node.gpu.memory, value=memory)
    return dataclasses.replace(node, gpu=dataclasses.replace(node.gpu, memory=figure))


def _with_tiers(node: Node, factor: float) -> Node:
    tiers = []
    for tier in node.tiers:
        capacity = dataclasses.replace(
            tier.capacity, value=int(tier.capacity.value * factor) + (1 << 38)
        )
        tiers.append(dataclasses.replace(tier, capacity=capacity))
    return dataclasses.replace(node, tiers=tuple(tiers))


_spreads = st.sampled_from(
    [
        Parallel(tp=8),
        Parallel(tp=4),
        Parallel(tp=2, pp=2),
        Parallel(tp=4, cp=2),
        Parallel(tp=8, dp_attention=4),
        Parallel(pp=3),
    ]
)
_loads = st.builds(
    Load,
    context=st.integers(1, 200_000),
    conversation=st.integers(0, 50_000),
    block_size=st.sampled_from([1, 16, 256]),
    tokens_per_s=st.sampled_from([0.0, 1000.0]),
    request_bytes=st.sampled_from([0, 1 << 20]),
)


def _planned(node: Node, model: str, load: Load, spread: Parallel) -> Plan:
    return plan(node, _SPECS[model], load, Weights(20 * 10**9), spread)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(_MODELS), _loads, _spreads, st.integers(50 * 10**9, 200 * 10**9))
def test_the_batch_is_the_largest_that_fits(
    model: str, load: Load, spread: Parallel, memory: int
) -> None:
    batch = _planned(_with_memory(_NODE, memory), model, load, spread).batch
    assert batch.largest is not None
    spec = _SPECS[model]

    def need(requests: int) -> int:
        mine = -(-requests // spread.dp_attention)
        kv = rank_bytes(spec, spread, load.context, requests, load.block_size)
        return kv + mine * load.request_bytes

    assert need(batch.largest) <= max(0, batch.kv_bytes)
    assert need(batch.largest + 1) > batch.kv_bytes
    assert batch.without_copies is not None
    assert batch.copies == 1 or batch.largest <= batch.without_copies


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(_MODELS),
    _loads,
    _spreads,
    st.integers(30 * 10**9, 200 * 10**9),
    st.integers(0, 10**9),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
)
def test_more_memory_never_holds_less(
    model: str,
    load: Load,
    spread: Parallel,
    memory: int,
    more: int,
    factor: float,
    extra: float,
) -> None:
    small = _planned(_with_tiers(_with_memory(_NODE, memory), factor), model, load, spread)
    large = _planned(
        _with_tiers(_with_memory(_NODE, memory + more), factor + extra), model, load, spread
    )
    assert (large.batch.largest or 0) >= (small.batch.largest or 0)
    for less, many in zip(small.tiers, large.tiers, strict=True):
        assert many.kv_bytes >= less.kv_bytes
        for name in ("requests", "conversations", "tokens", "recompute_seconds"):
            assert getattr(many, name) >= getattr(less, name), (less.name, name)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(_MODELS), _loads)
def test_a_tier_holds_its_tokens_and_not_one_more(model: str, load: Load) -> None:
    spec = _SPECS[model]
    for tier in _planned(_NODE, model, load, Parallel(tp=8)).tiers[1:]:
        assert tier.requests is not None
        assert tier.tokens is not None
        whole = tier.requests * spec.bytes(load.context, 1, load.block_size)
        begun = tier.tokens - tier.requests * load.context
        assert 0 <= begun < load.context
        assert whole + spec.bytes(begun, 1, load.block_size) <= tier.kv_bytes
        assert whole + spec.bytes(begun + 1, 1, load.block_size) > tier.kv_bytes


def test_latents_bind_by_replication_and_grouped_heads_by_memory() -> None:
    load = Load(context=4096)
    latent = _planned(_NODE, "deepseek-v3", load, Parallel(tp=8)).batch
    assert (latent.binds, latent.copies) == ("replication", 8.0)
    heads = _planned(_NODE, "llama-3-70b", load, Parallel(tp=8)).batch
    assert (heads.binds, heads.copies) == ("memory", 1.0)
    split = _planned(_NODE, "deepseek-v3", load, Parallel(tp=8, dp_attention=8)).batch
    assert (split.binds, split.copies) == ("memory", 1.0)


def test_uneven_stages_bind_as_copies_do() -> None:
    batch = _planned(_NODE, "llama-3-70b", Load(context=4096), Parallel(pp=3)).batch
    assert batch.binds == "replication"
    assert batch.copies == pytest.approx(3 * 27 / 80)


def test_weights_that_do_not_fit_are_said_to_with_the_gpus_that_they_need() -> None:
    found = plan(_NODE, _SPECS["deepseek-v3"], Load(context=4096), published("deepseek-v3", "fp8"))
    assert found.batch.binds == "weights"
    assert "10 GPUs" in found.batch.why
    assert found.batch.largest == 0
    assert found.tiers[0].kv_bytes == 0


def test_a_request_too_large_for_a_gpu_is_said_to_be() -> None:
    node = _with_memory(_NODE, 14 * 10**9)
    batch = _planned(node, "llama-3-70b", Load(context=131_072), Parallel(tp=8)).batch
    assert (batch.binds, batch.largest) == ("request", 0)


def test_instances_share_a_node() -> None:
    one = _planned(_NODE, "llama-3-70b", Load(context=4096), Parallel(tp=4))
    assert one.batch.instances == 2
    assert one.batch.largest is not None
    assert one.tiers[0].requests == 2 * one.batch.largest


def test_minutes_loads_and_prices_follow_from_their_figures() -> None:
    node = parse_node(_TINY, "tiny")
    load = Load(context=1000, tokens_per_s=100.0, prefill_tokens_per_s=500.0)
    found = plan(node, _SPECS["llama-3-70b"], load, Weights(10**9))
    dram = found.tiers[1]
    size = 327_680 * 1000
    assert dram.requests == 100 * 10**9 // size
    assert dram.minutes == pytest.approx((dram.tokens or 0) / 100 / 60)
    assert dram.recompute_seconds == pytest.approx((dram.tokens or 0) / 500)
    assert dram.load_seconds == pytest.approx(10e-6 + size / 10e9)
    assert dram.faster is True
    assert dram.usd == 250.0
    assert found.recompute_request_seconds == 2.0


@pytest.mark.parametrize("name", builtin_nodes())
def test_every_figure_of_a_builtin_node_has_a_source(name: str) -> None:
    node = load_node(name)
    assert node.title
    for figure in node.figures():
        assert figure.assumed or figure.source.startswith("https://"), figure


def test_one_builtin_node_adds_up_to_over_38_tb() -> None:
    assert sum(tier.kv_bytes for tier in _NODE.tiers) > 38 * 10**12
    assert [tier.name for tier in _NODE.tiers] == ["dram", "cxl", "nvme", "fabric", "pfs"]


def test_the_published_parameters_are_of_models_of_the_catalogue() -> None:
    path = Path(sys.modules["tiered_kv.planner"].__file__ or "").parent / "parameters.json"
    for model in json.loads(path.read_text("utf-8")):
        assert model in entries()
        assert published(model).active <= published(model).params


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"10 GB"', '"ten GB"', "gpu.memory.value"),
        ('"10 GB"', '"10 XB"', "gpu.memory.value"),
        ('"10 GB"', "-1", "gpu.memory.value"),
        ('"10 GB"', "true", "gpu.memory.value"),
        ('"10 GB"', '"1e90 GB"', "gpu.memory.value"),
        ("value = 2,", "value = 0,", "gpu.count"),
        ('"10 us"', '"10"', "tiers.dram.latency.value"),
        ('"10 GB/s"', '"10 GB"', "tiers.dram.bandwidth.value"),
        ('"10 GB/s"', '"0 GB/s"', "tiers.dram.bandwidth"),
        ("value = 2.5", "value = nan", "tiers.dram.usd_per_gb.value"),
        ("value = 2.5", "price = 2.5", "tiers.dram.usd_per_gb.price"),
        ("[tiers.dram]", "[tiers.tape]", "tiers.tape"),
        ('title = "A test"', "title = 3", "title"),
        ('title = "A test"', "", "title"),
        ('{ value = "100 GB", source = "a" }', '"100 GB"', "tiers.dram.capacity"),
        ('{ value = "100 GB", source = "a" }', '{ value = "1 GB" }', "capacity.source"),
        ("[sources]", "[[sources]]", "sources"),
        ("[gpu]", "[gpu", "node"),
    ],
)
def test_a_wrong_description_is_an_error_that_names_the_field(
    old: str, new: str, field: str
) -> None:
    assert old in _TINY
    with pytest.raises(InvalidArgumentError) as caught:
        parse_node(_TINY.replace(old, new, 1), "tiny")
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--context", "0"], "context"),
        (["--context", "-5"], "context"),
        (["--batch", "-1"], "batch"),
        (["--tp", "3"], "tp"),
        (["--tp", "16"], "tp"),
        (["--gpus", "9"], "gpus"),
        (["--gpus", "0"], "gpus"),
        (["--pp", "0"], "pp"),
        (["--params", "many"], "params"),
        (["--params", "0"], "params"),
        (["--weight-dtype", "fp3"], "weight_dtype"),
        (["--active-params", "80B"], "active_params"),
        (["--reserve", "8 XB"], "reserve"),
        (["--request-bytes", "-1"], "request_bytes"),
        (["--tokens-per-s", "-1"], "tokens_per_s"),
        (["--prefill-tokens-per-s", "nan"], "prefill_tokens_per_s"),
        (["--kv-dtype", "fp3"], "kv_dtype"),
        (["--node", "no-such-node"], "node"),
        (["--model", "no-such-model"], "model"),
        (["--model", "phi-2"], "params"),
        (["--plot", "plan.gif"], "plot"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_the_field(
    args: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--node", "dgx-h100", "--model", "llama-3-70b", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert f"`{field}`" in err
    assert err.count("\n") == 1


def test_missing_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--node", "dgx-h100"]) == 2
    assert "--model is missing" in capsys.readouterr().err


def test_a_batch_that_does_not_fit_is_a_check_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["plan", "--node", "dgx-h100", "--model", "llama-3-70b", "--json"]
    assert main(base) == 0
    largest = json.loads(capsys.readouterr().out)["batch"]["on_node"]
    assert main([*base, "--batch", str(largest)]) == 0
    capsys.readouterr()
    assert main([*base, "--batch", str(largest + 1)]) == 1
    assert json.loads(capsys.readouterr().out)["batch"]["asked_fits"] is False


def test_json_has_every_input_and_the_text_every_assumption(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["plan", "--node", "six-tiers", "--model", "llama-3-70b", "--request-bytes", "8MiB"]
    assert main([*base, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(base) == 0
    text = capsys.readouterr().out
    assert {figure["name"] for figure in found["figures"]} >= {"gpu.memory", "tiers.pfs.latency"}
    assert found["weights"]["bytes"] == 140 * 10**9
    for assumption in found["assumptions"]:
        assert f"assumed: {assumption}" in text
    for figure in found["figures"]:
        assert figure["assumed"] or figure["source"] in text


def test_nodes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list-nodes", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)) == builtin_nodes()


def test_nothing_heavy_is_imported_without_a_plot() -> None:
    script = (
        "import sys\n"
        "from tiered_kv.cli.entry import main\n"
        "main(['plan', '--node', 'dgx-h100', '--model', 'llama-3-70b'])\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'transformers', 'typer', 'rich'}\n"
        "sys.exit(sorted(heavy & set(sys.modules)) or 0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_plot_is_drawn(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan{ending}"
    args = ["plan", "--node", "six-tiers", "--model", "llama-3-70b", "--plot", str(path)]
    assert main(args) == 0
    capsys.readouterr()
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == ".png" else b"<?xml" in start


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"10 GB"', '"' + "9" * 5000 + ' GB"', "gpu.memory.value"),
        ('"10 GB"', "9" * 5000, "is not TOML"),
        ('"10 GB"', "9" * 4000, "gpu.memory.value"),
        ('"10 us"', '"' + "9" * 5000 + ' us"', "tiers.dram.latency.value"),
        ("value = 2,", "value = 2.5,", "gpu.count.value"),
        ("value = 2,", 'value = "2.5",', "gpu.count.value"),
        ("value = 2.5", "value = 1e308", "tiers.dram.usd_per_gb.value"),
        ("reserve =", 'flops = { value = "0 TFLOPS", source = "a" }\nreserve =', "gpu.flops.value"),
        (
            "reserve =",
            'prefill_efficiency = { value = 1e-300, source = "a" }\nreserve =',
            "gpu.prefill_efficiency.value",
        ),
        ("memory =", '"me\\nm\\u001b" =', r"`gpu.me\nm\x1b` is not known"),
        ('source = "a" }', '"so\\nurce" = "a" }', r"`gpu.count.so\nurce` is not known"),
        ("[tiers.dram]", '[tiers."\\u001b[2J"]', r"`tiers.\x1b[2J` is not known"),
        ("value = 2,", "value = " + "[" * 5000 + "]" * 5000 + ",", "is not TOML"),
        ("value = 2,", f"{'x' * 5000} = 2,", "gpu.count.xxx"),
    ],
)
def test_a_hostile_description_is_one_short_line(old: str, new: str, field: str) -> None:
    """A figure of 0 divided, and one of many digits or levels ended in a traceback."""
    assert old in _TINY
    with pytest.raises(InvalidArgumentError) as caught:
        parse_node(_TINY.replace(old, new, 1), "tiny")
    assert field in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize("name", ["tokens_per_s", "prefill_tokens_per_s"])
@pytest.mark.parametrize("rate", [1e-300, 1e300, float("inf"), float("nan"), -1.0])
def test_a_rate_that_makes_no_figure_is_refused(name: str, rate: float) -> None:
    """JSON has no infinity, which is what such a rate gave."""
    with pytest.raises(InvalidArgumentError, match=f"`{name}`"):
        Load(context=1, **{name: rate})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "a\0b", "/dev/zero"])
def test_a_node_that_is_none_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--node", name, "--model", "llama-3-70b"]) == 2
    printed = capsys.readouterr()
    assert "`node`" in printed.err
    assert printed.err[:-1].isprintable()


def test_what_a_node_is_called_stays_on_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a\nb.toml"
    path.write_text(_TINY.replace("A test", "A\\u001b[2J\\ntest"))
    args = ["plan", "--node", str(path), "--model", "llama-3-8b", "--context", "100"]
    assert main([*args, "--tp", "1", "--weight-dtype", "int4"]) == 0
    first = capsys.readouterr().out.split("\n")[0]
    assert first == r"a\nb: A\x1b[2J\ntest"


def test_a_name_is_no_formula_in_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name with two dollar signs was read as mathematics, and ended in a traceback."""
    pytest.importorskip("matplotlib")
    node = tmp_path / "$\\frac$\n.toml"
    node.write_text(_TINY)
    path = tmp_path / "plan.svg"
    args = ["plan", "--node", str(node), "--model", "llama-3-8b", "--tp", "1"]
    assert main([*args, "--plot", str(path)]) == 0, capsys.readouterr().err
    assert path.stat().st_size > 1000
