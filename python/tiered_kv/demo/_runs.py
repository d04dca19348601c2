"""Runs as both processes of the demo make them, and the form in which they are passed on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiered_kv import StoreConfig
from tiered_kv.engines.transformers import GenerationResult, TransformersEngine

WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Run:
    """One answer.

    Attributes:
        turn: Name of the row that it belongs to.
        question: The question.
        tokens: The answer's tokens.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Tokens of it that were not computed.
        ttft_s: Seconds from token ids to the first token.
        restore_s: Seconds of it spent in loading.
        decode_s: Seconds for all later tokens.
        source_bytes: Bytes restored, by tier.
        device_bytes: Bytes that the process read from the device meanwhile (`/proc/self/io`).
        open_s: Seconds that the store took to open just before; 0 where it was open.
    """

    turn: str
    question: str
    tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float
    restore_s: float = 0.0
    decode_s: float = 0.0
    source_bytes: dict[str, int] = field(default_factory=dict)
    device_bytes: int = 0
    open_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """What the restarted process is to do; passed as JSON on its standard input.

    Attributes:
        model: Directory of the model.
        document: The text.
        questions: The questions, one for each repeat.
        store_dir: Directory of the NVMe tier.
        dram_capacity: Capacity of the DRAM tier.
        nvme_capacity: Capacity of the NVMe tier.
        salt: Salt of the namespace.
        threads: Threads of torch.
        max_new_tokens: Tokens of an answer.
        eos: Token ids that end an answer.
        naive_file: What `torch.save` wrote.
    """

    model: str
    document: str
    questions: list[str]
    store_dir: str
    dram_capacity: str
    nvme_capacity: str
    salt: str
    threads: int
    max_new_tokens: int
    eos: list[int]
    naive_file: str

    def as_dict(self) -> dict[str, Any]:
        """The job as JSON takes it."""
        return asdict(self)


def store_config(directory: str, dram_capacity: str, nvme_capacity: str) -> StoreConfig:
    """The configuration of the demo's store."""
    return StoreConfig(
        dram_capacity=dram_capacity, nvme_paths=[directory], nvme_capacity=nvme_capacity
    )


def record(
    turn: str, question: str, result: GenerationResult, *, device_bytes: int = 0, open_s: float = 0
) -> Run:
    """The run that an engine's result stands for."""
    return Run(
        turn=turn,
        question=question,
        tokens=result.tokens,
        prompt_tokens=result.prompt_tokens,
        reused_tokens=result.reused_tokens,
        ttft_s=result.ttft_s,
        restore_s=result.restore_s,
        decode_s=result.decode_s,
        source_bytes=dict(result.source_bytes),
        device_bytes=device_bytes,
        open_s=open_s,
    )


async def warm_up(engine: TransformersEngine, segments: list[list[int]]) -> None:
    """Runs a few tokens, so that no turn pays for what torch sets up at its first call."""
    tokens = [token for segment in segments for token in segment][:WARM_UP_TOKENS]
    await engine.generate_uncached([tokens], max_new_tokens=2)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The token ids that end an answer of this model."""
    found = getattr(model.generation_config, "eos_token_id", None)
    ends = found if isinstance(found, list) else [found, tokenizer.eos_token_id]
    return sorted({token for token in ends if token is not None})


def device_bytes_read() -> int:
    """Bytes that this process has read from block devices so far; 0 where that is unknown."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(": ", 1) for line in lines)
    return int(fields.get("read_bytes", "0"))
