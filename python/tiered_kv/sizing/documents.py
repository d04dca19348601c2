"""Reading JSON that may be hostile: bounded in size and depth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tiered_kv.sizing.checks import fault

MOST_BYTES = 10_000_000
"""The largest configuration accepted; published ones are a few kilobytes."""
MOST_DEPTH = 64


def load_json(path: Path) -> dict[str, Any]:
    """Reads a configuration's file.

    Raises:
        InvalidArgumentError: It cannot be read, is too large, or is no JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise fault(f"`{path}` cannot be read: {error.strerror or error}") from None
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parses a configuration.

    Args:
        text: Its bytes.
        where: What an error calls it.

    Raises:
        InvalidArgumentError: It is too large, too deep, or no JSON object.
    """
    if len(text) >= MOST_BYTES:
        raise fault(f"`{where}` has {MOST_BYTES // 1_000_000} MB or more: it is no configuration")
    if _depth(text) > MOST_DEPTH:
        raise fault(f"`{where}` is nested deeper than {MOST_DEPTH} levels: it is no configuration")
    try:
        loaded = json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise fault(f"`{where}` is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise fault(f"`{where}` is a JSON {type(loaded).__name__}: give an object")
    return loaded


def _constant(name: str) -> float:
    return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}[name]


def _depth(text: bytes) -> int:
    """The deepest nesting of brackets; those in strings count too, which does no harm."""
    depth = deepest = 0
    for byte in text.translate(None, delete=_NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
