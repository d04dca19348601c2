"""What the scheduler's side knows of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tiered_kv import AttachedHold, RequestContext
from tiered_kv.engines.vllm.messages import Blocks, part
from tiered_kv.engines.vllm.tenancy import Tenancy


@dataclasses.dataclass
class Tracked:
    """A request, as the scheduler's side knows it.

    Attributes:
        request: vLLM's own.
        tenancy: Whose blocks it uses; None for one that goes without the store.
        context: What is known of it.
        keys: For each group packed keys for each rank, of as many blocks as were asked for.
        saved: For each group the blocks that were given to the workers to save.
        epoch: The epoch in which it began, or began anew.
        first: The first token that the engine lacks, by the last lookup.
        limit: Tokens that are worth a lookup; fewer after a load has failed.
        holds: What keeps the blocks of the last lookup.
        loading: Block ids that are being loaded, of all groups; of the only one from `first` on.
    """

    request: Any
    tenancy: Tenancy | None
    context: RequestContext
    keys: list[list[bytes]]
    saved: list[int]
    epoch: str = ""
    first: int = 0
    limit: int | None = None
    holds: list[AttachedHold] = dataclasses.field(default_factory=list)
    loading: tuple[int, ...] = ()

    def release(self) -> None:
        """Lets go of what was held."""
        for hold in self.holds:
            hold.release()
        self.holds = []

    def cut(self, tokens: int) -> None:
        """Whatever a lookup says: what is behind is computed now, and stored again."""
        self.limit = tokens if self.limit is None else min(self.limit, tokens)


def blocks_of(
    tracked: Tracked, tenancy: Tenancy, group: int, first: int, block_ids: Sequence[int]
) -> Blocks:
    """Blocks of a request for the workers, from a place in the sequence on."""
    last = first + len(block_ids)
    packed = tracked.keys[group]
    return Blocks(
        request_id=tracked.request.request_id,
        tenancy=tenancy,
        context=tracked.context,
        first=first,
        keys=tuple(part(keys, first, last) for keys in packed),
        parents=tuple(part(keys, first - 1, first) if first else b"" for keys in packed),
        block_ids=tuple(block_ids),
        group=group,
    )
