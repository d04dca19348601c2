"""Scenarios of many requests: a tiny pool of the engine, traffic without reuse, two replicas."""

from __future__ import annotations

import os
import random
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving import jobs, peers
from serving.jobs import BLOCK
from serving.server import Answer, Server

if TYPE_CHECKING:
    from serving.acceptance import Bench

Row = dict[str, Any]

SESSIONS = 32
PROMPT, ANSWER = 100, 30
POOL = 64
"""Blocks of the engine: a quarter of what the sessions need."""
SHORT = ("--max-model-len", "1024", "--enable-prompt-tokens-details")
STORE_PART = 0.03
"""Of the engine's processor time, what the store may take where nothing is used again."""
ROUNDS = 3
BATCH = 8
FRESH = 512


def prompts(count: int, length: int, seed: int, most: int = 40_000) -> list[list[int]]:
    """Prompts of random tokens."""
    source = random.Random(seed)
    return [[source.randrange(1000, most) for _ in range(length)] for _ in range(count)]


def together(server: Server, asked: Sequence[Sequence[int]], answer: int) -> list[Answer]:
    """Has all answered at once."""
    with ThreadPoolExecutor(len(asked)) as clients:
        return list(clients.map(lambda prompt: server.complete(prompt, answer), asked))


def sessions(bench: Bench) -> Row:
    """Sessions of two turns, all at once, in an engine that has room for a quarter of them."""
    return _sessions(bench, bench.store("sessions"))


def sessions_tier(bench: Bench) -> Row:
    """The same with the secondary tier."""
    return _sessions(bench, bench.tier("sessions"))


def _sessions(bench: Bench, flag: Sequence[str]) -> Row:
    first = prompts(SESSIONS, PROMPT, 1)
    then = prompts(SESSIONS, 20, 2)
    pool = [*SHORT, "--num-gpu-blocks-override", str(POOL), "--max-num-seqs", str(SESSIONS)]

    def told(server: Server) -> tuple[list[list[Answer]], float, int]:
        turns = [together(server, first, ANSWER)]
        server.reset()
        before = server.external()
        asked = [
            old + answer.tokens + new
            for old, answer, new in zip(first, turns[0], then, strict=True)
        ]
        turns.append(together(server, asked, ANSWER))
        preempted = server.metric("vllm:num_preemptions_total")
        return turns, preempted, server.external() - before

    # Enough memory that nothing is evicted: what a session stored, it finds.
    with bench.server(engine=pool) as server:
        plain, _, _ = told(server)
    with bench.server(flag, engine=pool) as server:
        ours, preempted, external = told(server)
    same = [
        [one.tokens for one in mine] == [one.tokens for one in others]
        for mine, others in zip(ours, plain, strict=True)
    ]
    whole = (PROMPT + ANSWER - 1) // BLOCK * BLOCK
    found = [one.cached for one in ours[1]]
    return {
        "holds": all(same) and preempted > 0 and min(found) >= whole,
        "tokens_identical": all(same),
        "sessions": SESSIONS,
        "pool_blocks": POOL,
        "preemptions": preempted,
        "external_tokens_of_second_turn": external,
        "cached_tokens_a_session": {"least": min(found), "most": max(found), "wanted": whole},
    }


def _threads(root: int) -> dict[str, float]:
    """Processor seconds of a process and its children, by name of thread."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    spent: dict[str, float] = {}
    for pid in family:
        for path in Path(f"/proc/{pid}/task").glob("*"):
            try:
                name = (path / "comm").read_text().rstrip()
                # In nanoseconds: the clock's ticks miss what ends before the next.
                ran_ns = int((path / "schedstat").read_text().split()[0])
            except OSError:
                continue
            spent[name] = spent.get(name, 0) + ran_ns / 1e9
    return spent


def no_reuse(bench: Bench) -> Row:
    """New prompts all the time, in turns to an engine with the store and to one without."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    # With a connector vLLM picks other processors, and more of them, than without.
    env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
    flag = bench.store("fresh")
    with bench.server(engine=SHORT, env=env) as plain, bench.server(flag, SHORT, env) as ours:
        for server in (plain, ours):
            together(server, prompts(2, FRESH, 0), 2)
        begun = _threads(ours.process.pid)
        copied = ours.metric("vllm:tiered_kv_save_seconds_sum")
        for number in range(ROUNDS):
            fresh = prompts(BATCH, FRESH, 10 + number)
            for name, server in (("with", ours), ("without", plain)):
                peers.let_rest()
                begun_s = time.perf_counter()
                together(server, fresh, ANSWER)
                rates[name].append(BATCH * (FRESH + ANSWER) / (time.perf_counter() - begun_s))
        ended = _threads(ours.process.pid)
        copied = ours.metric("vllm:tiered_kv_save_seconds_sum") - copied
        stored = ours.metric("vllm:tiered_kv_event_bytes_total", event="put")
    spent = {name: seconds - begun.get(name, 0) for name, seconds in ended.items()}
    of_store = sum(seconds for name, seconds in spent.items() if re.match("tkv-|tiered-kv", name))
    # Copies are made in the engine's own thread; what they wait for a processor counts here, too.
    part = (of_store + copied) / sum(spent.values())
    ratios = [mine / other for mine, other in zip(rates["with"], rates["without"], strict=True)]
    return {
        "holds": part <= STORE_PART and stored > 0,
        "store_of_engine_cpu": round(part, 4),
        "store_threads_s": round(of_store, 3),
        "copies_s": round(copied, 3),
        "engine_cpu_s": round(sum(spent.values()), 2),
        "bytes_stored": stored,
        "throughput_ratio": {
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
            "rounds": ROUNDS,
        },
    }


def replicas(bench: Bench) -> Row:
    """Two engine cores by one JSON: each finds its own blocks after a restart."""
    engine = [*SHORT, "--data-parallel-size", "2"]
    args = bench.store("replicas", sharers=2)
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    asked = prompts(2, PROMPT, 3)
    runs = []
    for _ in range(2):
        with bench.server(args, engine, env) as server:
            answers = [
                server.complete(prompt, ANSWER, {"X-data-parallel-rank": str(rank)})
                for rank, prompt in enumerate(asked)
            ]
            hits = [
                int(server.metric("vllm:external_prefix_cache_hits_total", engine=str(rank)))
                for rank in range(2)
            ]
            runs.append((answers, hits))
    cold, warm = runs
    whole = PROMPT // BLOCK * BLOCK
    same = [one.tokens for one in warm[0]] == [one.tokens for one in cold[0]]
    return {
        "holds": same and cold[1] == [0, 0] and warm[1] == [whole, whole],
        "tokens_identical": same,
        "external_tokens_by_replica": {"first": cold[1], "after_restart": warm[1]},
        "directories": sorted(str(one.name) for one in (bench.scratch / "replicas").iterdir()),
        "processors": os.cpu_count(),
        "block": jobs.BLOCK,
    }
