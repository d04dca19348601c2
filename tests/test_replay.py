"""`tiered_kv.replay`, `tiered-kv replay` and `tiered-kv trace`."""

from __future__ import annotations

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from test_imports import loaded
from tiered_kv import cli, replay
from tiered_kv.cli.exits import ExitCode
from tiered_kv.errors import InvalidArgumentError, NotFoundError, UnsupportedError

FIGURES = Path(__file__).resolve().parent / "data" / "replay_figures.json"
HEAD = ["trace", "block_size", "requests", "block_accesses", "unique_blocks", "ceiling_pct"]
RESULT = [
    *("capacity_pct", "capacity_blocks", "policy", "seed"),
    *("hit_pct", "cost_saved_pct", "ns_per_block"),
]
LINE = '{"timestamp": 1, "block_size": 16, "input_length": 40, "hash_runs": [[0, 3]]}'


@pytest.fixture(scope="module")
def chat() -> replay.Trace:
    return replay.generate("chat", 800, 7)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_the_figures_are_those_of_the_library() -> None:
    """The Rust library is held to the same file."""
    wanted = json.loads(FIGURES.read_text())
    trace = replay.generate("chat", wanted["requests"], 7)
    capacities = list(dict.fromkeys(result["capacity_pct"] for result in wanted["results"]))
    found = replay.replay(trace, capacities, ["all"], seeds=2, threads=2)
    assert list(found) == [*HEAD, "results"]
    assert len(found["results"]) == len(wanted["results"]) > 2 * len(replay.policies()["all"])
    for one, other in zip(found["results"], wanted["results"], strict=True):
        assert list(one) == RESULT
        assert one.pop("ns_per_block") > 0
        other.pop("ns_per_block")
        assert one == pytest.approx(other), other
    assert {key: found[key] for key in HEAD} == pytest.approx({key: wanted[key] for key in HEAD})


def test_a_trace_says_what_it_has(chat: replay.Trace, tmp_path: Path) -> None:
    assert (chat.name, chat.format, chat.requests, chat.block_size) == ("chat", "runs", 800, 16)
    assert chat.unchained == 0
    assert chat.has_outputs
    assert 0 < chat.ceiling_pct(False) < chat.ceiling_pct(True) < 100
    assert chat.seconds > 0
    assert min(chat.tokens()) > 0
    path = tmp_path / "chat.jsonl.gz"
    chat.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    again = replay.read(path)
    names = ["name", "requests", "sessions", "block_accesses", "unique_blocks", "seconds"]
    assert [getattr(again, name) for name in names] == [getattr(chat, name) for name in names]
    plain = tmp_path / "plain.jsonl"
    again.write(plain)
    assert plain.read_bytes() == gzip.decompress(path.read_bytes())
    lines = [json.loads(line) for line in plain.read_text().splitlines()]
    turns: dict[str, list[int]] = {}
    for line in lines:
        turns.setdefault(line["session_id"], []).append(line["turn"])
        if line["parent_id"] >= 0:
            assert lines[line["parent_id"]]["session_id"] == line["session_id"]
    assert all(each == list(range(1, len(each) + 1)) for each in turns.values())


def test_without_labels_sessions_are_inferred(chat: replay.Trace) -> None:
    told, untold = (
        replay.replay(chat, [3], ["beta-draw-256", "lru"], labels=labels)["results"]
        for labels in (True, False)
    )
    assert told[1]["hit_pct"] == untold[1]["hit_pct"]
    assert told[0]["hit_pct"] != untold[0]["hit_pct"]
    assert told[0]["hit_pct"] == pytest.approx(untold[0]["hit_pct"], abs=2)


def test_outputs_raise_the_ceiling(chat: replay.Trace) -> None:
    with_outputs = replay.replay(chat, [50], ["min"], outputs=True)
    without = replay.replay(chat, [50], ["min"])
    assert with_outputs["ceiling_pct"] > without["ceiling_pct"]
    assert with_outputs["results"][0]["hit_pct"] > without["results"][0]["hit_pct"]


