"""Writes `sizing/defaults.json`: what a published configuration may leave out.

Run in `tests` with transformers installed: `python -m support.sizing_defaults`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import tiered_kv.sizing
from tiered_kv.errors import InvalidArgumentError
from tiered_kv.sizing.dtypes import BF16
from tiered_kv.sizing.families import ARCHITECTURES, build
from tiered_kv.sizing.fields import Fields

TARGET = Path(tiered_kv.sizing.__file__).parent / "defaults.json"


class Recording(Fields):
    """Fields that note which names are asked for."""

    asked: set[str] = set()  # noqa: RUF012 - shared by every copy on purpose

    def _find(self, name: str) -> Any:
        Recording.asked.add(name)
        return super()._find(name)

    def with_values(self, values: Any) -> Recording:
        return Recording({**self.values, **values}, self.aliases, self.defaults, self.prefix)


def class_defaults(config_class: Any) -> dict[str, Any]:
    """Defaults of a configuration class's own fields, as far as they are plain values."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value = field.default
        if isinstance(value, bool | int | float | str | list | tuple):
            found[field.name] = list(value) if isinstance(value, tuple) else value
        elif field.default_factory is not dataclasses.MISSING:
            made = field.default_factory()
            if isinstance(made, list | dict):
                found[field.name] = made
    return found


def collected() -> dict[str, Any]:
    """The aliases and the defaults of every architecture that transformers has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    everything: dict[str, Any] = {}
    for model_type, arch in ARCHITECTURES.items():
        if model_type not in CONFIG_MAPPING_NAMES:
            continue
        config_class = CONFIG_MAPPING[model_type]
        defaults = class_defaults(config_class)
        aliases = dict(config_class.attribute_map)
        everything[model_type] = {"aliases": aliases, "defaults": defaults}
        # The defaults of some classes describe no model; their names are asked for all the same.
        with contextlib.suppress(InvalidArgumentError):
            build(
                Recording({}, aliases, defaults), arch, name="", model_type=model_type, dtype=BF16
            )
    return {model_type: _relevant(entry) for model_type, entry in everything.items()}


def _relevant(entry: dict[str, Any]) -> dict[str, Any]:
    asked = Recording.asked - {"dtype", "torch_dtype", "per_layer_config"}
    aliases = {name: alias for name, alias in entry["aliases"].items() if name in Recording.asked}
    wanted = asked | {alias for name, alias in aliases.items() if name in asked}
    defaults = {name: value for name, value in entry["defaults"].items() if name in wanted}
    return {"aliases": aliases, "defaults": defaults}


def text() -> str:
    """The file, one model type a line."""
    lines = [
        f"{json.dumps(model_type)}: {json.dumps(entry, sort_keys=True)}"
        for model_type, entry in sorted(collected().items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TARGET.write_text(text())
