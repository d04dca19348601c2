"""What makes the chunks of one engine's offloading differ from those of another."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

from tiered_kv import ConfigError, KvLayout, NamespaceSpec, UnsupportedError
from tiered_kv._core import blake3
from tiered_kv.engines.vllm.identity import refuse_uncachable, replicas_of_node, spec_of
from tiered_kv.engines.vllm.options import TierOptions

_SEED = "PYTHONHASHSEED"
_SHA = "sha256"
_WHERE = "secondary_tiers"

SHA_BYTES = 32
"""Bytes of a cryptographic hash of vLLM's; the weak ones are shorter."""


def config_of(offloading: Any) -> VllmConfig | None:
    """The configuration, which vLLM does not hand to a tier; None where it cannot be had.

    A tier is made by vLLM's connector, which has it: the calls that lead here are searched for it.

    Args:
        offloading: vLLM's `OffloadingSpec`.
    """
    current = get_current_vllm_config_or_none()
    frame = sys._getframe(1)
    while current is None and frame is not None:
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig):
            current = found
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    if current is None or current.model_config.model != offloading.config.model.name:
        return None
    return current


def sharers_of(offloading: Any, config: VllmConfig | None, options: TierOptions) -> int:
    """Replicas that divide this node's capacities.

    Raises:
        ConfigError: vLLM does not know of all, and the option is not given.
    """
    if options.sharers is not None:
        return options.sharers
    if config is None:
        return max(1, int(offloading.config.parallel.data_parallel_size))
    return replicas_of_node(config, _WHERE, "replicas")


def tier_spec(
    offloading: Any, config: VllmConfig | None, options: TierOptions, chunk_bytes: int
) -> NamespaceSpec:
    """The namespace of the chunks: a row of all ranks, of one group of layers, under vLLM's keys.

    Args:
        offloading: vLLM's `OffloadingSpec`.
        config: vLLM's configuration, None where it cannot be had.
        options: The options of the tier.
        chunk_bytes: Bytes of a row.

    Raises:
        ConfigError: An option is missing or does not fit; the message names it.
        UnsupportedError: vLLM's configuration is not served; the message names what of it.
    """
    told = offloading.config
    tokens = told.groups[0].tokens_per_block * told.cache.blocks_per_chunk
    layout = KvLayout(tokens, chunk_bytes)
    groups = [
        (one.group_id, one.tokens_per_block, ",".join(one.layer_names)) for one in told.groups
    ]
    row: dict[str, object] = {
        "chunk": f"{told.cache.blocks_per_chunk} blocks, a hash is {told.cache.tokens_per_hash}",
        "groups": f"{len(groups)} {blake3(repr(groups).encode())[:32]}",
        "row": f"{told.worker_kv_bytes_per_block} bytes a worker and block, "
        f"layout={told.kv_cache_layout} canonical={told.canonical_layout} "
        f"replicated={told.replicated_layout}",
    }
    whole = told.parallel
    parallel = (
        f"all of tp={whole.tp_size} pp={whole.pp_size} pcp={whole.pcp_size} dcp={whole.dcp_size}"
    )
    if config is None:
        return _by_name(options, layout, told, parallel, row)
    refuse_uncachable(config)
    if config.lora_config is not None and options.lora != "by_path":
        message = (
            f"{_WHERE}: LoRA is enabled, and vLLM's keys tell an adapter by its path, not by its "
            'content: give "lora": "by_path" where no adapter ever changes under its path, or use '
            "TieredKVConnector, which reads the files"
        )
        raise UnsupportedError(message, op="engines")
    row["hash"] = hash_of(config.cache_config.prefix_caching_hash_algo, options.weak_hash)
    row["lora"] = options.lora
    # The attention kernels are chosen in the workers: by these, the platform and the version.
    row["attention"] = blake3(repr(config.attention_config).encode())[:32]
    row["platform"] = _platform()
    return spec_of(config, layout, told.model.dtype, parallel, options.weights, row)


def hash_of(algorithm: str, allowed: str) -> str:
    """What vLLM's keys are made with, where they mean the same after a restart.

    Args:
        algorithm: vLLM's `prefix_caching_hash_algo`.
        allowed: A hash that is not cryptographic and is allowed by its name.

    Raises:
        ConfigError: It is weak and not allowed, or its seed is random.
    """
    seed = os.environ.get(_SEED)
    if not algorithm.startswith(_SHA):
        if allowed != algorithm:
            message = (
                f"{_WHERE}: `prefix_caching_hash_algo` is {algorithm}, which is not cryptographic: "
                "two prompts may be made to share blocks. Start vLLM with "
                "--prefix-caching-hash-algo sha256_cbor, or allow it by its name with "
                f'"weak_hash": "{algorithm}"'
            )
            raise ConfigError(message, op="engines")
        if seed is None:
            message = (
                f"{_WHERE}: with {algorithm} vLLM draws a random seed for each process, and finds "
                f"nothing again after a restart: set {_SEED} to a number that stays, or start vLLM "
                "with --prefix-caching-hash-algo sha256_cbor"
            )
            raise ConfigError(message, op="engines")
    # The seed is a secret where the hash is weak.
    return f"{algorithm} {blake3((seed or DEFAULT_NONE_HASH_SEED).encode())[:32]}"


def _by_name(
    options: TierOptions, layout: KvLayout, told: Any, parallel: str, row: dict[str, object]
) -> NamespaceSpec:
    """The namespace by what the user says of the model."""
    if not options.namespace:
        message = (
            f"{_WHERE}: vLLM's configuration cannot be had here, and `namespace` is missing: give "
            "a name of the model, its revision and all settings that its blocks depend on"
        )
        raise ConfigError(message, op="engines")
    if options.lora != "by_path":
        message = (
            f"{_WHERE}: vLLM's configuration cannot be had here, nor whether LoRA is "
            'enabled: give "lora": "by_path" where it is not, or no adapter changes under its path'
        )
        raise ConfigError(message, op="engines")
    row["platform"] = _platform()
    row["hash"] = f"{blake3(os.environ.get(_SEED, DEFAULT_NONE_HASH_SEED).encode())[:32]}"
    return NamespaceSpec(
        model=f"{told.model.name} as {options.namespace}",
        weights=options.weights or options.namespace,
        kv_dtype=told.model.dtype,
        layout=layout,
        parallel=parallel,
        engine=f"vllm {vllm.__version__} "
        + " ".join(f"{name}={value}" for name, value in row.items()),
    )


def _platform() -> str:
    if current_platform.is_cpu():
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(current_platform.get_device_name())
