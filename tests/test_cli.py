"""The command line: exit statuses, one-line errors, JSON on stdout, lazy imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_kv import cli
from tiered_kv.cli import demo as cli_demo
from tiered_kv.cli import exits
from tiered_kv.cli.app import app
from tiered_kv.cli.exits import ExitCode

COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


def _run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiered_kv", *args]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def _one_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("error: "), text
    return lines[0]


def test_help_names_every_command_and_status() -> None:
    run = _run("--help")
    assert run.returncode == ExitCode.OK
    assert {"demo", "doctor", "info", "size"} <= set(COMMANDS)
    for word in [*COMMANDS, "--install-completion", "Exit status"]:
        assert word in run.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from tiered_kv.cli import main; main(['--help']); main(['demo', '--help']);"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stderr.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json(command: str) -> None:
    run = _run(command, "--help")
    assert run.returncode == ExitCode.OK
    assert "--json" in run.stdout


def test_the_version_is_that_of_the_core() -> None:
    from tiered_kv import _core

    assert _run("--version").stdout == f"tiered-kv {_core.__version__}\n"


def test_info_as_json_is_one_document() -> None:
    run = _run("info", "--json")
    document = json.loads(run.stdout)
    assert run.stderr == ""
    assert {"version", "format_version", "python", "platform", "default_config"} <= set(document)


def test_info_for_people() -> None:
    run = _run("info")
    assert run.returncode == ExitCode.OK
    assert "version" in run.stdout


@pytest.mark.parametrize(
    "args",
    [["nonsense"], ["info", "--nonsense"], ["demo", "--repeats", "0"], ["demo", "--seed"], []],
)
def test_wrong_usage(args: list[str]) -> None:
    run = _run(*args)
    assert run.returncode == ExitCode.USAGE
    assert run.stdout == ""
    if args:
        _one_line(run.stderr)


def test_a_closed_pipe_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "tiered_kv", "info", "--json"],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    assert run.returncode == ExitCode.PIPE_CLOSED
    assert run.stderr == b""


class _ConfigError(Exception):
    kind = "config"


class InUseError(Exception):
    """Named as a kind without a status of its own."""


class InvalidArgumentError(Exception):
    """Named as a kind with one."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (_ConfigError(), ExitCode.USAGE),
        (InvalidArgumentError(), ExitCode.USAGE),
        (InUseError(), ExitCode.STORE),
    ],
)
def test_store_errors_end_by_their_kind(error: Exception, code: ExitCode) -> None:
    assert exits.store_error_code(error) is code


def _fake_demo(
    monkeypatch: pytest.MonkeyPatch, run_from_cli: Callable[..., int]
) -> dict[str, object]:
    """Puts `run_from_cli` where the command looks; returns what it was called with."""
    seen: dict[str, object] = {}

    def recording(**options: object) -> int:
        seen.update(options)
        return run_from_cli(**options)

    module = types.ModuleType("tiered_kv.demo")
    monkeypatch.setattr(module, "run_from_cli", recording, raising=False)
    monkeypatch.setitem(sys.modules, "tiered_kv.demo", module)
    return seen


def test_demo_forwards_its_options_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _fake_demo(monkeypatch, lambda **_: 1)
    args = ["demo", "--model", "m", "--json", "r.json", "--repeats", "2", "--threads", "1"]
    assert cli.main(args) == ExitCode.FAILED
    assert seen["json"] == Path("r.json")
    assert (seen["model"], seen["repeats"], seen["threads"]) == ("m", 2, 1)
    assert seen["document"] is None


def test_demo_json_keeps_stdout_for_the_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_from_cli(*, json: Path, **_: object) -> int:
        os.write(1, b"from a child process\n")
        json.write_text('{"rows": []}', encoding="utf-8")
        return 0

    _fake_demo(monkeypatch, run_from_cli)
    assert cli.main(["demo", "--json"]) == ExitCode.OK
    out, err = capfd.readouterr()
    assert json.loads(out) == {"rows": []}
    assert "from a child process" in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["demo", "--json"], ["demo", "--json=-"]),
        (["demo", "--json", "--repeats", "1"], ["demo", "--json=-", "--repeats", "1"]),
        (["demo", "--json", "a"], ["demo", "--json", "a"]),
        (["info", "--json"], ["info", "--json"]),
    ],
)
def test_bare_json(args: list[str], expected: list[str]) -> None:
    assert cli_demo.bare_json(args) == expected


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ModuleNotFoundError("no", name="torch.nn"), ExitCode.ENVIRONMENT, "tiered-kv[torch]"),
        (ModuleNotFoundError("no", name="own"), ExitCode.INTERNAL, "TIERED_KV_TRACEBACK"),
        (OSError(28, "No space left on device", "f"), ExitCode.STORE, "No space"),
        (ValueError("two\nlines"), ExitCode.INTERNAL, "two lines"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
    ],
)
def test_failures_end_in_one_line(
    error: BaseException,
    code: ExitCode,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_from_cli(**_: object) -> int:
        raise error

    _fake_demo(monkeypatch, run_from_cli)
    monkeypatch.delenv("TIERED_KV_TRACEBACK", raising=False)
    assert cli.main(["demo"]) == code
    assert words in _one_line(capsys.readouterr().err)


def test_the_traceback_is_there_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_from_cli(**_: object) -> int:
        raise ValueError("planted")

    _fake_demo(monkeypatch, run_from_cli)
    monkeypatch.setenv("TIERED_KV_TRACEBACK", "1")
    assert cli.main(["demo"]) == ExitCode.INTERNAL
    assert "Traceback" in capsys.readouterr().err


def test_a_store_error_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered_kv import errors

    monkeypatch.setattr(errors, "TieredKvError", _ConfigError)
    assert exits.error_status(_ConfigError("`a` is bad")) == (ExitCode.USAGE, "`a` is bad")
    assert exits.error_status(InUseError("x"))[0] is ExitCode.INTERNAL


def test_names_neither_break_lines_nor_drive_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model called "[/x]" ended `tiered-kv ls`: names were taken as markup."""
    from tiered_kv.cli import output
    from tiered_kv.errors import TieredKvError

    console = output.people(as_json=False)
    console.print("[/x] :smile: \x1b[31m\ra")
    output.print_lines(["one\ntwo", "three\x1b[2J"])
    output.error_line("a  fault\nwith \x1b[2J")
    printed = capsys.readouterr()
    assert printed.out == "[/x] :smile: \\x1b[31m\\ra\none\\ntwo\nthree\\x1b[2J\n"
    assert printed.err == "error: a fault with \\x1b[2J\n"
    assert str(TieredKvError("`a\nb\x1b` is unknown")) == r"`a\nb\x1b` is unknown"
