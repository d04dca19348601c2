"""What simpler rules would have said, and why they are right or wrong."""

from __future__ import annotations

from tiered_kv.sizing.checks import count
from tiered_kv.sizing.spec import AsIf, Comparison, Kind, KvSpec

_REASONS = {
    Kind.MLA: "MLA keeps one latent and one rotary key a token, not a key and a value a head",
    Kind.SLIDING: "windowed layers stop growing at the window",
    Kind.CHUNKED: "chunked layers start again at each chunk",
    Kind.SHARED: "some layers read the cache of others and keep none",
    Kind.RECURRENT: "recurrent layers keep a state of constant size",
    Kind.LINEAR: "linear-attention layers keep a state of constant size",
    Kind.CONV: "convolutions keep their last inputs only",
    Kind.CROSS: "cross attention keeps the encoder's tokens, not the decoder's",
    Kind.INDEX: "sparse attention keeps index keys as well, which the rule leaves out",
    Kind.COMPRESSED: "compressed layers keep one entry for several tokens",
}


def as_mha(spec: KvSpec, context: int, batch: int = 1) -> Comparison | None:
    """See `KvSpec.as_mha`."""
    shape = spec.as_if
    return None if shape is None else _compare(spec, shape, "mha", shape.heads, context, batch)


def as_gqa(spec: KvSpec, context: int, batch: int = 1) -> Comparison | None:
    """See `KvSpec.as_gqa`."""
    shape = spec.as_if
    return None if shape is None else _compare(spec, shape, "gqa", shape.kv_heads, context, batch)


def _compare(
    spec: KvSpec, shape: AsIf, rule: str, heads: int, context: int, batch: int
) -> Comparison:
    count("context", context)
    count("batch", batch)
    vector = spec.kv_dtype.vector_bytes(shape.head_dim)
    per_token = 2 * shape.layers * heads * vector
    return Comparison(
        rule=rule,
        bytes_per_token=per_token,
        bytes_total=per_token * context * batch,
        exact=spec.bytes(context, batch),
        why=_why(spec, shape, rule, per_token),
    )


def _why(spec: KvSpec, shape: AsIf, rule: str, per_token: int) -> str:
    kinds = list(dict.fromkeys(group.kind for group in spec.groups))
    reasons = [_REASONS[kind] for kind in kinds if kind in _REASONS]
    full = [group for group in spec.groups if group.kind is Kind.FULL]
    if rule == "mha" and full and shape.kv_heads < shape.heads:
        reasons.append(
            f"{shape.heads // shape.kv_heads} query heads share each key-value head"
            if shape.heads % shape.kv_heads == 0
            else f"there are {shape.kv_heads} key-value heads for {shape.heads} query heads"
        )
    if not reasons and per_token != spec.bytes_per_token:
        reasons.append("the dimensions or the layers that keep a cache differ from the usual")
    if not reasons:
        return "the rule is exact for this model"
    return "; ".join(reasons)
