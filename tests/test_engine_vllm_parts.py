"""The parts of the vLLM adapter, each by itself: `serving/parts.py`, where vLLM is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serving import jobs

SOURCES = [path.read_text("utf-8") for path in sorted(jobs.HERE.glob("*checks.py"))]
NAMES = [name for text in SOURCES for name in re.findall(r"^def (check_\w+)", text, re.MULTILINE)]

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = jobs.vllm_python()
    out = tmp_path_factory.mktemp("checks") / "out.json"
    done = subprocess.run(
        [str(python), "-m", "serving.parts", str(out)],
        cwd=jobs.HERE.parent,
        env=jobs.environment() | {"XDG_CACHE_HOME": str(out.parent)},
        timeout=jobs.LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(Path(out).read_text()))


@pytest.mark.parametrize("name", NAMES)
def test_part(found: dict[str, Any], name: str) -> None:
    assert name in found["ran"]
    assert name not in found["faults"], found["faults"][name]
