"""The KV cache of a model: groups of alike layers, exact bytes, and the exact inverse."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from tiered_kv.sizing.checks import count, fault
from tiered_kv.sizing.dtypes import DType
from tiered_kv.sizing.parts import Part, SpanKind

if TYPE_CHECKING:
    from tiered_kv.spec import KvLayout


class Kind(enum.Enum):
    """What the layers of a group keep."""

    FULL = "full"
    """Keys and values of every token."""
    SLIDING = "sliding_window"
    """Keys and values of the last tokens."""
    CHUNKED = "chunked"
    """Keys and values of the current chunk of tokens."""
    MLA = "mla"
    """A latent vector and a rotary key of every token, for all heads together."""
    SHARED = "shared"
    """Nothing: these layers read what other layers keep."""
    RECURRENT = "recurrent"
    """A state-space or RWKV state of a constant size."""
    LINEAR = "linear_attention"
    """A linear-attention state of a constant size (gated delta net, lightning, KDA)."""
    CONV = "conv"
    """The last inputs of a short convolution."""
    CROSS = "cross_attention"
    """Keys and values of the encoder's tokens, or of an image's."""
    INDEX = "index_keys"
    """The keys by which sparse attention chooses its tokens."""
    COMPRESSED = "compressed"
    """A window, entries that stand for several tokens, and the tokens not compressed yet."""


class Role(enum.Enum):
    """Which model the layers of a group belong to."""

    MODEL = "model"
    MTP = "mtp"
    """Layers that predict several tokens."""
    EAGLE = "eagle"
    """The layer of a draft model."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same things.

    A layer that keeps two kinds of things, such as a latent and index keys, is in two groups.

    Attributes:
        kind: What they keep.
        layers: Their cache indices, from 0. A model whose layers have two caches each (LongCat)
            has two indices a layer.
        parts: What each of them keeps; empty for `SHARED`.
        role: The model that they belong to.
        window: Tokens of the window or chunk, 0 where there is none.
        note: What is particular to them, in a sentence.
    """

    kind: Kind
    layers: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    role: Role = Role.MODEL
    window: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise fault(f"the {self.kind.value} group has no `layers`: leave it out")
        if bool(self.parts) == (self.kind is Kind.SHARED):
            raise fault(f"the {self.kind.value} group has wrong `parts`: a shared one has none")

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one more token adds in the long run, in all layers.

        0 for windows and states: a full window trades a token for a token. A group of
        compressed attention gives a fraction, where several tokens share an entry.
        """
        return len(self.layers) * sum((part.bytes_per_token for part in self.parts), Fraction(0))

    @property
    def filling_bytes_per_token(self) -> Fraction:
        """Bytes that one more token adds while no window is full yet, in all layers."""
        window = sum(part.entry_bytes for part in self.parts if part.span.kind is SpanKind.LAST)
        return self.bytes_per_token + len(self.layers) * window

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a sequence that do not grow any more: full windows and states."""
        return len(self.layers) * sum(part.fixed_bytes for part in self.parts)

    def bytes(self, context: int, batch: int = 1, block_size: int = 1, encoder_len: int = 0) -> int:
        """Bytes of this group; see `KvSpec.bytes`."""
        one = sum(part.bytes(context, encoder_len, block_size) for part in self.parts)
        return batch * len(self.layers) * one


@dataclasses.dataclass(frozen=True, slots=True)
class AsIf:
    """What the usual formula, 2 x layers x heads x head dim x bytes, takes from a configuration.

    Attributes:
        layers: All layers, whatever they keep.
        heads: Query heads.
        kv_heads: Key-value heads as the configuration has them.
        head_dim: Dimension of a head.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What a simpler rule would have said.

    Attributes:
        rule: `"mha"` or `"gqa"`.
        bytes_per_token: Bytes a token by that rule.
        bytes_total: Bytes for the same context and batch by that rule.
        exact: The exact bytes.
        why: Why the rule is right or wrong for this model, in a sentence.
    """

    rule: str
    bytes_per_token: int
    bytes_total: int
    exact: int
    why: str

    @property
    def ratio(self) -> Fraction:
        """The rule's bytes divided by the exact ones; 0 where nothing is held."""
        return Fraction(self.bytes_total, self.exact) if self.exact else Fraction(0)


