"""LMCache's own classes around the adapters, and the commands of docs/lmcache.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import test_engine_lmcache as native
from serving import jobs
from tiered_kv import cli, replay
from tiered_kv.cli.exits import ExitCode
from tiered_kv.engines.lmcache import TieredKVNativePlugin

engine = pytest.mark.engine
slow = pytest.mark.slow

DOCS = jobs.ROOT / "docs/lmcache.md"
SHOWN = "/mnt/nvme0/kv"
CHECKS = jobs.ROOT / "tests/serving/lmcache_checks.py"
N = 8
OBJECT_BYTES = 8192
MODEL = "/models/MODEL"


def ran(command: list[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    """A process in LMCache's environment."""
    python = jobs.lmcache_python()
    done = subprocess.run(
        [str(python), *command],
        env=jobs.environment(),
        timeout=jobs.LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def check(name: str, path: Path) -> tuple[dict[str, Any], str]:
    done = ran([str(CHECKS), name, str(path / "kv")])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


def shown(program: str) -> list[str]:
    """The commands of the page that begin with a word."""
    blocks = re.findall(r"^```\n(.*?)^```", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(program)]


def model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return directory


def here(command: str, path: Path) -> list[str]:
    """A command of the page, of which the paths are others and the store is small."""
    small = command.replace(SHOWN, str(path / "kv")).replace(MODEL, str(path / "MODEL"))
    return shlex.split(small.replace("500GiB", "256MiB").replace("16GiB", "64MiB"))


@engine
@slow
def test_the_l2_adapter_keeps_apart_what_lmcache_does_not(tmp_path: Path) -> None:
    found, _ = check("l2_adapter", tmp_path)
    used = found.pop("used_after_restart")
    assert used >= (N - 3) * OBJECT_BYTES
    assert found == {
        "distinct_fds": 3,
        "before": 0,
        "stored": True,
        "looked_up": N,
        "loaded": N,
        "same": True,
        "as_float16": 0,
        "other_salt": 0,
        "listed": [5, N - 5, N, None],
        "of_another_model": 0,
        "by_salt": {"": N * OBJECT_BYTES},
        "after_delete": N - 3,
        "healthy": True,
        "told": [N, N, 3],
        "after_restart": N - 3,
        "loaded_after_restart": N - 3,
        "of_other_weights": 0,
    }


@engine
@slow
def test_lmcache_hears_of_what_the_store_evicts(tmp_path: Path) -> None:
    found, _ = check("evicted", tmp_path)
    assert found["deleted"] > 0
    assert found["by_salt"] == {"": (found["stored"] - found["deleted"]) * OBJECT_BYTES}


def test_what_is_looked_up_is_recorded_as_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = str(tmp_path / "traces")
    plugin = TieredKVNativePlugin(**native.params(tmp_path, record=traces, chunk_tokens=16))
    other_rank = [one.replace("@02000201@", "@02000202@") for one in native.KEYS]
    for length in (3, 5, 7):
        # Chunks of one rank, then those of the next.
        native.ended(plugin, plugin.submit_batch_exists(native.KEYS[:length] + other_rank[:length]))
    native.ended(
        plugin, plugin.submit_batch_exists([native.key(0, "tenant"), native.key(1, "tenant")])
    )
    native.ended(plugin, plugin.submit_batch_exists([]))
    native.ended(plugin, plugin.submit_batch_exists(["no key of LMCache's", "\ud800"]))
    native.put(plugin, native.KEYS, native.Memory())
    told = plugin.status()
    plugin.close()
    path = Path(told["record"]["path"])
    assert (told["record"]["lost"], told["record"]["fault"]) == (0, None)
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["input_length"] for line in lines] == [48, 80, 112, 32]
    assert "org/model" not in path.read_text()
    found = replay.replay(replay.read(path), [100], ["lru"])
    assert (found["requests"], found["block_size"]) == (4, 16)
    # A salt's chunks are chunks of their own.
    assert (found["block_accesses"], found["unique_blocks"]) == (3 + 5 + 7 + 2, 7 + 2)
    assert found["ceiling_pct"] == pytest.approx(100 * (3 + 5) / 17)
    monkeypatch.chdir(tmp_path)
    (command,) = shown("tiered-kv replay")
    args = shlex.split(re.sub(r"/var/log/kv-traces/\S+", str(path), command))
    assert cli.main(args[1:]) == ExitCode.OK
    assert capsys.readouterr().out


@engine
@slow
def test_usage_is_that_of_the_objects_remembered_and_lookups_are_recorded(tmp_path: Path) -> None:
    found, _ = check("forgotten", tmp_path)
    assert found == {
        "by_salt": {"": 3 * N * OBJECT_BYTES},
        "listed": 3 * N,
        "found": N,
        "recorded": [4 * N],
    }


@engine
@slow
def test_the_connector_in_the_engines_process(tmp_path: Path) -> None:
    found, said = check("connector", tmp_path)
    for turn in ("first", "restarted"):
        assert found[f"exists_{turn}"] == [True, True, False]
        assert found[f"got_{turn}"] == [True, True, True]
        assert found[f"shape_{turn}"] == [2, 2, 5, 64], "a part of a chunk has its own tokens"
    assert found["released"] == 0
    assert "`namespace` is missing" in found["refused"]
    assert "`record` is not for the connector" in found["not_recorded"]
    assert "tiered-kv does not serve LMCache" in said, "LMCache itself only logs it"


def test_the_page_shows_the_flags_that_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = next(line for line in shown("tiered-kv engines") if "--check" not in line)
    model(tmp_path / "MODEL")
    assert cli.main(shlex.split(told.replace(MODEL, str(tmp_path / "MODEL")))[1:]) == ExitCode.OK
    out = capsys.readouterr().out
    digest = re.search(r"MODEL/([0-9a-f]{32})/bfloat16", out)
    assert digest is not None
    for line in (*shown("lmcache server"), *shown("lmcache bench")):
        flag = line[line.index("--l2-adapter") :].partition(" --num-keys")[0]
        assert re.sub("[0-9a-f]{32}", digest[1], flag) in out


@engine
@slow
def test_the_check_of_the_page_works(tmp_path: Path) -> None:
    told = next(line for line in shown("tiered-kv engines") if "--check" in line)
    main = "import sys; from tiered_kv.cli import main; sys.exit(main())"
    found = json.loads(ran(["-c", main, *here(told, tmp_path)[1:], "--json"]).stdout)
    assert found["check"]["verdict"] == "works"
    adapters = found["check"]["adapters"]
    assert {name: adapters[name] for name in ("lmcache", "lmcache native")} == {
        "lmcache": "loads",
        "lmcache native": "loads",
    }
    assert list((tmp_path / "kv").iterdir()) == []


@engine
@slow
@pytest.mark.parametrize("kind", ["plugin", "native_plugin"])
def test_lmcaches_bench_of_the_page_verifies_what_comes_back(tmp_path: Path, kind: str) -> None:
    (told,) = shown("lmcache bench")
    command = here(told, tmp_path)
    at = command.index("--l2-adapter") + 1
    config = {**json.loads(command[at]), "type": kind}
    if kind == "plugin":
        config["class_name"] = "TieredKVL2Adapter"
    command[at] = json.dumps(config)
    main = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    done = ran(["-c", main, *command[1:]])
    assert re.search(r"All \d+ keys data verified OK", done.stdout)
