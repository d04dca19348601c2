"""Whatever a configuration, a GGUF file or a path is: an answer, or one short line; no hang."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test_sizing_read import LATENT, LLAMA, gguf, packed, plain
from tiered_kv import cli
from tiered_kv.cli.exits import ExitCode
from tiered_kv.errors import InvalidArgumentError, TieredKvError
from tiered_kv.sizing import catalogue_entries, read_config
from tiered_kv.sizing.engines import EngineOptions
from tiered_kv.sizing.engines.vllm import size as vllm_size
from tiered_kv.sizing.fields import MOST_LAYERS
from tiered_kv.sizing.parallel import Parallel
from tiered_kv.sizing.report import document, lines

DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]
JUNK = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 3, 1.5, 2.0, 1e300, math.nan, math.inf, -math.inf),
        *(10**30, 2**48, 2**48 + 1, 10**5000, "", "x", "8", "a\nb", "\x1b[31m", "FSSF", "MM*E"),
        *([], [0], [-1], [None], [[]], [1] * 5000, ["full_attention"], ["a\nb"] * 4, DEEP),
        *({}, {"\n": {}}, {7: 1}, {"0": None}, {"0": {"num_key_value_heads": 3}}, {"type": "x"}),
    ]
)
CONFIGS = [dict(entry.config) for entry in catalogue_entries().values()]
NAMES = sorted(
    {name for config in CONFIGS for name in config}
    | {"per_layer_config", "layers_block_type", "hybrid_override_pattern", "compress_ratios"}
    | {
        "num_nextn_predict_layers",
        "mtp_layer_types",
        "swa_\n",
        "n_head",
        "n_layer",
        "no_rope_layers",
    }
)


def refused(error: TieredKvError) -> None:
    """An error is one line of a bounded length, without commands to a terminal."""
    assert str(error).isprintable()
    assert len(str(error)) < 1100


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(CONFIGS),
    st.dictionaries(st.sampled_from(NAMES) | st.just("model_type"), JUNK, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["none", "mtp", "eagle"]),
)
def test_a_configuration_is_sized_or_refused_in_one_line(
    config: dict[str, Any], changes: dict[str, Any], nested: bool, speculative: str
) -> None:
    values = {**config, **changes}
    if nested:
        values = {"model_type": changes.get("model_type", "outer"), "text_config": values}
    try:
        spec = read_config(values, speculative=speculative)
        found = document(spec, context=4097, batch=3, block_size=16, parallel=Parallel(tp=2))
        json.dumps(found, allow_nan=False)
        assert list(lines(found))
        vllm_size(spec, 4097, 3, EngineOptions())
    except InvalidArgumentError as error:
        refused(error)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": DEEP}, "model_type"),
        ({"num_hidden_layers": DEEP}, "num_hidden_layers"),
        ({"num_attention_heads": 10**5000}, "num_attention_heads"),
        ({"num_attention_heads": math.nan}, "num_attention_heads"),
        ({"num_key_value_heads": -math.inf}, "num_key_value_heads"),
        ({"num_hidden_layers": MOST_LAYERS + 1}, "num_hidden_layers"),
        ({"model_type": "longcat_flash", "num_layers": 1 << 48, **LATENT}, "num_layers"),
        ({"model_type": "new", "swa_\nx": 1}, r"`swa_\\nx`"),
        ({"model_type": "new", "swa_" + "x" * 5000: 1}, "swa_xxx"),
        ({"model_type": "new\x1b[2J", "mamba_d_state": 1}, "mamba_d_state"),
        ({"model_type": "jamba", "mamba_expand": math.inf}, "mamba_expand"),
        ({"model_type": "jamba", "mamba_expand": 1e14}, "mamba_expand x hidden_size"),
        (
            {"model_type": "deepseek_v32", "index_topk_pattern": "F" * 5000, **LATENT},
            "index_topk_pattern",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "*" * 5000}
            | {"num_hidden_layers": None},
            "num_hidden_layers",
        ),
        (
            {"model_type": "dory", "n_input_layers": 0, "n_output_layers": 0, "sliding_window": 4}
            | {"n_recurrent_loops": 1000},
            "1000 loops of 4 layers",
        ),
    ],
)
def test_a_hostile_field_is_named_in_one_short_line(changes: dict[str, Any], field: str) -> None:
    defaults = {"mamba_d_state": 8, "mamba_d_conv": 4, "attn_layer_period": 2}
    more = {"attn_layer_offset": 1, **defaults} if changes.get("model_type") == "jamba" else {}
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        read_config(plain(**more, **changes))
    refused(caught.value)


def test_the_layers_for_several_tokens_are_bounded() -> None:
    config = plain(model_type="deepseek_v3", num_nextn_predict_layers=1 << 40, **LATENT)
    with pytest.raises(InvalidArgumentError, match="num_nextn_predict_layers"):
        read_config(config, speculative="mtp")


def test_overrides_of_many_layers_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer went through all of them: a file of 10 MB took an hour."""
    seen = 0

    def number(key: str) -> int:
        nonlocal seen
        seen += 1
        return int(key)

    monkeypatch.setattr("tiered_kv.sizing.fields._number", number)
    many = {str(at): {"num_key_value_heads": 4} for at in range(2000)}
    spec = read_config(plain(num_hidden_layers=MOST_LAYERS, per_layer_config=many))
    assert len(spec.groups[0].layers) == MOST_LAYERS
    assert seen == len(many)


