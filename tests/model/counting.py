"""Rules that are counted, and what they draw."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import rule

from model.side import CHAINS, DEPTH, SPACES, Span

COUNTS: collections.Counter[str] = collections.Counter()
"""How often each rule ran, in all examples."""
RULES: set[str] = set()

spaces = st.integers(0, SPACES - 1)
spans = st.builds(
    Span, spaces, st.integers(0, CHAINS - 1), st.integers(0, DEPTH - 1), st.integers(1, DEPTH)
)
starts = st.builds(
    Span, spaces, st.integers(0, CHAINS - 1), st.just(0), st.sampled_from([DEPTH, DEPTH, 2, 5])
)
"""Parts of chains, and parts that begin at the root."""
large = st.builds(Span, st.just(1), st.integers(0, CHAINS - 1), st.just(0), st.just(DEPTH))
"""Enough bytes that threads of the core copy them while the caller waits."""
seeds = st.integers(0, 1 << 16)
computed_by = st.sampled_from(["prefill", "prefill", "prefill", "decode"])
naps = st.integers(0, 3)
"""Turns of the loop that a call has before it is cancelled."""
faces = st.sampled_from(["asyncio", "blocking", "channel"])
any_spans = st.one_of(starts, spans)


def counted(**drawn: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule of the machine that counts how often it ran."""

    def decorate(function: Callable[..., None]) -> Any:
        RULES.add(function.__name__)

        @functools.wraps(function)
        def run(self: object, *args: Any, **kwargs: Any) -> None:
            function(self, *args, **kwargs)
            COUNTS[function.__name__] += 1

        decorated: Any = rule(**drawn)
        return decorated(run)

    return decorate
