"""`lmcache server` and vLLM on the CPU, in processes of their own, with the store as L2."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import jobs
from serving.model import VOCABULARY
from serving.server import Server
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines import flags

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK = 2 * jobs.BLOCK
PROMPT_CHUNKS = 12
ANSWER = 24


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def lmcache(path: Path, model: Path, log: Path) -> Iterator[int]:
    """LMCache's server with the flag that the command prints; its port."""
    rows = {row["engine"]: row for row in flags.engines(path, "64MiB", "256MiB", model)}
    port = free_port()
    main = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    command = [str(jobs.lmcache_python()), "-c", main, "server"]
    command += ["--l2-adapter", json.dumps(rows["lmcache"]["config"])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(free_port())]
    command += ["--chunk-size", str(CHUNK), "--l1-size-gb", "0.25", "--eviction-policy", "LRU"]
    # On a CPU the engine moves the bytes, through shared memory.
    command += ["--disable-observability", "--supported-transfer-mode", "auto"]
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=jobs.environment(), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + jobs.LIMIT_S
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.5)
        yield port
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()


@contextlib.contextmanager
def vllm(model: Path, port: int, log: Path) -> Iterator[Server]:
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    args = ["--kv-transfer-config", json.dumps(transfer), "--skip-tokenizer-init"]
    server = Server(jobs.lmcache_python(), model, log, args, {"PYTHONHASHSEED": "0"})
    try:
        yield server
    finally:
        server.stop()


Found = tuple[list[int], int]
"""The tokens of an answer, and how many of its prompt LMCache had."""


def asked(path: Path, model: Path, logs: Path, prompt: list[int], chunks: int) -> list[Found]:
    """Both started anew, the prompt asked twice; then they end, when the chunks are stored."""
    with (
        lmcache(path, model, logs / "lmcache.log") as port,
        vllm(model, port, logs / "vllm.log") as server,
    ):
        found: list[Found] = []
        for _ in range(2):
            before = server.external()
            answer = server.complete(prompt, ANSWER)
            found.append((answer.tokens, server.external() - before))
            server.reset()
        deadline = time.monotonic() + jobs.LIMIT_S
        with BlockingStore.attach(path) as store:
            while store.stats()["dram"]["blocks"] + store.stats()["nvme"]["blocks"] < chunks:
                assert time.monotonic() < deadline, (logs / "lmcache.log").read_text()[-4000:]
                time.sleep(0.2)
    return found


def damage(path: Path) -> None:
    """Flips a byte of each page of every segment."""
    for segment in path.glob("segment-*.tkv"):
        content = bytearray(segment.read_bytes())
        content[64::4096] = bytes(byte ^ 1 for byte in content[64::4096])
        segment.write_bytes(content)


def test_vllm_takes_from_the_store_what_it_had_before_a_restart(tmp_path: Path) -> None:
    python = jobs.lmcache_python()
    model = jobs.make("model", python, tmp_path / "model")
    source = random.Random(3)
    prompt = [source.randrange(3, VOCABULARY) for _ in range(PROMPT_CHUNKS * CHUNK + 5)]
    path = tmp_path / "kv"
    (computed, none), (again, from_memory) = asked(path, model, tmp_path, prompt, PROMPT_CHUNKS)
    assert (none, from_memory) == (0, PROMPT_CHUNKS * CHUNK)
    assert again == computed
    first, _ = asked(path, model, tmp_path, prompt, PROMPT_CHUNKS)
    assert first == (computed, PROMPT_CHUNKS * CHUNK)
    damage(path)
    first, _ = asked(path, model, tmp_path, prompt, PROMPT_CHUNKS)
    assert first == (computed, 0)
