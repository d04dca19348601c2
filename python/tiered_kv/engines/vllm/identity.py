"""What makes the blocks of one vLLM process differ from those of another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from tiered_kv import ConfigError, KvLayout, NamespaceSpec, TieredKvError, UnsupportedError
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

_LOG = init_logger("vllm.tiered_kv")

_CLOCK_S = 2.0
_KINDS = (*WEIGHT_SUFFIXES, ".pt", ".pth")


class Place(NamedTuple):
    """Which part of the model a worker holds."""

    replica: int
    rank: int
    ranks: int
    parallel: str
    sharers: int


def place_of(config: Any, pp_rank: int, tp_rank: int, sharers: int | None = None) -> Place:
    """The place of a worker among all.

    Args:
        config: vLLM's configuration.
        pp_rank: Its pipeline stage.
        tp_rank: Its tensor-parallel rank.
        sharers: Ranks that share this node's memory and drive, None for those that vLLM knows of.

    Raises:
        ConfigError: vLLM does not know of all, and `sharers` is not given.
    """
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if sharers is None:
        replicas = replicas_of_node(config, "kv_connector_extra_config", "all their ranks")
        sharers = replicas * max(1, tp * pp // max(1, parallel.nnodes))
    name = f"tp={tp_rank}/{tp} pp={pp_rank}/{pp}"
    return Place(parallel.data_parallel_index, pp_rank * tp + tp_rank, tp * pp, name, sharers)


def replicas_of_node(config: Any, where: str, whose: str) -> int:
    """Data-parallel replicas of this node.

    Args:
        config: vLLM's configuration.
        where: Which option has `sharers`.
        whose: What `sharers` counts.

    Raises:
        ConfigError: vLLM does not know of all.
    """
    parallel = config.parallel_config
    # Each of such replicas is told of itself alone: of how many the node has, nothing.
    alone = parallel.data_parallel_index > 0 and parallel.data_parallel_size == 1
    if parallel.data_parallel_external_lb or alone:
        message = (
            f"{where}: `sharers` is missing: several engines may run on this node, and divide the "
            f"capacities: give the number of {whose}"
        )
        raise ConfigError(message, op="engines")
    return max(1, int(parallel.data_parallel_size_local))


def refuse_model(config: Any) -> None:
    """Refuses what is known not to be served before there is a cache.

    Args:
        config: vLLM's configuration.

    Raises:
        UnsupportedError: The model or an option is not served; the message names it.
    """
    refuse_uncachable(config)
    model = config.model_config
    names = ", ".join(model.architectures or ())
    if model.is_hybrid and not config.cache_config.enable_prefix_caching:
        raise _unsupported(
            f"{names} has layers with recurrent state, which vLLM keeps at no block's end without "
            "prefix caching: give `--enable-prefix-caching`"
        )
    if model.is_hybrid and config.speculative_config is not None:
        raise _unsupported(
            f"{names} has layers with recurrent state, which may have drafts in it that are "
            f"refused later, and `speculative_config` has the method "
            f"{config.speculative_config.method}: leave it out"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise _unsupported(f"`{name}` is {getattr(parallel, name)}: only 1 is served yet")


def refuse_uncachable(config: Any) -> None:
    """Refuses what no adapter serves.

    Args:
        config: vLLM's configuration.

    Raises:
        UnsupportedError: The message names the model or the option.
    """
    model = config.model_config
    if not model.is_prefix_caching_supported or model.is_diffusion:
        names = ", ".join(model.architectures or ())
        raise _unsupported(
            f"vLLM has no prefix caching for {names}, since what a token's keys and values are "
            "depends on more than the tokens before it, or its pooling needs all tokens: leave "
            "`--kv-transfer-config` out"
        )
    speculative = config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        raise _unsupported(
            f"`speculative_config` has the method {speculative.method}, whose drafts have a KV "
            "cache of their own: use ngram or suffix, or leave it out"
        )


def base_spec(
    config: Any, paged: PagedCache, tokens: int, place: Place, weights: str, part: str = ""
) -> NamespaceSpec:
    """The namespace of a worker's blocks, without LoRA and salt.

    Args:
        config: vLLM's configuration.
        paged: The worker's cache.
        tokens: Tokens of a block.
        place: The worker's place.
        weights: What stands for the weights; empty: a digest of their files.
        part: Which of a block's parts these are; empty where it has but one.

    Raises:
        ConfigError: There are no files to digest, and `weights` is empty.
    """
    computed = {"attention": _kernels(config), "cache": paged.describe()}
    if part:
        computed["part"] = part
    layout = KvLayout(tokens, paged.block_bytes)
    return spec_of(config, layout, paged.dtype_name, place.parallel, weights, computed)


def spec_of(
    config: Any,
    layout: KvLayout,
    elements: str,
    parallel: str,
    weights: str,
    more: Mapping[str, object],
) -> NamespaceSpec:
    """A namespace of all that vLLM's configuration tells, and of what an adapter knows besides.

    Args:
        config: vLLM's configuration.
        layout: Tokens and bytes of a block.
        elements: The types of the stored elements.
        parallel: Which part of the model a block holds.
        weights: What stands for the weights; empty: a digest of their files.
        more: What the adapter knows, by name.

    Raises:
        ConfigError: There are no files to digest, and `weights` is empty.
    """
    model, hf = config.model_config, config.model_config.hf_config
    architecture = ",".join(model.architectures or ())
    computed = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization or "none",
        # It decides which of the factors of long rope are used.
        "max_model_len": model.max_model_len,
        "loading": _loading(config),
        "state": _state(config.cache_config),
        "media": _media(model),
        **more,
    }
    return NamespaceSpec(
        model=f"{architecture}/{config_fingerprint(hf)[:32]}",
        weights=weights or _weights(model, config.load_config.load_format),
        kv_dtype=f"{config.cache_config.cache_dtype} as {elements}",
        layout=layout,
        rope=rope_parameters(hf),
        parallel=parallel,
        # Versions of vLLM pack the same elements in different ways.
        engine=f"vllm {vllm.__version__} "
        + " ".join(f"{name}={value}" for name, value in computed.items()),
    )


def _state(cache: Any) -> str:
    """How states of recurrent layers are kept, which vLLM decides by its options alone."""
    names = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode")
    return " ".join(str(getattr(cache, name, "none")) for name in names)


def _media(model: Any) -> str:
    """What becomes of images and sounds: vLLM's keys have them as they were sent."""
    config = getattr(model, "multimodal_config", None)
    if config is None:
        return "none"
    names = ("mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize")
    told = [f"{name}={getattr(config, name, None)!r}" for name in (*names, "video_pruning_rate")]
    directory = local_directory(model.model, model.revision)
    files = [] if directory is None else sorted(directory.glob("*processor*.json"))
    return blake3("\n".join([*told, *file_digests(files, cache_file())]).encode())[:32]


