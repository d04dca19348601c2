"""Time in a tier's methods on the scheduler's thread: `python -m serving.tier_steps OUT SCRATCH`.

vLLM's own manager is driven at a steady rate of steps, in turns with our tier and with its tier of
files. Each step stores the chunks of new requests, and every tenth looks up and loads older ones.
"""

from __future__ import annotations

import gc
import json
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import LookupResult

from serving.tiering import TOKENS, Driven, keys_of, offloading

CHUNK = 26 << 12
"""Bytes of a chunk: 10,000 of them a second are more than 1 GB/s."""
STEP_S = 0.01
STORED = 100
"""Chunks a step, of two requests."""
REQUESTS = 2
LOADED = 50
EVERY = 10
STEPS = 200
WARM = 30
ROUNDS = 2
PRIMARY = 6144
LIMIT_US = 200
CONTROL = 3000
CALIBRATED = 1000
_TIMED = (
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "has_pending_work",
    "touch",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "serve_external_requests",
    "take_events",
    "get_stats",
)

Row = dict[str, Any]


class Step(NamedTuple):
    """What the methods of a tier took in a step.

    Attributes:
        us: Microseconds by the clock.
        cpu_us: Those of the processor.
        waits: How often a method waited for something.
        taken: How often the kernel gave the processor to another thread meanwhile.
    """

    us: float
    cpu_us: float
    waits: int
    taken: int


