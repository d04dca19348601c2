"""What one rank holds under tensor, pipeline, context, expert and data-parallel attention."""

from __future__ import annotations

import dataclasses

from tiered_kv.sizing.checks import count, fault
from tiered_kv.sizing.parts import Part, SpanKind
from tiered_kv.sizing.spec import KvSpec, LayerGroup

MOST_RANKS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Parallel:
    """How a model is spread over ranks.

    Attributes:
        tp: Ranks that split the heads.
        pp: Stages that split the layers.
        cp: Ranks that split the context (decode context parallel).
        ep: Ranks that split the experts: no cache is split by them.
        dp_attention: Replicas of the attention inside the `tp` ranks; each has its own sequences
            and splits the heads over tp / dp_attention ranks.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_attention: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "dp_attention"):
            count(name, getattr(self, name), least=1, most=MOST_RANKS)
        if self.tp % self.dp_attention:
            raise fault(
                f"`dp_attention` is {self.dp_attention}, which does not divide `tp` = {self.tp}: "
                "give a divisor"
            )

    @property
    def attention_tp(self) -> int:
        """Ranks over which one sequence's heads are split."""
        return self.tp // self.dp_attention


def heads_of_rank(part: Part, tp: int) -> int:
    """Vectors of an entry that each of `tp` ranks keeps.

    Raises:
        InvalidArgumentError: `tp` does not divide the heads, nor do they divide it.
    """
    if part.heads % tp and tp % part.heads:
        raise fault(
            f"`tp` is {tp}, but the {part.name} have {part.heads} heads: give a divisor or a "
            "multiple"
        )
    return max(1, part.heads // tp)


def replication(part: Part, tp: int, *, stored_once: bool = False) -> int:
    """Ranks that keep the same bytes: max(1, tp / heads); for a latent, all of them.

    Args:
        part: What is kept.
        tp: Ranks.
        stored_once: Whether a store below the ranks keeps equal bytes once.
    """
    return 1 if stored_once else heads_of_rank(part, tp) * tp // part.heads


def of_rank(spec: KvSpec, tp: int) -> KvSpec:
    """The specification of what each of `tp` ranks keeps.

    Raises:
        InvalidArgumentError: `tp` does not divide the heads of a part.
    """
    count("tp", tp, least=1, most=MOST_RANKS)
    return spec.with_parts(lambda part: dataclasses.replace(part, heads=heads_of_rank(part, tp)))


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """The layers of each pipeline stage: as even as can be, the longer stages last but one first.

    Raises:
        InvalidArgumentError: There are more stages than layers.
    """
    count("pp", pp, least=1, most=num_layers)
    short, longer = divmod(num_layers, pp)
    sizes = [short + int(pp - 1 - longer <= stage < pp - 1) for stage in range(pp)]
    if longer and sum(sizes) < num_layers:
        sizes[-1] += num_layers - sum(sizes)
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def of_stage(spec: KvSpec, layers: range) -> KvSpec:
    """The specification of one stage; layers beyond the model's own are in its last stage."""
    groups: list[LayerGroup] = []
    last = layers.stop >= spec.num_layers
    for group in spec.groups:
        places = [layer // spec.caches_per_layer for layer in group.layers]
        mine = tuple(
            layer
            for layer, place in zip(group.layers, places, strict=True)
            if place in layers or (last and place >= spec.num_layers)
        )
        if mine:
            groups.append(dataclasses.replace(group, layers=mine))
    return dataclasses.replace(spec, groups=tuple(groups))


def rank_bytes(
    spec: KvSpec, parallel: Parallel, context: int, batch: int = 1, block_size: int = 1
) -> int:
    """Bytes of the rank that holds most.

    Args:
        spec: The whole model's cache.
        parallel: How it is spread.
        context: Tokens of each sequence.
        batch: Sequences of the whole deployment.
        block_size: Tokens of a block.

    Raises:
        InvalidArgumentError: A number is out of range or does not divide.
    """
    spec.bytes(context, batch, block_size)
    heads = of_rank(spec, parallel.attention_tp)
    mine = -(-batch // parallel.dp_attention)
    return max(
        sum(
            mine * len(group.layers) * _part_bytes(heads, part, parallel.cp, context, block_size)
            for group in stage.groups
            for part in group.parts
        )
        for stage in (of_stage(heads, at) for at in stage_layers(spec.num_layers, parallel.pp))
    )


def _part_bytes(spec: KvSpec, part: Part, cp: int, context: int, block_size: int) -> int:
    """Bytes of a part in one layer on one of `cp` ranks; states are on each of them."""
    kind = part.span.kind
    if cp == 1 or kind in (SpanKind.ONCE, SpanKind.BUFFER, SpanKind.REMAINDER):
        return part.bytes(context, spec.encoder_len, block_size)
    # Blocks are dealt out in turn: a block of each rank covers `cp` x `block_size` tokens.
    whole = part.span.entries(context, spec.encoder_len, cp * block_size)
    return part.entry_bytes * -(-whole // cp)
