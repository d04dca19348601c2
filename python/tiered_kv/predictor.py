"""What the reuse predictor of a store has learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

BlockTypeName = Literal["system", "tool", "user", "reasoning"]
TransitionName = Literal["shared", "first", "continued", "left_behind"]


@dataclasses.dataclass(frozen=True)
class PairPosterior:
    """How likely a block of one pair is used again.

    Attributes:
        block_type: What the block holds.
        transition: How a request reached it last: it was another session's ("shared"), the
            session's first request, or it went on; or the session came back without it.
        mean: Mean of the Beta posterior of the chance that a life ends in a reuse.
        interval: Where the central 90 % of that posterior begin and end.
        lives: Evidence that has not faded: lives that ended.
        reuses: Those of them that ended in a reuse.
        hazard: For each age bucket, the chance that a block which was not used before is used in
            it: means of the Beta posteriors.
    """

    block_type: BlockTypeName
    transition: TransitionName
    mean: float
    interval: tuple[float, float]
    lives: float
    reuses: float
    hazard: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A snapshot of the predictor.

    Attributes:
        policy: Name of the policy, as `tiered-kv replay` has it.
        requests: Requests that it has learned from, those of earlier processes included.
        ghosts: Blocks that are remembered after they left the store.
        ages: Where each age bucket of a hazard starts, in seconds; the last one is open.
        pairs: All 16 pairs of a block type and a transition.
    """

    policy: str
    requests: int
    ghosts: int
    ages: tuple[float, ...]
    pairs: tuple[PairPosterior, ...]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Predictor:
        """The snapshot that the core gives.

        Args:
            found: Its fields by name.

        Returns:
            The same, typed.
        """
        pairs = tuple(PairPosterior(**pair) for pair in found["pairs"])
        return cls(**{**found, "pairs": pairs})

    def pair(self, block_type: BlockTypeName, transition: TransitionName) -> PairPosterior:
        """The posterior of one pair.

        Args:
            block_type: What the block holds.
            transition: How a request reached it last.

        Returns:
            Its posterior.

        Raises:
            KeyError: There is no such pair.
        """
        for pair in self.pairs:
            if (pair.block_type, pair.transition) == (block_type, transition):
                return pair
        raise KeyError((block_type, transition))