def test_chunks_in_huge_blocks_are_counted_at_once() -> None:
    """Each chunk was looked at in turn, so that a large block never came to an end."""
    spec = read_config("llama-4-scout")
    options = EngineOptions(block_size=(1 << 40) + 16)
    assert vllm_size(spec, 1 << 48, 1, options).bytes_total > 0


# Paths


@pytest.mark.parametrize("command", [["size"], ["plan", "--node", "dgx-h100", "--model"]])
@pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "\x1b[2J", "a\0b", "/dev/zero", "/dev/stdin"])
def test_a_path_that_is_none_ends_in_one_line(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, name]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "`model` is" in printed.err
    assert printed.err[:-1].isprintable()


def test_no_kind_of_file_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "d" / "config.json").mkdir(parents=True)
    (tmp_path / "e").mkdir()
    os.mkfifo(tmp_path / "e" / "config.json")
    for name in ("fifo", "loop", "d", "e"):
        with pytest.raises(InvalidArgumentError, match="`model` is"):
            read_config(str(tmp_path / name))


def test_what_a_model_is_called_stays_on_its_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / os.fsdecode(b"a\nb\x1b[31m\xff") / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(plain(model_type="new\n\x1b[2J")))
    assert cli.main(["size", str(path)]) == ExitCode.OK
    printed = capfd.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n"))
    assert printed.startswith("a\\nb\\x1b[31m\\udcff: new\\n\\x1b[2J (inferred), 4 layers")
    assert cli.main(["size", str(path), "--json"]) == ExitCode.OK
    assert json.loads(capfd.readouterr().out)["model_type"] == "new\n\x1b[2J"


# The hub


@contextlib.contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, home: Path, chunks: list[bytes]) -> Iterator[None]:
    """A hub that answers one request with some bytes, with a pause between them."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as peer, contextlib.suppress(OSError):
                peer.recv(65536)
                for chunk in chunks:
                    peer.sendall(chunk)
                    time.sleep(0.02)

        serving = threading.Thread(target=answer)
        serving.start()
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield
        serving.join()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: "


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([b"garbage\x1b[2J\r\n\r\n"], "cannot be had"),
        ([OK + b"9\r\n\r\n{"], "is not JSON"),
        ([OK + b"20000000\r\n\r\n" + b"x" * 10_000_001], "10 MB"),
        ([OK + b"1000\r\n\r\n", *[b" "] * 100], "it sends for more than"),
    ],
)
def test_a_hub_that_sends_anything_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: list[bytes], what: str
) -> None:
    """A trickle went on for days, and what is no HTTP ended in a traceback."""
    monkeypatch.setattr("tiered_kv.sizing.hub.SECONDS", 0.2)
    with (
        hub(monkeypatch, tmp_path, chunks),
        pytest.raises(InvalidArgumentError, match=what) as caught,
    ):
        read_config("some/model")
    refused(caught.value)


# GGUF


def one(value: Any) -> bytes:
    """A value with its type, whatever it is."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + packed(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 11, len(value)) + struct.pack(f"<{len(value)}q", *value)
    return struct.pack("<Iq", 11, value)


GGUF_JUNK = st.sampled_from(
    [-1, 0, 1 << 62, 1.5, math.nan, "x\n", True, [1, 2, 0, 3], [], [-1] * 5]
)
GGUF_TAILS = ("nextn_predict_layers", "attention.kv_lora_rank", "rope.dimension_count")
GGUF_KEYS = [key.removeprefix("llama.") for key in LLAMA if key.startswith("llama.")]
GGUF_KEYS += [*GGUF_TAILS, "attention.key_length", "attention.sliding_window", "ssm.state_size"]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["llama", "deepseek2", "glm4moe", "qwen35", "mamba", "lfm2", "falcon", "mpt"]),
    st.dictionaries(st.sampled_from(GGUF_KEYS), GGUF_JUNK, max_size=4),
    st.lists(st.tuples(st.integers(4, 400), st.integers(0, 255)), max_size=3),
    st.integers(0, 40),
)
def test_a_gguf_file_is_sized_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory,
    arch: str,
    changes: dict[str, Any],
    flips: list[tuple[int, int]],
    cut: int,
) -> None:
    pairs = {key.removeprefix("llama."): value for key, value in LLAMA.items() if "toke" not in key}
    pairs = {**pairs, **dict.fromkeys(GGUF_TAILS, 4), **changes}
    pairs["general.architecture"] = arch
    named = {
        (key if "." in key and key[:3] == "gen" else f"{arch}.{key}"): v for key, v in pairs.items()
    }
    body = b"".join(packed(key) + one(value) for key, value in named.items())
    data = bytearray(b"GGUF" + struct.pack("<IQQ", 3, 0, len(named)) + body)
    for at, value in flips:
        data[at % len(data)] = value
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(data[: len(data) - cut])
    try:
        assert read_config(path).bytes(1000) >= 0
    except InvalidArgumentError as error:
        refused(error)


@pytest.mark.parametrize(
    ("value", "what"),
    [("x", "`nextn_predict_layers` is 'x'"), (9, "`num_hidden_layers` is -5"), ([1], "is a list")],
)
def test_layers_for_several_tokens_of_a_gguf_are_a_number(
    tmp_path: Path, value: Any, what: str
) -> None:
    path = tmp_path / "model.gguf"
    pairs = {key.replace("llama.", "glm4moe."): value for key, value in LLAMA.items()}
    pairs["general.architecture"] = "glm4moe"
    if isinstance(value, list):
        what = r"`nextn_predict_layers` is \[1\]"
    path.write_bytes(gguf({**pairs, "glm4moe.nextn_predict_layers": value}))
    with pytest.raises(InvalidArgumentError, match=what):
        read_config(path)
