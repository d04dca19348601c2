"""What vLLM 0.32 holds: pages of one size, groups of layers, and one pool of blocks.

Reproduced for its CUDA backends with their default layout; `tests/data/vllm_sizes.json` has the
figures of vLLM's own functions, which a test compares. Blocks that are reserved for tokens in
flight during a prefill, and prefixes that are kept for later requests, come on top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tiered_kv.sizing.checks import bad, count, fault
from tiered_kv.sizing.dtypes import BF16, FP16, FP32, dtype_named, is_dtype
from tiered_kv.sizing.engines import EngineGroup, EngineOptions, EngineReport
from tiered_kv.sizing.engines import vllm_pages as paging
from tiered_kv.sizing.engines.vllm_pages import STATES, Cache
from tiered_kv.sizing.parallel import of_rank, of_stage, stage_layers
from tiered_kv.sizing.parts import Part
from tiered_kv.sizing.spec import Kind, KvSpec, LayerGroup

VERSION = "0.32"
_DEFAULT_BLOCK = 16
_KERNEL, _LATENT_KERNEL = 16, 64
_PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token in the packed layouts of sparse MLA."""
_PACKED_DIMS = (512, 64)
_INDEX_SCALE_BLOCK = 128
# A request keeps the state before the last block beside its current one: prefixes end there.
_STATES_ALIGNED = 2
# These take the type of their recurrent state from the configuration; others keep it in the type
# of the convolution's unless they are told otherwise.
_OWN_STATE_TYPE = frozenset(
    {"nemotron_h", "kimi_linear", "kimi_k3", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"}
    | {"qwen3_5_moe_text"}
)
_WITHOUT_LATENTS = frozenset({"minicpm3"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """A cache that vLLM registers: that of a layer, or a second one of it.

    Attributes:
        index: The layer.
        kind: What it keeps; states of all kinds are `RECURRENT`.
        token_bytes: Bytes of a token, or of the state.
        window: Tokens of the window or chunk.
        shape: Heads and dimensions.
    """

    index: int
    kind: Kind
    token_bytes: int
    window: int
    shape: tuple[tuple[int, int, str], ...]


def size(spec: KvSpec, context: int, batch: int, options: EngineOptions) -> EngineReport:
    """What vLLM holds on the rank that holds most.

    Raises:
        InvalidArgumentError: A number is out of range, the ranks do not divide, the type is not
            one of vLLM's for this model, or vLLM lays the architecture out in a way of its own.
    """
    parallel = options.parallel
    count("context", context)
    count("batch", batch)
    if spec.model_type in _WITHOUT_LATENTS:
        raise fault(
            f"`engine` vllm keeps whole keys and values for {spec.model_type}, not its latents, "
            "which is not reproduced: leave `engine` out"
        )
    typed = _typed(spec, options.kv_dtype)
    mine = of_rank(typed, parallel.attention_tp)
    requests = -(-batch // parallel.dp_attention)
    stages = [of_stage(mine, at) for at in stage_layers(spec.num_layers, parallel.pp)]
    reports = [
        _stage(stage, context, requests, options)
        for stage in stages
        if any(group.parts for group in stage.groups)
    ]
    if not reports:
        raise fault(f"{spec.name} holds nothing: there is no page to lay out")
    return max(reports, key=lambda report: report.bytes_total)


def _typed(spec: KvSpec, kv_dtype: str | None) -> KvSpec:
    """The specification with vLLM's types of keys, values and states."""
    plain = spec.kv_dtype if spec.kv_dtype in (BF16, FP16, FP32) else BF16
    if kv_dtype is not None and kv_dtype not in _PACKED and kv_dtype != "auto":
        if not is_dtype(kv_dtype):
            raise bad("kv_dtype", kv_dtype, f"a type of `size`, auto, or {', '.join(_PACKED)}")
        spec = spec.with_kv_dtype(dtype_named(kv_dtype))
    if spec.model_type in _OWN_STATE_TYPE:
        return spec
    own = {part.dtype for group in spec.groups for part in group.parts if part.taps}

    def state(part: Part) -> Part:
        if not part.shape or part.taps:
            return part
        return dataclasses.replace(part, dtype=next(iter(own), plain))

    return spec.with_parts(state)


def _stage(stage: KvSpec, context: int, requests: int, options: EngineOptions) -> EngineReport:
    layers = _layers(stage, options.kv_dtype)
    block, caches = _paged(layers, options.block_size)
    cp = options.parallel.cp
    grouped = paging.groups(caches)
    block_bytes = paging.block_bytes(grouped)
    kinds = {cache.kind in STATES for cache in caches}
    # Without attention vLLM keeps no prefixes, hence no second state.
    states = _STATES_ALIGNED if len(kinds) > 1 and context > block else 1
    found = []
    for group in grouped:
        held = requests * paging.pages(group[0], context, stage.encoder_len, cp, states)
        used = requests * sum(_used(cache, context, stage.encoder_len, cp) for cache in group)
        found.append(
            EngineGroup(
                kind=_name(group),
                layers=len(group),
                bytes_total=held * block_bytes,
                page_bytes=_page_bytes(group),
                pages=held,
                waste_bytes=held * block_bytes - used,
            )
        )
    found.append(EngineGroup("null block", 0, block_bytes, block_bytes, 1, block_bytes))
    return EngineReport(
        engine=f"vllm {VERSION}",
        groups=tuple(found),
        block_size=block,
        notes=tuple(_notes(grouped, block, block_bytes, len(kinds) > 1)),
    )


def _page_bytes(group: Sequence[Cache]) -> int:
    """Bytes of a layer's page; of all layers' together where they differ."""
    sizes = [cache.page_bytes for cache in group]
    return sizes[0] if len(set(sizes)) == 1 else sum(sizes)


def _name(group: Sequence[Cache]) -> str:
    return ", ".join(dict.fromkeys(cache.kind.value for cache in group))


def _layers(spec: KvSpec, kv_dtype: str | None) -> list[_Layer]:
    """The caches that vLLM registers, in the order of their layers."""
    found: dict[tuple[int, Kind], _Layer] = {}
    for group in spec.groups:
        for index in group.layers:
            layer = _layer(index, group, kv_dtype)
            if layer is None:
                continue
            place = (index, layer.kind)
            if place not in found:
                found[place] = layer
            elif layer.kind is Kind.RECURRENT:
                # A layer's states are one page, whatever they are of.
                first = found[place]
                found[place] = dataclasses.replace(
                    first,
                    token_bytes=first.token_bytes + layer.token_bytes,
                    shape=first.shape + layer.shape,
                )
            else:
                raise fault(f"`engine` vllm: layer {index} has two {layer.kind.value} caches")
    return [found[place] for place in sorted(found, key=lambda place: place[0])]


def _layer(index: int, group: LayerGroup, kv_dtype: str | None) -> _Layer | None:
    if not group.parts:
        return None
    if group.kind is Kind.COMPRESSED or any(part.span.size > 1 for part in _growing(group)):
        raise fault(
            "`engine` vllm lays compressed attention out in a way of its own, which is not "
            "reproduced: leave `engine` out"
        )
    shape = tuple((part.heads, part.dim, part.dtype.name) for part in group.parts)
    size = sum(part.entry_bytes for part in group.parts)
    if group.kind in STATES:
        return _Layer(index, Kind.RECURRENT, size, 0, shape)
    if group.kind is Kind.INDEX:
        return _Layer(index, Kind.INDEX, _index_bytes(group), 0, shape)
    if kv_dtype in _PACKED:
        if group.kind is not Kind.MLA or tuple(part.dim for part in group.parts) != _PACKED_DIMS:
            raise bad("kv_dtype", kv_dtype, "it for MLA of 512 + 64 elements alone")
        size = _PACKED[kv_dtype]
    windowed = group.kind is Kind.MLA and group.window
    return _Layer(index, Kind.SLIDING if windowed else group.kind, size, group.window, shape)


def _growing(group: LayerGroup) -> list[Part]:
    return [part for part in group.parts if part.span.grows]


def _index_bytes(group: LayerGroup) -> int:
    """Index keys are fp8 with an fp32 scale for each 128 elements, whatever the other type."""
    part = group.parts[0]
    if len(group.parts) != 1 or part.heads != 1 or part.dim % _INDEX_SCALE_BLOCK:
        raise fault("`engine` vllm: index keys of this shape are not reproduced: leave it out")
    return part.dim + 4 * (part.dim // _INDEX_SCALE_BLOCK)


def _paged(layers: Sequence[_Layer], asked: int | None) -> tuple[int, list[Cache]]:
    """Tokens of a block, and a page of each cache."""
    latent = any(layer.kind in (Kind.MLA, Kind.INDEX) for layer in layers)
    kernel = _LATENT_KERNEL if latent else _KERNEL
    block = asked or (kernel if latent else _DEFAULT_BLOCK)
    if block % kernel:
        raise bad("block_size", block, f"a multiple of {kernel}, as vLLM's kernels take")
    state = max((layer.token_bytes for layer in layers if layer.kind in STATES), default=0)
    tokens = [layer.token_bytes for layer in layers if layer.kind not in STATES]
    padded = 0
    if state and tokens:
        block = paging.attention_block(block, kernel, max(tokens), state, latent)
        padded = block * max(tokens)
    return block, [_cache(layer, block, padded) for layer in layers]


def _cache(layer: _Layer, block: int, padded: int) -> Cache:
    used = layer.token_bytes * (1 if layer.kind in STATES else block)
    page = max(used, padded) if layer.kind in STATES else used
    return Cache(layer.kind, block, used, page, layer.window, layer.shape)


def _used(cache: Cache, context: int, encoder_len: int, cp: int) -> int:
    """Bytes that a request needs of what a layer holds, on one of `cp` ranks."""
    if context == 0:
        return 0
    if cache.kind in STATES:
        return cache.used_bytes
    tokens = encoder_len if cache.kind is Kind.CROSS else context
    if cache.window:
        tokens = min(tokens, cache.window)
    return -(-tokens // cp) * cache.used_bytes // cache.block_size


def _notes(
    grouped: Sequence[Sequence[Cache]], block: int, block_bytes: int, hybrid: bool
) -> list[str]:
    notes = [
        f"{len(grouped)} groups share one pool of blocks of {block_bytes:,} B, the largest "
        "group's; a block that nobody may use is the null block"
        if len(grouped) > 1
        else f"one pool of blocks of {block_bytes:,} B; one of them is the null block"
    ]
    if hybrid:
        notes.append(
            f"blocks have {block:,} tokens, so that a page of attention holds a state; states are "
            "padded to that page"
        )
        notes.append("a request holds two states, since prefixes end at blocks")
    if any(cache.window for group in grouped for cache in group):
        notes.append("windows are held in whole blocks, one more where they straddle")
    return notes
