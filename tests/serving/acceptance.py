"""`make acceptance-engines`: vLLM's server on the demo's model, with the store and without.

Runs each scenario, prints a line for each, and writes what came of them as JSON. A scenario that
does not hold what is asked of it makes the status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from serving import busy, jobs, peers
from serving.jobs import BLOCK
from serving.server import Answer, Server
from tiered_kv import _core
from tiered_kv.demo._model import model_directory

DOCUMENT = jobs.ROOT / "python/tiered_kv/demo/document.txt"
DOCUMENT_TOKENS = 2000
ANSWER = 24
QUESTIONS = (
    "Who tells this story, and where?",
    "What happened first?",
    "Who else is there?",
    "Why did they do that?",
    "How does it end?",
)
DRIVEN_LIMIT_S = 1800
WINDOWS = 5
WHOLE = WINDOWS * ((DOCUMENT_TOKENS - 1) // BLOCK * BLOCK)
"""Of these documents, the tokens in whole blocks."""
WARM_PART = 0.2
"""Of the time to a first token of a prompt that is computed, what one from the drive may take."""
ENGINE = ("--max-model-len", "4096", "--enable-prompt-tokens-details", "--max-num-seqs", "8")

Row = dict[str, Any]


class Bench:
    """What all scenarios need.

    Args:
        python: The interpreter that has vLLM.
        model: The model's directory.
        scratch: Where stores and logs go.
    """

    def __init__(self, python: Path, model: Path, scratch: Path) -> None:
        self.python = python
        self.model = model
        self.scratch = scratch
        self._servers = 0

    def store(self, name: str, nvme: str = "4GiB", dram: str = "1GiB", **fields: Any) -> list[str]:
        """The flag of a store of this name."""
        path = self.scratch / name
        config = jobs.transfer(path, nvme_capacity=nvme, dram_capacity=dram, **fields)
        return ["--kv-transfer-config", json.dumps(config)]

    def tier(self, name: str, nvme: str = "4GiB", **fields: Any) -> list[str]:
        """The flag of a secondary tier of this name, below 1 GiB of host memory."""
        entry = {"type": "TieredKV", "module_path": "tiered_kv.engines.vllm"}
        entry |= {"path": str(self.scratch / name), "nvme_capacity": nvme, **fields}
        return peers.tiering(entry)

    @contextmanager
    def server(
        self,
        args: Sequence[str] = (),
        engine: Sequence[str] = ENGINE,
        env: dict[str, str] | None = None,
    ) -> Iterator[Server]:
        """A server that ends with the block."""
        self._servers += 1
        log = self.scratch / f"server{self._servers}.log"
        server = Server(self.python, self.model, log, [*engine, *args], env)
        try:
            yield server
        finally:
            server.stop()

    @contextmanager
    def servers(
        self, ways: dict[str, list[str]], env: dict[str, str] | None = None
    ) -> Iterator[dict[str, Server]]:
        """Servers that end with the block, with flags each."""
        env = peers.environment() | (env or {})
        with ExitStack() as stack:
            made = {
                name: stack.enter_context(self.server(args, env=env)) for name, args in ways.items()
            }
            yield made


class Talk:
    """Five turns behind a document, and a second session on it; the engine's own cache emptied."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.external: list[int] = []
        self.lengths: list[int] = []
        self._history: list[int] = []

    def ask(self, server: Server, questions: Sequence[str]) -> None:
        """The next turns."""
        if not self._history:
            self._history = server.tokens(DOCUMENT.read_text("utf-8"))[:DOCUMENT_TOKENS]
        for question in questions:
            self._history += server.tokens(f"\n\nQuestion: {question}\nAnswer:")
            self.lengths.append(len(self._history))
            self._history += self._answered(server, self._history)

    def again(self, server: Server) -> None:
        """The second session."""
        question = server.tokens(f"\n\nQuestion: {QUESTIONS[1]}\nAnswer:")
        self._answered(server, [*self._history[:DOCUMENT_TOKENS], *question])

    def _answered(self, server: Server, prompt: Sequence[int]) -> list[int]:
        before = server.external()
        server.reset()
        self.answers.append(server.complete(prompt, ANSWER))
        self.external.append(server.external() - before)
        return self.answers[-1].tokens

    def beside(self, plain: Talk) -> Row:
        """What came of it, beside the same without the store."""
        # Of the last token of an answer, nobody has computed keys and values.
        wanted = [0]
        wanted += [(length + ANSWER - 1) // BLOCK * BLOCK for length in self.lengths[:-1]]
        wanted.append(DOCUMENT_TOKENS // BLOCK * BLOCK)
        same = [one.tokens for one in self.answers] == [one.tokens for one in plain.answers]
        return {
            "holds": same and self.external == wanted,
            "tokens_identical": same,
            "answers": len(self.answers),
            "prompt_tokens": self.lengths,
            "external_tokens": self.external,
            "wanted_external_tokens": wanted,
            "first_token_s": {
                "without": [round(one.first_s, 3) for one in plain.answers],
                "with": [round(one.first_s, 3) for one in self.answers],
            },
        }


def conversation(bench: Bench) -> Row:
    """A conversation with the connector, and without the store."""
    plain, ours = Talk(), Talk()
    for talk, args in ((plain, []), (ours, bench.store("conversation"))):
        with bench.server(args) as server:
            talk.ask(server, QUESTIONS)
            talk.again(server)
    return ours.beside(plain)


def conversation_tier(bench: Bench) -> Row:
    """The same with the secondary tier; the engine starts again in between, its memory empty."""
    plain, ours = Talk(), Talk()
    with bench.server() as server:
        plain.ask(server, QUESTIONS)
        plain.again(server)
    args = bench.tier("conversation")
    with bench.server(args) as server:
        ours.ask(server, QUESTIONS[:3])
    with bench.server(args) as server:
        ours.ask(server, QUESTIONS[3:])
        ours.again(server)
        disk = server.metric("vllm:tiered_kv_hits_total", tier="nvme")
    row = ours.beside(plain)
    return {**row, "holds": row["holds"] and disk > 0, "chunks_from_the_drive": disk}


def restart(bench: Bench) -> Row:
    """Time to the first token of documents: computed, from the drive after a restart, from memory.

    In the same run also by vLLM's own tier of files. All engines are up at once, and are asked in
    turns: what else the machine does meets them all.
    """
    ways = {
        "tiered_kv": bench.store("restart"),
        "tiered_kv_layers": bench.store("restart layers", layerwise=True),
        "tiered_kv_tier": bench.tier("restart tier"),
        "vllm_fs": peers.fs_tier(bench.scratch / "fs"),
    }
    with bench.servers(ways) as servers:
        prompts = windows(servers["vllm_fs"])
        cold = in_turns(servers, prompts)
        for server in servers.values():
            server.reset()
        warm = in_turns(servers, prompts)
    with bench.servers(ways) as servers:
        before = {}
        for name, server in servers.items():
            # The first request of all warms up what is no matter of the store.
            server.complete(prompts[0][::-1][:BLOCK], 1)
            before[name] = server.external()
        drive = in_turns(servers, prompts)
        external = {name: server.external() - before[name] for name, server in servers.items()}
    rows: Row = {}
    for name in ways:
        rows[name] = {
            "tokens_identical": same_tokens(cold[name], warm[name], drive[name]),
            "external_tokens_after_restart": external[name],
            "first_token_s": {
                "computed": spread([one.first_s for one in cold[name]]),
                "memory": spread([one.first_s for one in warm[name]]),
                "drive": spread([one.first_s for one in drive[name]]),
            },
        }
    return beside_peer(rows)


def neighbours(bench: Bench) -> Row:
    """Two engines bound to one processor, one asked while the other's worker still spins there.

    What a request may wait for is vLLM's matter; what is stored is found all the same.
    """
    ways = {
        "beside_steps": bench.store("neighbour"),
        "by_layers": bench.store("other neighbour", layerwise=True),
    }
    with bench.servers(ways, {"VLLM_CPU_OMP_THREADS_BIND": "0"}) as servers:
        prompts = windows(servers["beside_steps"])
        cold = in_turns(servers, prompts, rest=False)
        for server in servers.values():
            server.reset()
        before = {name: server.external() for name, server in servers.items()}
        warm = in_turns(servers, prompts, rest=False)
        external = {name: server.external() - before[name] for name, server in servers.items()}
    rows: Row = {}
    for name in ways:
        rows[name] = {
            "tokens_identical": same_tokens(cold[name], warm[name]),
            "external_tokens": external[name],
            "first_token_s": {
                "computed": spread([one.first_s for one in cold[name]]),
                "memory": spread([one.first_s for one in warm[name]]),
            },
        }
    held = [row["tokens_identical"] and row["external_tokens"] == WHOLE for row in rows.values()]
    return {"holds": all(held), "wanted_external_tokens": WHOLE, **rows}


def windows(server: Server) -> list[list[int]]:
    """Documents of one length, from one text."""
    text = server.tokens(DOCUMENT.read_text("utf-8"))
    step = (len(text) - DOCUMENT_TOKENS) // WINDOWS
    return [text[at * step : at * step + DOCUMENT_TOKENS] for at in range(WINDOWS)]


def same_tokens(first: Sequence[Answer], *others: Sequence[Answer]) -> bool:
    """Whether all were answered alike."""
    tokens = [one.tokens for one in first]
    return all([one.tokens for one in other] == tokens for other in others)


def in_turns(
    servers: dict[str, Server], prompts: Sequence[list[int]], *, rest: bool = True
) -> dict[str, list[Answer]]:
    """Has each prompt answered by all, another one first each time."""
    names = list(servers)
    told: dict[str, list[Answer]] = {name: [] for name in names}
    for at, prompt in enumerate(prompts):
        first = at % len(names)
        for name in names[first:] + names[:first]:
            if rest:
                peers.let_rest()
            told[name].append(servers[name].complete(prompt, ANSWER))
    return told


def beside_peer(rows: Row) -> Row:
    """What is asked of a restart; by layers how fast it is is only told."""
    peer = rows["vllm_fs"]["first_token_s"]["drive"]["median"]
    held = []
    for name in ("tiered_kv", "tiered_kv_layers", "tiered_kv_tier"):
        row, times = rows[name], rows[name]["first_token_s"]
        row["drive_of_computed"] = round(times["drive"]["median"] / times["computed"]["median"], 4)
        row["drive_of_vllm_fs"] = round(times["drive"]["median"] / peer, 4)
        held += [row["tokens_identical"], row["external_tokens_after_restart"] == WHOLE]
        if name != "tiered_kv_layers":
            fast = row["drive_of_computed"] <= WARM_PART and row["drive_of_vllm_fs"] <= peers.MOST
            held.append(fast)
    return {"holds": all(held), "wanted_external_tokens": WHOLE, **rows}


def driven(bench: Bench, module: str, *args: str) -> Row:
    """What a module has measured that needs vLLM's parts and no server."""
    out = bench.scratch / "driven.json"
    subprocess.run(
        [str(bench.python), "-m", f"serving.{module}", str(out), *args],
        cwd=jobs.HERE.parent,
        env=jobs.environment(),
        timeout=DRIVEN_LIMIT_S,
        check=True,
    )
    return dict(json.loads(out.read_text()))


def tier_steps(bench: Bench) -> Row:
    """Time on the scheduler's thread of our tier and of vLLM's tier of files."""
    return driven(bench, "tier_steps", str(bench.scratch))


def cache_policy(bench: Bench) -> Row:
    """Hit rates of policies of vLLM's own host memory, on traces made up or given."""
    traces = os.environ.get("TIERED_KV_TRACES", "chat:3000,agents:1000").split(",")
    return driven(bench, "policy_rates", *traces)


def spread(seconds: Sequence[float]) -> Row:
    """Median, least and most."""
    return {
        "median": round(statistics.median(seconds), 4),
        "least": round(min(seconds), 4),
        "most": round(max(seconds), 4),
        "runs": len(seconds),
    }


SCENARIOS: dict[str, Callable[[Bench], Row]] = {
    "conversation": conversation,
    "conversation_tier": conversation_tier,
    "restart": restart,
    "neighbours": neighbours,
    "sessions": busy.sessions,
    "sessions_tier": busy.sessions_tier,
    "no_reuse": busy.no_reuse,
    "replicas": busy.replicas,
    "tier_steps": tier_steps,
    "cache_policy": cache_policy,
}


def main() -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="JSON file for the rows")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="run these alone")
    args = parser.parse_args()
    model = model_directory(None, print)
    python = jobs.vllm_python()
    rows = json.loads(args.report.read_text())["rows"] if args.report.exists() else {}
    for name in args.only or SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="tiered-kv-acceptance-") as scratch:
            begun = time.time()
            loads = [os.getloadavg()[0]]
            row = SCENARIOS[name](Bench(python, model, Path(scratch)))
            loads.append(os.getloadavg()[0])
        row |= {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
            "took_s": round(time.time() - begun, 1),
            "load_average": loads,
            "build": "release" if _core.IS_RELEASE else "development",
        }
        rows[name] = row
        print(f"{name}: {'holds' if row['holds'] else 'DOES NOT HOLD'} {json.dumps(row)}")
        machine = f"{platform.machine()}, {os.cpu_count()} processors, no accelerator"
        told = {"engine": "vllm 0.32.0 on CPUs", "model": model.name, "machine": machine}
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["holds"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
