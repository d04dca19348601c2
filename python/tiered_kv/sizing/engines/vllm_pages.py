"""How vLLM 0.32 turns the caches of layers into pages of one size, and layers into groups.

Pure arithmetic on what a layer keeps. One pool of blocks serves all groups: a block is a page of
each layer of a group, and every group's block is as large as the largest group's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from tiered_kv.sizing.checks import fault
from tiered_kv.sizing.spec import Kind

STATES = frozenset({Kind.RECURRENT, Kind.LINEAR, Kind.CONV})
FULL = frozenset({Kind.FULL, Kind.MLA, Kind.INDEX})
_PADS = frozenset({Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.CROSS})
# Layers of the largest kind may be this many times those of the smallest before they are split.
_ALIKE = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """What one layer keeps, as pages.

    Attributes:
        kind: What it is; states of all kinds are `RECURRENT`.
        block_size: Tokens of a page.
        used_bytes: Bytes of a page that are used when it is full.
        page_bytes: Bytes of a page, padding among them.
        window: Tokens of the window or chunk.
        shape: What else must be equal in a group, such as heads and dimensions.
    """

    kind: Kind
    block_size: int
    used_bytes: int
    page_bytes: int
    window: int = 0
    shape: Hashable = ()

    def grown(self, ratio: int) -> Cache:
        """The cache with `ratio` times the tokens in a page."""
        return dataclasses.replace(
            self,
            block_size=self.block_size * ratio,
            used_bytes=self.used_bytes * ratio,
            page_bytes=self.page_bytes * ratio,
        )


def attention_block(
    block_size: int, kernel: int, token_bytes: int, state_bytes: int, latent: bool
) -> int:
    """Tokens of a block of a hybrid model: so many that an attention page holds a state.

    Args:
        block_size: Tokens of a block that were asked for.
        kernel: Tokens of which the attention kernel takes multiples.
        token_bytes: Bytes of a token in one attention layer.
        state_bytes: Bytes of the largest state.
        latent: Whether the attention is MLA: its kernels want multiples of 128.
    """
    step = max(kernel, block_size, 128 if latent else 1)
    least = step * -(-state_bytes // (step * token_bytes))
    return max(block_size, kernel * -(-least // kernel))


def unify(caches: Sequence[Cache]) -> list[Cache]:
    """Pages of one size: smaller ones get more tokens if that fits exactly, else padding.

    Raises:
        InvalidArgumentError: The page of a latent is smaller and does not divide: vLLM refuses.
    """
    largest = max(cache.page_bytes for cache in caches)
    return [_unified(cache, largest) for cache in caches]


def _unified(cache: Cache, page: int) -> Cache:
    if cache.page_bytes == page:
        return cache
    if cache.kind not in STATES and page % cache.page_bytes == 0:
        return cache.grown(page // cache.page_bytes)
    if cache.kind in STATES or cache.kind in _PADS:
        return dataclasses.replace(cache, page_bytes=page)
    raise fault(
        f"`engine` vllm cannot unify the {cache.kind.value} page of {cache.page_bytes} B with the "
        f"largest of {page} B: give another `block_size`"
    )


def groups(caches: Sequence[Cache]) -> list[list[Cache]]:
    """The layers in groups that share a table of blocks.

    Args:
        caches: One of each layer, in the order of the layers.
    """
    if _one_type(caches):
        return [list(caches)]
    alike: dict[Cache, list[Cache]] = {}
    for cache in unify(caches):
        alike.setdefault(cache, []).append(cache)
    counts = [len(layers) for layers in alike.values()]
    size = max(counts) if max(counts) < _ALIKE * min(counts) else min(counts)
    found = []
    for layers in alike.values():
        number = -(-len(layers) // size)
        found += [layers[at::number] for at in range(number)]
    return found


def _one_type(caches: Sequence[Cache]) -> bool:
    """Whether all layers need the same number of tokens: then one table of blocks does."""
    first = caches[0]
    if any(cache.block_size != first.block_size for cache in caches):
        return False
    if first.kind in FULL:
        return all(cache.kind in FULL for cache in caches)
    if first.kind in STATES:
        return all(
            cache.kind in STATES and cache.page_bytes == first.page_bytes for cache in caches
        )
    return all(cache.kind is first.kind and cache.window == first.window for cache in caches)


def block_bytes(grouped: Sequence[Sequence[Cache]]) -> int:
    """Bytes of a block of the pool: a page of each layer of the largest group."""
    return max(sum(cache.page_bytes for cache in group) for group in grouped)


def pages(cache: Cache, context: int, encoder_len: int, cp: int, states: int) -> int:
    """The most pages that a request has held at once in a group, at a context up to this one.

    Args:
        cache: A layer of the group.
        context: Tokens.
        encoder_len: Tokens of the encoder.
        cp: Ranks that split the context: a page of each covers `cp` x its tokens.
        states: States that a request holds.
    """
    if context == 0:
        return 0
    if cache.kind in STATES:
        return states
    size = cache.block_size * cp
    if cache.kind is Kind.CROSS:
        return -(-encoder_len // size)
    if cache.kind is Kind.SLIDING:
        return _sliding(context, cache.window, size)
    if cache.kind is Kind.CHUNKED:
        return _chunked(context, cache.window, size)
    return -(-context // size)


def _sliding(context: int, window: int, size: int) -> int:
    # At token n, whole pages before token n - window have been freed.
    full = -(-min(context, window) // size)
    first = -(-window // size) * size
    return full + int(size > 1 and window % size != 1 and context > first)


def _chunked(context: int, chunk: int, size: int) -> int:
    # A page that reaches over the start of a chunk stays. Each chunk starts `over` tokens further
    # into its page than the one before; the first that starts at the last multiple of `over` in a
    # page is the first to need one page more, where its own tokens do not end with that page.
    full = -(-min(context, chunk) // size)
    over = chunk % size
    if over == 0 or size % over == 0:
        return full
    late = size // over
    first = late * chunk + -(-chunk // size) * size - late * over
    return full + int(context > first)
