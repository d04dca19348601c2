"""The configuration of a store; its schema, defaults and checks are the core's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tiered_kv import _core
from tiered_kv.errors import ConfigError

Size = int | str
"""Bytes, or text such as `"512MiB"`."""


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """How a store is opened.

    A field that is `None` takes the core's default. Everything is checked when a store is opened.

    Attributes:
        dram_capacity: Bytes of host memory. None: min(25 % of the cgroup's limit, 4 GiB). 0: none;
            blocks are read from the drives into the caller's memory, `get` and `reserve` are
            refused, and a `put` ends when it is durable.
        staging_capacity: Where `dram_capacity` is 0: bytes through which blocks are written, and
            read into memory that is not registered; eight times a block's at least.
        nvme_paths: Directory of each drive; empty for none. A single path may stand alone. One
            that cannot be opened is lost, and its blocks are misses, where another can.
        nvme_capacity: Bytes that may be allocated on each drive, all files counted.
        nvme_write_bytes_per_s: Bytes a second that may be written to each drive, over the hours: an
            hour's may be written at once. Where less than half of that is left, what is worth most
            is written, and the rest stays in memory only. 0: no bound.
        segment_bytes: Bytes of a segment file. None: min(256 MiB, capacity / 8).
        max_leased_fraction: Part of host memory that leases may pin; beyond it a `get` is a miss.
        dirty_high_fraction: Part of host memory that may wait to be written; beyond it a `put` is
            throttled.
        dirty_low_fraction: Part of host memory that must be left waiting before puts are taken
            again after that.
        max_load_bytes: Bytes that may be loading at once; beyond it a `get` is a miss.
        load_timeout_s: Deadline of a load in seconds, where the call names none.
        put_timeout_s: Deadline of a put in seconds, where the call names none.
        recompute_tokens_per_s: Tokens a second that the engine computes in prefill. A load that is
            estimated to take longer than computing what it would bring is not begun: it is a miss,
            `recompute`. None: every load is worth it, unless its call says otherwise.
        ahead_waste: Part of what is moved up from the drives to host memory that may be so for
            nothing: behind a block that a get reads from a drive, what is stored next is read
            ahead, as far as this allows. 0: only what is asked for is.
        drive_stall_s: Seconds without an answer to any read after which a drive counts as stalled:
            what waits for it is a miss then, and it is not asked until it answers again.
        drive_retry_s: Seconds after which a drive that failed repeatedly is tried again.
        scrub_bytes_per_s: Bytes a second that are read back from the drives and verified while
            nothing else is to be done. 0: none.
        reservation_ttl_s: Seconds after which an unpublished reservation cannot be published.
        close_timeout_s: Seconds that `close` may spend on writing what is not yet durable.
        on_format_mismatch: What to do with a directory of another format version.
        event_log_entries: Entries that the event log keeps.
        event_file: File to which each event is written as a line of JSON, before what follows from
            it is done; at 64 MiB it becomes `NAME.1`. None: no file.
        policy: What decides which block leaves a tier: predicted reuse ("beta", or "beta-spec" as
            first specified) or the order of use ("lru").
        metadata_bytes: Most bytes of memory that the predictor keeps of blocks, at least 4 MiB;
            what it remembers of blocks that left shrinks first. None: 1 % of all tiers, at least
            64 MiB.
        record: File to which requests are recorded as a trace for `tiered-kv replay`: ids, times
            and lengths, no tokens and no names. None: no file.
        record_bytes: Bytes of that file beyond which nothing more is recorded.
        io_backend: Who reads and writes the drives. "auto": io_uring where it can be had, else
            threads that block.
        load_threads: Threads that serve loads, with the blocking backend; two buffers of 2 MiB a
            drive for each, at most 16, besides `dram_capacity`.
        store_threads: Threads that write to the drives, with the blocking backend.
        copy_threads: Threads that copy and check payloads.
        cpus: Processors that the store is opened and its threads run on, as numbers or as text such
            as "0-3,8"; those that the process may not use are left out. None: those of the thread
            that opens it, which are too few where an engine has bound that one to its computation.
        huge_pages: Collapse host memory to huge pages where the kernel can.
    """

    dram_capacity: Size | None = None
    staging_capacity: Size = 64 << 20
    nvme_paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] = ()
    nvme_capacity: Size = 0
    nvme_write_bytes_per_s: Size = 0
    segment_bytes: Size | None = None
    max_leased_fraction: float = 0.5
    dirty_high_fraction: float = 0.75
    dirty_low_fraction: float = 0.5
    max_load_bytes: Size = 1 << 30
    load_timeout_s: float = 10.0
    put_timeout_s: float = 30.0
    recompute_tokens_per_s: float | None = None
    ahead_waste: float = 0.05
    drive_stall_s: float = 2.0
    drive_retry_s: float = 5.0
    scrub_bytes_per_s: Size = 0
    reservation_ttl_s: float = 60.0
    close_timeout_s: float = 60.0
    on_format_mismatch: Literal["error", "reset"] = "error"
    event_log_entries: int = 65_536
    event_file: str | os.PathLike[str] | None = None
    policy: Literal["beta", "beta-spec", "lru"] = "beta"
    metadata_bytes: Size | None = None
    record: str | os.PathLike[str] | None = None
    record_bytes: Size = 256 << 20
    io_backend: Literal["auto", "io_uring", "blocking"] = "auto"
    load_threads: int = 2
    store_threads: int = 1
    copy_threads: int = 2
    cpus: Sequence[int] | str | None = None
    huge_pages: bool = True

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> StoreConfig:
        """Checks fields by name and fills in the defaults.

        Args:
            fields: Fields of the schema; one that is `None` is left to its default.
            env: Variables `TIERED_KV_<FIELD>` that win over `fields`. None: no variables.

        Returns:
            The configuration, its sizes in bytes.

        Raises:
            ConfigError: A field is unknown or wrong; the message names it.
        """
        return cls(**_core.parse_config(dict(fields), None if env is None else _own(env)))

    @classmethod
    def from_toml(
        cls, source: str | os.PathLike[str], env: Mapping[str, str] | None = None
    ) -> StoreConfig:
        """Reads a TOML file or TOML text; environment variables win over it.

        Args:
            source: A path, or TOML text: whatever holds a `=` or a line break is text.
            env: The environment; that of the process by default.

        Returns:
            The configuration, its sizes in bytes.

        Raises:
            ConfigError: A field is unknown or wrong, or the file cannot be read.
        """
        text = source if isinstance(source, str) and _is_toml(source) else _read(source)
        return cls(**_core.parse_config(text, _own(os.environ if env is None else env)))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> StoreConfig:
        """The defaults with the environment's `TIERED_KV_<FIELD>` variables on top.

        Args:
            env: The environment; that of the process by default.

        Returns:
            The configuration, its sizes in bytes.

        Raises:
            ConfigError: A variable has a wrong value.
        """
        return cls.from_dict({}, os.environ if env is None else env)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as given."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _own(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("TIERED_KV_")}


def _is_toml(source: str) -> bool:
    return "=" in source or "\n" in source or not source.strip()


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"config: the file {os.fspath(path)} cannot be read as TOML: {error}"
        raise ConfigError(message, op="config") from error


def resolve(config: StoreConfig | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for the core from what `open` was given.

    Args:
        config: A configuration, or None.
        fields: Keyword arguments instead of one.

    Returns:
        The fields by name. With neither argument, the environment's.

    Raises:
        ConfigError: Both were given, or a field is unknown.
    """
    if config is not None and fields:
        message = f"open: give a StoreConfig or keyword arguments ({', '.join(fields)}), not both"
        raise ConfigError(message, op="open")
    if config is not None:
        return config.to_dict()
    if fields:
        return dict(fields)
    return StoreConfig.from_env().to_dict()
