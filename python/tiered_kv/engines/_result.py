"""What the engine reports of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tiered_kv.engines._runner import Run

TIER_NAMES = {0: "none", 1: "dram", 2: "cxl", 3: "nvme", 4: "fabric", 5: "pfs"}


@dataclass(frozen=True)
class GenerationResult:
    """One answer and what it cost.

    Attributes:
        tokens: Generated token ids, the end token included.
        prompt_tokens: Length of the prompt.
        reused_tokens: Prompt tokens whose keys and values were not computed.
        computed_tokens: Prompt tokens that were prefilled.
        ttft_s: Seconds from the call to the first token.
        restore_s: Seconds of it spent in getting blocks and copying them into the cache.
        prefill_s: Seconds of it spent in the model.
        decode_s: Seconds for the tokens after the first.
        store_s: Seconds spent in storing new blocks, after the answer.
        source_bytes: Bytes restored from each tier, by name.
        stored_blocks: Blocks that the store took.
        dropped_blocks: Blocks that it did not take: it was throttled until the time-out.
        finish_reason: `eos` or `length`.
        first_logits: Logits of the first token, `[vocabulary]`.
    """

    tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    ttft_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    store_s: float = 0.0
    source_bytes: Mapping[str, int] = field(default_factory=dict)
    stored_blocks: int = 0
    dropped_blocks: int = 0
    finish_reason: str = "length"
    first_logits: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)


@dataclass
class Restored:
    """The prefix that was not computed: its tokens, the seconds it took and where it came from."""

    tokens: int = 0
    seconds: float = 0.0
    source_bytes: dict[str, int] = field(default_factory=dict)


def make_result(
    run: Run, prompt: Sequence[int], restored: Restored, began: float, **stored: Any
) -> GenerationResult:
    """The result of `run`, which began at `began` (`time.perf_counter()`)."""
    return GenerationResult(
        tokens=run.tokens,
        prompt_tokens=len(prompt),
        reused_tokens=restored.tokens,
        computed_tokens=len(prompt) - restored.tokens,
        ttft_s=run.first_token_at - began,
        restore_s=restored.seconds,
        prefill_s=run.prefill_s,
        decode_s=run.decode_s,
        source_bytes=restored.source_bytes,
        finish_reason="eos" if run.stopped_by_eos else "length",
        first_logits=run.logits,
        **stored,
    )
