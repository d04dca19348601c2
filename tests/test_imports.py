"""What is imported when, and that every public name is where a type checker believes it to be."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiered_kv
from test_sizing_read import PLAIN

# Each takes a good part of what sizing a model takes, or more.
NEVER = {
    *("torch", "transformers", "numpy", "matplotlib", "typer", "rich", "pydantic", "blake3"),
    *("asyncio", "tiered_kv._core", "tiered_kv.store", "tiered_kv.spec", "importlib.metadata"),
    *(
        "urllib.request",
        "http.client",
        "ssl",
        "socket",
        "subprocess",
        "logging",
        "shutil",
        "difflib",
    ),
}


def loaded(code: str) -> set[str]:
    """What is loaded after some code, of which the interpreter itself loads nothing."""
    code += "\nimport sys, json; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(json.loads(run.stderr.splitlines()[-1])) - BARE


BARE = frozenset(
    subprocess.run(
        [sys.executable, "-c", "import sys; print('\\n'.join(sys.modules))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
)
PLAN = "'plan', '--node', 'dgx-h100', '--model', 'deepseek-v3', '--weight-dtype', 'int4'"


@pytest.mark.parametrize(
    ("args", "more"),
    [
        ("'size', 'deepseek-v3'", {"tiered_kv.sizing.hub", "tiered_kv.sizing.engines", "tomllib"}),
        ("'size', 'deepseek-v3', '--json'", {"tiered_kv.sizing.hub", "tiered_kv.planner"}),
        ("'size', CONFIG", {"tiered_kv.sizing.hub", "tiered_kv.sizing.engines.vllm"}),
        ("'size', 'llama-3-8b', '--engine', 'vllm'", set()),
        (PLAN, {"tiered_kv.planner.plot", "tiered_kv.sizing.hub"}),
        (f"{PLAN}, '--json'", {"tiered_kv.planner.plot"}),
    ],
)
def test_size_and_plan_load_nothing_that_takes_long(
    args: str, more: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN))
    code = f"CONFIG = {str(path)!r}\nfrom tiered_kv.cli import main\nassert main([{args}]) == 0"
    assert loaded(code) & (NEVER | more) == set()


def test_the_package_loads_a_name_when_it_is_asked_for() -> None:
    alone = {name for name in loaded("import tiered_kv") if name.startswith("tiered_kv")}
    assert alone == {"tiered_kv"}
    some = loaded("from tiered_kv import KvLayout, TieredKvError")
    assert {"tiered_kv.spec", "tiered_kv.errors"} <= some
    assert not {"tiered_kv._core", "asyncio"} & some
    assert {"tiered_kv._core", "asyncio"} <= loaded("from tiered_kv import TieredStore")


def test_every_public_name_is_where_the_type_checker_believes_it_to_be() -> None:
    tree = ast.parse(Path(tiered_kv.__file__).read_text("utf-8"))
    believed = {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tiered_kv.")
        for alias in node.names
    }
    assert sorted(believed) == sorted(tiered_kv.__all__)
    for name, module in believed.items():
        assert getattr(tiered_kv, name) is getattr(importlib.import_module(module), name), name
        homes = tiered_kv._HOMES
        assert f"tiered_kv.{homes.get(name, '_core')}" == module, name
    assert set(tiered_kv.__all__) <= set(dir(tiered_kv))


def test_a_name_that_is_not_there_is_an_error() -> None:
    name = "TiredStore"
    with pytest.raises(AttributeError, match="has no attribute 'TiredStore'"):
        getattr(tiered_kv, name)
    assert not hasattr(tiered_kv, name)
