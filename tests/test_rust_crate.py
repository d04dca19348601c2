"""The store as a Rust crate: the example of the workspace, and a program outside of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def cargo(*arguments: str) -> str:
    """Runs cargo at the root of the repository and returns what the program printed."""
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    done = subprocess.run(
        ["cargo", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_example_leases_restarts_reads_directly_and_deletes() -> None:
    printed = cargo("run", "--quiet", "--locked", "--example", "embed")
    assert "after a restart: 8 found" in printed
    assert "read directly: 8 blocks from Ok(Nvme)" in printed
    assert "deleted 4 blocks, durably: true\nleft: 4" in printed


def test_an_outside_crate_depends_on_the_store_by_path(tmp_path: Path) -> None:
    project = tmp_path / "outside"
    shutil.copytree(ROOT / "tests" / "outside", project)
    manifest = project / "Cargo.toml"
    text = manifest.read_text()
    assert 'path = "../.."' in text
    manifest.write_text(text.replace('path = "../.."', f'path = "{ROOT}"'))
    # The workspace's lock file, so that the same versions are built.
    shutil.copy(ROOT / "Cargo.lock", project / "Cargo.lock")
    printed = cargo(
        "run",
        "--quiet",
        "--manifest-path",
        str(manifest),
        "--target-dir",
        str(TARGET / "outside"),
        "--",
        str(tmp_path / "kv"),
    )
    assert "loaded 2 blocks from Ok(Nvme)" in printed
