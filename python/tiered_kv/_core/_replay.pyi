"""Traces and their replay; see `tiered_kv.replay` and the commands."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

@final
class Trace:
    """A trace of requests in memory: ids of blocks, times and lengths, and no text.

    Whatever takes long runs without the GIL on other threads, and ends soon after a signal.
    """

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Trace:
        """Reads a file of one request a line, packed with gzip or not; the format shows in it.

        Raises:
            NotFoundError: It is not there; `StorePermissionError`, `IoFaultError`: cannot be read.
            InvalidArgumentError: A line is no request of a known format, or out of order.
        """
    @staticmethod
    def parse(data: bytes, name: str) -> Trace:
        """As `read`, of bytes, under a name."""
    @staticmethod
    def generate(kind: str, requests: int, seed: int) -> Trace:
        """Makes a trace up; equal arguments make equal traces.

        Raises:
            InvalidArgumentError: No kind of that name, or no number of requests from 1 to 10^6.
        """
    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes it as runs of ids, mode 0600; packed if the path ends in `.gz`.

        Raises:
            StorePermissionError, NotFoundError, IoFaultError: It cannot be written.
        """
    @property
    def name(self) -> str:
        """The file's name up to its first dot, or the kind."""
    @property
    def format(self) -> str:
        """`runs`, `mooncake`, `qwen-bailian` or `lmcache`."""
    @property
    def block_size(self) -> int:
        """Tokens of a block."""
    @property
    def requests(self) -> int:
        """How many requests it has."""
    @property
    def sessions(self) -> int:
        """How many sessions are told; 0 where none is."""
    @property
    def block_accesses(self) -> int:
        """Accesses to blocks of prompts."""
    @property
    def unique_blocks(self) -> int:
        """Different blocks of prompts."""
    @property
    def unchained(self) -> int:
        """Blocks that came behind another one than before: 0 where ids stand for prefixes."""
    @property
    def has_outputs(self) -> bool:
        """Whether it tells the blocks of outputs."""
    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
    def tokens(self) -> tuple[int, int]:
        """Tokens of all prompts, and of all outputs."""
    def ceiling_pct(self, outputs: bool) -> float:
        """Percent of the accesses that are hits if nothing ever leaves."""
    def replay(
        self,
        capacities: Iterable[float],
        policies: Sequence[str],
        *,
        seeds: int,
        outputs: bool,
        labels: bool,
        threads: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[dict[str, Any]]:
        """Runs policies at capacities; see `tiered_kv.replay.replay`."""
    def prefetch(
        self,
        fast: float,
        slow: float,
        *,
        outputs: bool,
        labels: bool,
        progress: Callable[[int], object] | None = None,
    ) -> list[dict[str, Any]]:
        """Prefetches between two tiers; see `tiered_kv.replay.prefetch`."""
    def nodes(
        self,
        specs: str,
        *,
        outputs: bool,
        labels: bool,
        threads: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> str:
        """Replays over the tiers of nodes, JSON in and out; see `tiered_kv.replay.node`."""
    def posterior(
        self,
        capacity: float,
        policy: str,
        *,
        outputs: bool,
        labels: bool,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, Any]:
        """What the predictor has learned at the end; see `tiered_kv.replay.posterior`."""

def replay_policies() -> dict[str, list[str]]:
    """Names of policies: those that "all", "ablation", "steps" and "tried" stand for."""

def trace_kinds() -> dict[str, str]:
    """Kinds of traces that are made up, and what each is about."""
