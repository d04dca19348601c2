"""`tiered-kv doctor`: honest answers here, without io_uring, on tmpfs, without a drive."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered_kv import _core, doctor
from tiered_kv.blocking import BlockingStore
from tiered_kv.cli.exits import ExitCode

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what is tested is a store in memory


def _run(*args: str, filtered: bool = False) -> tuple[int, str]:
    before = [str(HERE / "seccomp.py")] if filtered else []
    command = [sys.executable, *before, "-m", "tiered_kv", "doctor", *args]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    return run.returncode, run.stdout


def _document(directory: Path, *, filtered: bool = False) -> tuple[int, dict[str, Any]]:
    code, out = _run("--dir", str(directory), "--json", filtered=filtered)
    return code, json.loads(out)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    if doctor.filesystem(SHARED_MEMORY) != "tmpfs":
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as made:
        yield Path(made)


def test_this_machine(tmp_path: Path) -> None:
    code, found = _document(tmp_path)
    assert (code, found["verdict"]) == (ExitCode.OK, "works")
    uring, reason = _core.probe_io_uring()
    assert found["io_uring"] == {"available": uring, "reason": reason}
    store, about = found["store"], found["directory"]
    assert store["backend"] == ("io_uring" if uring else "blocking")
    assert (store["opens"], store["verified"], store["durable"]) == (True, True, True)
    assert store["write_gb_s"] > 0
    assert store["read_gb_s"] > 0
    assert found["memory"]["copy_gb_s"] > 0
    assert store["warnings"] == []
    assert store["direct_reason"] == about["reason"]
    assert about["free_bytes"] > 0
    assert about["filesystem"] == doctor.filesystem(tmp_path)
    assert found["memory"]["limit_bytes"] >= found["memory"]["available_bytes"] > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_fast_measures_nothing_and_tests_all_the_same(tmp_path: Path) -> None:
    code, out = _run("--dir", str(tmp_path), "--json", "--fast")
    found = json.loads(out)
    assert (code, found["verdict"], found["store"]["verified"]) == (ExitCode.OK, "works", True)
    assert "write_gb_s" not in found["store"]
    assert "copy_gb_s" not in found["memory"]
    code, out = _run("--dir", str(tmp_path), "--fast")
    assert (code, "quick look" in out) == (ExitCode.OK, False)


def test_without_io_uring(tmp_path: Path) -> None:
    code, found = _document(tmp_path, filtered=True)
    assert (code, found["verdict"]) == (ExitCode.OK, "works")
    assert not found["io_uring"]["available"]
    assert "seccomp" in found["io_uring"]["reason"]
    store = found["store"]
    assert (store["backend"], store["verified"]) == ("blocking", True)
    assert found["io_uring"]["reason"] in store["backend_reason"]
    assert any("allow io_uring_setup" in text for text in found["advice"])


def test_on_tmpfs(in_memory: Path) -> None:
    code, found = _document(in_memory)
    assert (code, found["verdict"]) == (ExitCode.OK, "works")
    assert found["directory"]["filesystem"] == "tmpfs"
    assert found["directory"]["direct"] is False
    assert "tmpfs" in found["directory"]["reason"]
    assert found["store"]["verified"]
    assert "lost with the machine" in found["advice"][0]
    assert list(in_memory.iterdir()) == []


def test_where_no_store_can_be(tmp_path: Path) -> None:
    code, found = _document(tmp_path / "absent" / "store")
    assert (code, found["verdict"]) == (ExitCode.FAILED, "memory only")
    assert not found["store"]["opens"]
    assert str(tmp_path / "absent") in found["store"]["error"]
    assert found["store"]["error"] in found["advice"][0]
    (tmp_path / "file").touch()
    assert _document(tmp_path / "file")[0] == ExitCode.FAILED


def test_a_directory_to_be_made_is_not_made(tmp_path: Path) -> None:
    code, found = _document(tmp_path / "store")
    assert (code, found["directory"]["exists"]) == (ExitCode.OK, False)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_give_back_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(BlockingStore):
        def get_into(self, *args: Any, **options: Any) -> _core.IntoReport:
            report = super().get_into(*args, **options)
            args[2][7] ^= 1
            return report

    monkeypatch.setattr(doctor, "BlockingStore", Forgetful)
    found = doctor.examine(tmp_path)
    assert found["verdict"] == "fails"
    assert "self-test" in found["advice"][0]


def test_for_people(tmp_path: Path) -> None:
    code, out = _run("--dir", str(tmp_path))
    assert code == ExitCode.OK
    for word in ("io_uring", "direct I/O", "huge pages", "not a benchmark", "verdict: works"):
        assert word in out
    assert "transparent huge pages: " in " ".join(out.split())
    code, out = _run("--dir", str(tmp_path), filtered=True)
    assert code == ExitCode.OK
    assert "allow io_uring_setup" in " ".join(out.split())


def test_the_configured_directory_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_KV_NVME_PATHS", str(tmp_path / "kv"))
    monkeypatch.setenv("TIERED_KV_NVME_CAPACITY", "1GiB")
    _, out = _run("--json")
    assert json.loads(out)["directory"]["path"] == str(tmp_path / "kv")
    monkeypatch.delenv("TIERED_KV_NVME_PATHS")
    monkeypatch.delenv("TIERED_KV_NVME_CAPACITY")
    _, out = _run("--json")
    assert json.loads(out)["directory"]["path"] == tempfile.gettempdir()
