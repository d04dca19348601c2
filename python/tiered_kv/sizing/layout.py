"""From a specification to the slab grid of a store's blocks."""

from __future__ import annotations

from tiered_kv.sizing.checks import count, fault
from tiered_kv.sizing.parts import Part, SpanKind
from tiered_kv.sizing.spec import KvSpec, LayerGroup
from tiered_kv.spec import KvLayout


def to_layout(spec: KvSpec, tokens_per_block: int, head_groups: int) -> KvLayout:
    """See `KvSpec.to_layout`."""
    count("tokens_per_block", tokens_per_block, least=1, most=1 << 32)
    count("head_groups", head_groups, least=1, most=64)
    slabs: list[int] = []
    for group in spec.groups:
        _check_heads(group, head_groups)
        row = len(group.layers) * sum(_in_block(part, tokens_per_block) for part in group.parts)
        if row:
            slabs += [row // head_groups] * head_groups
    if not slabs:
        raise fault(f"{spec.name} holds nothing for its tokens: there is no block to lay out")
    return KvLayout(
        tokens_per_block,
        layer_groups=len(slabs) // head_groups,
        head_groups=head_groups,
        slab_bytes=slabs,
    )


def _check_heads(group: LayerGroup, head_groups: int) -> None:
    for part in group.parts:
        if part.heads % head_groups:
            raise fault(
                f"`head_groups` is {head_groups}, but the {group.kind.value} group's {part.name} "
                f"have {part.heads} heads: give a divisor"
            )


def _in_block(part: Part, tokens: int) -> int:
    """Bytes of a part in one full block."""
    kind, size = part.span.kind, part.span.size
    if kind is SpanKind.LAST:
        return part.entry_bytes * tokens
    if kind is SpanKind.ONCE:
        return part.entry_bytes
    if kind is SpanKind.ENCODER:
        return 0
    if tokens % size:
        raise fault(
            f"`tokens_per_block` is {tokens}, but {size} tokens share an entry of the "
            f"{part.name}: give a multiple of {size}"
        )
    # At the end of such a block nothing waits to be compressed: buffers are empty.
    return part.entry_bytes * (tokens // size) if kind is SpanKind.EVERY else 0
