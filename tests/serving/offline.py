"""Runs vLLM in this process: `python offline.py JOB`, a JSON file; the answers go to `JOB.out`.

A job has `model`, a directory; `engine`, further arguments of `LLM`; `transfer`, the value of
`--kv-transfer-config` or null; `stats`, whether the store of this process is asked at the end, as
it is by default; and `rounds`.

A round has `prompts` of token ids, `max_tokens`, and optionally `salts`, one a prompt; `follow`,
whether each prompt comes behind that of the last round and its answer; `lora`, the number and the
directory of an adapter; `damage`, a directory and what is done to its segments before the round,
"truncate", "lengthen" or "delete"; `drop`, a directory and a part, all of whose blocks are deleted
before the round, "all", "window" or "state"; `fail`, how many of the round's first copies from the
store into the engine's cache raise; and `reset`, whether the engine's own cache is emptied
before it, or, where it is "external", also the connector's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def _counted(llm: Any, name: str) -> int:
    return sum(int(one.value) for one in llm.get_metrics() if one.name == name)


def _damage(directory: str, kind: str) -> None:
    """Changes the files of a store that is in use."""
    segments = sorted(Path(directory).glob("segment-*.tkv"))
    assert segments
    for path in segments:
        if kind == "delete":
            path.unlink()
        else:
            # What a segment holds is at its start.
            os.truncate(path, 4096 if kind == "truncate" else path.stat().st_size + 4096)


def _drop(directory: str, kind: str) -> int:
    """Deletes one part of every block of a store that is in use, by its operator's interface."""
    from tiered_kv._core import Operator
    from tiered_kv.operator import blocks, namespaces

    core = Operator.attach(directory)
    dropped = 0
    for row in list(namespaces(core)):
        _, _, name = ((row["fields"] or {}).get("engine") or "").partition(" part=")
        if name.split(" ")[1:2] == [kind]:
            keys = b"".join(one["key"] for one in blocks(core, row["namespace"]))
            dropped += core.delete_keys(row["namespace"], keys, 30.0)[0]
    core.close()
    return dropped


def _fail(copies: int) -> None:
    """Has the next copies into the engine's blocks fail."""
    from tiered_kv.engines.vllm.paged import PagedCache

    write, left = PagedCache.write, [copies]

    def broken(self: PagedCache, *args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            message = "as it was told to"
            raise RuntimeError(message)
        write(self, *args)

    PagedCache.write = broken  # type: ignore[method-assign,assignment]


def _round(llm: Any, job: dict[str, Any], history: list[list[int]]) -> dict[str, Any]:
    from vllm import SamplingParams

    reset = None
    if job.get("damage"):
        _damage(*job["damage"])
    if job.get("reset"):
        reset = llm.reset_prefix_cache(reset_connector=job["reset"] == "external")
    if job.get("fail"):
        _fail(job["fail"])
    dropped = _drop(*job["drop"]) if job.get("drop") else 0
    before = _counted(llm, "vllm:external_prefix_cache_hits")
    asked = job["prompts"]
    if job.get("follow"):
        asked = [old + new for old, new in zip(history, asked, strict=True)]
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in asked]
    for prompt, salt in zip(prompts, job.get("salts") or [], strict=False):
        if salt:
            prompt["cache_salt"] = salt
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    lora = None
    if job.get("lora"):
        from vllm.lora.request import LoRARequest

        number, directory = job["lora"]
        lora = LoRARequest("adapter", number, directory)
    done = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
    outputs = [list(one.outputs[0].token_ids) for one in done]
    history[:] = [ids + answer for ids, answer in zip(asked, outputs, strict=True)]
    return {
        "outputs": outputs,
        "reasons": [one.outputs[0].finish_reason for one in done],
        "cached": [one.num_cached_tokens for one in done],
        "external": _counted(llm, "vllm:external_prefix_cache_hits") - before,
        "preemptions": _counted(llm, "vllm:num_preemptions"),
        "reset": reset,
        "dropped": dropped,
    }


def main(path: str) -> None:
    """Runs a job."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    job = json.loads(Path(path).read_text())
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **job.get("engine", {}),
    }
    if job.get("transfer") is not None:
        options["kv_transfer_config"] = job["transfer"]
    llm = LLM(model=job["model"], **options)
    history: list[list[int]] = []
    rounds = [_round(llm, one, history) for one in job["rounds"]]
    stats = {}
    if job.get("transfer") is not None and job.get("stats", True):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        stats = get_kv_transfer_group().stats()
    Path(f"{path}.out").write_text(json.dumps({"rounds": rounds, "stats": stats}, default=str))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
