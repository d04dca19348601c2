"""The restarted process of the demo: `python -m tiered_kv.demo.restarted`.

It takes a job as JSON on standard input and writes one line of JSON on standard output for each
event: `ready` once, `run` for each answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.demo._runs import Job, Run

NVME = "restarted, NVMe hit"
OTHER = "another session, DRAM hit"
NAIVE = "restarted, torch.load"


def _emit(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _emit_run(run: Run) -> None:
    _emit("run", run=asdict(run))


async def _work(job: Job, import_s: float) -> None:
    import torch

    from tiered_kv import RequestContext, TieredStore
    from tiered_kv.demo import _model, _naive
    from tiered_kv.demo._prompt import Prompts
    from tiered_kv.demo._runs import device_bytes_read, end_tokens, record, store_config, warm_up
    from tiered_kv.engines.transformers import TransformersEngine

    torch.set_num_threads(job.threads)
    _model.quiet()
    began = time.perf_counter()
    tokenizer, model = _model.load_apart(job.model)
    prompts = Prompts(tokenizer, job.document)
    _emit("ready", import_s=import_s, model_load_s=time.perf_counter() - began)
    eos = end_tokens(model, tokenizer)
    config = store_config(job.store_dir, job.dram_capacity, job.nvme_capacity)
    room = prompts.document_tokens + 512 + job.max_new_tokens
    for number, question in enumerate(job.questions):
        # Opened anew for each question, so that each one finds the DRAM tier empty.
        opening = time.perf_counter()
        async with TieredStore.open(config) as store:
            open_s = time.perf_counter() - opening
            engine = TransformersEngine(model, store, salt=job.salt, reserve_tokens=room)
            segments = prompts.segments(question)
            await warm_up(engine, segments)
            for turn, session in ((NVME, "first"), (OTHER, "second")):
                before = device_bytes_read()
                result = await engine.generate(
                    segments,
                    max_new_tokens=job.max_new_tokens,
                    context=RequestContext(session=session, turn=number + 1),
                    eos=eos,
                )
                read = device_bytes_read() - before
                opened = open_s if turn == NVME else 0.0
                _emit_run(record(turn, question, result, device_bytes=read, open_s=opened))
            engine.close()
        with ThreadPoolExecutor(1) as thread:
            naive = thread.submit(
                _naive.answer,
                model,
                Path(job.naive_file),
                question,
                segments,
                job.max_new_tokens,
                eos,
                NAIVE,
            )
        _emit_run(naive.result())


def main() -> None:
    """Reads the job, works, reports."""
    began = time.perf_counter()
    from tiered_kv.demo._runs import Job  # brings torch and transformers, hence timed

    job = Job(**json.load(sys.stdin))
    asyncio.run(_work(job, time.perf_counter() - began))


if __name__ == "__main__":
    main()
