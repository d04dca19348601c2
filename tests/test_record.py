"""What an engine was asked, as a trace: `engines/_record.py`, without an engine."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from test_engine_vllm_http import shown
from tiered_kv import KEY_BYTES, ConfigError, RequestContext, cli, replay
from tiered_kv.cli.exits import ExitCode
from tiered_kv.engines import _record
from tiered_kv.engines._record import Recorder

TOKENS = 16


def keys(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(8, "little") * (KEY_BYTES // 8) for block in blocks)


def lines(recorder: Recorder) -> list[dict[str, Any]]:
    recorder.close()
    return [json.loads(line) for line in recorder.path.read_text().splitlines()]


def test_a_trace_has_the_requests_in_the_order_of_arrival(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traces", "dp0", TOKENS)
    chat = RequestContext(session="s", kind="chat")
    recorder.begin("slow", chat, 40, keys(1, 2))
    recorder.begin("fast", RequestContext(), 33, keys(1, 2))
    recorder.begin("slow", chat, 40, keys(1, 2))  # as after a preemption
    recorder.end("fast", 33, keys(1, 2))
    recorder.end("slow", 60, keys(1, 2, 3))
    recorder.end("nobody", 60, keys(7))
    recorder.begin("next", RequestContext(session="s"), 70, keys(1, 2, 3, 4))
    first, second, third = lines(recorder)
    stamps = [one.pop("timestamp") for one in (first, second, third)]
    assert stamps == sorted(stamps)
    assert first == {
        "session_id": "s",
        "type": "chat",
        "input_length": 40,
        "output_length": 20,
        "block_size": TOKENS,
        "hash_runs": [[1, 1], [2, 1]],
        "out_hash_runs": [[3, 1]],
    }
    assert (second["input_length"], second["output_length"]) == (33, 0)
    assert "session_id" not in second
    # It was still answered when the engine was closed.
    assert (third["hash_runs"], third["output_length"]) == ([[1, 1], [2, 1], [3, 1], [4, 1]], 0)


def test_the_trace_is_one_that_replay_reads(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "dp0", TOKENS)
    for turn in range(1, 5):
        blocks = keys(*range(100, 100 + 2 * turn))
        context = RequestContext(session="s" * 400, kind="\N{SNOWMAN}" * 256)
        recorder.begin(f"r{turn}", context, 2 * turn * TOKENS, blocks)
        recorder.end(f"r{turn}", 2 * turn * TOKENS + TOKENS, blocks + keys(1000 + turn))
    recorder.close()
    found = replay.replay(replay.read(recorder.path), [100], ["lru"])
    assert (found["requests"], found["block_size"]) == (4, TOKENS)
    assert (found["block_accesses"], found["unique_blocks"]) == (2 + 4 + 6 + 8, 8)
    assert found["ceiling_pct"] == pytest.approx(100 * (2 + 4 + 6) / 20)


def test_the_commands_of_the_page_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, "dp0", TOKENS)
    for number in range(20):
        recorder.begin(str(number), RequestContext(session="secret"), 35, keys(number % 5, 77))
        recorder.end(str(number), 35, keys(number % 5, 77))
    recorder.close()
    monkeypatch.chdir(tmp_path)
    commands = [one for one in shown("tiered-kv") if "kv-traces" in one]
    assert len(commands) == 2
    for command in commands:
        told = re.sub(r"/var/log/kv-traces/\S+", str(recorder.path), command)
        assert cli.main(shlex.split(told)[1:]) == ExitCode.OK
    capsys.readouterr()
    shared = gzip.decompress((tmp_path / "shared.jsonl.gz").read_bytes())
    assert shared.count(b"\n") == 20
    assert b"secret" not in shared
    assert b'"hash_runs":[[0,2]]' in shared


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traces", "dp0", TOKENS)
    recorder.close()
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorder.path.parent.stat().st_mode) == 0o700


def test_one_that_goes_on_and_on_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_record, "_MOST_WAITING", 3)
    recorder = Recorder(tmp_path, "dp0", TOKENS)
    recorder.begin("endless", RequestContext(), 16, keys(1))
    for number in range(5):
        recorder.begin(str(number), RequestContext(), 16, keys(2))
        recorder.end(str(number), 17, keys(2))
    recorder.end("endless", 99, keys(1, 3))
    found = lines(recorder)
    assert [one["output_length"] for one in found] == [0, 1, 1, 1, 1, 1]
    assert recorder.lost == 0


@pytest.mark.parametrize("short", [True, False])
def test_a_full_drive_ends_the_trace_behind_a_whole_line(
    short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    recorder = Recorder(tmp_path, "dp0", TOKENS)

    def full(file: int, line: bytes) -> int:
        if b'"input_length":16,' in line:
            return write(file, line)
        if short:
            return write(file, line[:-5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for number, tokens in enumerate([16, 17, 18]):
        recorder.begin(str(number), RequestContext(), tokens, keys(1))
        recorder.end(str(number), tokens, keys(1))
    assert len(lines(recorder)) == 1
    assert recorder.lost == 2
    assert recorder.fault is not None
    assert "full" in recorder.fault or "space" in recorder.fault


def test_a_directory_in_which_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"`record` is .*file"):
        Recorder(tmp_path / "file", "dp0", TOKENS)
