"""The compute side of the transformers engine: restore, prefill and decode, in one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered_kv.engines._arena import ArenaCache, KvArena
from tiered_kv.engines._kv_layout import ForwardStyle, KvGeometry
from tiered_kv.torch import view


class Stopped(Exception):  # noqa: N818 - not an error: the caller was cancelled
    """The request was cancelled while it was being computed."""


@dataclass(frozen=True)
class Run:
    """What one pass over a prompt produced.

    Attributes:
        tokens: The tokens generated, the end token included.
        stopped_by_eos: Whether the last token is an end token.
        logits: Logits of the first token, `[vocabulary]`.
        first_token_at: `time.perf_counter()` when the first token was known.
        prefill_s: Seconds from the start of the prefill to the first token.
        decode_s: Seconds for all later tokens.
    """

    tokens: list[int]
    stopped_by_eos: bool
    logits: torch.Tensor
    first_token_at: float
    prefill_s: float
    decode_s: float


class Runner:
    """Runs a model over the arena. Not thread-safe: one call at a time.

    Args:
        model: The model, in evaluation mode.
        geometry: The shape of its cache.
        style: How its `forward` is called.
        tokens_per_block: Tokens of a stored block.
    """

    def __init__(
        self, model: Any, geometry: KvGeometry, style: ForwardStyle, tokens_per_block: int
    ) -> None:
        self.arena = KvArena(geometry)
        self.resident: list[int] = []
        """The tokens whose keys and values the arena holds."""
        self._model = model
        self._geometry = geometry
        self._style = style
        self._tokens_per_block = tokens_per_block
        self._staging = torch.empty(0, dtype=geometry.dtype)

    def reserve(self, tokens: int) -> None:
        """Makes room for a sequence of `tokens` tokens."""
        if self.arena.reserve(tokens):
            self.resident = []

    def release(self) -> None:
        """Frees the memory of the sequence and of the staged blocks."""
        self.arena = KvArena(self._geometry)
        self.resident = []
        self._staging = torch.empty(0, dtype=self._geometry.dtype)

    def restore(self, blocks: Iterable[Any], prompt: Sequence[int], stop: threading.Event) -> None:
        """Copies leased blocks to the start of the arena.

        Args:
            blocks: The prompt's first blocks, in order: buffers of `block_bytes`.
            prompt: The prompt that they begin.
            stop: Ends the copy early when set.

        Raises:
            Stopped: `stop` was set.
        """
        shape = self._geometry
        sizes = (shape.rows, self._tokens_per_block, shape.head_dim)
        self.resident = []
        count = 0
        for count, block in enumerate(blocks, 1):
            if stop.is_set():
                raise Stopped
            target = self.arena.blocks(count - 1, 1, self._tokens_per_block)[0]
            target.copy_(view(block, shape.dtype, sizes))
        self.resident = list(prompt[: count * self._tokens_per_block])

    def run(
        self,
        prompt: Sequence[int],
        start: int,
        ends: Sequence[int],
        max_new_tokens: int,
        eos: Collection[int],
        stop: threading.Event,
    ) -> Run:
        """Prefills `prompt` from `start` on, chunk by chunk, and decodes greedily.

        Args:
            prompt: Token ids.
            start: Tokens whose keys and values the arena holds already.
            ends: Ends of the chunks to compute; the last is the prompt's length.
            max_new_tokens: Tokens to generate at most, 1 or more.
            eos: Token ids that end the answer.
            stop: Ends the run early when set.

        Raises:
            Stopped: `stop` was set.
        """
        began = time.perf_counter()
        self.resident = self.resident[:start]
        with torch.inference_mode():
            cache = ArenaCache(self.arena, start)
            ids = torch.tensor([prompt[start:]], device=self._geometry.device)
            position = start
            logits = torch.empty(0)
            for end in ends:
                logits = self._forward(ids[:, position - start : end - start], cache, stop)
                self.resident = list(prompt[:end])
                position = end
            tokens = [int(logits.argmax())]
            first = time.perf_counter()
            while tokens[-1] not in eos and len(tokens) < max_new_tokens:
                step = torch.tensor([[tokens[-1]]], device=self._geometry.device)
                following = int(self._forward(step, cache, stop).argmax())
                self.resident.append(tokens[-1])
                tokens.append(following)
        done = time.perf_counter()
        # A clone outside of inference mode is a plain tensor, which callers may do anything with.
        return Run(tokens, tokens[-1] in eos, logits.clone(), first, first - began, done - first)

    def stage(self, first: int, count: int) -> torch.Tensor:
        """Copies blocks out of the arena into CPU memory as they are stored.

        Args:
            first: Number of the first block.
            count: Blocks to copy.

        Returns:
            `[count, rows, tokens_per_block, head_dim]`, valid until the next call.
        """
        blocks = self.arena.blocks(first, count, self._tokens_per_block)
        if self._staging.numel() < blocks.numel():
            self._staging = torch.empty(blocks.numel(), dtype=blocks.dtype)
        return self._staging[: blocks.numel()].view(blocks.shape).copy_(blocks)

    def copy_of(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of each layer's keys and values of the first tokens."""
        layers = (self.arena.layer(index) for index in range(self._geometry.layers))
        return [
            (keys[:, :, :tokens].clone(), values[:, :, :tokens].clone()) for keys, values in layers
        ]

    def _forward(self, ids: torch.Tensor, cache: ArenaCache, stop: threading.Event) -> torch.Tensor:
        """Logits of the last position, `[vocabulary]`."""
        if stop.is_set():
            raise Stopped
        arguments: dict[str, Any] = {self._style.cache_argument: cache, "use_cache": True}
        if self._style.keeps_logits:
            arguments["logits_to_keep"] = 1
        output: Any = self._model(ids, **arguments)
        logits: torch.Tensor = output.logits[0, -1]
        return logits
