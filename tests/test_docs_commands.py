"""The commands that the pages on sizing, planning and replay show run as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from test_sizing_read import PLAIN
from tiered_kv import cli, replay
from tiered_kv.cli.exits import ExitCode

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("sizing.md", "planning.md", "replay.md", "project.md")


def commands(page: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("tiered-kv")]


COMMANDS = [command for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_runs(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "path/to/config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({**PLAIN, "num_attention_heads": 16, "num_key_value_heads": 8}))
    described = re.search(
        r"^```toml\n(.*?)^```", (DOCS / "planning.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert described is not None
    (tmp_path / "node.toml").write_text(described[1])
    replay.generate("chat", 200).write(tmp_path / "requests.jsonl.gz")
    program, *args = shlex.split(command)
    assert program == "tiered-kv"
    assert cli.main(args) == ExitCode.OK
    printed = capsys.readouterr()
    assert printed.out
    assert printed.err == ""
    if "--plot" in args:
        assert (tmp_path / args[args.index("--plot") + 1]).stat().st_size > 1000


def test_the_pages_show_commands() -> None:
    assert len(commands("sizing.md")) >= 2
    assert len(commands("planning.md")) >= 3
    assert len(commands("replay.md")) >= 7
    assert len(commands("project.md")) >= 2


def test_the_fields_of_a_plan_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--node", "six-tiers", "--model", "llama-3-70b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    text = (DOCS / "planning.md").read_text("utf-8").partition("## The document")[2]
    parts = [found, found["load"], found["weights"], found["batch"], found["tiers"][0]]
    for name in {name for part in [*parts, found["figures"][0]] for name in part}:
        assert f"`{name}`" in text, name
