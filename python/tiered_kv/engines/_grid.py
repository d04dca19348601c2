"""The prefill grid: where chunks end, and how block keys cover it.

The bytes of a block depend on its tokens and, in the last bits, on the boundaries of the chunks in
which they were prefilled: a matrix product over another number of rows rounds differently. The grid
makes those boundaries a function of the prompt alone, so that a restored prefix continues as the
cold run would have.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_PERSON = b"tiered-kv grid 1"


@dataclass(frozen=True)
class Grid:
    """The chunk boundaries of one prompt.

    Attributes:
        ends: Position after the last token of each chunk, ascending; the last is the prompt's
            length, the others are multiples of `tokens_per_block`.
        tokens_per_block: Tokens of a block.
    """

    ends: tuple[int, ...]
    tokens_per_block: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return self.ends[-1]

    @property
    def reusable_blocks(self) -> int:
        """Most blocks that may be restored: at least one token is left to compute."""
        return (self.prompt_tokens - 1) // self.tokens_per_block

    @property
    def aligned_ends(self) -> tuple[int, ...]:
        """The chunk ends that fall on a block boundary."""
        return tuple(end for end in self.ends if end % self.tokens_per_block == 0)

    @property
    def aligned_blocks(self) -> int:
        """Blocks whose whole chunk ends on a block boundary: those that `exact` can restore."""
        aligned = self.aligned_ends
        return aligned[-1] // self.tokens_per_block if aligned else 0

    def ends_after(self, position: int) -> tuple[int, ...]:
        """The chunk ends beyond `position`, in tokens: what is left to prefill."""
        return tuple(end for end in self.ends if end > position)

    def block_ends_chunk(self, block: int) -> bool:
        """Whether a chunk ends where block number `block` ends."""
        return (block + 1) * self.tokens_per_block in self.ends

    def last_end_within(self, blocks: int) -> int:
        """The last chunk end, in blocks, that is at most `blocks`; 0 where there is none."""
        limit = blocks * self.tokens_per_block
        within = [end for end in self.aligned_ends if end <= limit]
        return within[-1] // self.tokens_per_block if within else 0


def make_grid(lengths: Sequence[int], tokens_per_block: int, chunk_tokens: int) -> Grid:
    """The grid of a prompt made of segments.

    Chunks are `chunk_tokens` long. The grid restarts where a segment ends, rounded down to a block
    boundary, so that a document's chunks do not depend on the question after it.

    Args:
        lengths: Tokens of each segment; the sum is at least 1.
        tokens_per_block: Tokens of a block.
        chunk_tokens: Tokens of a whole chunk, a multiple of `tokens_per_block`.

    Returns:
        The grid; the same for the same arguments, cold and warm.
    """
    total = sum(lengths)
    ends: list[int] = []
    start = reached = 0
    for length in lengths:
        reached += length
        stop = total if reached == total else reached // tokens_per_block * tokens_per_block
        while start < stop:
            start = min(start + chunk_tokens, stop)
            ends.append(start)
    return Grid(tuple(ends), tokens_per_block)


def exact_digests(tokens: Sequence[int], grid: Grid) -> bytes:
    """Chained digests of the blocks that `exact` may store and restore, 32 bytes each.

    A digest covers all tokens up to the block's end and the boundaries of every chunk up to and
    including the block's own. Equal digests mean blocks that one and the same computation wrote,
    whatever was evicted or stored in between; two grids never share a block past the first
    boundary in which they differ.

    Args:
        tokens: The prompt.
        grid: Its grid.

    Returns:
        `grid.aligned_blocks` digests, packed.
    """
    size = grid.tokens_per_block
    chain = b""
    packed: list[bytes] = []
    start = 0
    for end in grid.aligned_ends:
        bounds = start.to_bytes(8, "little") + end.to_bytes(8, "little")
        for first in range(start, end, size):
            block = struct.pack(f"<{size}Q", *tokens[first : first + size])
            digest = hashlib.blake2b(digest_size=32, person=_PERSON)
            digest.update(chain + bounds + block)
            chain = digest.digest()
            packed.append(chain)
        start = end
    return b"".join(packed)
