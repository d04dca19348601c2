"""Reading configurations: families and their traps, GGUF, the catalogue, bad input."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.errors import InvalidArgumentError
from tiered_kv.sizing import Kind, KvSpec, Role, catalogue_entries, read_config
from tiered_kv.sizing.families import ARCHITECTURES
from tiered_kv.sizing.gguf import read_pairs

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8}


def plain(**changes: Any) -> dict[str, Any]:
    return {**PLAIN, **changes}


def groups(spec: KvSpec) -> list[tuple[Kind, tuple[int, ...]]]:
    return [(group.kind, group.layers) for group in spec.groups]


# Sources


def test_a_configuration_is_read_from_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN))
    expected = 4 * 2 * 2 * 8 * 2
    for source in (PLAIN, path, str(path), tmp_path):
        assert read_config(source).bytes_per_token == expected
    assert read_config(tmp_path).name == tmp_path.name
    assert read_config(path).sources == (str(path),)


def test_the_hub_is_asked_only_for_what_can_be_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    nowhere = tmp_path / "some/where"
    nowhere.mkdir(parents=True)
    monkeypatch.chdir(nowhere)  # beside which nothing is that one of the names may mean
    with pytest.raises(InvalidArgumentError, match="HF_HUB_OFFLINE is set"):
        read_config("some/model")
    for name in ("nope", "a/b/c", "../x", "a/..b"):
        with pytest.raises(InvalidArgumentError, match="give a configuration's path"):
            read_config(name)
    snapshot = tmp_path / "hub/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(PLAIN))
    assert read_config("some/model").num_layers == 4


def test_a_hub_that_cannot_be_reached_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(InvalidArgumentError, match="cannot be had from the hub"):
        read_config("some/model")


def test_the_catalogue_reads_and_has_sources() -> None:
    entries = catalogue_entries()
    assert len(entries) >= 60
    for entry in entries.values():
        spec = read_config(entry.name)
        assert spec.bytes(1000) > 0, entry.name
        assert not spec.inferred, entry.name
        assert spec.sources == (entry.source,)
        assert entry.source.startswith(f"https://huggingface.co/{entry.hub}/")
        assert read_config(entry.hub.upper()).groups == spec.groups


def test_a_name_close_to_one_of_the_catalogue_is_suggested() -> None:
    with pytest.raises(InvalidArgumentError, match="deepseek-v3"):
        read_config("deepsek-v3")


# Families


def test_a_nested_text_part_is_read_with_its_parents_dtype() -> None:
    text = {key: value for key, value in PLAIN.items() if key != "dtype"}
    for part in ("text_config", "llm_config", "language_config"):
        outer = {"model_type": "some_vision_model", "torch_dtype": "float32", part: text}
        spec = read_config(outer)
        assert (spec.model_type, spec.kv_dtype.name) == ("llama", "fp32")
    outer = {"model_type": "x", "thinker_config": {"text_config": PLAIN}}
    assert read_config(outer).num_layers == 4


def test_a_nested_part_may_leave_out_the_defaults_of_its_architecture() -> None:
    spec = read_config(
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 12, "hidden_size": 2560}}
    )
    assert spec.model_type == "gemma3_text"
    assert groups(spec) == [
        (Kind.SLIDING, (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)),
        (Kind.FULL, (5, 11)),
    ]
    assert spec.groups[1].bytes_per_token == 2 * 2 * 4 * 256 * 2


def test_a_null_window_is_no_window() -> None:
    assert groups(read_config(plain(model_type="mistral", sliding_window=None))) == [
        (Kind.FULL, (0, 1, 2, 3))
    ]
    assert read_config(plain(model_type="mistral", sliding_window=7)).groups[0].window == 7


def test_qwen_windows_begin_where_they_are_used() -> None:
    windowed = plain(model_type="qwen2", sliding_window=8, max_window_layers=2)
    assert groups(read_config(windowed)) == [(Kind.FULL, (0, 1, 2, 3))]
    windowed["use_sliding_window"] = True
    assert groups(read_config(windowed)) == [(Kind.FULL, (0, 1)), (Kind.SLIDING, (2, 3))]


def test_gemma_4_full_layers_have_their_own_heads_and_the_last_is_full() -> None:
    config = plain(
        model_type="gemma4_text",
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"] * 2,
        num_hidden_layers=6,
    )
    spec = read_config(config)
    assert groups(spec) == [(Kind.SLIDING, (0, 2, 3)), (Kind.FULL, (1, 4, 5))]
    assert spec.groups[1].bytes_per_token == 3 * 2 * 1 * 16 * 2
    config["attention_k_eq_v"] = False
    assert read_config(config).groups[1].bytes_per_token == 3 * 2 * 2 * 16 * 2
    config["num_kv_shared_layers"] = 3
    assert groups(read_config(config)) == [
        (Kind.SLIDING, (0, 2)),
        (Kind.FULL, (1,)),
        (Kind.SHARED, (3, 4, 5)),
    ]


@pytest.mark.parametrize("key", ["2", "02", 2])
def test_per_layer_config_overrides_one_layer(key: object) -> None:
    spec = read_config(plain(per_layer_config={key: {"num_key_value_heads": 4}}))
    assert groups(spec) == [(Kind.FULL, (0, 1, 3)), (Kind.FULL, (2,))]
    skips = read_config(plain(per_layer_config={key: {"skip": ["attention"]}}))
    assert groups(skips) == [(Kind.FULL, (0, 1, 3))]


def test_longcat_has_two_caches_a_layer() -> None:
    config = plain(model_type="longcat_flash", num_layers=3, **LATENT)
    del config["num_hidden_layers"]
    spec = read_config(config)
    assert (spec.num_layers, spec.caches_per_layer) == (3, 2)
    assert groups(spec) == [(Kind.MLA, tuple(range(6)))]


def test_kimi_linear_counts_layers_from_one() -> None:
    lists = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 2, "head_dim": 8}
    config = plain(
        model_type="kimi_linear",
        linear_attn_config={**lists, "short_conv_kernel_size": 4},
        **LATENT,
    )
    assert groups(read_config(config)) == [(Kind.LINEAR, (0, 1, 2)), (Kind.MLA, (3,))]
    config["linear_attn_config"]["kda_layers"] = [1, 2]
    with pytest.raises(InvalidArgumentError, match=r"full_attn_layers.*3 is in none"):
        read_config(config)


def test_legacy_layer_types_are_understood() -> None:
    config = plain(
        model_type="granitemoehybrid",
        layer_types=["mamba", "attention", "mamba", "attention"],
        mamba_n_heads=4,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
    )
    assert groups(read_config(config)) == [(Kind.RECURRENT, (0, 2)), (Kind.FULL, (1, 3))]


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full", "shared", "shared", "full"]},
        {"index_topk_pattern": "FSSF"},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    ],
)
def test_layers_that_share_an_indexer_hold_no_index_keys(changes: dict[str, Any]) -> None:
    spec = read_config(plain(model_type="glm_moe_dsa", index_head_dim=8, **LATENT, **changes))
    assert groups(spec) == [(Kind.MLA, (0, 1, 2, 3)), (Kind.INDEX, (0, 3))]


def test_values_may_be_smaller_than_keys() -> None:
    spec = read_config(plain(model_type="mimo_v2_flash", head_dim=12, v_head_dim=8))
    full = next(group for group in spec.groups if group.kind is Kind.FULL)
    assert [part.dim for part in full.parts] == [12, 8]


def test_layers_for_several_tokens_are_added_when_asked_for() -> None:
    config = plain(model_type="deepseek_v3", num_nextn_predict_layers=2, **LATENT)
    assert len(read_config(config).groups) == 1
    mtp = read_config(config, speculative="mtp").groups[-1]
    assert (mtp.role, mtp.layers) == (Role.MTP, (4, 5))
    eagle = read_config(PLAIN, speculative="eagle").groups[-1]
    assert (eagle.role, eagle.layers) == (Role.EAGLE, (4,))
    with pytest.raises(InvalidArgumentError, match="num_nextn_predict_layers"):
        read_config(PLAIN, speculative="mtp")
    with pytest.raises(InvalidArgumentError, match="`speculative` is 'medusa'"):
        read_config(PLAIN, speculative="medusa")
    v4 = read_config("deepseek-v4-flash", speculative="mtp").groups[-1]
    assert (v4.kind, v4.layers) == (Kind.SLIDING, (43,))


def test_more_types_than_layers_are_those_for_several_tokens() -> None:
    types = ["full_attention"] * 4 + ["sliding_attention"]
    config = plain(layer_types=types, sliding_window=8, num_nextn_predict_layers=1)
    assert groups(read_config(config)) == [(Kind.FULL, (0, 1, 2, 3))]
    assert groups(read_config(config, speculative="mtp"))[1] == (Kind.SLIDING, (4,))


@pytest.mark.parametrize(("arch", "heads"), [(True, 3), (False, 1)])
def test_falcon_has_one_head_or_its_own_number(arch: bool, heads: int) -> None:
    config = plain(model_type="falcon", new_decoder_architecture=arch, num_kv_heads=3)
    del config["num_key_value_heads"]
    assert read_config(config).groups[0].parts[0].heads == heads


@pytest.mark.parametrize(("more", "heads"), [({"n_head_kv": 8}, 8), ({"multi_query": True}, 1)])
def test_falcon_under_its_first_name_has_the_heads_that_it_says(
    more: dict[str, Any], heads: int
) -> None:
    """The 40 B model's first configuration names eight heads, and was sized as one."""
    config = {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_layer": 60, **more}
    assert read_config(config).groups[0].parts[0].heads == heads


def test_names_of_old_architectures_are_aliases() -> None:
    spec = read_config({"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4})
    assert spec.bytes_per_token == 2 * 2 * 32 * 2
    assert any("dtype" in note for note in spec.notes)
    cut = {"model_type": "gpt_bigcode", "n_layer": 2, "n_embd": 32, "n_head": 4}
    assert read_config(cut).groups[0].parts[0].heads == 1


def test_the_list_of_architectures_is_long() -> None:
    assert len(ARCHITECTURES) >= 150


# Inference


def test_an_unknown_architecture_is_inferred_and_marked() -> None:
    spec = read_config(plain(model_type="brand_new"))
    assert spec.inferred
    assert any("brand_new" in note for note in spec.notes)
    latent = read_config(plain(model_type="brand_new", **LATENT))
    assert latent.groups[0].kind is Kind.MLA


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
        ({"layer_types": ["conv"] * 4}, "layer_types"),
        ({"kv_lora_rank": 16}, "qk_rope_head_dim"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"is_encoder_decoder": True}, "encoder"),
    ],
)
def test_what_cannot_be_inferred_says_what_is_missing(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        read_config(plain(model_type="brand_new", **changes))


# Bad input


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": None}, "`num_hidden_layers`"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000"),
        ({"num_hidden_layers": "4"}, "`num_hidden_layers` is '4'"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` is True"),
        ({"num_attention_heads": None}, "`num_attention_heads`"),
        ({"hidden_size": None}, "`head_dim` or `hidden_size`"),
        ({"hidden_size": 65}, "`hidden_size` = 65"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` = 3"),
        ({"num_key_value_heads": -2}, "`num_key_value_heads` is -2"),
        ({"num_key_value_heads": 1.5}, "`num_key_value_heads` is 1.5"),
        ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries"),
        ({"layer_types": ["full_attention", 3] * 2}, r"`layer_types\[1\]`"),
        ({"layer_types": ["warp_attention"] * 4}, r"`layer_types\[0\]` is 'warp_attention'"),
        ({"layer_types": "full"}, "`layer_types` is 'full'"),
        ({"layer_types": ["sliding_attention"] * 4}, "`sliding_window`"),
        ({"per_layer_config": [1]}, "`per_layer_config`"),
        ({"per_layer_config": {"1": 3}}, r"`per_layer_config\[1\]`"),
        ({"dtype": "int3"}, "`dtype` is 'int3'"),
        ({"model_type": 7}, "`model_type` is 7"),
        ({"model_type": "deepseek_v3"}, "`kv_lora_rank`"),
        ({"model_type": "mamba"}, "state_size"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        ({"model_type": "deepseek_v4", "compress_ratios": [7] * 4}, r"compress_ratios\[0\]"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 9}, "num_kv_shared_layers"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        read_config(plain(**changes))
    assert "\n" not in str(caught.value)


def test_a_nested_field_is_named_with_its_place() -> None:
    with pytest.raises(InvalidArgumentError, match=r"`text_config\.num_key_value_heads` is 'x'"):
        read_config({"model_type": "y", "text_config": plain(num_key_value_heads="x")})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "is not JSON"),
        (b"{'a': 1}", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "is a JSON list"),
        (b"3", "is a JSON int"),
        (b"[" * 1000 + b"]" * 1000, "nested deeper"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "nested deeper"),
        (b'{"a": "' + b"x" * 10_000_000 + b'"}', "10 MB"),
    ],
)
def test_hostile_json_ends_in_one_line(tmp_path: Path, text: bytes, what: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(InvalidArgumentError, match=what) as caught:
        read_config(path)
    assert len(str(caught.value)) < 500


def test_a_directory_without_a_configuration_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no config\.json"):
        read_config(tmp_path)


def test_deep_nesting_in_a_mapping_ends() -> None:
    deep: dict[str, Any] = dict(PLAIN)
    for _ in range(1000):
        deep = {"text_config": deep}
    with pytest.raises(InvalidArgumentError, match="nested deeper than 8"):
        read_config(deep)


# GGUF


def packed(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(pairs: dict[str, Any], version: int = 3, count: int | None = None) -> bytes:
    body = b""
    for key, value in pairs.items():
        body += packed(key)
        if isinstance(value, str):
            body += struct.pack("<I", 8) + packed(value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            body += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(packed, value))
        elif isinstance(value, list):
            body += struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
        else:
            body += struct.pack("<II", 4, value)
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count)
    return head + body


LLAMA = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["a", "bc"] * 3000,
    "llama.block_count": 4,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 4096,
}


