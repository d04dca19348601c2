"""Processors for a store's threads, in a process whose own are bound to its computation."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

# What OpenMP's libraries take their binding from. An engine that sets it for a worker binds what
# the worker computes with, and all that is started from there.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_NODES = Path("/sys/devices/system/node")
_LIMIT = 1024
"""Processors with this number and above cannot be named."""


def cpus_beside_computation() -> list[int] | None:
    """The processors on which a store does not wait for what the engine computes.

    A thread that computes or spins on the one processor that a store's threads may use keeps them
    from answering for as long as it does. What an operator has bound, by `taskset`, `numactl`, a
    cpuset or OpenMP's variables, stays bound.

    Returns:
        Those of the parent process on the nodes of memory that this one is on, where an engine has
        made this one as a worker and has had OpenMP bind it to fewer. None where a store's threads
        may stay with the one that opens it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return None
    try:
        given = _environment(parent.pid)
        if not any(os.environ.get(name, "") != given.get(name, "") for name in _BINDING):
            return None
        mine, wider = os.sched_getaffinity(0), os.sched_getaffinity(parent.pid)
    except OSError:
        return None  # it has ended
    near = {cpu for cpu in wider & (_near(mine) or wider) if cpu < _LIMIT}
    return sorted(near) if mine < near else None


def _environment(process: int) -> dict[str, str]:
    """The variables that a process began with."""
    rows = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    pairs = (row.decode(errors="replace").partition("=") for row in rows)
    return {name: value for name, _, value in pairs}


def _near(mine: set[int]) -> set[int]:
    """The processors on the nodes of memory of some of them; none where nobody says."""
    near: set[int] = set()
    for node in _NODES.glob("node[0-9]*"):
        has = {int(path.name.removeprefix("cpu")) for path in node.glob("cpu[0-9]*")}
        near |= has if has & mine else set()
    return near
