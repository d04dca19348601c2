"""The built-in catalogue: the published configurations of well-known models."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A model of the catalogue.

    Attributes:
        name: How it is called here, such as `"llama-3-70b"`.
        hub: Its id on the hub.
        source: Where its figures are from: the configuration that its owner publishes.
        config: Those fields of that configuration on which the cache depends.
    """

    name: str
    hub: str
    source: str
    config: Mapping[str, Any]


@functools.cache
def entries() -> dict[str, Entry]:
    """Every model, by its name."""
    text = Path(__file__).with_name("catalogue.json").read_text("utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return {
        name: Entry(
            name=name,
            hub=entry["hub"],
            source=entry.get(
                "source", f"https://huggingface.co/{entry['hub']}/resolve/main/config.json"
            ),
            config=entry["config"],
        )
        for name, entry in loaded.items()
    }


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def find(name: str) -> Entry | None:
    """The model of a name or of a hub id, whatever its case; None where there is none."""
    wanted = _plain(name)
    for entry in entries().values():
        if wanted in (entry.name, _plain(entry.hub), _plain(entry.hub.rpartition("/")[2])):
            return entry
    return None


def close_to(name: str) -> list[str]:
    """Names of the catalogue that resemble one."""
    import difflib

    return difflib.get_close_matches(_plain(name), list(entries()), n=3, cutoff=0.5)