def test_a_gguf_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(LLAMA))
    spec = read_config(path)
    assert (spec.name, spec.kv_dtype.name, spec.max_context) == ("model", "fp16", 4096)
    assert spec.bytes_per_token == 4 * 2 * 2 * 8 * 2


def test_gguf_latents_and_lists_of_heads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    deepseek = {key.replace("llama.", "deepseek2."): value for key, value in LLAMA.items()}
    deepseek |= {
        "general.architecture": "deepseek2",
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
        "deepseek2.attention.value_length": 128,
    }
    path.write_bytes(gguf(deepseek))
    assert read_config(path).bytes_per_token == 4 * 1_152
    path.write_bytes(gguf({**LLAMA, "llama.attention.head_count_kv": [2, 0, 4, 2]}))
    assert groups(read_config(path)) == [(Kind.FULL, (0, 3)), (Kind.FULL, (2,))]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (gguf(LLAMA)[:-1], "cut short"),
        (gguf(LLAMA, version=1), "version 1"),
        (gguf(LLAMA, count=1 << 60), "key-value pairs"),
        (gguf({"general.architecture": "wonder"}), "general.architecture"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "too long"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + packed("a") + struct.pack("<IIQ", 9, 9, 1),
            "array of the GGUF type 9",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + packed("a")
            + struct.pack("<IIQ", 9, 8, 1 << 60),
            "strings",
        ),
    ],
)
def test_a_broken_gguf_ends_in_one_line(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=what):
        read_config(path)


def test_a_long_gguf_array_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf({**LLAMA, "long": list(range(5000)), "short": [1, 2]}))
    pairs = read_pairs(path)
    assert "long" not in pairs
    assert pairs["short"] == [1, 2]
