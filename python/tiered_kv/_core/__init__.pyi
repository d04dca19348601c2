"""The compiled core. Use `tiered_kv`; what is here without a document there is its own affair.

Wherever a `Buffer` is asked for, any C-contiguous object with the buffer protocol will do. The
files beside this one describe parts of the one module: at run time there is nothing to import.
"""

import os
from collections.abc import Mapping
from typing import Any

from typing_extensions import Buffer

from tiered_kv._core._attached import Attached, AttachedHold
from tiered_kv._core._channel import Channel
from tiered_kv._core._evictor import CountedRequest, Evictor
from tiered_kv._core._handles import Hold, Namespace, PutOptions, Request
from tiered_kv._core._memory import Lease, Leases, Region, Reservation, Slots
from tiered_kv._core._operator import (
    Operator,
    Verify,
    describe_spec,
    resize,
    tenant_digest,
    token_keys,
)
from tiered_kv._core._replay import Trace, replay_policies, trace_kinds
from tiered_kv._core._results import (
    CloseReport,
    DeleteReport,
    FlushReport,
    IntoReport,
    Lookup,
    PutReport,
    ScrubReport,
)
from tiered_kv._core._store import StallGate, Store

__all__ = [
    "FORMAT_VERSION",
    "IS_RELEASE",
    "KEY_BYTES",
    "Attached",
    "AttachedHold",
    "Channel",
    "CloseReport",
    "CountedRequest",
    "DeleteReport",
    "Evictor",
    "FlushReport",
    "Hold",
    "IntoReport",
    "Lease",
    "Leases",
    "Lookup",
    "Namespace",
    "Operator",
    "PutOptions",
    "PutReport",
    "Region",
    "Request",
    "Reservation",
    "ScrubReport",
    "Slots",
    "StallGate",
    "Store",
    "Trace",
    "Verify",
    "__version__",
    "blake3",
    "blake3_file",
    "default_config",
    "describe_spec",
    "parse_config",
    "probe_directory",
    "probe_io_uring",
    "probe_memory",
    "replay_policies",
    "resize",
    "tenant_digest",
    "token_keys",
    "trace_kinds",
]

__version__: str
FORMAT_VERSION: int
IS_RELEASE: bool
KEY_BYTES: int

def blake3(buffer: Buffer) -> str:
    """The blake3 digest of a buffer's bytes, in hexadecimal; computed without the GIL."""

def blake3_file(path: object) -> str:
    """The blake3 digest of a file's contents, in hexadecimal; computed without the GIL."""

def default_config() -> dict[str, Any]:
    """Every field of the configuration with its default; None where that depends on the machine."""

def parse_config(
    fields: Mapping[str, Any] | str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Checks fields or TOML text, lets variables override them, and fills in the defaults."""

def probe_io_uring() -> tuple[bool, str]:
    """Whether this thread can have an io_uring that will do, and what it is, or why not."""

def probe_directory(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How a store would open files in a directory, which is made where it is absent.

    Returns:
        `direct`, whether files bypass the page cache, with the `reason`; `memory_alignment` and
        `offset_alignment` in bytes.

    Raises:
        TieredKvError: The directory cannot be made or written.
    """

def probe_memory() -> dict[str, Any]:
    """What memory there is: tried with a small arena that is freed again.

    Returns:
        `tried_bytes`, and of these `huge_bytes` on huge pages; `limit_bytes` of the cgroup or the
        machine and `available_bytes`, None where it cannot be told.

    Raises:
        NoSpaceError: Not even the small arena could be had.
    """
