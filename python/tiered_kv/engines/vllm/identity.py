"""What makes the blocks of one vLLM process differ from those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from tiered_kv import ConfigError, KvLayout, NamespaceSpec, UnsupportedError
from tiered_kv._core import blake3
from tiered_kv.engines._fingerprint import (
    WEIGHT_SUFFIXES,
    cache_file,
    config_fingerprint,
    file_digests,
    local_directory,
    weight_files,
)
from tiered_kv.engines._identity import rope_parameters
from tiered_kv.engines.vllm.paged import PagedCache

_KINDS = (*WEIGHT_SUFFIXES, ".pt", ".pth")


class Place(NamedTuple):
    """Which part of the model a worker holds."""

    replica: int
    rank: int
    ranks: int
    parallel: str
    sharers: int


def place_of(config: Any, pp_rank: int, tp_rank: int) -> Place:
    """The place of a worker among all.

    Args:
        config: vLLM's configuration.
        pp_rank: Its pipeline stage.
        tp_rank: Its tensor-parallel rank.
    """
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replicas = max(1, parallel.data_parallel_size_local)
    # Ranks that share this node's memory and drive.
    sharers = replicas * max(1, tp * pp // max(1, parallel.nnodes))
    name = f"tp={tp_rank}/{tp} pp={pp_rank}/{pp}"
    return Place(parallel.data_parallel_index, pp_rank * tp + tp_rank, tp * pp, name, sharers)


def block_tokens(config: Any, cache_config: Any) -> int:
    """Tokens of a block, where this version of the adapter serves the configuration.

    Args:
        config: vLLM's configuration.
        cache_config: Its `KVCacheConfig`.

    Raises:
        UnsupportedError: It does not; the message names the option.
    """
    groups = cache_config.kv_cache_groups
    if len(groups) != 1 or not _whole(groups[0].kv_cache_spec):
        kinds = ", ".join(sorted({type(one.kv_cache_spec).__name__ for one in groups}))
        raise _unsupported(
            f"the model keeps caches of kinds that are not served yet ({len(groups)} groups: "
            f"{kinds}); only attention to all tokens is, or what vLLM serves as such with "
            "`--disable-hybrid-kv-cache-manager`"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise _unsupported(f"`{name}` is {getattr(parallel, name)}: only 1 is served yet")
    speculative = config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        raise _unsupported(
            f"`speculative_config` has the method {speculative.method}, whose drafts have a KV "
            "cache of their own: use ngram or suffix, or leave it out"
        )
    tokens: int = groups[0].kv_cache_spec.block_size
    return tokens


def base_spec(
    config: Any, paged: PagedCache, tokens: int, place: Place, weights: str
) -> NamespaceSpec:
    """The namespace of a worker's blocks, without LoRA and salt.

    Args:
        config: vLLM's configuration.
        paged: The worker's cache.
        tokens: Tokens of a block.
        place: The worker's place.
        weights: What stands for the weights; empty: a digest of their files.

    Raises:
        ConfigError: There are no files to digest, and `weights` is empty.
    """
    model, hf = config.model_config, config.model_config.hf_config
    architecture = ",".join(model.architectures or ())
    computed = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization or "none",
        "attention": _kernels(config),
        "cache": paged.describe(),
    }
    return NamespaceSpec(
        model=f"{architecture}/{config_fingerprint(hf)[:32]}",
        weights=weights or _weights(model, config.load_config.load_format),
        kv_dtype=f"{config.cache_config.cache_dtype} as {paged.dtype_name}",
        layout=KvLayout(tokens, paged.block_bytes),
        rope=rope_parameters(hf),
        parallel=place.parallel,
        # Versions of vLLM pack the same elements in different ways.
        engine=f"vllm {vllm.__version__} "
        + " ".join(f"{name}={value}" for name, value in computed.items()),
    )


class Adapters:
    """Digests of LoRA adapters, by the files that vLLM loads.

    vLLM keeps an adapter in memory when its files change, and may load it again later. Which of the
    two computed a block cannot be told then, so the adapter's requests go without the store.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str | None]] = {}

    def identity(self, lora: Any) -> str | None:
        """What stands for the adapter of a request.

        Args:
            lora: vLLM's `LoRARequest`, or None.

        Returns:
            Its digest, empty for no adapter, None where it cannot be told.
        """
        if lora is None:
            return ""
        try:
            return self._identity(lora)
        except OSError:
            return None

    def _identity(self, lora: Any) -> str | None:
        directory = local_directory(lora.lora_path, None, "adapter_config.json")
        files = [] if directory is None else _adapter_files(directory)
        stats = [(path, path.stat()) for path in files]
        state = [(path, at.st_ino, at.st_size, at.st_mtime_ns) for path, at in stats]
        known = self._known.get(lora.lora_int_id)
        if known is None or (lora.load_inplace and known[0] != state):
            digest = None
            if files:
                digest = blake3("\n".join(file_digests(files, cache_file())).encode())
            known = self._known[lora.lora_int_id] = (state, digest)
        return known[1] if known[0] == state else None


def _whole(spec: Any) -> bool:
    """Whether every block of a request is kept until its end."""
    parts = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(part, FullAttentionSpec) for part in parts)


def _unsupported(text: str) -> UnsupportedError:
    return UnsupportedError(f"vllm: {text}", op="engines")


def _weights(model: Any, load_format: str) -> str:
    # Random weights come from no file, though there may be some.
    files = [] if load_format == "dummy" else _files(Path(model.model), model)
    if not files:
        message = (
            f"vllm: no weight files of {model.model} are on this machine to tell its revision by: "
            "give `weights`, a name that changes with them, in kv_connector_extra_config"
        )
        raise ConfigError(message, op="engines")
    return blake3("\n".join(file_digests(files, cache_file())).encode())


def _files(name: Path, model: Any) -> list[Path]:
    if name.is_file():  # GGUF
        return [name]
    directory = local_directory(model.model, model.revision)
    if directory is None:
        return []
    # Of whatever kind: which one vLLM loads is its own matter.
    return sorted(path for kind in _KINDS for path in directory.glob(f"*{kind}"))


def _adapter_files(directory: Path) -> list[Path]:
    weights = weight_files(directory)
    return [*weights, *sorted(directory.glob("adapter_config.json"))] if weights else []


def _kernels(config: Any) -> str:
    """The attention kernels of all layers, which decide how elements are packed."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    names = {f"{layer.get_attn_backend().get_name()}{_isa(layer)}" for layer in layers.values()}
    return ",".join(sorted(names))


def _isa(layer: Any) -> str:
    isa = getattr(layer, "isa", None)
    return f":{isa}" if isa else ""
