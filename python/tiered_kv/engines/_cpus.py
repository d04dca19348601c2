"""Processors for a store's threads, in a process whose own are bound to its computation."""

from __future__ import annotations

import multiprocessing
import os

# What OpenMP's libraries take their binding from. An engine that sets it for its workers binds what
# they compute with, and all that is started from there.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def cpus_beside_computation() -> list[int] | None:
    """The processors on which a store does not wait for what the engine computes.

    A thread that computes or spins on the one processor that a store's threads may use keeps them
    from answering for as long as it does. An operator's own binding, by `taskset`, `numactl` or a
    cpuset, meets the parent process too and is kept.

    Returns:
        Those of the parent process, where an engine has made this one as a worker and OpenMP has
        bound it to fewer. None where a store's threads may stay with the one that opens it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not any(os.environ.get(name) for name in _BINDING):
        return None
    try:
        wider = os.sched_getaffinity(parent.pid)
    except OSError:
        return None  # it has ended
    return sorted(wider) if os.sched_getaffinity(0) < wider else None
