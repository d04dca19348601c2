"""`make crash-power`: the load in a guest, whose emulator is killed and whose disk loses power.

A round: the guest boots, is under load until a random moment, its emulator gets a SIGKILL, and the
disk keeps a random part of what was not flushed. The next guest boots on what is left, repairs the
file system, opens the store and reads it through. What the guest logs lies on the host before
the guest goes on. Prints the line of `make crash`, and what the cuts took: lost_writes (some or
all of their sectors), torn_writes among them, unflushed_writes, of which they are a part.

Here a block is expected if it was committed before the cut: one that turns out to be damaged is
lost, not excused as a fault. What was not committed may be damaged: `unread` counts that.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import vm
from .__main__ import History, Totals, lines
from .disk import Cut, Disk, Server

BOOT_S = 300.0
CHECK_S = 600.0
FRESH_EVERY = 10
"""Rounds after which a disk is given up for a new one."""
LOAD_S = 8.0
"""Emulated, a store does in this time what it does natively in some tenths of a second."""
EARLY_S = 3.0
DIE_S = 3.0


class GuestError(Exception):
    """The guest did not do what it was to do; its console says why."""


@dataclass
class Job:
    """What a guest is to do: `end` of the check and `seed` of the load, None for neither."""

    drives: int
    backend: str
    end: str | None
    seed: int | None


def latest(home: Path) -> int:
    """The time of the last line that a guest logged."""
    events = [event["unix_ns"] for event in lines(home / "events.jsonl")]
    work = [line["t"] for line in lines(home / "work.jsonl")]
    return int(max([0, *events, *work]))


class Machine:
    """A disk and the guests that boot on it, one after the other.

    Args:
        home: the directory that the guests share with this process.
        initrd: what the guests start with.
        drives: directories of the store.
        accelerator: of the emulator.
        seed: of the disk's delays.
    """

    def __init__(self, home: Path, initrd: Path, drives: int, accelerator: str, seed: int) -> None:
        self.home = home
        self.initrd = initrd
        self.drives = drives
        self.accelerator = accelerator
        for number in range(drives):
            (home / f"drive{number}").mkdir(parents=True)
        self.disk = Disk(vm.make_disk(drives))
        self.booted_on = bytes(self.disk.kept)
        # A socket's path is short, and a temporary directory's may not be.
        self.scratch = tempfile.TemporaryDirectory(prefix="tkv-disk-")
        self.socket = Path(self.scratch.name) / "nbd"
        self.server = Server(self.disk, self.socket, seed)
        (home / "command").write_text(vm.command(drives))

    def boot(self, job: Job, rng: random.Random) -> tuple[dict[str, Any] | None, Cut]:
        """One guest: what its check saw, and what the cut did that ended it."""
        self.booted_on = bytes(self.disk.kept)
        seen_file = self.home / "seen.json"
        seen_file.unlink(missing_ok=True)
        said = job.__dict__ | {"after": latest(self.home)}
        (self.home / "job.json").write_text(json.dumps(said))
        opened = self._logged("opened")
        guest = vm.start(self.home, self.initrd, self.socket, self.accelerator)
        try:
            seen = None
            if job.end is not None:
                self._wait(guest, seen_file.exists, BOOT_S + CHECK_S, "checked the store")
                seen = json.loads(seen_file.read_text())
            if job.seed is not None:
                # Once in ten rounds the store is opening, or has hardly opened, at the cut; a new
                # one has something to lose first.
                early = job.end is not None and rng.random() < 0.1
                if job.end is None:
                    self._wait(guest, lambda: self._logged("durable") > 0, BOOT_S, "stored blocks")
                elif not early:
                    self._wait(guest, lambda: self._logged("opened") > opened, BOOT_S, "opened")
                time.sleep(rng.uniform(0.0, EARLY_S if early else LOAD_S))
                self._choose_moment(rng)
                if guest.poll() is not None:
                    raise GuestError(f"the load ended by itself:\n{vm.told(self.home)}")
        finally:
            guest.kill()
            guest.wait()
        self.server.settle()
        return seen, self.disk.cut(rng)

    def _choose_moment(self, rng: random.Random) -> None:
        """Lets the disk die; most random moments find nothing unflushed and nothing at stake."""
        match rng.randrange(5):
            case 0:
                pass
            case 1 | 2:
                self.server.die(rng.randint(1, 6), DIE_S)
            case _:
                # The guest has just been told that something is durable.
                self._acknowledged(rng.choice(("durable", "deleted")))
                self.server.die(0, DIE_S)

    def _acknowledged(self, what: str) -> None:
        until = time.monotonic() + DIE_S
        with (self.home / "work.jsonl").open("rb") as log:
            log.seek(0, 2)
            while json.dumps(what).encode() not in log.read() and time.monotonic() < until:
                time.sleep(0.001)

    def _logged(self, what: str) -> int:
        return sum(line["do"] == what for line in lines(self.home / "work.jsonl"))

    def _wait(
        self, guest: subprocess.Popen[bytes], done: Callable[[], bool], for_s: float, what: str
    ) -> None:
        until = time.monotonic() + for_s
        while not done():
            if guest.poll() is not None or time.monotonic() > until:
                raise GuestError(f"no guest that {what}:\n{vm.told(self.home)}")
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the disk."""
        self.server.close()
        self.scratch.cleanup()


