"""The commands of docs/vllm.md: the flag that is printed starts `vllm serve`, and it works."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import jobs
from serving.jobs import BLOCK
from serving.server import Server
from tiered_kv import cli
from tiered_kv.cli.exits import ExitCode
from tiered_kv.engines import flags

DOCS = jobs.ROOT / "docs/vllm.md"
SHOWN = "/mnt/nvme0/kv"
METRICS = "vllm:tiered_kv_"
TIERS = ("dram", "nvme")
PROMPT = list(range(5, 105))
ANSWER = 40


def shown(program: str) -> list[str]:
    """The commands of the page that begin with a word."""
    blocks = re.findall(r"^```\n(.*?)^```", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(program)]


def arguments(command: str, path: Path) -> list[str]:
    """A command of the page, of which the path is another one and the store is small."""
    small = command.replace(SHOWN, str(path)).replace("500GiB", "256MiB")
    return shlex.split(small.replace("16GiB", "64MiB"))[1:]


def test_the_page_shows_the_flag_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = next(line for line in shown("tiered-kv engines") if "--check" not in line)
    assert cli.main(shlex.split(told)[1:]) == ExitCode.OK
    printed = capsys.readouterr().out
    for serve in shown("vllm serve"):
        assert serve.removeprefix("vllm serve MODEL ") in printed
    assert len(shown("vllm serve")) == 2


@pytest.mark.engine
@pytest.mark.slow
def test_the_check_of_the_page_works(python: Path, tmp_path: Path) -> None:
    told = next(line for line in shown("tiered-kv engines") if "--check" in line)
    done = subprocess.run(
        [
            str(python),
            "-c",
            "import sys; from tiered_kv.cli import main; sys.exit(main())",
            *arguments(told, tmp_path / "kv"),
            "--json",
        ],
        env=jobs.environment(),
        timeout=jobs.LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["check"]["verdict"] == "works"
    assert found["check"]["adapters"] == {"vllm": "loads"}
    assert found["check"]["blocks"] > 0
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_check_without_an_engine_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags, "_version", lambda _name: None)
    command = ["engines", "--check", "--path", str(tmp_path), "--nvme", "1GiB", "--json"]
    assert cli.main(command) == ExitCode.FAILED
    found = json.loads(capsys.readouterr().out)["check"]
    assert "no engine is installed" in found["verdict"]
    assert found["blocks"] > 0, "the drive is fine"


@pytest.mark.parametrize(("option", "value"), [("--nvme", "lots"), ("--dram", "0")])
def test_a_flag_that_vllm_would_refuse_is_not_printed(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["engines", "--path", str(tmp_path), option, value]) != ExitCode.OK
    told = capsys.readouterr()
    assert "kv-transfer-config" not in told.out
    assert {"--nvme": "nvme_capacity", "--dram": "dram_capacity"}[option] in told.err


def test_a_check_that_fails_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv").write_text("no directory")
    command = ["engines", "--check", "--path", str(tmp_path / "kv"), "--json"]
    assert cli.main(command) == ExitCode.FAILED
    assert str(tmp_path / "kv") in json.loads(capsys.readouterr().out)["check"]["verdict"]


def started(python: Path, model: Path, path: Path, log: Path) -> Server:
    """A server with the flag as the page shows it."""
    command = next(one for one in shown("vllm serve") if "TieredKVConnector" in one)
    args = arguments(command.replace("serve MODEL", ""), path)
    return Server(python, model, log, [*args, "--skip-tokenizer-init", "--max-model-len", "1024"])


def complete(server: Server) -> list[int]:
    params = {"tiered_kv": {"session": "s", "turn": 1, "tenant": "t"}}
    return server.complete(PROMPT, ANSWER, detokenize=False, kv_transfer_params=params).tokens


def places(server: Server, name: str) -> set[frozenset[int]]:
    """Where the threads of a server may run whose names begin like this."""
    found = set()
    for task in Path("/proc").glob("[0-9]*/task/*"):
        with contextlib.suppress(OSError):  # it has ended
            is_its = os.getsid(int(task.parts[2])) == server.process.pid
            if is_its and (task / "comm").read_text().startswith(name):
                found.add(frozenset(os.sched_getaffinity(int(task.name))))
    return found


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for server in made:
        server.stop()


@pytest.mark.engine
@pytest.mark.slow
def test_the_page_starts_a_server_that_uses_the_store(
    python: Path,
    model: Path,
    tmp_path: Path,
    servers: list[Server],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "kv"
    servers.append(started(python, model, path, tmp_path / "first.log"))
    cold = complete(servers[0])
    assert len(cold) == ANSWER
    assert servers[0].external() == 0
    # vLLM binds what a worker computes with to some processors, on each of which it may spin.
    everywhere = frozenset(os.sched_getaffinity(servers[0].process.pid))
    assert places(servers[0], "tkv-") == {everywhere}
    if len(everywhere) > 1:
        assert any(place < everywhere for place in places(servers[0], "VLLM::Worker"))
    servers[0].reset()
    assert complete(servers[0]) == cold
    whole = len(PROMPT) // BLOCK * BLOCK
    assert servers[0].external() == whole
    counted = {tier: servers[0].metric(f"{METRICS}hits_total", tier=tier) for tier in TIERS}
    assert sum(counted.values()) == whole // BLOCK
    stored = servers[0].metric(f"{METRICS}events_total", event="put_stored")
    assert stored == (len(PROMPT) + ANSWER - 1) // BLOCK
    # The page's way to see into the store of a server that runs.
    (ls,) = shown("tiered-kv ls")
    capsys.readouterr()
    assert cli.main([*arguments(ls, path), "--json"]) == ExitCode.OK
    listed = capsys.readouterr().out
    blocks = (len(PROMPT) + ANSWER - 1) // BLOCK
    assert sum(row["blocks"] for row in json.loads(listed)["namespaces"]) == blocks
    servers.pop().stop()

    servers.append(started(python, model, path, tmp_path / "second.log"))
    assert complete(servers[0]) == cold
    assert servers[0].external() == whole


def started_with_the_tier(python: Path, model: Path, path: Path, log: Path) -> Server:
    """The same with the flag of the tier, as the page changes it for CPUs."""
    command = next(one for one in shown("vllm serve") if "OffloadingConnector" in one)
    on_cpus = re.search(r'`("spec_name": "CpuTieringSpec", [^`]*)`', DOCS.read_text("utf-8"))
    assert on_cpus is not None
    small = command.replace('"spec_name": "TieringOffloadingSpec"', on_cpus[1])
    args = arguments(small.replace("serve MODEL", "").replace(str(16 << 30), str(64 << 20)), path)
    return Server(python, model, log, [*args, "--skip-tokenizer-init", "--max-model-len", "1024"])


@pytest.mark.engine
@pytest.mark.slow
def test_the_page_starts_a_server_that_uses_the_tier(
    python: Path, model: Path, tmp_path: Path, servers: list[Server]
) -> None:
    path, whole = tmp_path / "kv", len(PROMPT) // BLOCK * BLOCK
    servers.append(started_with_the_tier(python, model, path, tmp_path / "first.log"))
    cold = complete(servers[0])
    servers.pop().stop()

    servers.append(started_with_the_tier(python, model, path, tmp_path / "second.log"))
    assert complete(servers[0]) == cold
    assert servers[0].external() == whole
    time.sleep(1.5)  # what is counted is told in the step after
    servers[0].complete(PROMPT[:BLOCK], 1, detokenize=False)
    assert servers[0].metric(f"{METRICS}hits_total", tier="nvme") == whole // BLOCK
    # Deleted for good, of this process and the next one.
    servers[0].reset(external=True)
    before = servers[0].external()
    assert complete(servers[0]) == cold
    assert servers[0].external() == before
    servers.pop().stop()

    servers.append(started_with_the_tier(python, model, path, tmp_path / "third.log"))
    assert complete(servers[0]) == cold
    assert servers[0].external() == 0
