"""What `kv_connector_extra_config` of the vLLM flag may hold."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from tiered_kv import ConfigError, StoreConfig
from tiered_kv._core import probe_memory
from tiered_kv.engines._cpus import cpus_beside_computation

OnReset = Literal["new_epoch", "keep"]
OnLora = Literal["refuse", "by_path"]

# Set by the adapter for each rank, not by the user; and what it records itself, since it knows
# prompts from answers and one rank is like all.
_OURS = frozenset({"nvme_paths", "record", "record_bytes"})
_PASSED_ON = frozenset(field.name for field in dataclasses.fields(StoreConfig)) - _OURS
_MOST_BY_DEFAULT = 4 << 30
_HERE = frozenset({"path", "weights", "on_reset", "load_timeout_s", "sharers", "record"})
_TIER_CHOICES: dict[str, tuple[str, ...]] = {
    "lora": get_args(OnLora),
    "locality": ("LOCAL", "REMOTE"),
}
_CONNECTORS_OWN = frozenset({"layerwise"})
_TIERS_OWN = frozenset({"namespace", "weak_hash", *_TIER_CHOICES})


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
        layerwise: Whether a step saves each layer when it is computed, and waits for its loads a
            layer at a time; of the connector alone.
        store: Fields of `StoreConfig`, capacities of the whole node.
    """

    path: Path
    weights: str = ""
    on_reset: OnReset = "new_epoch"
    load_timeout_s: float = 10.0
    sharers: int | None = None
    record: Path | None = None
    layerwise: bool = False
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
        where = "kv_connector_extra_config"
        fields, filled = _common(where, extra, _HERE | _CONNECTORS_OWN)
        layerwise = extra.get("layerwise", False)
        if type(layerwise) is not bool:
            raise _wrong(where, f"`layerwise` is {layerwise!r}: give true or false")
        if filled.dram_capacity == 0:
            raise _wrong(
                where,
                "`dram_capacity` is 0: blocks pass through host memory on their way to the "
                "engine's; give it a size, or leave it out",
            )
        return cls(**fields, layerwise=layerwise)

    def directory(self, replica: int, rank: int | None) -> Path:
        """The directory of a replica, or of a rank of it: no two processes share one."""
        whole = self.path / f"dp{replica}"
        return whole if rank is None else whole / f"rank{rank}"

    def store_config(self, directory: Path, sharers: int) -> StoreConfig:
        """The configuration of one rank's store, in the process that is to own it.

        Args:
            directory: Its directory.
            sharers: Ranks of this node, which divide its capacities.

        Returns:
            The configuration, sizes in bytes.

        Raises:
            ConfigError: A field is wrong.
        """
        fields = {"cpus": cpus_beside_computation(), **self.store}
        filled = StoreConfig.from_dict({**fields, "nvme_paths": [os.fspath(directory)]})
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

    def make_directory(self, replica: int, rank: int | None) -> Path:
        """Makes such a directory, nobody else's to read.

        Raises:
            OSError: It cannot be made.
        """
        wanted = self.directory(replica, rank)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted.parent.mkdir(mode=0o700, exist_ok=True)
        wanted.mkdir(mode=0o700, exist_ok=True)
        return wanted


@dataclasses.dataclass(frozen=True)
class TierOptions(Options):
    """Those of the secondary tier: one store for all ranks of a replica, with no memory of its own.

    Attributes:
        namespace: What stands for the model and all its settings where vLLM's configuration cannot
            be had; empty for none.
        weak_hash: Name of a hash that is not cryptographic and is allowed all the same; empty for
            none.
        lora: "refuse" adapters, of which vLLM's keys have the path and not the content; or tell
            them "by_path".
        locality: What vLLM is told of where the drive is.
    """

    namespace: str = ""
    weak_hash: str = ""
    lora: OnLora = "refuse"
    locality: Literal["LOCAL", "REMOTE"] = "LOCAL"

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> TierOptions:
        """Checks the options of an entry of `secondary_tiers`, less `type` and `module_path`.

        Raises:
            ConfigError: One is missing, unknown or wrong; the message names it.
        """
        where = "secondary_tiers"
        # The primary tier is host memory already: a second copy there would save no reading.
        fields, _ = _common(where, {"dram_capacity": 0, **extra}, _HERE | _TIERS_OWN)
        for name, wanted in _TIER_CHOICES.items():
            if extra.get(name, wanted[0]) not in wanted:
                given = f"`{name}` is {extra[name]!r}: give one of "
                raise _wrong(where, given + ", ".join(repr(one) for one in wanted))
        for name in ("namespace", "weak_hash"):
            if not isinstance(extra.get(name, ""), str):
                raise _wrong(where, f"`{name}` is {extra[name]!r}: give a text")
        return cls(**fields, **{name: extra[name] for name in _TIERS_OWN if name in extra})


def _common(
    where: str, extra: Mapping[str, Any], known: frozenset[str]
) -> tuple[dict[str, Any], StoreConfig]:
    """What all adapters have: the fields of `Options`, and the store's with their defaults."""
    unknown = sorted(set(extra) - _PASSED_ON - known)
    if unknown:
        names = ", ".join(sorted(_PASSED_ON | known))
        raise _wrong(where, f"`{unknown[0]}` is unknown: give any of {names}")
    path = extra.get("path")
    if not isinstance(path, str) or not path:
        raise _wrong(
            where,
            "`path` is missing: give the directory on the drive that keeps the blocks, as in "
            '{"path": "/mnt/nvme0/kv"}',
        )
    on_reset = extra.get("on_reset", "new_epoch")
    if on_reset not in get_args(OnReset):
        choices = ", ".join(get_args(OnReset))
        raise _wrong(where, f"`on_reset` is {on_reset!r}: give one of {choices}")
    weights = extra.get("weights", "")
    if not isinstance(weights, str):
        raise _wrong(where, f"`weights` is {weights!r}: give a text")
    sharers = extra.get("sharers")
    if sharers is not None and (type(sharers) is not int or sharers < 1):
        what = "the number of ranks of this node, 1 or more"
        raise _wrong(where, f"`sharers` is {sharers!r}: give {what}")
    record = extra.get("record")
    if record is not None and (not isinstance(record, str) or not record):
        raise _wrong(where, f"`record` is {record!r}: give a directory for traces")
    store = {name: extra[name] for name in extra if name in _PASSED_ON}
    filled = StoreConfig.from_dict({**store, "nvme_paths": [path]})
    fields = {
        "path": Path(path),
        "weights": weights,
        "on_reset": on_reset,
        "load_timeout_s": filled.load_timeout_s,
        "sharers": sharers,
        "record": None if record is None else Path(record),
        "store": store,
    }
    return fields, filled


def _wrong(where: str, text: str) -> ConfigError:
    return ConfigError(f"{where}: {text}", op="engines")
