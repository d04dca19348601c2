"""The naive way: one file with `torch.save`, read with `torch.load`, into a plain cache."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer

from tiered_kv.demo._runs import Run, device_bytes_read


def save(layers: list[tuple[torch.Tensor, torch.Tensor]], tokens: int, path: Path) -> None:
    """Writes what a cache holds after `tokens` tokens to `path`, and to the device."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        flat = [part for pair in layers for part in pair]
        torch.save({"layers": flat, "tokens": tokens}, file)
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Drops the file from the page cache, as a restarted machine would have."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def answer(
    model: Any,
    path: Path,
    question: str,
    segments: list[list[int]],
    max_new_tokens: int,
    eos: Collection[int],
    turn: str,
) -> Run:
    """Answers a question with the prefix loaded from `path`.

    Args:
        model: The model.
        path: What `save` wrote for the first tokens of the prompt.
        question: The question.
        segments: Its prompt.
        max_new_tokens: Tokens to generate at most.
        eos: Token ids that end the answer.
        turn: Name of the row.
    """
    forget(path)
    device_before = device_bytes_read()
    began = time.perf_counter()
    prompt = [token for segment in segments for token in segment]
    file = torch.load(path, weights_only=True)
    saved, start = file["layers"], file["tokens"]
    cache = _filled(model, saved, start)
    loaded = time.perf_counter()
    tokens: list[int] = []
    ids = torch.tensor([prompt[start:]])
    first = loaded
    with torch.inference_mode():
        while not tokens or (tokens[-1] not in eos and len(tokens) < max_new_tokens):
            output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            tokens.append(int(output.logits[0, -1].argmax()))
            if len(tokens) == 1:
                first = time.perf_counter()
            ids = torch.tensor([[tokens[-1]]])
    return Run(
        turn=turn,
        question=question,
        tokens=tokens,
        prompt_tokens=len(prompt),
        reused_tokens=start,
        ttft_s=first - began,
        restore_s=loaded - began,
        decode_s=time.perf_counter() - first,
        source_bytes={"file": sum(part.nbytes for part in saved)},
        device_bytes=device_bytes_read() - device_before,
    )


def _filled(model: Any, saved: list[torch.Tensor], tokens: int) -> DynamicCache:
    """A cache of `tokens` tokens that holds the saved keys and values."""
    cache = DynamicCache(config=model.config)
    layers = [layer for layer in cache.layers if not isinstance(layer, DummyLayer)]
    for layer, keys, values in zip(layers, saved[::2], saved[1::2], strict=True):
        layer.update(keys, values)
        if layer.is_sliding:
            layer.cumulative_length = tokens
    return cache