@pytest.mark.parametrize("pct", [0, -1, float("nan"), 200, float("inf"), "many", None])
def test_a_capacity_is_a_percentage(chat: replay.Trace, pct: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"`capacities` is .*above 0 and at most 100"):
        replay.replay(chat, [1, pct], ["lru"])
    with pytest.raises(InvalidArgumentError, match="`capacity` is"):
        replay.posterior(chat, pct)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacities": []}, "`capacities`"),
        ({"capacities": 5}, "`capacities`"),
        ({"capacities": [1] * 1001}, "`capacities`"),
        ({"policies": ["lru", "clairvoyant"]}, "`clairvoyant` is none; there are all, .*sieve"),
        ({"policies": []}, "`policies` is empty"),
        ({"seeds": 0}, "`seeds` is 0: give an integer from 1 to 1000"),
        ({"seeds": True + 1.5}, "`seeds`"),
        ({"threads": 0}, "`threads` is 0"),
        ({"threads": 10**9}, "`threads`"),
    ],
)
def test_wrong_arguments_name_the_field(
    chat: replay.Trace, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replay.replay(chat, **{"capacities": [1], "policies": ["lru"], **arguments})


def test_made_up_traces_have_bounds() -> None:
    assert {"chat", "agents", "scan"} <= set(replay.kinds())
    for arguments, field in [
        (("music", 10, 0), "kind"),
        (("chat", 0, 0), "requests"),
        (("chat", 10**7, 0), "requests"),
        (("chat", 10, -1), "seed"),
    ]:
        with pytest.raises(InvalidArgumentError, match=f"`{field}` is"):
            replay.generate(*arguments)


def test_no_name_makes_the_posterior_learn_otherwise(chat: replay.Trace) -> None:
    with pytest.raises(InvalidArgumentError, match='`policy` is "lru": only beta'):
        replay.posterior(chat, policy="lru")


def test_a_posterior_has_sixteen_pairs_with_evidence(chat: replay.Trace) -> None:
    found = replay.posterior(chat, 5)
    assert found["policy"] == "beta"
    assert found["capacity_blocks"] == chat.unique_blocks * 5 // 100
    assert len({(pair["block_type"], pair["transition"]) for pair in found["pairs"]}) == 16
    ages = found["age_starts_s"]
    assert ages == sorted(ages)
    for pair in found["pairs"]:
        assert 0 <= pair["low"] <= pair["mean"] <= pair["high"] <= 1
        assert len(pair["hazard"]) == len(ages) == 56
        assert 0 <= pair["reuses"] <= pair["lives"]
    seen = [pair for pair in found["pairs"] if pair["lives"] > 50]
    unseen = [pair for pair in found["pairs"] if pair["lives"] == 0]
    assert min(pair["high"] - pair["low"] for pair in unseen) > 0.8
    assert max(pair["high"] - pair["low"] for pair in seen) < 0.3


def test_progress_tells_how_far_it_is_and_may_end_it() -> None:
    trace = replay.generate("agents", 3000, 1)
    heard: list[int] = []

    def stop(done: int) -> None:
        heard.append(done)
        if done:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        replay.replay(trace, seeds=1000, threads=2, progress=stop)
    assert 0 < heard[-1] < 1000 * trace.requests


def test_other_threads_run_meanwhile(chat: replay.Trace) -> None:
    ended = threading.Event()

    def work() -> None:
        replay.replay(chat, [1, 2, 5], ["all"], seeds=3, threads=1)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not ended.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert turns > 5


def test_a_signal_interrupts(tmp_path: Path) -> None:
    """The command ends by Ctrl-C while its threads run, and says so in one line."""
    command = [
        *(sys.executable, "-m", "tiered_kv", "replay", "generate:agents:20000"),
        *("--seeds", "1000", "--json", str(tmp_path / "never.json")),
    ]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    threads = Path(f"/proc/{run.pid}/task")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(threads.iterdir())) < 3:
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (ExitCode.INTERRUPTED, "", "error: interrupted\n")
    assert not (tmp_path / "never.json").exists()


