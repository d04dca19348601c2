"""Multi-head latent attention, sparse attention over it, and DeepSeek V4's compression."""

from __future__ import annotations

import dataclasses

from tiered_kv.sizing.checks import bad
from tiered_kv.sizing.dtypes import FP32, INT64
from tiered_kv.sizing.families.arch import Layer, heads, indexer, softmax
from tiered_kv.sizing.families.patterns import without_rope
from tiered_kv.sizing.fields import MOST_LAYERS, Fields
from tiered_kv.sizing.layers import Keep, index_keys, mla
from tiered_kv.sizing.parts import Part, Span, SpanKind, last
from tiered_kv.sizing.spec import Kind


def latent(layer: Layer) -> Keep:
    """The latent and the rotary key of every token, or of a window."""
    fields = layer.fields
    rank = fields.integer("kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim", least=0)
    window = fields.integer("sliding_window") if layer.is_sliding else 0
    return mla(rank, rope, layer.dtype, window)


def sometimes_rotary(layer: Layer) -> Keep:
    """Mistral Large 4: no rotary key in the layers without rotary positions."""
    if not without_rope(layer.fields)[layer.index]:
        return latent(layer)
    return mla(layer.fields.integer("kv_lora_rank"), 0, layer.dtype)


def by_window(layer: Layer) -> Keep:
    """Dots 3: windowed layers have latents of dimensions of their own, under `swa_` names."""
    fields = layer.fields
    if not layer.is_sliding or fields.has("per_layer_config"):
        return latent(layer)
    rope = fields.maybe("swa_qk_rope_head_dim")
    if rope is None:
        rope = (fields.maybe("swa_head_dim") or 256) - (fields.maybe("swa_qk_nope_head_dim") or 192)
    rank = fields.maybe("swa_kv_lora_rank", least=1) or 1024
    return latent(
        dataclasses.replace(
            layer, fields=fields.with_values({"kv_lora_rank": rank, "qk_rope_head_dim": rope})
        )
    )


