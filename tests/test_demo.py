"""The demo from end to end with a tiny model, and what its report says."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny_models
from tiered_kv import InvalidArgumentError
from tiered_kv.demo import _naive, run_from_cli
from tiered_kv.demo._measure import COLD, DRAM, LIMIT, STORED, TURNS
from tiered_kv.demo._prompt import Prompts, read_document
from tiered_kv.demo._report import make_report, print_table
from tiered_kv.demo._runs import Run
from tiered_kv.demo.restarted import NAIVE, NVME, OTHER

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
WORDS = [f"w{number}" for number in range(tiny_models.VOCABULARY - 3)]
# The template's words are unknown to the tokenizer, so each of them is one token as well.
DOCUMENT = " ".join(WORDS[number * 7 % len(WORDS)] for number in range(300))


def tokenizer() -> Any:
    vocabulary = {token: number for number, token in enumerate(SPECIAL.values())}
    vocabulary |= {word: 3 + number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, SPECIAL["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Puts back the number of threads, which the demo sets for the process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    tiny_models.llama().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_whole_demo(tmp_path: Path, model_directory: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT, encoding="utf-8")
    report_path, plot_path = tmp_path / "out" / "demo.json", tmp_path / "out" / "demo.png"
    code = run_from_cli(
        model=str(model_directory),
        document=document,
        store_dir=tmp_path / "store",
        json=report_path,
        plot=plot_path,
        repeats=2,
        threads=1,
        dram_capacity="64MiB",
        nvme_capacity="256MiB",
        max_new_tokens=6,
    )
    assert code == 0
    report = json.loads(report_path.read_text(encoding="utf-8"))
    assert report["identical"] is True
    rows = {row["turn"]: row for row in report["rows"]}
    assert tuple(rows) == TURNS
    reused = report["facts"]["document_tokens"] // 32 * 32
    assert reused >= 288
    sources = {
        COLD: "none",
        STORED: "none",
        DRAM: "dram",
        LIMIT: "model",
        NVME: "nvme",
        OTHER: "dram",
        NAIVE: "file",
    }
    for turn, source in sources.items():
        row = rows[turn]
        assert row["source"] == source
        assert row["identical"] is True
        assert row["reused_tokens"] == (0 if source == "none" else reused)
        assert row["computed_tokens"] == row["prompt_tokens"] - row["reused_tokens"]
        assert row["ttft_min_s"] <= row["ttft_s"] <= row["ttft_max_s"]
        assert row["runs"] == {STORED: 1, DRAM: 4, LIMIT: 4}.get(turn, 2)
    restored = reused // 32 * report["facts"]["block_bytes"]
    assert rows[NVME]["source_bytes"] == {"nvme": restored}
    if os.major(tmp_path.stat().st_dev) != 0:  # not a file system in memory
        assert rows[NVME]["device_bytes"] >= restored
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".store-*"))


def _runs(*, dram: list[int]) -> list[Run]:
    def run(turn: str, tokens: list[int], ttft_s: float, reused: int) -> Run:
        return Run(turn, "q", tokens, 100, reused, ttft_s)

    return [
        run(COLD, [1, 2], 4.0, 0),
        run(STORED, [1, 2], 3.0, 0),
        run(DRAM, [1, 2], 0.3, 96),
        run(DRAM, dram, 0.1, 96),
        run(DRAM, [1, 2], 0.2, 96),
        run(LIMIT, [1, 2], 0.1, 96),
    ]


def _report(runs: list[Run]) -> Any:
    return make_report(
        runs,
        cold=(COLD, STORED),
        limit=LIMIT,
        facts={"document_tokens": 100, "threads": 1, "repeats": 3},
        process={"import_s": 1.0, "model_load_s": 1.0, "open_s": 0.1},
        restarted={"import_s": 1.0, "model_load_s": 1.0},
        answer_text=str,
    )


def test_rows_are_medians_and_speed_is_against_the_faster_cold_way() -> None:
    report = _report(_runs(dram=[1, 2]))
    row = next(row for row in report.rows if row.turn == DRAM)
    assert (row.ttft_s, row.ttft_min_s, row.ttft_max_s, row.runs) == (0.2, 0.1, 0.3, 3)
    assert row.speedup == pytest.approx(15)
    assert report.cold_s == 3.0
    assert report.identical


def test_one_answer_that_differs_is_reported() -> None:
    report = _report(_runs(dram=[1, 3]))
    assert not report.identical
    assert [row.turn for row in report.rows if not row.identical] == [DRAM]


@pytest.mark.parametrize(("width", "columns"), [(80, 6), (140, 10)])
def test_the_table_fits_and_loses_no_text(width: int, columns: int) -> None:
    sizes: dict[str, Any] = {
        "source_bytes": {"nvme": 186 << 20},
        "device_bytes": 186 << 20,
        "open_s": 12.5,
    }
    hits = [Run(turn, "q", [1, 2], 4257, 4224, 12.5, **sizes) for turn in (NVME, OTHER, NAIVE)]
    report = _report([*_runs(dram=[1, 2]), *hits])
    text = io.StringIO()
    print_table(report, Console(file=text, width=width, force_terminal=True, color_system=None))
    lines = text.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "…" not in text.getvalue()
    head = next(line for line in lines if "turn" in line)
    assert len([name for name in re.split(r" {2,}", head.strip()) if name]) == columns
    assert all(any(row.turn in line for line in lines) for row in report.rows)


def test_a_merge_never_crosses_from_the_document_into_the_question() -> None:
    prompts = Prompts(tokenizer(), DOCUMENT)
    one, other = prompts.segments("w1 w2"), prompts.segments("w3")
    assert one[0] == other[0]
    assert len(one[0]) == prompts.document_tokens
    assert one[1] != other[1]


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe\x00"])
def test_an_unusable_document_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "document.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"document: .*give"):
        read_document(path)


def test_the_naive_file_is_private_and_restores_the_same_tensors(tmp_path: Path) -> None:
    layers = [(torch.rand(1, 2, 8, 4), torch.rand(1, 2, 8, 4)) for _ in range(3)]
    path = tmp_path / "naive.pt"
    _naive.save(layers, 8, path)
    assert path.stat().st_mode & 0o777 == 0o600
    saved = torch.load(path, weights_only=True)["layers"]
    assert all(torch.equal(a, b) for a, b in zip(saved, sum(layers, ()), strict=True))