class _AdapterState(NamedTuple):
    """Files of an adapter, what marks them, and how vLLM reads them."""

    files: tuple[Path, ...]
    marks: tuple[tuple[int, ...], ...]
    is_3d: bool


class _Adapter(NamedTuple):
    """What is known of an adapter: None for one of which nobody can tell."""

    state: object
    digest: Future[str] | None


class Adapters:
    """Digests of LoRA adapters, by the files that vLLM loads.

    vLLM loads an adapter when it likes, keeps it when its files change, and may load it again
    later. So files say what it uses only where they have been there since before it started; and an
    adapter that was once loaded in place, or was seen with other files, goes without the store for
    good. Where vLLM takes adapters from its API while it runs, one may change under requests that
    compute, with no word to a connector: all go without the store.

    Args:
        started_s: When vLLM started, as a Unix time; now by default.
        updatable: Whether vLLM's API may load adapters; by default what its environment says.
    """

    def __init__(self, started_s: float | None = None, updatable: bool | None = None) -> None:
        self._started_s = time.time() if started_s is None else started_s
        if updatable is None:
            updatable = bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)
        self._updatable = updatable
        self._known: dict[int, _Adapter] = {}
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="tiered-kv-lora")

    def ready(self, lora: Any) -> bool:
        """Whether `identity` answers at once; if not, the files are being read for it."""
        if lora is None:
            return True
        digest = self._look(lora).digest
        return digest is None or digest.done()

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
            digest = self._look(lora).digest
            return None if digest is None else digest.result()
        except (OSError, TieredKvError):
            self._known[lora.lora_int_id] = _Adapter(None, None)
            return None

    def close(self) -> None:
        """Ends the reading of files."""
        self._hasher.shutdown(cancel_futures=True)

    def _look(self, lora: Any) -> _Adapter:
        """What is known of an adapter, once its files have been looked at again."""
        if self._updatable:
            if not self._known:
                _LOG.warning(
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING is set: requests with LoRA adapters go "
                    "without the store"
                )
            return self._known.setdefault(lora.lora_int_id, _Adapter(None, None))
        known = self._known.get(lora.lora_int_id)
        if known is not None and known.digest is None:
            return known
        state = None if lora.load_inplace else self._state(lora)
        if known is None or known.state != state:
            digest = None
            if known is None and state is not None:
                digest = self._hasher.submit(_adapter_digest, state)
            known = self._known[lora.lora_int_id] = _Adapter(state, digest)
        return known

    def _state(self, lora: Any) -> _AdapterState | None:
        """The adapter's files as they are, None where they are not those of before the start."""
        try:
            directory = local_directory(lora.lora_path, None, "adapter_config.json")
            files = [] if directory is None else _adapter_files(directory)
            if directory is None or not files:
                return None
            # A link or a directory may have been put in the place of another one.
            places = [Path(lora.lora_path), directory, directory.resolve(), *files]
            stats = [one.lstat() for one in places if one.exists()]
            stats += [one.stat() for one in files]
        except OSError:
            return None
        # Clocks of file systems are coarse, and those of others may go wrong a little.
        if max(one.st_ctime for one in stats) > self._started_s - _CLOCK_S:
            return None
        marks = tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)
        return _AdapterState(tuple(files), marks, bool(getattr(lora, "is_3d_lora_weight", False)))


def _unsupported(text: str) -> UnsupportedError:
    return UnsupportedError(f"vllm: {text}", op="engines")


def _loading(config: Any) -> str:
    """How the same files become the weights: in which format, and what is quantised then."""
    load = config.load_config
    told = (config.model_config.quantization_config, load.model_loader_extra_config)
    return f"{load.load_format}/{blake3(repr(told).encode())[:32]}"


def _weights(model: Any, load_format: str) -> str:
    # Random weights come from no file, though there may be some.
    files = [] if load_format == "dummy" else _files(Path(model.model), model)
    if not files:
        message = (
            f"vllm: no weight files of {model.model} are on this machine to tell its revision by: "
            "give `weights`, a name that changes with them, among the options of the flag"
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


def _adapter_digest(state: _AdapterState) -> str:
    digests = file_digests(list(state.files), cache_file())
    return blake3("\n".join([*digests, f"3d={state.is_3d}"]).encode())


def _kernels(config: Any) -> str:
    """The attention kernels of all layers, which decide how elements are packed."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    names = {f"{layer.get_attn_backend().get_name()}{_isa(layer)}" for layer in layers.values()}
    return ",".join(sorted(names))


def _isa(layer: Any) -> str:
    isa = getattr(layer, "isa", None)
    return f":{isa}" if isa else ""
