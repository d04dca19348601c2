"""Runs a model with a cache, and compares what it holds with the sizing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from transformers import StaticCache

from sizing_truth import build
from sizing_truth.held import held
from tiered_kv.sizing.engines.transformers import view
from tiered_kv.sizing.parts import SpanKind
from tiered_kv.sizing.read import read_config
from tiered_kv.sizing.spec import KvSpec

# On both sides of the window and the chunk (8), the compression rates (4 and 8) and a block (16).
CONTEXTS = (1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 33)
FEW_CONTEXTS = (3, 7, 9, 16)
STATIC_LENGTH = 24
STATIC_PROMPT = 16
"""With a window's room this fills a cache that makes room by the length of its prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A cache after some tokens.

    Attributes:
        context: Tokens, those of a pass for one more token among them.
        held: Bytes that the cache's tensors show.
        said: Bytes that the sizing says.
        spare: Bytes of storage that no tensor shows.
        counters: Bytes of lengths kept in tensors.
    """

    context: int
    held: int
    said: int
    spare: int
    counters: int


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """An architecture's caches.

    Attributes:
        model_type: The architecture.
        classes: Names of the classes seen.
        inferred: Whether the sizing had to infer the architecture.
        rows: What was held.
    """

    model_type: str
    classes: tuple[str, ...]
    inferred: bool
    rows: tuple[Row, ...]

    @property
    def equal(self) -> bool:
        """Whether what is held is what the sizing says, each time."""
        return all(row.held == row.said for row in self.rows)


def spec_of(runner: build.Runner) -> KvSpec:
    """The sizing of the published configuration, as this engine holds it."""
    return view(read_config(runner.published, encoder_len=runner.encoder_len or None))


@functools.cache
def measure(model_type: str, contexts: tuple[int, ...] = FEW_CONTEXTS) -> Measured:
    """An architecture's tiny model, after a prompt and after one token more."""
    runner = build.runner(model_type)
    return compare(model_type, runner, contexts)


def compare(model_type: str, runner: build.Runner, contexts: tuple[int, ...]) -> Measured:
    """A model's caches after each context, and after one token more."""
    spec = spec_of(runner)
    rows: list[Row] = []
    classes: set[str] = set()
    for context in contexts:
        cache = runner.forward(context)
        for more in (0, 1):
            cache = runner.forward(1, cache) if more else cache
            found = held(cache)
            classes |= found.classes
            said = spec.bytes(context + more, build.BATCH)
            rows.append(Row(context + more, found.bytes, said, found.spare, found.counters))
    return Measured(model_type, tuple(sorted(classes)), spec.inferred, tuple(rows))


def measure_static(model_type: str) -> Measured:
    """An architecture's tiny model with a cache of a fixed length: it holds all of it at once.

    A window of W tokens is held whole there, for a token is written over the oldest one.
    """
    runner = build.runner(model_type)
    kept = read_config(runner.published)
    dynamic = iter([part for group in view(kept).groups for part in group.parts])

    def fixed(part: Any) -> Any:
        other = next(dynamic)
        return part if part.span.kind is SpanKind.LAST else other

    spec = kept.with_parts(fixed)
    cache = runner.forward(
        STATIC_PROMPT, StaticCache(config=runner.config, max_cache_len=STATIC_LENGTH)
    )
    found = held(cache)
    said = spec.bytes(STATIC_LENGTH, build.BATCH)
    row = Row(STATIC_LENGTH, found.bytes, said, found.spare, found.counters)
    return Measured(model_type, tuple(sorted(found.classes)), spec.inferred, (row,))
