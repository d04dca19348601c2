"""vLLM's pages, against what vLLM 0.32's own functions said: `make sizing-vllm` asks them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.errors import InvalidArgumentError
from tiered_kv.sizing.engines import EngineOptions, EngineReport
from tiered_kv.sizing.engines.vllm import size
from tiered_kv.sizing.engines.vllm_pages import Cache, pages
from tiered_kv.sizing.parallel import Parallel
from tiered_kv.sizing.read import read_config
from tiered_kv.sizing.spec import Kind

_ASKED = json.loads((Path(__file__).parent / "data" / "vllm_sizes.json").read_text("utf-8"))
_CASES = {case["name"]: case for case in _ASKED["cases"]}
_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "recurrent",
    "CrossAttentionSpec": "cross_attention",
}
# vLLM keeps whole keys and values here, for which the configuration of the cache says too little.
_REFUSED = {"minicpm3-4b"}


def _dtype(case: dict[str, Any]) -> str | None:
    named = case.get("kv_dtype") or case.get("arguments", {}).get("kv_cache_dtype")
    return None if named is None else str(named)


def _held(case: dict[str, Any], context: int) -> EngineReport:
    options = EngineOptions(Parallel(tp=case.get("tp", 1)), case["block_size"], _dtype(case))
    spec = read_config(case["config"])
    return size(spec, context, 1, options)


@pytest.mark.parametrize("name", sorted(set(_CASES) - _REFUSED))
def test_groups_pages_and_blocks_are_those_of_vllm(name: str) -> None:
    case = _CASES[name]
    expected = case["expected"]
    reports = [_held(case, context) for context in _ASKED["contexts"]]
    assert {report.block_size for report in reports} == {expected["block_size"]}
    rows = sorted(
        (
            group.kind.split(",")[0],
            group.layers,
            group.page_bytes,
            tuple(report.groups[at].pages for report in reports),
        )
        for at, group in enumerate(reports[0].groups[:-1])
    )
    asked = sorted(
        (_KINDS[row["kind"]], row["layers"], row["page_bytes"], tuple(row["pages"]))
        for row in expected["groups"]
    )
    if any(kind == "cross_attention" for kind, *_ in rows):
        # vLLM's scheduler holds the encoder's pages apart: their number is not in the figures.
        assert [row[:3] for row in rows] == [row[:3] for row in asked]
    else:
        assert rows == asked
    null = reports[0].groups[-1]
    assert null.kind == "null block"
    assert (1 << 40) // null.bytes_total == expected["blocks_in_1_tib"]


def test_the_figures_cover_every_kind() -> None:
    asked = {row["kind"] for case in _CASES.values() for row in case["expected"]["groups"]}
    assert asked == set(_KINDS)


@pytest.mark.parametrize(("kv_dtype", "token"), [("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)])
def test_a_packed_token_has_the_bytes_of_its_layout(kv_dtype: str, token: int) -> None:
    spec = read_config("deepseek-v3")
    report = size(spec, 64, 1, EngineOptions(kv_dtype=kv_dtype))
    assert report.groups[0].page_bytes == 64 * token
    assert report.groups[0].bytes_total == 61 * 64 * token
    assert report.groups[0].waste_bytes == 0


def test_waste_is_what_the_model_does_not_need() -> None:
    spec = read_config("qwen3-next-80b-a3b")
    report = size(spec, 9000, 3, EngineOptions())
    need = read_config("qwen3-next-80b-a3b").bytes(9000, 3)
    # vLLM keeps recurrent states in 16 bits by default, which the specification has in 32.
    states = sum(
        len(group.layers) * part.entry_bytes // 2
        for group in spec.groups
        for part in group.parts
        if part.fixed and part.dtype.name == "fp32"
    )
    assert report.bytes_total - sum(group.waste_bytes for group in report.groups) == (
        need - 3 * states
    )


def test_a_pipeline_holds_what_its_fullest_stage_holds() -> None:
    spec = read_config("llama-3-70b")
    whole = size(spec, 4096, 1, EngineOptions()).groups[0].bytes_total
    halves = size(spec, 4096, 1, EngineOptions(Parallel(pp=2))).groups[0].bytes_total
    assert 2 * halves == whole


def test_replicas_share_the_requests_and_ranks_of_the_context_the_blocks() -> None:
    spec = read_config("deepseek-v3")
    one = size(spec, 4096, 1, EngineOptions()).groups[0]
    for parallel, batch in [
        (Parallel(tp=8), 1),
        (Parallel(tp=8, dp_attention=8), 8),
        (Parallel(tp=8, dp_attention=4), 4),
        (Parallel(ep=64), 1),
    ]:
        # A latent is whole on each rank that has the request.
        assert size(spec, 4096, batch, EngineOptions(parallel)).groups[0] == one, parallel
    halves = size(spec, 4096, 1, EngineOptions(Parallel(cp=2))).groups[0]
    assert (2 * halves.pages, 2 * halves.bytes_total) == (one.pages, one.bytes_total)
    heads = read_config("llama-3-70b")
    whole = size(heads, 4096, 1, EngineOptions()).groups[0].bytes_total
    for tp in (2, 8, 16):
        mine = size(heads, 4096, 1, EngineOptions(Parallel(tp=tp))).groups[0].bytes_total
        assert tp * mine == max(1, tp // 8) * whole


@pytest.mark.parametrize(
    ("model", "options", "field"),
    [
        ("llama-3-70b", EngineOptions(block_size=24), "block_size"),
        ("deepseek-v3", EngineOptions(block_size=16), "block_size"),
        ("llama-3-70b", EngineOptions(kv_dtype="fp8_ds_mla"), "kv_dtype"),
        ("llama-3-70b", EngineOptions(kv_dtype="fp3"), "kv_dtype"),
        ("llama-3-70b", EngineOptions(Parallel(tp=3)), "tp"),
        ("deepseek-v4-flash", EngineOptions(), "engine"),
        ("minicpm3-4b", EngineOptions(), "engine"),
    ],
)
def test_what_vllm_does_not_do_is_an_error_that_names_the_field(
    model: str, options: EngineOptions, field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"`{field}`"):
        size(read_config(model), 1000, 1, options)


@given(
    kind=st.sampled_from([Kind.SLIDING, Kind.CHUNKED]),
    window=st.integers(1, 40),
    block=st.integers(1, 60),
    context=st.integers(1, 400),
)
def test_windows_hold_the_most_blocks_that_a_walk_has_held(
    kind: Kind, window: int, block: int, context: int
) -> None:
    """The closed form, against freeing whole blocks before each token in turn."""
    most = 0
    for token in range(1, context + 1):
        first = token - window if kind is Kind.SLIDING else (token - 1) // window * window
        most = max(most, -(-token // block) - max(0, first) // block)
    assert pages(Cache(kind, block, 1, 1, window), context, 0, 1, 1) == most