def test_the_command_loads_no_engine() -> None:
    never = {"torch", "transformers", "numpy", "matplotlib", "tokenizers", "typer", "asyncio"}
    code = "from tiered_kv.cli import main\nassert main(['replay', 'generate:zipf:20']) == 0"
    assert loaded(code) & never == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no request in it"),
        (b"hello", "line 1: not a request of a known format"),
        (b"\x00\xff" * 100, "line 1: not a request"),
        (b'{"a": 1}', "line 1: not a request of a known format .*timestamp"),
        (b'{"timestamp": 1}', "hash_runs, hash_ids and chunk_hashes is wanted"),
        (
            LINE.encode() + b'\n{"timestamp": 0, "block_size": 16, "hash_runs": []}',
            "line 2: .*sort",
        ),
        (b"\x1f\x8b\x08\x00garbage", "line 1"),
        (b"{" * 10_000_000, "line 1: not a request"),
        (b"x" * 10_000_000, "line 1: not a request"),
        (b'{"timestamp": 1, "type": "' + b"x" * 10_000_000 + b'", "hash_runs": []}', "type: more"),
        (b'{"timestamp": 1, "hash_ids": [' + b"1," * 5_000_000 + b"1]}", "blocks in a request"),
        (b'{"timestamp": 1, "hash_runs": [[0, 4294967295]]}', "blocks in a request"),
    ],
    ids=range(12),
)
def test_what_is_no_trace_is_one_line(
    text: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text)
    with pytest.raises(InvalidArgumentError, match=f"`trace` .*bad.jsonl: .*{message}"):
        replay.read(path)
    assert cli.main(["replay", str(path)]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert len(printed.err) < 1000


def test_a_file_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFoundError, match=r"`trace` .*absent: it is not there: check the path"):
        replay.read(tmp_path / "absent")
    for args in (["replay", "absent"], ["trace", "info", str(tmp_path)], ["replay", "a\nb"]):
        assert cli.main(args) == ExitCode.STORE
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert cli.main(["trace", "convert", "generate:zipf:10", str(tmp_path)]) == ExitCode.STORE


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--capacity", "0"], "`capacity` is '0': give percentages above 0"),
        (["--capacity", "-3"], "`capacity` is '-3'"),
        (["--capacity", "nan"], "`capacity` is 'nan'"),
        (["--capacity", "1,200"], "`capacity` is '200'"),
        (["--capacity", "1,,2"], "`capacity` is ''"),
        (["--policies", "lru,oracle"], "`policies` is 'oracle': give one or more of all, ablation"),
        (["--seeds", "0"], "`seeds` is 0"),
        (["--seeds", "x"], "--seeds"),
        (["--threads", "-1"], "`threads` is -1"),
        (["--plot", "picture.jpeg"], "`plot` is 'picture.jpeg': give a path that ends in .png"),
        (["--json", "absent/found.json"], "`json` is 'absent/found.json': give a file in a"),
        (["--posterior", "--capacity", "1,2"], "`posterior`"),
        (["--posterior", "--policies", "lru"], "`policy`"),
        (["--fast"], "--fast"),
    ],
)
def test_wrong_options_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in args:
        pytest.importorskip("matplotlib")
    assert cli.main(["replay", "generate:zipf:50", *args]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)


@pytest.mark.parametrize(
    "spec", ["generate:", "generate:chat:x", "generate:chat:9:9:9", "generate:no"]
)
def test_a_trace_that_cannot_be_made_is_one_line(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "info", spec]) == ExitCode.USAGE
    assert "give" in capsys.readouterr().err


