"""Loads within a step of the engine: which models have them, and what vLLM makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tiered_kv.engines.vllm.groups import Group, is_plain
from tiered_kv.engines.vllm.messages import Blocks


def why_beside(config: Any, groups: Sequence[Group]) -> str:
    """Why steps cannot wait for their loads, and these go beside them; empty if they can.

    Where a load fails in a step, vLLM has to take back what it has computed on it, and no rank may
    store any of that.

    Args:
        config: vLLM's configuration.
        groups: The parts that a block of tokens has.
    """
    if not is_plain(groups):
        return "vLLM cannot take back a load of a model that keeps several kinds of cache"
    if config.parallel_config.pipeline_parallel_size > 1:
        return "a later stage of a pipeline computes on what an earlier one could not load"
    if config.scheduler_config.async_scheduling:
        return "vLLM gives out tokens of a step that it has begun before it knows of a failed load"
    if config.use_v2_model_runner:
        return "vLLM's model runner V2 goes on behind a failed load"
    return ""


class Within:
    """The loads that the step in progress waits for, seen from the scheduler.

    There is one such step at a time. vLLM counts their blocks as computed, and names them in its
    own prefix cache, from the moment that they are allocated, also when they could not be loaded.
    """

    def __init__(self) -> None:
        self.evict: Callable[[set[int]], None] | None = None
        self._blocks: dict[str, tuple[int, ...]] = {}

    def begin(self, loads: Iterable[Blocks], state: Any) -> None:
        """Notes all blocks of the requests that a step loads something for.

        Args:
            loads: What it loads.
            state: vLLM's `KVConnectorBlockState` of the step.
        """
        for load in loads:
            (self._blocks[load.request_id],) = map(tuple, state.get_block_ids(load.request_id))

    def end(self, failed: set[int]) -> tuple[str, ...]:
        """Notes that the step has ended; what failed, and all behind it, is nobody's prefix.

        vLLM leaves such blocks in its prefix cache, since their request computes them again: but it
        may be preempted or aborted before, and others would find what was never computed.

        Args:
            failed: The engine's blocks that were not filled.

        Returns:
            The requests that it loaded something for.
        """
        requests, self._blocks = self._blocks, {}
        for block_ids in requests.values():
            bad = next((at for at, block in enumerate(block_ids) if block in failed), None)
            if bad is not None and self.evict is not None:
                self.evict(set(block_ids[bad:]))
        return tuple(requests)