def topk_types(fields: Fields) -> list[str]:
    """Which layers run the indexer and which share the result of another.

    A pattern such as `"FSSF"` rules; else a frequency and an offset.
    """
    layers = fields.layers()
    pattern = fields.given("index_topk_pattern")
    if isinstance(pattern, str):
        names = {"F": "full", "S": "shared"}
        if len(pattern) > MOST_LAYERS or set(pattern) - set(names):
            want = f"at most {MOST_LAYERS} letters F and S"
            raise bad(f"{fields.prefix}index_topk_pattern", pattern, want)
        return [names[letter] for letter in pattern]
    if pattern is not None:
        return fields.words("index_topk_pattern") or []
    step = max(fields.maybe("index_topk_freq") or 1, 1)
    offset = fields.maybe("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return ["full" if max(at - offset + 1, 0) % step == 0 else "shared" for at in range(layers)]


def sometimes_indexed(layer: Layer) -> list[Keep]:
    """Index keys in the layers that run an indexer: those that share its result hold none."""
    if layer.fields.words("indexer_types") is not None:
        return indexer(layer)
    modes = topk_types(layer.fields)
    if layer.index < len(modes) and modes[layer.index] == "shared":
        return []
    return [index_keys(layer.fields.integer("index_head_dim"), layer.dtype)]


def exact_indexed(layer: Layer) -> list[Keep]:
    """Dots 3: index keys in fp32."""
    keeps = sometimes_indexed(layer)
    return [index_keys(layer.fields.integer("index_head_dim"), FP32)] if keeps else []


def hunyuan_indexed(layer: Layer) -> list[Keep]:
    """Hunyuan 4: the first layer and each fourth after the second run an indexer."""
    if layer.fields.words("indexer_types") is not None:
        return indexer(layer)
    if layer.index and (layer.index - 1) % 4:
        return []
    return [index_keys(layer.fields.integer("index_head_dim"), layer.dtype)]


def pooled_indexed(layer: Layer) -> list[Keep]:
    """GLM 5.3 Flash: a key, its gate and a mark of every token, in layers with an indexer."""
    keeps = sometimes_indexed(layer)
    if not keeps:
        return []
    dim = layer.fields.integer("index_head_dim")
    return [index_keys(2 * dim + 1, layer.dtype)]


def grouped_indexed(layer: Layer) -> list[Keep]:
    """Qwen 4: index keys of `indexer_kv_heads` heads; three positions a token in the first."""
    fields = layer.fields
    count = fields.maybe("indexer_kv_heads", least=1) or 1
    keep = index_keys(fields.integer("indexer_head_dim"), layer.dtype, count)
    if layer.type not in layer.types[: layer.index]:
        positions = Part("positions", 1, 3, INT64, fixed=True)
        keep = dataclasses.replace(keep, parts=(*keep.parts, positions))
    return [keep]


def minimax_m3(layer: Layer) -> list[Keep] | None:
    """MiniMax M3: keys and values, and one index key a token, in the sparse layers."""
    if layer.type != "minimax_m3_sparse":
        return None
    own = layer.fields.nested("sparse_attention_config")
    dim = own.maybe("sparse_index_dim", least=1) or layer.fields.integer("index_head_dim")
    return [softmax(layer, heads(layer)), index_keys(dim, layer.dtype)]


def _rate(layer: Layer) -> int:
    """Tokens that share an entry in a compressed layer."""
    legacy = {"heavily_compressed_attention": "hca", "compressed_sparse_attention": "csa"}
    own = layer.fields.maybe(f"compress_rate_{legacy[layer.type]}", least=1)
    if own is not None:
        return own
    rates = layer.fields.nested("compress_rates")
    default = {"heavily_compressed_attention": 128, "compressed_sparse_attention": 4}
    return rates.maybe(layer.type, least=1) or default[layer.type]


def compressed(layer: Layer) -> list[Keep] | None:
    """DeepSeek V4: a window, one entry for several tokens, and what waits to be compressed.

    Keys are values: a vector is kept once. Sparse layers keep index keys as well, at the
    same rate, and what the next group of tokens overlaps with.
    """
    if layer.type == "sliding_attention":
        fields = layer.fields
        window = fields.integer("sliding_window")
        keys = Part("keys", 1, fields.integer("head_dim"), layer.dtype, last(window))
        return [Keep(Kind.SLIDING, (keys,), window)]
    if layer.type not in ("heavily_compressed_attention", "compressed_sparse_attention"):
        return None
    fields, dtype = layer.fields, layer.dtype
    dim, window, rate = fields.integer("head_dim"), fields.integer("sliding_window"), _rate(layer)
    grouped, waiting = Span(SpanKind.EVERY, rate), Span(SpanKind.BUFFER, rate)
    keys = Part("keys", 1, dim, dtype, last(window))
    entries = Part("compressed entries", 1, dim, dtype, grouped)
    # Each waiting token has a candidate and a gate; a sparse layer has two series of each.
    series = 1 if layer.type == "heavily_compressed_attention" else 2
    buffer = Part("waiting tokens", 2, series * dim, dtype, waiting, fixed=True)
    parts = [keys, entries, *([buffer] if rate > 1 else [])]
    if series == 1:
        return [Keep(Kind.COMPRESSED, tuple(parts), window)]
    index = fields.integer("index_head_dim")
    once = Span(SpanKind.ONCE, rate)
    parts += _overlap(rate, dim, once, dtype_part=keys)
    waiting_keys = Part("waiting index keys", 2, 2 * index, dtype, waiting, fixed=True)
    indexed = [
        Part("index keys", 1, index, dtype, grouped),
        *([waiting_keys] if rate > 1 else []),
        *_overlap(rate, index, once, dtype_part=keys),
    ]
    return [Keep(Kind.COMPRESSED, tuple(parts), window), Keep(Kind.INDEX, tuple(indexed))]


def _overlap(rate: int, dim: int, once: Span, dtype_part: Part) -> list[Part]:
    """The last group's candidates and, in fp32, its gates, which the next group overlaps with."""
    candidates = Part("overlap", 1, rate * dim, dtype_part.dtype, once, fixed=True)
    gates = dataclasses.replace(candidates, name="overlap gates", dtype=FP32)
    return [candidates, gates]
