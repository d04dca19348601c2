"""Classes of an engine's adapters, whose modules import the engine: loaded when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping


def load(package: str, modules: Mapping[str, str], name: str) -> object:
    """What a package's `__getattr__` answers.

    Args:
        package: The package's name.
        modules: By the name of each class, its module within the package.
        name: What is asked for.

    Raises:
        AttributeError: It is none of these classes.
    """
    if name in modules:
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
    message = f"module {package!r} has no attribute {name!r}"
    raise AttributeError(message, name=name)
