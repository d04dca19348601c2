"""`tiered-kv info`: what is installed here."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from tiered_kv.cli.output import people, print_json


def _collect() -> dict[str, object]:
    from tiered_kv import _core

    found: dict[str, object] = {
        "version": _core.__version__,
        "build": "release" if _core.IS_RELEASE else "development",
        "format_version": _core.FORMAT_VERSION,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
    }
    default_config = getattr(_core, "default_config", None)
    found["default_config"] = default_config() if callable(default_config) else None
    return found


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Show versions, the platform and the default configuration."""
    found = _collect()
    if as_json:
        print_json(found)
        return
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, value in found.items():
        nested = value if isinstance(value, dict) else {"": value}
        for field, entry in nested.items():
            label = f"{name}.{field}" if field else name
            table.add_row(label, "unset" if entry is None else str(entry))
    people(as_json=False).print(table)
