"""Every Rust dependency comes under a licence that lets us ship it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}


def is_permissive(expression: str) -> bool:
    """Whether an SPDX expression can be met with permissive licences alone.

    Args:
        expression: As in Cargo.toml; the old form `MIT/Apache-2.0` means OR.
    """
    spaced = re.sub(r"([()])", r" \1 ", expression.replace("/", " OR "))
    tokens = re.sub(r"\s+WITH\s+", "_WITH_", spaced).split()
    value, rest = _alternatives(tokens)
    return value and not rest


def _alternatives(tokens: list[str]) -> tuple[bool, list[str]]:
    value, rest = _conjunction(tokens)
    while rest[:1] == ["OR"]:
        other, rest = _conjunction(rest[1:])
        value = value or other
    return value, rest


def _conjunction(tokens: list[str]) -> tuple[bool, list[str]]:
    value, rest = _term(tokens)
    while rest[:1] == ["AND"]:
        other, rest = _term(rest[1:])
        value = value and other
    return value, rest


def _term(tokens: list[str]) -> tuple[bool, list[str]]:
    if not tokens:
        return False, []
    if tokens[0] != "(":
        return tokens[0].replace("_WITH_", " WITH ") in PERMISSIVE, tokens[1:]
    value, rest = _alternatives(tokens[1:])
    return value and rest[:1] == [")"], rest[1:]


@pytest.mark.parametrize(
    ("expression", "permissive"),
    [
        ("MIT", True),
        ("MIT/Apache-2.0", True),
        ("GPL-3.0 OR MIT", True),
        ("GPL-3.0", False),
        ("MIT AND GPL-3.0", False),
        ("(MIT OR GPL-3.0) AND Unicode-3.0", True),
        ("(MIT OR Apache-2.0) AND GPL-2.0", False),
        ("GPL-2.0 WITH Classpath-exception-2.0", False),
        ("Apache-2.0 WITH LLVM-exception OR MIT", True),
        ("(MIT", False),
        ("MIT MIT", False),
        ("", False),
    ],
)
def test_expressions(expression: str, permissive: bool) -> None:
    assert is_permissive(expression) is permissive


def test_all_dependencies_are_permissive() -> None:
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--all-features"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    packages = json.loads(output)["packages"]
    assert len(packages) > 10
    refused = [
        f"{package['name']} {package['version']}: {package['license']}"
        for package in packages
        if not is_permissive(package["license"] or "")
    ]
    assert not refused, "\n" + "\n".join(refused)
