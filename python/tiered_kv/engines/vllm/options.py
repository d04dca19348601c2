"""What `kv_connector_extra_config` of the vLLM flag may hold."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from tiered_kv import ConfigError, StoreConfig
from tiered_kv._core import probe_memory

OnReset = Literal["new_epoch", "keep"]

# Set by the adapter for each rank, not by the user.
_OURS = frozenset({"nvme_paths"})
_PASSED_ON = frozenset(field.name for field in dataclasses.fields(StoreConfig)) - _OURS
_MOST_BY_DEFAULT = 4 << 30
_HERE = frozenset({"path", "weights", "on_reset", "load_timeout_s", "sharers", "record"})


@dataclasses.dataclass(frozen=True)
class Options:
    """The adapter's own options, and those of its stores.

    Attributes:
        path: Directory under which each replica and rank has its own.
        weights: What stands for the weights instead of a digest of their files; empty for that.
        on_reset: What a reset of external caches does: "new_epoch" forgets all blocks of this
            model, durably, "keep" nothing.
        load_timeout_s: Seconds after which a load is a miss.
        sharers: Ranks of all engines of the node, which divide its capacities; None for those that
            vLLM knows of.
        record: Directory in which each engine writes what it was asked, as a trace; None for none.
        store: Fields of `StoreConfig`, capacities of the whole node.
    """

    path: Path
    weights: str = ""
    on_reset: OnReset = "new_epoch"
    load_timeout_s: float = 10.0
    sharers: int | None = None
    record: Path | None = None
    store: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Options:
        """Checks the options of the flag.

        Args:
            extra: `kv_connector_extra_config`.

        Returns:
            The options.

        Raises:
            ConfigError: One is missing, unknown or wrong; the message names it.
        """
        unknown = sorted(set(extra) - _PASSED_ON - _HERE)
        if unknown:
            known = ", ".join(sorted(_PASSED_ON | _HERE))
            message = f"kv_connector_extra_config: `{unknown[0]}` is unknown: give any of {known}"
            raise ConfigError(message, op="engines")
        path = extra.get("path")
        if not isinstance(path, str) or not path:
            message = (
                "kv_connector_extra_config: `path` is missing: give the directory on the drive "
                'that keeps the blocks, as in {"path": "/mnt/nvme0/kv"}'
            )
            raise ConfigError(message, op="engines")
        on_reset = extra.get("on_reset", "new_epoch")
        if on_reset not in get_args(OnReset):
            message = (
                f"kv_connector_extra_config: `on_reset` is {on_reset!r}: give one of "
                f"{', '.join(get_args(OnReset))}"
            )
            raise ConfigError(message, op="engines")
        weights = extra.get("weights", "")
        if not isinstance(weights, str):
            message = f"kv_connector_extra_config: `weights` is {weights!r}: give a text"
            raise ConfigError(message, op="engines")
        sharers = extra.get("sharers")
        if sharers is not None and (type(sharers) is not int or sharers < 1):
            message = (
                f"kv_connector_extra_config: `sharers` is {sharers!r}: give the number of ranks of "
                "this node, 1 or more"
            )
            raise ConfigError(message, op="engines")
        record = extra.get("record")
        if record is not None and (not isinstance(record, str) or not record):
            message = (
                f"kv_connector_extra_config: `record` is {record!r}: give a directory for traces"
            )
            raise ConfigError(message, op="engines")
        store = {name: extra[name] for name in extra if name in _PASSED_ON}
        filled = StoreConfig.from_dict({**store, "nvme_paths": [path]})
        if filled.dram_capacity == 0:
            message = (
                "kv_connector_extra_config: `dram_capacity` is 0: blocks pass through host memory "
                "on their way to the engine's; give it a size, or leave it out"
            )
            raise ConfigError(message, op="engines")
        return cls(
            path=Path(path),
            weights=weights,
            on_reset=cast("OnReset", on_reset),
            load_timeout_s=filled.load_timeout_s,
            sharers=sharers,
            record=None if record is None else Path(record),
            store=store,
        )

    def directory(self, replica: int, rank: int) -> Path:
        """The directory of a rank of a data-parallel replica: no two processes share one."""
        return self.path / f"dp{replica}" / f"rank{rank}"

    def store_config(self, directory: Path, sharers: int) -> StoreConfig:
        """The configuration of one rank's store.

        Args:
            directory: Its directory.
            sharers: Ranks of this node, which divide its capacities.

        Returns:
            The configuration, sizes in bytes.

        Raises:
            ConfigError: A field is wrong.
        """
        fields = {**self.store, "nvme_paths": [os.fspath(directory)]}
        filled = StoreConfig.from_dict(fields)
        dram = filled.dram_capacity
        if dram is None and sharers > 1:
            # The core's default is that of a store which has the node to itself.
            limit = probe_memory()["limit_bytes"]
            dram = _MOST_BY_DEFAULT if limit is None else min(limit // 4, _MOST_BY_DEFAULT)
        return dataclasses.replace(
            filled,
            # `from_dict` has made bytes of every size.
            dram_capacity=None if dram is None else int(dram) // sharers,
            nvme_capacity=int(filled.nvme_capacity) // sharers,
        )

    def make_directory(self, replica: int, rank: int) -> Path:
        """Makes the directory of a rank, nobody else's to read.

        Raises:
            OSError: It cannot be made.
        """
        wanted = self.directory(replica, rank)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted.parent.mkdir(mode=0o700, exist_ok=True)
        wanted.mkdir(mode=0o700, exist_ok=True)
        return wanted
