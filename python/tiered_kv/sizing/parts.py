"""What a layer of a cache holds: parts, each a number of equal entries that follows the context."""

from __future__ import annotations

import dataclasses
import enum
from fractions import Fraction

from tiered_kv.sizing.checks import count
from tiered_kv.sizing.dtypes import DType


class SpanKind(enum.Enum):
    """How the number of entries follows the context of n tokens."""

    EVERY = "every"
    """One entry for every `size` tokens: floor(n / size)."""
    LAST = "last"
    """One entry for each of the last `size` tokens: min(n, size)."""
    BUFFER = "buffer"
    """Room for the tokens that do not fill a group of `size` yet: min(n, size - 1)."""
    REMAINDER = "remainder"
    """Exactly the tokens that do not fill a group of `size`: n mod size. Not monotone."""
    ONCE = "once"
    """One entry from the token `size` on: states."""
    ENCODER = "encoder"
    """One entry for each token of the encoder, whatever the decoder's context."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """How many entries a sequence holds.

    Attributes:
        kind: How their number follows the context.
        size: The kind's number of tokens.
    """

    kind: SpanKind
    size: int = 1

    def __post_init__(self) -> None:
        count("size", self.size, least=1)

    @property
    def grows(self) -> bool:
        """Whether there is no bound: more tokens are always more entries."""
        return self.kind is SpanKind.EVERY

    def entries(self, context: int, encoder_len: int = 0, block_size: int = 1) -> int:
        """Entries that a sequence of `context` tokens holds.

        Args:
            context: Tokens.
            encoder_len: Tokens of the encoder.
            block_size: Tokens of a block; whatever goes with tokens is held in whole blocks. A
                window counts the most blocks that it has touched at once up to this context.
        """
        if context == 0:
            return 0
        if self.kind is SpanKind.EVERY:
            return _up(context, block_size) // self.size
        if self.kind is SpanKind.LAST:
            return _window_blocks(context, self.size, block_size) * block_size
        if self.kind is SpanKind.BUFFER:
            return min(context, self.size - 1)
        if self.kind is SpanKind.REMAINDER:
            return context % self.size
        if self.kind is SpanKind.ONCE:
            return int(context >= self.size)
        return _up(encoder_len, block_size)


EVERY_TOKEN = Span(SpanKind.EVERY)
STATE = Span(SpanKind.ONCE)
ENCODER = Span(SpanKind.ENCODER)


def last(size: int) -> Span:
    """The span of a window of `size` tokens, the current one among them."""
    return Span(SpanKind.LAST, size)


def _up(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def _window_blocks(context: int, window: int, block_size: int) -> int:
    """The most blocks that a moving window has touched at once, at a context up to this one."""
    blocks = -(-min(context, window) // block_size)
    # A window that does not start at the first token of a block straddles one more, except where
    # its last token would be the only one there and its first token alone as well.
    straddles = block_size > 1 and window % block_size != 1
    return blocks + int(straddles and context > -(-window // block_size) * block_size)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer: entries of `heads` vectors of `dim` elements.

    Tensor parallelism splits the heads, and replicates them where there are fewer than ranks.

    Attributes:
        name: What it is: `"keys"`, `"values"`, `"latent"`, `"conv state"` and so on.
        heads: Vectors of an entry.
        dim: Elements of a vector.
        dtype: How a vector is stored.
        span: How many entries a sequence has.
        fixed: The type stays as it is whatever type is chosen for the keys and values: states.
        shape: Shape of a state's entry, for engines that lay it out; empty for (heads, dim).
        taps: Width of the convolution whose last taps - 1 inputs this is; 0 for anything else.
    """

    name: str
    heads: int
    dim: int
    dtype: DType
    span: Span = EVERY_TOKEN
    fixed: bool = False
    shape: tuple[int, ...] = ()
    taps: int = 0

    def __post_init__(self) -> None:
        count("heads", self.heads, least=1)
        count("dim", self.dim, least=1)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, scales among them."""
        return self.heads * self.dtype.vector_bytes(self.dim)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one more token adds in the long run: none in a window or a state."""
        return Fraction(self.entry_bytes, self.span.size) if self.span.grows else Fraction(0)

    @property
    def fixed_bytes(self) -> int:
        """The most that it holds, where its span is bounded by the model; else 0."""
        if self.span.kind in (SpanKind.EVERY, SpanKind.ENCODER):
            return 0
        if self.span.kind is SpanKind.ONCE:
            return self.entry_bytes
        room = self.span.size - (0 if self.span.kind is SpanKind.LAST else 1)
        return self.entry_bytes * room

    def bytes(self, context: int, encoder_len: int = 0, block_size: int = 1) -> int:
        """Bytes of this part in one layer of one sequence."""
        return self.entry_bytes * self.span.entries(context, encoder_len, block_size)
