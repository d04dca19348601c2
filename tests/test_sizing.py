"""Sizing arithmetic: the published figures to the byte, the inverse, ranks, layouts."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.errors import InvalidArgumentError
from tiered_kv.sizing import (
    DTYPES,
    ENCODER,
    EVERY_TOKEN,
    STATE,
    Kind,
    KvSpec,
    LayerGroup,
    Parallel,
    Part,
    Span,
    SpanKind,
    dtype_named,
    last,
    of_rank,
    rank_bytes,
    read_config,
    replication,
)
from tiered_kv.sizing.engines import EngineOptions, engine_named
from tiered_kv.sizing.engines.transformers import view
from tiered_kv.sizing.parallel import of_stage, stage_layers

GIB = 1 << 30


def test_deepseek_v3_is_1152_bytes_a_token_and_layer_not_65536() -> None:
    spec = read_config("deepseek-v3")
    assert spec.bytes_per_token == 61 * 1_152 == 70_272
    mha = spec.as_mha(131_072)
    assert mha is not None
    assert mha.bytes_per_token == 61 * 65_536
    assert mha.ratio == Fraction(65_536, 1_152)
    assert round(float(mha.ratio), 1) == 56.9
    assert "latent" in mha.why


def test_llama_3_70b_is_40_gib_at_128_ki_tokens_and_320_as_mha() -> None:
    spec = read_config("llama-3-70b")
    assert spec.bytes_per_token == 327_680
    assert spec.bytes(131_072) == 40 * GIB
    mha, gqa = spec.as_mha(131_072), spec.as_gqa(131_072)
    assert mha is not None
    assert gqa is not None
    assert mha.bytes_total == 320 * GIB
    assert gqa.bytes_total == 40 * GIB
    assert gqa.why == "the rule is exact for this model"


# By hand: (model, bytes a token in the long run, bytes of full windows and states).
GOLDEN = [
    ("llama-3.1-405b", 126 * 2 * 8 * 128 * 2, 0),
    ("mistral-7b-v0.1", 0, 32 * 2 * 8 * 128 * 2 * 4096),
    ("gemma-2-27b", 23 * 2 * 16 * 128 * 2, 23 * 2 * 16 * 128 * 2 * 4096),
    ("gemma-3-27b", 10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2 * 1024),
    ("gemma-4-e2b", 3 * 2 * 512 * 2, 12 * 2 * 256 * 2 * 512),
    ("gemma-4-31b", 10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2 * 1024),
    ("gpt-oss-120b", 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2 * 128),
    ("llama-4-scout", 12 * 2 * 8 * 128 * 2, 36 * 2 * 8 * 128 * 2 * 8192),
    ("mimo-v2-flash", 9 * 4 * (192 + 128) * 2, 39 * 8 * (192 + 128) * 2 * 129),
    ("falcon-7b", 32 * 2 * 64 * 2, 0),
    ("deepseek-v3.2", 61 * (1_152 + 128 * 2), 0),
    ("longcat-flash", 2 * 28 * 1_152, 0),
    ("minicpm3-4b", 62 * (256 + 32) * 2, 0),
    ("kimi-linear-48b-a3b", 7 * 1_152, 20 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2)),
    ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)),
    ("jamba-v0.1", 4 * 2 * 8 * 128 * 2, 28 * 8192 * (16 * 4 + 3 * 2)),
    ("nemotron-h-8b", 4 * 2 * 8 * 128 * 2, 24 * (128 * 64 * 128 * 4 + (8192 + 2048) * 3 * 2)),
    ("falcon-h1-7b", 44 * 2 * 2 * 128 * 2, 44 * (24 * 128 * 256 * 4 + (3072 + 512) * 3 * 2)),
]


@pytest.mark.parametrize(("model", "growth", "fixed"), GOLDEN)
def test_case_29_sizing_is_right_for_mla_windows_hybrids_and_states(
    model: str, growth: int, fixed: int
) -> None:
    spec = read_config(model)
    assert spec.bytes_per_token == growth
    assert spec.fixed_bytes == fixed
    # Once the windows are full, the two together are all.
    assert spec.bytes(100_000) == 100_000 * growth + fixed


def test_deepseek_v4_counts_windows_entries_and_what_waits() -> None:
    spec = read_config("deepseek-v4-flash")
    n = 10_001  # 2,500 entries of 4 and 78 of 128; 1 and 17 tokens wait
    windows = 43 * 128 * 512 * 2
    sparse = 21 * (2_500 * (512 + 128) * 2 + 4 * (512 + 128) * (2 + 4))
    dense = 20 * 78 * 512 * 2
    waiting = 21 * 2 * 2 * (512 + 128) * 2, 20 * 2 * 512 * 2
    held = view(spec).with_parts(
        lambda part: dataclasses.replace(part, span=last(128)) if part.name == "keys" else part
    )
    assert held.bytes(n) == windows + sparse + dense + 1 * waiting[0] + 17 * waiting[1]
    assert spec.bytes(n) == windows + sparse + dense + 3 * waiting[0] + 127 * waiting[1]


def test_cross_attention_follows_the_encoder_alone() -> None:
    spec = read_config("whisper-large-v3")
    assert spec.encoder_len == 1500
    each = 32 * 2 * 20 * 64 * 2
    assert spec.bytes(448) == 448 * each + 1500 * each
    assert spec.with_encoder_len(0).bytes(448) == 448 * each


@pytest.mark.parametrize(
    ("name", "dim", "size"),
    [
        ("bf16", 128, 256),
        ("torch.float32", 128, 512),
        ("fp8", 128, 128),
        ("fp8_per_token_head", 128, 132),
        ("int8", 128, 128),
        ("nvfp4", 128, 64 + 8),
        ("nvfp4", 17, 9 + 2),
        ("mxfp4", 128, 64 + 4),
    ],
)
def test_types_count_their_scales(name: str, dim: int, size: int) -> None:
    assert dtype_named(name).vector_bytes(dim) == size


def test_a_kv_type_leaves_states_as_they_are() -> None:
    spec = read_config("qwen3-next-80b-a3b")
    fp8 = read_config("qwen3-next-80b-a3b", kv_dtype="fp8")
    assert fp8.bytes_per_token * 2 == spec.bytes_per_token
    assert fp8.fixed_bytes == spec.fixed_bytes


# Ranks


def test_case_28_a_store_keeps_mla_once_however_many_ranks() -> None:
    """A latent stored once a rank takes eight times the bytes."""
    spec = read_config("deepseek-v3")
    part = spec.groups[0].parts[0]
    assert replication(part, 8) == 8
    assert replication(part, 8, stored_once=True) == 1
    assert of_rank(spec, 8).bytes(1000) == spec.bytes(1000)


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (2, 1), (8, 1), (16, 2), (64, 8)])
def test_case_28_gqa_is_replicated_where_there_are_fewer_heads_than_ranks(
    tp: int, copies: int
) -> None:
    keys = read_config("llama-3-70b").groups[0].parts[0]
    assert replication(keys, tp) == copies == max(1, tp // 8)


def test_stages_and_contexts_and_attention_replicas() -> None:
    spec = read_config("llama-3-70b")
    assert [len(stage) for stage in stage_layers(61, 4)] == [15, 15, 16, 15]
    assert rank_bytes(spec, Parallel(pp=4), 1000) * 4 == spec.bytes(1000)
    assert rank_bytes(spec, Parallel(cp=8), 1001) == 126 * 327_680
    whole = rank_bytes(spec, Parallel(tp=8), 1000, 8)
    assert rank_bytes(spec, Parallel(tp=8, dp_attention=8), 1000, 8) == whole
    mla = read_config("deepseek-v3")
    assert rank_bytes(mla, Parallel(tp=8, dp_attention=8), 1000, 8) == mla.bytes(1000)
    assert rank_bytes(mla, Parallel(ep=64), 1000) == mla.bytes(1000)
    last_stage = of_stage(read_config("longcat-flash"), stage_layers(28, 2)[1])
    assert last_stage.groups[0].layers == tuple(range(28, 56))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tp": 0}, "`tp`"),
        ({"pp": -1}, "`pp`"),
        ({"tp": 4, "dp_attention": 3}, "`dp_attention`"),
    ],
)
def test_wrong_ranks_are_named(changes: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        Parallel(**changes)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="`tp` is 3, but the keys have 8 heads"):
        of_rank(read_config("llama-3-70b"), 3)
    with pytest.raises(InvalidArgumentError, match="`pp`"):
        rank_bytes(read_config("llama-3-70b"), Parallel(pp=81), 1)


# Engines


def test_transformers_keeps_a_token_less_of_each_window() -> None:
    spec = read_config("gemma-3-27b")
    held = engine_named("transformers")(spec, 4096, 1, EngineOptions())
    assert spec.bytes(4096) - held.bytes_total == 52 * 2 * 16 * 128 * 2
    with pytest.raises(InvalidArgumentError, match="`tp`"):
        engine_named("transformers")(spec, 1, 1, EngineOptions(Parallel(tp=2)))
    with pytest.raises(InvalidArgumentError, match="`engine`"):
        engine_named("nope")


# Layouts


def test_a_layout_has_a_row_of_slabs_a_group() -> None:
    layout = read_config("gemma-3-27b").to_layout(32, head_groups=4)
    assert (layout.layer_groups, layout.head_groups) == (2, 4)
    assert layout.slab_bytes == (52 * 32 * 2048,) * 4 + (10 * 32 * 2048,) * 4
    assert read_config("deepseek-v3").to_layout(16).block_bytes == 16 * 70_272


def test_a_block_holds_the_state_after_its_last_token() -> None:
    spec = read_config("qwen3-next-80b-a3b")
    assert spec.to_layout(64).block_bytes == 64 * 24_576 + spec.fixed_bytes
    assert read_config("whisper-large-v3").to_layout(16).block_bytes == 16 * 163_840


def test_a_block_ends_where_nothing_waits_to_be_compressed() -> None:
    spec = read_config("deepseek-v4-flash")
    with pytest.raises(InvalidArgumentError, match="multiple of 128"):
        spec.to_layout(64)
    overlap = 21 * 4 * (512 + 128) * (2 + 4)
    assert spec.to_layout(128).block_bytes == 128 * (43 * 1024 + 6_880) + overlap
    with pytest.raises(InvalidArgumentError, match="`head_groups`"):
        spec.to_layout(128, head_groups=2)


# Properties

SPANS = st.one_of(
    st.just(EVERY_TOKEN),
    st.just(STATE),
    st.just(ENCODER),
    st.integers(1, 40).map(last),
    st.tuples(
        st.sampled_from([SpanKind.EVERY, SpanKind.BUFFER, SpanKind.ONCE]), st.integers(1, 9)
    ).map(lambda drawn: Span(*drawn)),
)
PARTS = st.builds(
    Part,
    name=st.just("part"),
    heads=st.sampled_from([1, 2, 3, 4, 8]),
    dim=st.integers(1, 70),
    dtype=st.sampled_from(list(DTYPES.values())),
    span=SPANS,
)
GROUPS = st.builds(
    LayerGroup,
    kind=st.sampled_from([kind for kind in Kind if kind is not Kind.SHARED]),
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True).map(tuple),
    parts=st.lists(PARTS, min_size=1, max_size=3).map(tuple),
)
SPECS = st.builds(
    KvSpec,
    name=st.just("drawn"),
    model_type=st.just("drawn"),
    groups=st.lists(GROUPS, min_size=1, max_size=4).map(tuple),
    num_layers=st.just(10),
    kv_dtype=st.just(DTYPES["bf16"]),
    encoder_len=st.integers(0, 20),
)
NUMBERS = st.integers(0, 200)
BLOCKS = st.integers(1, 24)


@given(SPECS, NUMBERS, st.integers(0, 9), BLOCKS)
def test_bytes_grow_with_context_and_batch(spec: KvSpec, n: int, batch: int, block: int) -> None:
    here = spec.bytes(n, batch, block)
    assert here <= spec.bytes(n + 1, batch, block)
    assert spec.bytes(n, batch + 1, block) == here + spec.bytes(n, 1, block)
    assert spec.bytes(n, batch) <= here
    assert spec.bytes(0, batch, block) == 0


@given(SPECS, NUMBERS, st.integers(0, 9), BLOCKS)
def test_bytes_add_up_over_groups(spec: KvSpec, n: int, batch: int, block: int) -> None:
    alone = [
        dataclasses.replace(spec, groups=(group,)).bytes(n, batch, block) for group in spec.groups
    ]
    assert spec.group_bytes(n, batch, block) == alone
    assert spec.bytes(n, batch, block) == sum(alone)


@given(SPECS, st.integers(0, 200_000), st.integers(1, 5), BLOCKS)
def test_the_inverse_is_exact(spec: KvSpec, budget: int, batch: int, block: int) -> None:
    tokens = spec.tokens_in(budget, batch, block)
    if tokens is None:
        assert spec.bytes(10**9, batch, block) <= budget
        return
    assert spec.bytes(tokens, batch, block) <= budget < spec.bytes(tokens + 1, batch, block)
    most = spec.batch_in(budget, 100, block)
    if most is None:
        assert spec.bytes(100, 1, block) == 0
    else:
        assert spec.bytes(100, most, block) <= budget < spec.bytes(100, most + 1, block)


@given(SPECS, st.integers(0, 60_000))
def test_the_inverse_is_exact_where_bytes_fall_again(spec: KvSpec, budget: int) -> None:
    """What waits to be compressed goes away when it is: bytes are not monotone then."""
    held = view(spec)
    tokens = held.tokens_in(budget)
    if tokens is None:
        return
    assert max(held.bytes(n) for n in range(tokens + 1)) <= budget < held.bytes(tokens + 1)


@given(SPECS, st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24]), NUMBERS)
def test_ranks_hold_what_the_replication_says(spec: KvSpec, tp: int, n: int) -> None:
    parts = [part for group in spec.groups for part in group.parts]
    if any(part.heads % tp and tp % part.heads for part in parts):
        with pytest.raises(InvalidArgumentError, match="`tp`"):
            of_rank(spec, tp)
        return
    for group, mine in zip(spec.groups, of_rank(spec, tp).groups, strict=True):
        for part, held in zip(group.parts, mine.parts, strict=True):
            copies = max(1, tp // part.heads)
            assert tp * held.bytes(n, spec.encoder_len) == copies * part.bytes(n, spec.encoder_len)
            assert replication(part, tp) == copies


@given(st.integers(1, 60), BLOCKS, st.integers(1, 200))
def test_a_window_counts_the_most_blocks_it_touched(window: int, block: int, n: int) -> None:
    def touched(at: int) -> int:
        return -(-at // block) - max(0, at - window) // block

    most = max(touched(at) for at in range(1, n + 1))
    assert last(window).entries(n, block_size=block) == most * block


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda spec: spec.bytes(-1), "`context` is -1"),
        (lambda spec: spec.bytes(1.5), "`context` is 1.5"),
        (lambda spec: spec.bytes(True), "`context` is True"),
        (lambda spec: spec.bytes(1 << 60), "`context` is"),
        (lambda spec: spec.bytes(1, -1), "`batch` is -1"),
        (lambda spec: spec.bytes(1, 1, 0), "`block_size` is 0"),
        (lambda spec: spec.tokens_in(-1), "`budget` is -1"),
        (lambda spec: spec.to_layout(0), "`tokens_per_block` is 0"),
    ],
)
def test_wrong_numbers_are_named(call: object, field: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidArgumentError, match=field):
        call(read_config("llama-3-8b"))
