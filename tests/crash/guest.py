"""Inside the guest: checks what the power cut left, then is under load until the next.

Run with `--files` on the host, it lists the files that all of this needs: the guest has no others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from . import check, load


def tell(home: Path, line: str) -> None:
    """Leaves the result of the check, whole, where the host looks for it."""
    (home / "seen.new").write_text(line + "\n")
    (home / "seen.new").rename(home / "seen.json")


def run(home: Path) -> None:
    """Does what `job.json` says."""
    job = json.loads((home / "job.json").read_text())
    # The clock of a fresh guest is up to a second late; what is logged must never go back in time.
    while time.time_ns() <= job["after"]:
        time.sleep(0.01)
    backend, drives = job["backend"], job["drives"]
    if job["end"] is not None:
        # Forked, since to import all of this takes long here.
        child = os.fork()
        if child == 0:
            check.run(home, backend, drives, job["end"], lambda line: tell(home, line))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            sys.exit(f"the check ended with status {status}")
    if job["seed"] is not None:
        load.Load(home, backend, drives, job["seed"]).run()


def files() -> list[str]:
    """Every file that is open, mapped or imported once a store has been in use."""
    with tempfile.TemporaryDirectory() as home:
        store = load.open_store(Path(home), "blocking", 1)
        ns = load.namespaces(store)[0]
        keys = load.chain_keys(ns, 0, 1)
        store.put(ns, keys, [load.content(keys, 1, load.BLOCK_BYTES[0])], wait=1.0)
        check.read_all(store, 0, ns, [keys])
        store.close()
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in maps if line.count("/") > 1}
    for module in list(sys.modules.values()):
        cached = getattr(getattr(module, "__spec__", None), "cached", None)
        names |= {name for name in (getattr(module, "__file__", None), cached) if name}
    return sorted(os.path.abspath(name) for name in names if Path(name).is_file())  # noqa: PTH100


if __name__ == "__main__":
    if sys.argv[1] == "--files":
        print(json.dumps(files()))
    else:
        run(Path(sys.argv[1]))
