"""Asks an installed vLLM 0.32 for the pages of models: `vllm_sizes.py CASES.json --all|NAME...`.

Each case of the file has a published configuration, shortened where the cache does not depend on
it. vLLM's own model classes are built from it on the meta device, its own functions group the
layers and lay out their pages, and its own cache manager is driven token by token. What comes out
is written into the case as `expected`. `make sizing-vllm` runs this in an environment of its own.
"""

from __future__ import annotations

import copy
import gc
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import set_current_vllm_config
from vllm.config.vllm import get_layers_from_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed import parallel_state as ranks
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core import kv_cache_utils as cache
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

CONTEXTS = (1, 15, 16, 17, 64, 1000, 1040, 4097, 9000)
MEMORY = 1 << 40
LONGEST = 16_384


def as_on_a_gpu() -> None:
    """Lets the CPU's backends take the block sizes and heads of FlashAttention and FlashMLA."""

    def any_size(*_args: object, **_named: object) -> bool:
        return True

    for backend in _backends():
        base = 64 if "MLA" in backend.__name__ else 16
        sizes = [MultipleOf(base)]
        backend.get_supported_kernel_block_sizes = staticmethod(lambda *_a, s=sizes, **_n: s)
        backend.supports_block_size = classmethod(any_size)
        backend.supports_head_size = classmethod(any_size)

    # Triton's backend packs a scale beside each head's data.
    CPUAttentionBackend.customize_spec = TritonAttentionBackend.customize_spec
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def dense(cls: Any, /, selected_backend: Any, attn_selector_config: Any, **named: Any) -> Any:
        plain = attn_selector_config._replace(use_sparse=False)
        return choose(cls, selected_backend, plain, **named)

    CpuPlatform.get_attn_backend_cls = classmethod(dense)
    check = CpuPlatform.check_and_update_config.__func__

    def keeps_prefixes(cls: type, config: Any) -> None:
        prefixes = config.cache_config.enable_prefix_caching
        check(cls, config)
        config.cache_config.enable_prefix_caching = prefixes

    CpuPlatform.check_and_update_config = classmethod(keeps_prefixes)


class _CudaOnly(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of those that compile kernels for a GPU: no kernel runs here."""

    def find_spec(self, name: str, *_rest: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("cutlass", "cuda"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, _module: Any) -> None:
        pass


def _backends() -> list[type[AttentionBackend]]:
    found = [CPUAttentionBackend]
    from vllm.v1.attention.backends.mla import cpu_mla

    found += [
        kind
        for kind in vars(cpu_mla).values()
        if isinstance(kind, type) and issubclass(kind, AttentionBackend) and "CPU" in kind.__name__
    ]
    return found


def build(case: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """The configuration that vLLM makes of a case, and the cache of each of its layers."""
    (folder / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=LONGEST,
        block_size=case["block_size"],
        **case.get("arguments", {}),
    ).create_engine_config()
    # The CPU's backends had chosen one of their own.
    config.cache_config.block_size = case["block_size"]
    tp = case.get("tp", 1)
    with set_current_vllm_config(config):
        if not ranks.model_parallel_is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:29531", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        # The first model had no experts: the group of one rank serves for them too.
        ranks._EP = ranks._EP or ranks.get_tp_group()
        ranks.get_tp_group().world_size = tp
        config.parallel_config.tensor_parallel_size = tp
        with torch.device("meta"):
            model = initialize_model(config)
        del model
        kv_dtype = case.get("kv_dtype")
        if kv_dtype is not None:
            config.cache_config.cache_dtype = kv_dtype
        for layer in get_layers_from_vllm_config(config, AttentionLayerBase).values():
            if kv_dtype is not None and isinstance(layer, (Attention, MLAAttention)):
                layer.kv_cache_dtype = kv_dtype
                layer.kv_cache_torch_dtype = torch.uint8
        # The platform of a GPU, not the CPU's, aligns attention with states.
        Platform.update_block_size_for_backend.__func__(CpuPlatform, config)
        specs = get_kv_cache_spec(config)
        ranks.get_tp_group().world_size = 1
    return config, specs


def pages_held(config: Any, groups: list[KVCacheGroupSpec], blocks: int) -> list[list[int]]:
    """The most blocks of each group that a request has held, at each context of `CONTEXTS`."""
    config.cache_config.kv_cache_layout = "LBHNC"
    plan = cache.get_kv_cache_config_from_groups(config, groups, MEMORY)
    plan.num_blocks = min(blocks, 20_000)
    # The scheduler sees one layer of a group whose pages differ.
    for group in plan.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            group.kv_cache_spec = group.kv_cache_spec.first_spec
    sizes = [group.kv_cache_spec.block_size for group in groups]
    manager = KVCacheManager(
        plan,
        max_model_len=LONGEST,
        scheduler_block_size=max(sizes),
        hash_block_size=min(sizes),
        enable_caching=False,
    )
    request = Request("0", [0], SamplingParams(max_tokens=LONGEST), None)
    most = [0] * len(groups)
    held = []
    for context in range(1, CONTEXTS[-1] + 1):
        if manager.allocate_slots(request, 1) is None:
            raise RuntimeError(f"no block is left at {context} tokens")
        request.num_computed_tokens += 1
        request.append_output_token_ids(0)
        for at, single in enumerate(manager.coordinator.single_type_managers):
            now = sum(not block.is_null for block in single.req_to_blocks["0"])
            most[at] = max(most[at], now)
        if context in CONTEXTS:
            held.append(list(most))
    return held


def expected(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What vLLM makes of a case."""
    config, specs = build(case, folder)
    config.cache_config.kv_cache_layout = "LBHNC"
    groups = cache.get_kv_cache_groups(config, specs)
    plan = cache.get_kv_cache_config_from_groups(config, groups, MEMORY)
    # The encoder's blocks are allocated by another path of the scheduler.
    cross = any("Cross" in type(group.kv_cache_spec).__name__ for group in groups)
    held = [] if cross else pages_held(config, copy.deepcopy(groups), plan.num_blocks)
    rows = []
    for at, group in enumerate(groups):
        spec = group.kv_cache_spec
        inner = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        rows.append(
            {
                "kind": type(inner).__name__,
                "layers": len(group.layer_names),
                "block_size": spec.block_size,
                "page_bytes": spec.page_size_bytes,
                "pages": [most[at] for most in held],
            }
        )
    return {
        "block_size": config.cache_config.block_size,
        "blocks_in_1_tib": plan.num_blocks,
        "groups": sorted(rows, key=lambda row: (row["kind"], row["layers"], row["page_bytes"])),
    }


def main(path: Path, only: list[str]) -> int:
    sys.meta_path.append(_CudaOnly())
    torch.cuda.Stream = torch.cuda.Event = mock.MagicMock
    as_on_a_gpu()
    cases = json.loads(path.read_text(encoding="utf-8"))
    cases["contexts"] = list(CONTEXTS)
    failed = 0
    for case in cases["cases"]:
        if only != ["--all"] and case["name"] not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                case["expected"] = expected(case, Path(folder))
            except Exception as error:  # the others are still wanted
                failed += 1
                print(case["name"], "failed:", repr(error)[:400], flush=True)
                if os.environ.get("TRACE"):
                    raise
                continue
            finally:
                gc.collect()
        print(case["name"], json.dumps(case["expected"]["groups"])[:300], flush=True)
        path.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
