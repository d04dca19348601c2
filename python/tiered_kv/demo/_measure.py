"""The turns of the demo, in the order in which a reader would try them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiered_kv import InvalidArgumentError, RequestContext, TieredKvError, TieredStore
from tiered_kv.demo import _model, _naive
from tiered_kv.demo._progress import Progress
from tiered_kv.demo._prompt import Prompts, read_document
from tiered_kv.demo._report import Report, make_report
from tiered_kv.demo._runs import Job, Run, end_tokens, record, store_config, warm_up
from tiered_kv.demo.restarted import NAIVE, NVME, OTHER
from tiered_kv.engines.transformers import TransformersEngine

COLD = "cold, one go"
STORED = "cold, on the grid, stored"
DRAM = "DRAM hit"
LIMIT = "limit: prefix in the model"

# Room for a question and the template after the document, in tokens.
_QUESTION_ROOM = 512
# How often a DRAM hit and the limit are run for each repeat: they are quick, and it is their ratio
# that noise hides first.
_PAIRS = 2
_EVENT_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True)
class Settings:
    """What the command line asks for; see `run_from_cli`."""

    model: str | None
    document: Path | None
    store_dir: Path | None
    cache_dir: Path | None
    repeats: int
    threads: int | None
    dram_capacity: str
    nvme_capacity: str
    max_new_tokens: int
    import_s: float


class _Demo:
    """The state that the turns share."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        _model.quiet()
        self.settings = settings
        self.progress = progress
        document, questions = read_document(settings.document)
        self.document = document
        self.questions = [questions[number % len(questions)] for number in range(settings.repeats)]
        if settings.model is None:
            progress.step("looking for the model")
            self.model_name = str(_model.model_directory(settings.cache_dir, progress.note))
        else:
            self.model_name = settings.model
        progress.step("loading the model")
        began = time.perf_counter()
        self.tokenizer, self.model = _model.load_apart(self.model_name)
        self.model_load_s = time.perf_counter() - began
        self.prompts = Prompts(self.tokenizer, document)
        self.eos = end_tokens(self.model, self.tokenizer)
        # A salt of its own: whatever earlier runs have left in the directory, cold is cold.
        self.salt = secrets.token_hex(8)
        self.runs: list[Run] = []
        progress.note(
            f"model loaded in {self.model_load_s:.1f} s; the document has "
            f"{self.prompts.document_tokens} tokens; {torch.get_num_threads()} threads"
        )

    @property
    def room(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompts.document_tokens + _QUESTION_ROOM + self.settings.max_new_tokens

    def done(self, run: Run) -> None:
        """Keeps a run and shows its answer."""
        self.runs.append(run)
        answer = self.prompts.text(run.tokens)
        self.progress.done(
            f"{run.turn:<26} {run.ttft_s:7.3f} s to the first token, reused {run.reused_tokens} of "
            f"{run.prompt_tokens} tokens: {answer}"
        )

    def options(self) -> dict[str, Any]:
        """The arguments that all runs share."""
        return {"max_new_tokens": self.settings.max_new_tokens, "eos": self.eos}


async def measure(settings: Settings, progress: Progress) -> Report:
    """Runs all turns.

    Args:
        settings: What to run.
        progress: Where to show it.

    Returns:
        The report, medians and comparisons included.

    Raises:
        TieredKvError: The store, the model or the document cannot be used.
    """
    demo = _Demo(settings, progress)
    progress.expect(1 + (4 + 2 * _PAIRS) * settings.repeats)
    with _store_directory(settings.store_dir) as directory, _scratch(directory) as scratch:
        config = store_config(str(directory), settings.dram_capacity, settings.nvme_capacity)
        progress.step("opening the store")
        began = time.perf_counter()
        async with TieredStore.open(config) as store:
            open_s = time.perf_counter() - began
            engine = TransformersEngine(demo.model, store, salt=demo.salt, reserve_tokens=demo.room)
            await _first_process(demo, engine)
            progress.step("writing the naive file")
            tokens = demo.runs[-1].reused_tokens
            _naive.save(engine.resident_prefix(tokens), tokens, scratch)
            progress.step("flushing and closing the store")
            await store.flush()
            engine.close()
        started = await _second_process(demo, directory, scratch)
    return make_report(
        demo.runs,
        cold=(COLD, STORED),
        limit=LIMIT,
        facts={
            "model": demo.model_name,
            "document": str(settings.document or "the package's own"),
            "document_tokens": demo.prompts.document_tokens,
            "threads": torch.get_num_threads(),
            "repeats": settings.repeats,
            "max_new_tokens": settings.max_new_tokens,
            "block_bytes": engine.block_bytes,
            "torch": torch.__version__,
        },
        process={
            "import_s": settings.import_s,
            "model_load_s": demo.model_load_s,
            "open_s": open_s,
        },
        restarted=started,
        answer_text=demo.prompts.text,
    )


async def _first_process(demo: _Demo, engine: TransformersEngine) -> None:
    progress = demo.progress
    prompts = [demo.prompts.segments(question) for question in demo.questions]
    progress.step("warming up")
    await warm_up(engine, prompts[0])
    for question, segments in zip(demo.questions, prompts, strict=True):
        progress.step(f"cold: {question}")
        demo.done(
            record(COLD, question, await engine.generate_uncached(segments, **demo.options()))
        )
    progress.step(f"cold, and storing the document: {demo.questions[0]}")
    context = RequestContext(session="first", turn=0)
    stored = await engine.generate(prompts[0], context=context, **demo.options())
    demo.done(record(STORED, demo.questions[0], stored))
    # By turns, so that whatever else the machine does hits both alike.
    pairs = list(zip(demo.questions, prompts, strict=True)) * _PAIRS
    for number, (question, segments) in enumerate(pairs, 1):
        progress.step(f"from DRAM: {question}")
        context = RequestContext(session="first", turn=number)
        hit = await engine.generate(segments, context=context, **demo.options())
        demo.done(record(DRAM, question, hit))
        progress.step(f"from the model's own cache: {question}")
        limit = await engine.generate_resident(segments, **demo.options())
        demo.done(record(LIMIT, question, limit))


async def _second_process(demo: _Demo, directory: Path, scratch: Path) -> dict[str, float]:
    """Starts the program anew and takes over its runs; returns how long it took to start."""
    settings = demo.settings
    job = Job(
        model=demo.model_name,
        document=demo.document,
        questions=demo.questions,
        store_dir=str(directory),
        dram_capacity=settings.dram_capacity,
        nvme_capacity=settings.nvme_capacity,
        salt=demo.salt,
        threads=torch.get_num_threads(),
        max_new_tokens=settings.max_new_tokens,
        eos=demo.eos,
        naive_file=str(scratch),
    )
    demo.progress.step("restarting: a new process imports torch and opens the store")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tiered_kv.demo.restarted",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_EVENT_LIMIT_BYTES,
    )
    started: dict[str, float] = {}
    try:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both were asked for")
        process.stdin.write(json.dumps(job.as_dict()).encode())
        await process.stdin.drain()
        process.stdin.close()
        async for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                started = {name: event[name] for name in ("import_s", "model_load_s")}
                demo.progress.note("restarted; " + _seconds(started))
            else:
                demo.done(Run(**event["run"]))
            demo.progress.step("the restarted process answers")
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status != 0:
        raise TieredKvError(f"the restarted process ended with status {status}; see above")
    return started


def _seconds(named: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_s')} {value:.1f} s" for name, value in named.items())


@contextlib.contextmanager
def _store_directory(given: Path | None) -> Iterator[Path]:
    """The directory of the NVMe tier; a fresh one goes away afterwards."""
    if given is not None:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield given
        return
    # Not in the system's temporary directory, which may be memory.
    base = Path("build")
    try:
        base.mkdir(exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="demo-store-", dir=base))
    except OSError as error:
        message = f"store_dir: cannot make one under {base.absolute()} ({error}); give --store-dir"
        raise InvalidArgumentError(message) from error
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A file beside the store, on the same device, for the naive way."""
    path = directory.parent / f".{directory.name}-{secrets.token_hex(4)}.pt"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


TURNS = (COLD, STORED, DRAM, LIMIT, NVME, OTHER, NAIVE)
"""All rows, in the order in which they are shown."""
