"""The architectures, and how the layers of each are read."""

from __future__ import annotations

from tiered_kv.sizing.checks import bad, count, fault
from tiered_kv.sizing.dtypes import DType
from tiered_kv.sizing.families.arch import (
    Arch,
    Layer,
    check_heads,
    head_dim,
    layer_types,
    query_heads,
    skipped,
)
from tiered_kv.sizing.families.encoders import decoder_fields
from tiered_kv.sizing.families.table import ARCHITECTURES
from tiered_kv.sizing.fields import MOST_LAYERS, Fields
from tiered_kv.sizing.layers import Keep, grouped, shared
from tiered_kv.sizing.spec import AsIf, Kind, KvSpec, Role

__all__ = ["ARCHITECTURES", "Arch", "build"]

SPECULATIVE = ("none", "mtp", "eagle")


def build(
    fields: Fields,
    arch: Arch,
    *,
    name: str,
    model_type: str,
    dtype: DType,
    speculative: str = "none",
) -> KvSpec:
    """The specification of a decoder.

    Args:
        fields: Its configuration.
        arch: How its layers are read.
        name: How it is called.
        model_type: Its architecture.
        dtype: Type of keys and values.
        speculative: `"none"`, `"mtp"` or `"eagle"`: which layers are added.

    Raises:
        InvalidArgumentError: A field is missing, wrong, or contradicts another.
    """
    if speculative not in SPECULATIVE:
        raise bad("speculative", speculative, f"one of {', '.join(SPECULATIVE)}")
    if arch.cross:
        fields = decoder_fields(fields)
    if arch.window is not None and (window := arch.window(fields)) is not None:
        fields = fields.with_values({"sliding_window": window})
    layers = _layers(fields, arch)
    found = layer_types(fields, arch, layers)
    types, more = tuple(found[:layers]), found[layers:]
    kept = _model(fields, arch, types, dtype)
    if arch.again is not None:
        kept += [kept[layer] for layer in arch.again(fields)]
    groups = grouped(list(enumerate(kept)))
    if speculative != "none":
        extra = _extra(fields, arch, types, more, dtype, speculative)
        role = Role.MTP if speculative == "mtp" else Role.EAGLE
        groups += grouped([(len(kept) + at, keeps) for at, keeps in enumerate(extra)], role)
    if not groups:
        raise fault(f"{name} keeps nothing: its layers have no cache")
    encoder = fields.maybe("max_source_positions") if arch.cross else None
    return KvSpec(
        name=name,
        model_type=model_type,
        groups=groups,
        num_layers=layers // arch.caches_per_layer,
        kv_dtype=dtype,
        as_if=_as_if(fields, arch, layers),
        caches_per_layer=arch.caches_per_layer,
        max_context=_max_context(fields),
        encoder_len=encoder or 0,
        notes=(arch.note,) if arch.note else (),
    )


def _layers(fields: Fields, arch: Arch) -> int:
    if arch.layers is not None:
        own = count("num_layers", arch.layers(fields), least=1, most=MOST_LAYERS)
        if not fields.has("num_hidden_layers"):
            fields.values = {**fields.values, "num_hidden_layers": own}
        return own
    listed = fields.words("layer_types") or fields.words("layers_block_type")
    pattern = fields.given("hybrid_override_pattern")
    if not fields.has("num_hidden_layers") and (listed or isinstance(pattern, str)):
        return count("num_hidden_layers", len(listed or pattern), least=1, most=MOST_LAYERS)
    return fields.layers()


def _max_context(fields: Fields) -> int:
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    return fields.maybe(*names, "n_ctx", "seq_length", "max_sequence_length") or 0


def _model(fields: Fields, arch: Arch, types: tuple[str, ...], dtype: DType) -> list[list[Keep]]:
    """What each layer of the model keeps."""
    sources = arch.reuses(fields, types) if arch.reuses is not None else [None] * len(types)
    kept: list[list[Keep]] = []
    for index, (kind, source) in enumerate(zip(types, sources, strict=True)):
        layer = Layer(fields.at_layer(index), index, kind, dtype, types)
        if skipped(layer.fields):
            kept.append([])
            continue
        keeps = arch.keeps(layer)
        if source is not None:
            # Index keys are a layer's own even where it reads another's keys and values.
            own = [keep for keep in keeps if keep.kind is Kind.INDEX]
            keeps = [shared("they read the keys and values of an earlier layer"), *own]
        kept.append(keeps)
    return kept


_STATES = ("linear_attention", "conv", "moe", "mlp")


def _extra(
    fields: Fields,
    arch: Arch,
    types: tuple[str, ...],
    more: list[str],
    dtype: DType,
    speculative: str,
) -> list[list[Keep]]:
    """What the layers for speculative decoding keep: as the model's last attention, by default."""
    attention = [at for at, kind in enumerate(types) if kind not in _STATES]
    if not attention:
        raise fault(f"`speculative` is {speculative!r}, but the model has no attention layer")
    last = attention[-1]
    if speculative == "eagle":
        listed = [types[last]]
    else:
        wanted = fields.maybe(*arch.mtp)
        if wanted is not None:
            # Each asks for a layer to be built.
            count(" or ".join(arch.mtp), wanted, most=MOST_LAYERS)
        own = fields.words("mtp_layer_types") or fields.words("mtp_layers_block_type")
        if not wanted:
            names = " or ".join(f"`{name}`" for name in arch.mtp)
            raise fault(f"`speculative` is 'mtp', but the configuration has no {names}")
        listed = (more or own or [types[last]]) * wanted
        listed = listed[: max(wanted, len(own or ()) * wanted)] if own else listed[:wanted]
    at_last = fields.at_layer(last)
    return [arch.keeps(Layer(at_last, last, kind, dtype, types)) for kind in listed]


def _as_if(fields: Fields, arch: Arch, layers: int) -> AsIf | None:
    """What the usual formula takes; None for a model without attention."""
    if not fields.has("num_attention_heads"):
        return None
    queries = query_heads(fields)
    kv_heads = fields.maybe("num_key_value_heads", least=1) or queries
    if arch.attention is None and kv_heads != queries:
        check_heads(fields, kv_heads)
    value = fields.maybe("v_head_dim", least=1) if fields.has("kv_lora_rank") else None
    return AsIf(layers, queries, kv_heads, value or head_dim(fields))
