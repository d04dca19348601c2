"""`tiered-kv size`: its document, its lines, its errors, and what it does not load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiered_kv import cli
from tiered_kv.cli.exits import ExitCode


def document(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert cli.main(["size", *args, "--json"]) == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_document_has_what_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "deepseek-v3", "--context", "131072", "--batch", "32", "--tp", "8")
    assert found["model"] == "deepseek-v3"
    assert found["bytes_per_token"] == 70_272
    assert found["bytes_total"] == 32 * 131_072 * 70_272
    assert [(group["kind"], group["layers"]) for group in found["groups"]] == [("mla", 61)]
    assert found["groups"][0]["bytes_per_token"] == 70_272
    assert found["groups"][0]["bytes_total"] == found["bytes_total"]
    assert found["groups"][0]["parts"][0]["replication"] == 8
    assert found["as_mha"]["ratio"] == 56.8889
    assert found["as_gqa"]["bytes_per_token"] == 61 * 65_536
    assert found["parallel"]["bytes_per_rank"] == found["bytes_total"]
    text = (Path(__file__).parents[1] / "docs/sizing.md").read_text()
    for name in [*found, *found["groups"][0], *found["groups"][0]["parts"][0], *found["as_mha"]]:
        assert f"`{name}`" in text, name


def test_options_reach_the_sizing(capsys: pytest.CaptureFixture[str]) -> None:
    plain = document(capsys, "llama-3-70b", "--context", "1000")
    fp8 = document(capsys, "llama-3-70b", "--context", "1000", "--kv-dtype", "fp8")
    assert 2 * fp8["bytes_total"] == plain["bytes_total"]
    blocks = document(capsys, "llama-3-70b", "--context", "1000", "--block-size", "64")
    assert blocks["waste_bytes"] == 24 * 327_680
    mtp = document(capsys, "deepseek-v3", "--speculative", "mtp")
    assert mtp["groups"][1]["role"] == "mtp"
    whisper = document(capsys, "whisper-large-v3", "--encoder-len", "10")
    assert whisper["encoder_len"] == 10
    held = document(capsys, "gemma-3-27b", "--context", "4096", "--engine", "transformers")
    assert held["bytes_total"] - held["engine"]["bytes_total"] == 52 * 8192


def test_the_lines_for_people_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["size", "gemma-3-27b", "--tp", "32", "--batch", "2"]) == ExitCode.OK
    text = capsys.readouterr().out
    for words in (
        "sliding_window of 1,024",
        "a token: 507,904 B until the windows are full, then 81,920 B",
        "as MHA: 1,015,808 B a token",
        "windowed layers stop growing at the window",
        "all 32 ranks together: 2.00 x the cache",
        "source: https://huggingface.co/google/gemma-3-27b-it",
    ):
        assert words in text


@pytest.mark.parametrize("none", [["--batch", "0"], ["--context", "0"]])
def test_nothing_held_has_no_ratio(none: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A rule was said to be 0.00 times nothing."""
    found = document(capsys, "llama-3-8b", *none)
    assert found["bytes_total"] == 0
    assert (found["as_mha"]["bytes_total"], found["as_mha"]["ratio"]) == (0, None)
    assert cli.main(["size", "llama-3-8b", *none]) == ExitCode.OK
    assert " x: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "model"),
        (["llama-3-8b", "--context", "-1"], "`context` is -1"),
        (["llama-3-8b", "--context", "many"], "--context"),
        (["llama-3-8b", "--batch", "-1"], "`batch` is -1"),
        (["llama-3-8b", "--tp", "3"], "`tp` is 3"),
        (["llama-3-8b", "--kv-dtype", "int3"], "`kv_dtype` is 'int3'"),
        (["llama-3-8b", "--engine", "warp"], "`engine` is 'warp'"),
        (["llama-3-8b", "--speculative", "mtp"], "num_nextn_predict_layers"),
        (["llama-3-8b", "--nope"], "--nope"),
        (["no-such-model"], "`model` is 'no-such-model'"),
    ],
)
def test_wrong_usage_ends_in_one_line(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["size", *args]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("error: ")
    assert words in printed.err