def logs_of(home: Path, into: Path) -> Path:
    """Copies what the guests logged until now."""
    into.mkdir()
    for path in home.glob("*.jsonl*"):
        shutil.copy2(path, into)
    return into


class Run:
    """All rounds, under `where`."""

    def __init__(self, where: Path, seed: int, accelerator: str) -> None:
        self.where = where
        self.seed = seed
        self.accelerator = accelerator
        self.rng = random.Random(seed)
        self.totals = Totals()
        self.cuts: list[Cut] = []

    def rounds(self, rounds: int) -> None:
        """Runs disks of `FRESH_EVERY` rounds until that many have been run, or one failed."""
        initrd = vm.build(self.where)
        for first in range(0, rounds, FRESH_EVERY):
            drives = 1 + first // FRESH_EVERY % 2
            home = self.where / f"store{first}"
            machine = Machine(home, initrd, drives, self.accelerator, self.seed + first)
            try:
                good = self._disk(machine, first, min(FRESH_EVERY, rounds - first))
            finally:
                machine.close()
            if not good:
                print(f"crash-power: seed {self.seed} failed: {home}", file=sys.stderr)
                (home / "disk.image").write_bytes(machine.booted_on)
                return

    def _disk(self, machine: Machine, first: int, rounds: int) -> bool:
        for number in range(rounds + 1):
            before = logs_of(machine.home, machine.home / f"logs{number}")
            job = Job(
                drives=machine.drives,
                backend=self.rng.choice(("io_uring", "blocking")),
                end=self.rng.choice(("clean", "kill")) if number > 0 else None,
                seed=self.seed + first + number if number < rounds else None,
            )
            seen, cut = machine.boot(job, self.rng)
            if seen is not None:
                self.totals.add(History(before, seen["namespaces"]), seen)
                if not self.fine:
                    what = seen | {"found": [len(there) for there in seen["found"]]}
                    print(f"crash-power: round {first + number - 1}: {what}", file=sys.stderr)
                    return False
            if job.seed is not None:
                self.cuts.append(cut)
        return True

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong as yet; there may be nothing to expect as yet."""
        return self.totals.good or self.totals.sums["expected"] == 0

    def report(self) -> dict[str, Any]:
        """What is printed."""
        return self.totals.report() | {
            "lost_writes": sum(cut.lost + cut.torn for cut in self.cuts),
            "torn_writes": sum(cut.torn for cut in self.cuts),
            "unflushed_writes": sum(cut.unflushed for cut in self.cuts),
            "lossy_rounds": sum(cut.lost + cut.torn > 0 for cut in self.cuts),
        }

    @property
    def good(self) -> bool:
        """Whether nothing was lost but what was not flushed, and there was something to lose."""
        lost = any(cut.lost + cut.torn for cut in self.cuts)
        return self.totals.good and lost


def main() -> int:
    """Runs the harness."""
    parser = argparse.ArgumentParser(prog="crash.power", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--accelerator", default="tcg", help="kvm where it boots a stock kernel")
    parser.add_argument("--report", type=Path, help="also write the line to this file")
    parser.add_argument("--dir", type=Path, help="where all is made, and kept if it fails")
    args = parser.parse_args()
    why = vm.missing()
    if why is not None:
        print(f"crash-power: skipped: {why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="tiered-kv-power-", dir=args.dir) as where:
        run = Run(Path(where), args.seed, args.accelerator)
        try:
            run.rounds(args.rounds)
        except (GuestError, RuntimeError) as fault:
            sys.exit(f"crash-power: {fault}")
        finally:
            if not run.good and args.dir:
                shutil.copytree(where, args.dir / "failed", dirs_exist_ok=True)
    report = json.dumps(run.report())
    print(report)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(report + "\n")
    return 0 if run.good else 1


if __name__ == "__main__":
    sys.exit(main())
