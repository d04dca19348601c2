"""The flags with which an unmodified LMCache uses the store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tiered_kv._core import blake3
from tiered_kv.engines import lmcache
from tiered_kv.engines._fingerprint import cache_file, file_digests, weight_files
from tiered_kv.engines.lmcache.options import PLACEHOLDER, Options
from tiered_kv.errors import ConfigError

Row = dict[str, Any]


def configs(
    path: Path, dram: str | None, nvme: str, model: Path | None, dtype: str | None
) -> dict[str, Row]:
    """The values of `--l2-adapter`, by the name of the adapter.

    Args:
        path: Directory on the drive that keeps the objects.
        dram: Host memory; None for the default.
        nvme: Room on the drive.
        model: Directory of the model's files; None for a placeholder in place of the namespace.
        dtype: Type of the cache, where it is not that of the model.

    Returns:
        Those of the L2 adapter and of the native plugin.

    Raises:
        ConfigError: An option is wrong, or the model's directory has no weights.
    """
    params = adapter_params(path, dram, nvme, PLACEHOLDER if model is None else named(model, dtype))
    Options.parse(params if model else {**params, "namespace": "any"})
    return {
        "lmcache": adapter_config("plugin", lmcache.L2_ADAPTER, params),
        "lmcache native": adapter_config("native_plugin", lmcache.NATIVE_PLUGIN, params),
    }


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