class Clock:
    """Adds up the time in the methods of a tier, and that of the processor in them."""

    def __init__(self, tier: Any) -> None:
        self._spent_ns = self._cpu_ns = self._own_ns = self._own_cpu_ns = 0
        self._waits = self._taken = 0
        nothing = self._timed(lambda: None)
        own = []
        for _ in range(CALIBRATED):
            nothing()
            step = self.take()
            own.append((step.us, step.cpu_us))
        # To ask for a time takes some of it, which is not the method's.
        self._own_ns, self._own_cpu_ns = (
            int(1000 * statistics.median(each)) for each in zip(*own, strict=True)
        )
        for name in _TIMED:
            setattr(tier, name, self._timed(getattr(tier, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            before = resource.getrusage(resource.RUSAGE_THREAD)
            cpu, begun = time.thread_time_ns(), time.perf_counter_ns()
            found = method(*args)
            self._spent_ns += time.perf_counter_ns() - begun - self._own_ns
            self._cpu_ns += time.thread_time_ns() - cpu - self._own_cpu_ns
            after = resource.getrusage(resource.RUSAGE_THREAD)
            self._waits += after.ru_nvcsw - before.ru_nvcsw
            self._taken += after.ru_nivcsw - before.ru_nivcsw
            return found

        return timed

    def take(self) -> Step:
        """What has come since the last call."""
        step = Step(self._spent_ns / 1000, self._cpu_ns / 1000, self._waits, self._taken)
        self._spent_ns = self._cpu_ns = self._waits = self._taken = 0
        return step


def control_us() -> float:
    """A loop of some 100 us: what the machine itself adds to it, it adds to the rest as well."""
    begun = time.perf_counter_ns()
    for _ in range(CONTROL):
        pass
    return (time.perf_counter_ns() - begun) / 1000


def paced(next_s: float) -> tuple[float, bool]:
    """Sleeps until a time; returns that time, or now where it has gone by, and whether it has."""
    left_s = next_s - time.monotonic()
    if left_s <= 0:
        return time.monotonic(), True
    time.sleep(left_s)
    return next_s, False


def again(driven: Driven, name: str, keys: list[Any]) -> tuple[Any, int]:
    """A request for what has been stored before, and how many chunks of it are loaded."""
    context = driven.begin(name, keys)
    found = [driven.manager.lookup(key, context) for key in keys]
    return context, sum(one is LookupResult.HIT_PENDING for one in found)


def run(tier: Row, name: str) -> Row:
    """One round with one tier."""
    driven = Driven(tier, chunks=PRIMARY, chunk_bytes=CHUNK, spec=offloading())
    clock = Clock(driven.tiers[0])
    gc.collect()
    gc.freeze()  # as vLLM's engine does when it has started
    per = STORED // REQUESTS
    prompts: list[list[Any]] = []
    steps: list[Step] = []
    control: list[float] = []
    stored = refused = loaded = late = 0
    manager = driven.manager
    open_requests: list[Any] = []
    begun_s = next_s = time.monotonic()
    for step in range(STEPS):
        if step == WARM:
            begun_s, stored = time.monotonic(), 0
        clock.take()
        # Scheduling, up to what the workers are told.
        outputs = []
        for number in range(REQUESTS):
            keys = keys_of(f"{name} {step} {number}", per)
            context = driven.begin(f"{step} {number}", keys)
            open_requests.append(context)
            output = manager.prepare_store(keys, context)
            if output is None:
                refused += per
            else:
                outputs.append((output.keys_to_store, context))
                prompts.append(keys)
        if step % EVERY == EVERY - 1 and len(prompts) > PRIMARY // per * 2:
            context, count = again(driven, f"{step} again", prompts.pop(0)[:LOADED])
            open_requests.append(context)
            loaded += count
        driven.step()
        # The model computes.
        next_s, was_late = paced(next_s + STEP_S)
        late += was_late
        # What has come of it.
        for keys, context in outputs:
            manager.complete_store(keys, context)
            stored += len(keys)
        for context in open_requests:
            driven.finish(context)
        open_requests = []
        manager.has_pending_work()
        manager.get_stats()
        if step >= WARM:
            steps.append(clock.take())
            control.append(control_us())
    took_s = time.monotonic() - begun_s
    driven.settle()
    settled_s = time.monotonic() - begun_s
    driven.manager.shutdown()
    return {
        "step_us": [one.us for one in steps],
        "step_cpu_us": [one.cpu_us for one in steps],
        # What is left where nobody else has had the processor in between.
        "whole_step_us": [one.us for one in steps if not one.taken],
        "control_us": control,
        "offered_bytes_per_s": round(stored * CHUNK / took_s),
        "stored_bytes_per_s": round(stored * CHUNK / settled_s),
        "chunks_per_s": round(stored / took_s),
        "refused_chunks": refused,
        "loaded_chunks": loaded,
        "late_steps": late,
        "waits_in_methods": sum(one.waits for one in steps),
        "steps_interrupted": sum(one.taken > 0 for one in steps),
    }


def summed(rounds: list[Row]) -> Row:
    """All rounds of a tier."""
    found: Row = {}
    for name in ("step_us", "whole_step_us", "step_cpu_us", "control_us"):
        all_us = sorted(us for one in rounds for us in one[name])
        if all_us:
            found[f"{name}_p50"] = round(statistics.median(all_us), 1)
            found[f"{name}_p99"] = round(all_us[int(len(all_us) * 0.99)], 1)
            found[f"{name}_most"] = round(all_us[-1], 1)
    found["steps"] = sum(len(one["step_us"]) for one in rounds)
    told = (name for name in rounds[0] if not name.endswith("_us"))
    return found | {name: [one[name] for one in rounds] for name in told}


def main() -> None:
    """Both tiers in turns, each round with files of its own."""
    out, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, list[Row]] = {"tiered_kv": [], "vllm_fs": []}
    for number in range(ROUNDS):
        ours = {
            "type": "TieredKV",
            "module_path": "tiered_kv.engines.vllm",
            "path": str(scratch / f"kv{number}"),
            "nvme_capacity": "3GiB",
            "namespace": "steps",
            "lora": "by_path",
        }
        files = {"type": "fs", "root_dir": str(scratch / f"fs{number}")}
        for name, tier in (("tiered_kv", ours), ("vllm_fs", files)):
            found[name].append(run(tier, f"{name} {number}"))
            shutil.rmtree(tier.get("path") or tier["root_dir"])
    rows = {name: summed(rounds) for name, rounds in found.items()}
    measured = rows["tiered_kv"]
    fast = min(measured["chunks_per_s"]) >= 0.95 * STORED / STEP_S
    out.write_text(
        json.dumps(
            {
                "holds": measured["step_us_p99"] <= LIMIT_US and fast,
                "limit_us": LIMIT_US,
                "step_s": STEP_S,
                "chunks_a_step": STORED,
                "chunk_bytes": CHUNK,
                "tokens_a_chunk": TOKENS,
                **rows,
            }
        )
    )


if __name__ == "__main__":
    main()
