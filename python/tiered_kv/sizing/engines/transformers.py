"""What the dynamic caches of transformers 5.24 hold after a forward pass."""

from __future__ import annotations

import dataclasses

from tiered_kv.sizing.checks import fault
from tiered_kv.sizing.engines import EngineGroup, EngineOptions, EngineReport
from tiered_kv.sizing.parts import EVERY_TOKEN, Part, SpanKind, last
from tiered_kv.sizing.spec import KvSpec

VERSION = "5.24"


def view(spec: KvSpec) -> KvSpec:
    """The specification of what `DynamicCache` holds between two forward passes.

    A window of W tokens keeps W - 1: the next token brings itself. (With W = 1 its slice `[-0:]`
    keeps all.) A convolution keeps an input for each of its taps. What waits to be compressed is
    held exactly, without spare room.
    """

    def held(part: Part) -> Part:
        if part.span.kind is SpanKind.LAST:
            size = part.span.size
            return dataclasses.replace(part, span=last(size - 1) if size > 1 else EVERY_TOKEN)
        if part.taps:
            *channels, inputs = part.shape
            return dataclasses.replace(
                part, dim=part.dim // inputs * part.taps, shape=(*channels, part.taps)
            )
        if part.span.kind is SpanKind.BUFFER:
            span = dataclasses.replace(part.span, kind=SpanKind.REMAINDER)
            return dataclasses.replace(part, span=span)
        return part

    return spec.with_parts(held)


def size(spec: KvSpec, context: int, batch: int, options: EngineOptions) -> EngineReport:
    """What transformers holds: one process, no blocks.

    Raises:
        InvalidArgumentError: The options ask for more ranks than one, or for blocks.
    """
    if dataclasses.astuple(options.parallel) != (1, 1, 1, 1, 1):
        raise fault("`tp`, `pp`, `cp`, `ep`, `dp_attention` must be 1 for the transformers engine")
    if options.block_size not in (None, 1):
        raise fault("`block_size` must be 1 for the transformers engine: its caches have no blocks")
    held = view(spec)
    sizes = held.group_bytes(context, batch)
    return EngineReport(
        engine=f"transformers {VERSION}",
        groups=tuple(
            EngineGroup(group.kind.value, len(group.layers), total)
            for group, total in zip(held.groups, sizes, strict=True)
        ),
        notes=("a window of W tokens keeps W - 1: the next token brings itself",)
        if any(group.window for group in held.groups)
        else (),
    )