@dataclasses.dataclass(frozen=True, slots=True)
class KvSpec:
    """The KV cache of a model.

    Attributes:
        name: The model as the caller or its configuration names it.
        model_type: Its architecture.
        groups: Its layer groups, in the order of their first layers.
        num_layers: Layers of the model itself.
        kv_dtype: Type of keys and values.
        as_if: What the usual formula would take; None where the model has no attention.
        caches_per_layer: Cache indices of one layer, one behind the other: 2 in LongCat.
        max_context: Most tokens that the model was made for; 0 if not known.
        encoder_len: Tokens that the encoder gives, for cross attention; 0 where there is none.
        inferred: The architecture is not known: its fields were taken at their usual meaning.
        notes: What a reader of the figures should know.
        sources: Where the figures come from.
    """

    name: str
    model_type: str
    groups: tuple[LayerGroup, ...]
    num_layers: int
    kv_dtype: DType
    as_if: AsIf | None = None
    caches_per_layer: int = 1
    max_context: int = 0
    encoder_len: int = 0
    inferred: bool = False
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count("num_layers", self.num_layers, least=1)
        count("max_context", self.max_context)
        count("encoder_len", self.encoder_len)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one more token adds in the long run, once every window is full."""
        return sum((group.bytes_per_token for group in self.groups), Fraction(0))

    @property
    def filling_bytes_per_token(self) -> Fraction:
        """Bytes that one more token adds while no window is full yet."""
        return sum((group.filling_bytes_per_token for group in self.groups), Fraction(0))

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a sequence that do not grow any more: full windows and states."""
        return sum(group.fixed_bytes for group in self.groups)

    @property
    def grows(self) -> bool:
        """Whether more tokens always need more bytes."""
        return self.bytes_per_token > 0

    def bytes(self, context: int, batch: int = 1, block_size: int = 1) -> int:
        """Bytes that `batch` sequences of `context` tokens each hold.

        Windows are bounded and states constant; a sequence of no token holds nothing.

        Args:
            context: Tokens of each sequence.
            batch: Sequences.
            block_size: Tokens of a block: what goes with tokens is held in whole blocks, and a
                window in as many as it has touched at once.

        Raises:
            InvalidArgumentError: A number is negative, no integer or too large.
        """
        count("context", context)
        count("batch", batch)
        count("block_size", block_size, least=1)
        return self._total(context, batch, block_size)

    def group_bytes(self, context: int, batch: int = 1, block_size: int = 1) -> list[int]:
        """`bytes` of each group, in their order."""
        self.bytes(context, batch, block_size)
        return [group.bytes(context, batch, block_size, self.encoder_len) for group in self.groups]

    def _total(self, context: int, batch: int, block_size: int) -> int:
        return sum(
            group.bytes(context, batch, block_size, self.encoder_len) for group in self.groups
        )

    def tokens_in(self, budget: int, batch: int = 1, block_size: int = 1) -> int | None:
        """The longest context such that it and every shorter one fit in a budget.

        Args:
            budget: Bytes.
            batch: Sequences of that context.
            block_size: Tokens of a block.

        Returns:
            Tokens of each sequence; None where any number fits, since the cache does not grow.

        Raises:
            InvalidArgumentError: A number is negative, no integer or too large.
        """
        count("budget", budget)
        count("batch", batch)
        count("block_size", block_size, least=1)
        bound = self if self._monotone else self._bounded()
        sizes = [part.span.size for group in self.groups for part in group.parts]
        high = 2 * max([1, block_size, *sizes])
        while bound._total(high, batch, block_size) <= budget:
            if not self.grows or batch == 0:
                return None
            high *= 2
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if bound._total(middle, batch, block_size) <= budget:
                low = middle
            else:
                high = middle
        # A remainder is at most its bound, and reaches it again and again: a short walk.
        while bound is not self and self._total(low + 1, batch, block_size) <= budget:
            low += 1
        return low

    def batch_in(self, budget: int, context: int, block_size: int = 1) -> int | None:
        """The most sequences of `context` tokens each that fit in a budget.

        Args:
            budget: Bytes.
            context: Tokens of each sequence.
            block_size: Tokens of a block.

        Returns:
            Sequences; None where any number fits, since a sequence holds nothing.

        Raises:
            InvalidArgumentError: A number is negative, no integer or too large.
        """
        count("budget", budget)
        one = self.bytes(context, 1, block_size)
        return budget // one if one else None

    @property
    def _monotone(self) -> bool:
        return all(
            part.span.kind is not SpanKind.REMAINDER
            for group in self.groups
            for part in group.parts
        )

    def _bounded(self) -> KvSpec:
        """This specification with every remainder at its bound."""

        def room(part: Part) -> Part:
            if part.span.kind is not SpanKind.REMAINDER:
                return part
            span = dataclasses.replace(part.span, kind=SpanKind.BUFFER)
            return dataclasses.replace(part, span=span)

        return self.with_parts(room)

    def with_parts(self, change: Callable[[Part], Part]) -> KvSpec:
        """This specification with every part changed by a function."""
        groups = tuple(
            dataclasses.replace(group, parts=tuple(change(part) for part in group.parts))
            for group in self.groups
        )
        return dataclasses.replace(self, groups=groups)

    def with_kv_dtype(self, dtype: DType) -> KvSpec:
        """This specification with keys and values of another type; states keep theirs."""

        def retyped(part: Part) -> Part:
            return part if part.fixed else dataclasses.replace(part, dtype=dtype)

        return dataclasses.replace(self.with_parts(retyped), kv_dtype=dtype)

    def with_encoder_len(self, encoder_len: int) -> KvSpec:
        """This specification for an encoder that gives `encoder_len` tokens."""
        return dataclasses.replace(self, encoder_len=encoder_len)

    def as_mha(self, context: int, batch: int = 1) -> Comparison | None:
        """What counting a key and a value for every query head of every layer would say."""
        from tiered_kv.sizing.compare import as_mha

        return as_mha(self, context, batch)

    def as_gqa(self, context: int, batch: int = 1) -> Comparison | None:
        """What counting the configuration's key-value heads in every layer would say."""
        from tiered_kv.sizing.compare import as_gqa

        return as_gqa(self, context, batch)

    def to_layout(self, tokens_per_block: int, head_groups: int = 1) -> KvLayout:
        """The shape of this model's blocks in a store: one row of slabs a group that holds bytes.

        A state is in every block: it is that after the block's last token. What
        depends on the encoder alone is in none.

        Args:
            tokens_per_block: Tokens of a block.
            head_groups: Columns of the grid; every group's heads must divide by it.

        Raises:
            InvalidArgumentError: The heads or the tokens do not divide, or nothing is held.
        """
        from tiered_kv.sizing.layout import to_layout

        return to_layout(self, tokens_per_block, head_groups)
