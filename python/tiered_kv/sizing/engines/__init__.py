"""What serving engines hold for a specification: one module an engine, found by name.

An engine's module has a function `size(spec, context, batch, options) -> EngineReport`. To add
one, write the module and its line in `ENGINES`; it is imported when it is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import cast

from tiered_kv.sizing.checks import bad
from tiered_kv.sizing.parallel import Parallel
from tiered_kv.sizing.spec import KvSpec

ENGINES = {
    "transformers": "tiered_kv.sizing.engines.transformers",
    "vllm": "tiered_kv.sizing.engines.vllm",
}
"""Module of each engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is told beside the model.

    Attributes:
        parallel: How the model is spread.
        block_size: Tokens of a block; None for the engine's own choice.
        kv_dtype: The cache type by the engine's name for it; None for the specification's own.
    """

    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    block_size: int | None = None
    kv_dtype: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineGroup:
    """What an engine holds for layers that it treats alike.

    Attributes:
        kind: What they keep, in the words of `Kind` or the engine's own.
        layers: How many.
        bytes_total: Bytes held, on one rank.
        page_bytes: Bytes of a page, 0 where the engine has none.
        pages: Pages held, 0 where the engine has none.
        waste_bytes: Bytes of `bytes_total` that hold nothing: padding and rounding.
    """

    kind: str
    layers: int
    bytes_total: int
    page_bytes: int = 0
    pages: int = 0
    waste_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine holds for a context and a batch, on the rank that holds most.

    Attributes:
        engine: Its name and the version that was read.
        groups: What it holds.
        block_size: Tokens of its blocks, 0 where it has none.
        notes: What differs from the model's own need, in sentences.
    """

    engine: str
    groups: tuple[EngineGroup, ...]
    block_size: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bytes_total(self) -> int:
        """Bytes held."""
        return sum(group.bytes_total for group in self.groups)


EngineSize = Callable[[KvSpec, int, int, EngineOptions], EngineReport]


def engine_named(name: str) -> EngineSize:
    """The sizing function of an engine.

    Raises:
        InvalidArgumentError: There is no such engine.
    """
    module = ENGINES.get(name)
    if module is None:
        raise bad("engine", name, f"one of none, {', '.join(ENGINES)}")
    return cast(EngineSize, importlib.import_module(module).size)
