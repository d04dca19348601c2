"""`make sim-mutants`: plants one fault at a time in a copy and plays seeds until one finds it.

A mutant that names a test is to be found by that test, which is run in the place of the seeds.
Prints a line for each mutant and writes them all as JSON. The exit status is 1 where one survives
that is not said to, or where one is found that is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
TOOL = ["-p", "tiered-kv", "--features", "sim", "--bin", "tiered-kv-sim"]
BUILD_S = 1800
RUN_S = 1800
TEST_S = 120
"""How long a test has: one that hangs has found the fault too."""


@dataclass(frozen=True)
class Mutant:
    """A fault to plant: `old` occurs exactly once in `file`."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    required: bool = False
    survives: str = ""
    test: str = ""
    """The test that finds it, as `path.rs::name`; none where the seeds are to."""


@dataclass(frozen=True)
class Result:
    """What became of a mutant: the seed or the test that found it, and what that said."""

    name: str
    breaks: str
    required: bool
    survives: str
    test: str
    found: bool
    seed: int | None
    said: str
    build_s: float
    search_s: float

    @property
    def as_expected(self) -> bool:
        """Whether it was found, or is said to survive and did."""
        return self.found != bool(self.survives)


def mutants() -> list[Mutant]:
    """All that the list names."""
    listed: dict[str, list[dict[str, Any]]] = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(**entry) for entry in listed["mutant"]]


def plant(mutant: Mutant, text: str) -> str:
    """The text with the fault in it.

    Raises:
        ValueError: `old` does not occur exactly once.
    """
    count = text.count(mutant.old)
    if count != 1:
        message = f"{mutant.name}: its old text occurs {count} times in {mutant.file}"
        raise ValueError(message)
    return text.replace(mutant.old, mutant.new)


def cargo_test(test: str) -> list[str]:
    """How cargo builds and runs one test, which it finds by the file that it is in."""
    path, _, name = test.partition("::")
    package = {"types": "tiered-kv-types", "policy": "tiered-kv-policy", "io": "tiered-kv-io"}
    top = path.split("/")[1] if path.startswith("rust/") else ""
    command = ["cargo", "test", "--locked", "-p", package.get(top, "tiered-kv")]
    if "tests/" in path:
        return [*command, "--test", Path(path).stem, name]
    return [*command, "--lib", name]


def copy_sources(to: Path) -> None:
    """Copies what git lists, and leaves files alone that are the same: cargo goes by their time."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {name for name in names.split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        if not name.startswith(("rust/", "benches/", "tests/", "examples/", "Cargo", "README")):
            continue
        target = to / name
        if target.exists() and target.read_bytes() == (ROOT / name).read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    for path in (to / "rust").rglob("*.rs"):
        if path.relative_to(to).as_posix() not in wanted:
            path.unlink()


class Bench:
    """A copy of the sources with its own build, in which faults are planted."""

    def __init__(self, home: Path, seeds: int) -> None:
        self.sources = home / "src"
        self.target = home / "target"
        self.seeds = seeds
        copy_sources(self.sources)

    def cargo(self, command: list[str], timeout: float = BUILD_S) -> tuple[int, str]:
        """Runs cargo in the copy; its exit status and all that was said.

        Raises:
            subprocess.TimeoutExpired: It took too long. It is killed, with what it has started.
        """
        with subprocess.Popen(
            command,
            cwd=self.sources,
            env={**os.environ, "CARGO_TARGET_DIR": str(self.target)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return process.returncode, said

    def build(self, mutant: Mutant) -> None:
        """Builds what is to find the mutant.

        Raises:
            RuntimeError: It does not compile.
        """
        tool = ["cargo", "build", "--locked", *TOOL]
        test = [*cargo_test(mutant.test)[:-1], "--no-run"]
        status, said = self.cargo(test if mutant.test else tool)
        if status != 0:
            raise RuntimeError(said[-4000:])

    def run(self, test: str) -> tuple[bool, str]:
        """Runs a test; whether it failed, and what it said.

        Raises:
            RuntimeError: There is no such test, or several.
        """
        try:
            status, output = self.cargo([*cargo_test(test), "--", "--test-threads=1"], TEST_S)
        except subprocess.TimeoutExpired:
            return True, f"does not end within {TEST_S} s"
        if "running 1 test\n" not in output:
            message = f"{test} is not one test:\n{output[-400:]}"
            raise RuntimeError(message)
        if status == 0:
            return False, ""
        panicked = re.search(r"panicked at [^\n]*\n(.*?)\n(?:note|stack)", output, re.DOTALL)
        return True, " ".join((panicked[1] if panicked else output[-200:]).split())

    def search(self) -> tuple[int | None, str]:
        """The first seed that fails, and what it said; None where all of them pass.

        Raises:
            RuntimeError: The tool ended in another way.
        """
        tool = self.target / "debug" / "tiered-kv-sim"
        done = subprocess.run(
            [tool, "--seeds", str(self.seeds)],
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        failed = re.search(
            r"^seed (\d+) failed, [^:]*: (.*)", done.stdout, re.MULTILINE | re.DOTALL
        )
        if failed is not None:
            return int(failed[1]), " ".join(failed[2].split("play it again")[0].split())
        if done.returncode != 0:
            raise RuntimeError((done.stdout + done.stderr)[-400:])
        return None, ""

    def attempt(self, mutant: Mutant) -> Result:
        """Plants one, builds, searches, and takes it out again."""
        path = self.sources / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(plant(mutant, text), encoding="utf-8")
        try:
            begin = time.monotonic()
            self.build(mutant)
            built = time.monotonic()
            if mutant.test:
                seed, (found, said) = None, self.run(mutant.test)
            else:
                seed, said = self.search()
                found = seed is not None
            ended = time.monotonic()
        finally:
            path.write_text(text, encoding="utf-8")
        return Result(
            name=mutant.name,
            breaks=mutant.breaks,
            required=mutant.required,
            survives=mutant.survives,
            test=mutant.test,
            found=found,
            seed=seed,
            said=said,
            build_s=round(built - begin, 1),
            search_s=round(ended - built, 1),
        )


def main() -> int:
    """Plants every mutant that was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="seeds for each (1000)")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="parts of the names of those to plant"
    )
    parser.add_argument("--home", type=Path, default=ROOT / "build/mutants")
    parser.add_argument("--report", type=Path, default=ROOT / "build/reports/mutants.json")
    asked = parser.parse_args()
    bench = Bench(asked.home.resolve(), asked.seeds)
    chosen = [m for m in mutants() if any(part in m.name for part in asked.only)]
    print(f"{'mutant':<32} {'by':>6} {'build s':>8} {'search s':>8}  what was seen", flush=True)
    results = []
    for mutant in chosen:
        result = bench.attempt(mutant)
        results.append(result)
        by = "none" if result.seed is None else str(result.seed)
        if result.test and result.found:
            by = "test"
        mark = "" if result.as_expected else "  <-- NOT AS EXPECTED"
        what = result.said.split(": ", 1)[-1][:60] or mutant.survives[:60]
        print(
            f"{result.name:<32} {by:>6} {result.build_s:>8} {result.search_s:>8}  {what}{mark}",
            flush=True,
        )
    expected = sum(result.as_expected for result in results)
    print(f"{expected} of {len(results)} as expected", flush=True)
    asked.report.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(result), "as_expected": result.as_expected} for result in results]
    asked.report.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if chosen and all(result.as_expected for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