def test_the_command_shows_ceiling_and_optimum_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    args = ["replay", "generate:chat:500:1", "--capacity", "1,5", "--policies", "beta,lru"]
    assert cli.main([*args, "--seeds", "3", "--outputs", "--no-labels", "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    found = json.loads(path.read_text())
    assert list(found) == [*HEAD, "results"]
    assert all(list(result) == RESULT for result in found["results"])
    ran = [result["policy"] for result in found["results"]]
    assert ran == ["beta"] * 6 + ["lru"] * 2 + ["min"] * 2
    assert f"ceiling {found['ceiling_pct']:.1f} %" in out[0]
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in out if line[:1] == "|"}
    assert {"hit %", "beta", "lru", "min", "ceiling"} <= set(rows)
    of_beta = [result for result in found["results"] if result["policy"] == "beta"]
    at_five = [result["hit_pct"] for result in of_beta if result["capacity_pct"] == 5]
    assert len(at_five) == 3
    assert float(rows["beta"][1]) == pytest.approx(sum(at_five) / 3, abs=0.006)
    assert cli.main([*args, "--json", "-"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [*HEAD, "results"]


def test_the_posterior_is_a_table_and_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    assert cli.main(["replay", "generate:chat:500", "--posterior", "--json", str(path)]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    found = json.loads(path.read_text())
    assert len(rows) == 18
    for row, pair in zip(rows[2:], found["pairs"], strict=True):
        assert [row[1].strip(), row[2].strip()] == [pair["block_type"], pair["transition"]]
        assert float(row[3]) == pytest.approx(pair["mean"], abs=6e-4)


@pytest.mark.parametrize("mode", [[], ["--posterior"]])
@pytest.mark.parametrize("end", ["png", "svg"])
def test_plots_are_drawn(mode: list[str], end: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{end}"
    policies = [] if mode else ["--policies", "lru,beta"]
    assert cli.main(["replay", "generate:chat:300", *mode, *policies, "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000
    assert path.read_bytes().startswith(b"\x89PNG" if end == "png" else b"<?xml")


def test_traces_are_described_converted_and_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", "generate", "scan", "made.jsonl.gz", "--requests", "300"]) == 0
    mooncake = '{"timestamp": %d, "input_length": 1000, "output_length": 5, "hash_ids": [0, %d]}'
    write(tmp_path / "moon.jsonl", mooncake % (0, 7), mooncake % (3000, 7), mooncake % (6000, 9))
    capsys.readouterr()
    assert cli.main(["trace", "info", "moon.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"format": "mooncake", "requests": 3, "sessions": 0, "seconds": 6.0, "block_size": 512}
    assert {key: found[key] for key in wanted} == wanted
    assert (found["block_accesses"], found["unique_blocks"]) == (6, 3)
    assert found["ceiling_pct"] == pytest.approx(50)
    assert cli.main(["trace", "convert", "moon.jsonl", "out.jsonl"]) == 0
    assert "out.jsonl: 3 requests of moon (mooncake)" in capsys.readouterr().out
    assert cli.main(["trace", "info", "out.jsonl"]) == 0
    text = capsys.readouterr().out
    assert "out (runs)" in text
    assert "sessions:  not told" in text
    assert "50.0 %" in text
    assert cli.main(["trace", "generate", "--list"]) == 0
    assert "flip: " in capsys.readouterr().out
    assert cli.main(["trace", "generate", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(replay.kinds())
    assert cli.main(["trace", "generate", "loop", "l.gz", "--requests", "9", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["requests"], made["format"], made["written"]) == (9, "generated", "l.gz")
    for args in ([], ["generate"], ["sing"], ["info"], ["convert", "moon.jsonl"]):
        assert cli.main(["trace", *args]) == ExitCode.USAGE
    assert cli.main(["trace", "--help"]) == 0


def test_chains_that_are_none_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"timestamp": %d, "input_length": 9, "output_length": 5, "hash_ids": [%s]}'
    path = write(tmp_path / "t.jsonl", line % (0, "1, 2"), line % (1, "2, 1"))
    assert cli.main(["replay", str(path), "--capacity", "100", "--policies", "lru"]) == 0
    assert "warning: 2 blocks came behind another one" in capsys.readouterr().err


CONVERSATIONS = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "a b c d e"},
            {"from": "gpt", "value": "f g h"},
            {"from": "human", "value": "i"},
            {"from": "gpt", "value": "j k"},
        ],
    },
    {"messages": [{"role": "user", "content": "a b c d"}, {"role": "assistant", "content": "z"}]},
]


def word_tokenizer(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate("abcdefghijklmnopqrstuvwxyz")}
    model = tokenizers.models.WordLevel(words, unk_token="z")  # noqa: S106 - a word of these
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def test_conversations_are_tokenised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "sharegpt.json", json.dumps(CONVERSATIONS))
    tokenizer = str(word_tokenizer(tmp_path / "tokenizer.json"))
    trace = replay.read(path, tokenizer=tokenizer, block_size=2)
    assert (trace.requests, trace.sessions, trace.block_size) == (3, 2, 2)
    # abcde|fgh, abcdefghi|jk, abcd|z: full blocks of the prompts are 2, 4 and 2.
    assert (trace.block_accesses, trace.unique_blocks) == (8, 4)
    assert trace.tokens() == (5 + 9 + 4, 3 + 2 + 1)
    assert trace.ceiling_pct(True) > trace.ceiling_pct(False) == 50
    args = [str(path), "--tokenizer", tokenizer, "--block-size", "2"]
    assert cli.main(["trace", "info", *args]) == 0
    assert "sharegpt (sharegpt)" in capsys.readouterr().out
    assert cli.main(["replay", *args, "--capacity", "50", "--policies", "lru"]) == 0


@pytest.mark.parametrize(
    ("text", "tokenizer", "message"),
    [
        (json.dumps(CONVERSATIONS), None, "`tokenizer` is missing: .*tokenizer.json"),
        (json.dumps(CONVERSATIONS), "bad", "`tokenizer` is 'bad': it cannot be loaded"),
        ("[", "good", "no JSON"),
        ("[]", "good", "no conversation with an answer"),
        ("[1]", "good", "entry 0 has no list of `conversations`"),
        ('[{"conversations": [1]}]', "good", "a message without `from` and `value`"),
        ("[" * 100_000, "good", "no JSON"),
    ],
)
def test_conversations_that_cannot_be_read_are_one_line(
    text: str, tokenizer: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "sharegpt.json", text)
    if tokenizer is not None:
        word_tokenizer(tmp_path / "good")
        write(tmp_path / "bad", "{}")
    with pytest.raises(InvalidArgumentError, match=message):
        replay.read(path, tokenizer=tokenizer)


def test_the_package_that_tokenises_is_named_where_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = write(tmp_path / "sharegpt.json", json.dumps(CONVERSATIONS))
    with pytest.raises(UnsupportedError, match="needs the package tokenizers: install it with"):
        replay.read(path, tokenizer="x")
    assert cli.main(["trace", "info", str(path), "--tokenizer", "x"]) == ExitCode.ENVIRONMENT
    assert len(capsys.readouterr().err.splitlines()) == 1
