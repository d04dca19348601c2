"""Runs stubtest on `tiered_kv._core`: one module, whose stubs are a package to keep files short.

For each part of the stubs, a module with the names that the part describes stands in, so that
stubtest compares them with what was compiled.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

from mypy import stubtest

CORE = "tiered_kv._core"


def stand_in(part: Path, core: ModuleType) -> ModuleType:
    """A module with the classes and functions of the core that a stub file describes."""
    module = ModuleType(f"{CORE}.{part.stem}")
    for node in ast.parse(part.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and hasattr(core, node.name):
            setattr(module, node.name, getattr(core, node.name))
    return module


def main(root: Path) -> int:
    """Checks the stubs; the exit status of stubtest."""
    core = importlib.import_module(CORE)
    for part in (root / "python/tiered_kv/_core").glob("_[a-z]*.pyi"):
        module = stand_in(part, core)
        sys.modules[module.__name__] = module
    config = ["--mypy-config-file", str(root / "pyproject.toml")]
    return stubtest.test_stubs(stubtest.parse_options([*config, CORE]))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
