"""The compute side of the transformers engine: restore, prefill and decode, in one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered_kv.engines._arena import ArenaCache, KvArena
from tiered_kv.engines._inspect import ForwardStyle
from tiered_kv.engines._kv_layout import KvGeometry
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
        # For each group the first token whose keys and values are those of `resident`.
        self._valid_from = [0] * len(geometry.groups)
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

    def resumable(self, start: int) -> bool:
        """Whether a run may go on after the first `start` resident tokens."""
        return start <= len(self.resident) and all(
            group.first_token(start) >= valid
            for group, valid in zip(self._geometry.groups, self._valid_from, strict=True)
        )

    def restore(
        self,
        first: int,
        blocks: Sequence[Mapping[int, Any]],
        prompt: Sequence[int],
        stop: threading.Event,
    ) -> None:
        """Copies leased slabs to where their tokens lie in the arena.

        Args:
            first: Number of the first block.
            blocks: For each block the slabs that a token to come attends to, by group.
            prompt: The prompt that the blocks belong to.
            stop: Ends the copy early when set.

        Raises:
            Stopped: `stop` was set.
        """
        shape, size = self._geometry, self._tokens_per_block
        count = first + len(blocks)
        self.resident = []
        for number, slabs in enumerate(blocks, first):
            if stop.is_set():
                raise Stopped
            for group, slab in slabs.items():
                self._fill(group, number, slab)
        self._valid_from = [group.first_block(count, size) * size for group in shape.groups]
        self.resident = list(prompt[: count * size])

    def _fill(self, group: int, number: int, slab: Any) -> None:
        size = self._tokens_per_block
        source = view(slab, self._geometry.dtype, (self._geometry.groups[group].elements(size),))
        for target in self.arena.slabs(group, number, 1, size):
            part, source = source[: target.numel()], source[target.numel() :]
            target.copy_(part.view(target.shape))

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
            start: Tokens whose keys and values the arena holds already, `resumable`.
            ends: Ends of the chunks to compute; the last is the prompt's length.
            max_new_tokens: Tokens to generate at most, 1 or more.
            eos: Token ids that end the answer.
            stop: Ends the run early when set.

        Raises:
            Stopped: `stop` was set.
        """
        began = time.perf_counter()
        self.resident = self.resident[:start]
        if start == 0:
            self._valid_from = [0] * len(self._valid_from)
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
            first: Number of the first block; it was computed, not restored.
            count: Blocks to copy.

        Returns:
            `[count, elements]`, the slabs of a block one behind the other; valid until the next
            call.
        """
        size = self._tokens_per_block
        elements = sum(group.elements(size) for group in self._geometry.groups)
        if self._staging.numel() < count * elements:
            self._staging = torch.empty(count * elements, dtype=self._geometry.dtype)
        staged = self._staging[: count * elements].view(count, elements)
        at = 0
        for group in range(len(self._geometry.groups)):
            for plane in self.arena.slabs(group, first, count, size):
                end = at + plane[0].numel()
                staged[:, at:end].unflatten(1, plane.shape[1:]).copy_(plane)
                at = end
        return staged

    def copy_of(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of what a cache of the first tokens holds, for each layer that holds something."""
        layers = ArenaCache(self.arena, tokens).layers
        return [
            (layer.keys.clone(), layer.values.clone()) for layer in layers if layer.keys is not None
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
