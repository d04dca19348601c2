"""The prefill grid and the digests that cover it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.engines._grid import exact_digests, make_grid

BLOCK = 4

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any)
chunks = st.integers(1, 6).map(lambda blocks: blocks * BLOCK)


@given(lengths, chunks)
def test_chunks_cover_the_prompt_and_end_on_blocks(segments: list[int], chunk: int) -> None:
    ends = make_grid(segments, BLOCK, chunk).ends
    assert ends[-1] == sum(segments)
    assert all(end % BLOCK == 0 for end in ends[:-1])
    assert all(0 < after - before <= chunk for before, after in pairwise((0, *ends)))


@given(lengths, lengths, st.integers(1, 30), chunks)
def test_a_shared_segment_has_the_same_chunks_whatever_follows(
    one: list[int], other: list[int], shared: int, chunk: int
) -> None:
    stop = shared // BLOCK * BLOCK
    first, second = (
        [end for end in make_grid([shared, *rest], BLOCK, chunk).ends if end <= stop]
        for rest in (one, other)
    )
    assert first == second
    assert (stop in first) == (stop > 0)


@given(lengths, chunks)
def test_something_is_always_left_to_compute(segments: list[int], chunk: int) -> None:
    grid = make_grid(segments, BLOCK, chunk)
    blocks = grid.last_end_within(grid.reusable_blocks)
    assert blocks * BLOCK < grid.prompt_tokens
    assert grid.ends_after(blocks * BLOCK)


def test_the_grid_restarts_where_a_segment_ended() -> None:
    assert make_grid([22, 9], BLOCK, 8).ends == (8, 16, 20, 28, 31)
    assert make_grid([3, 3, 3], BLOCK, 8).ends == (4, 9)


@given(lengths, lengths, chunks)
def test_digests_are_equal_exactly_as_far_as_the_grids_are(
    one: list[int], other: list[int], chunk: int
) -> None:
    tokens = list(range(300))
    first, second = (make_grid(segments, BLOCK, chunk) for segments in (one, other))
    digests = [exact_digests(tokens[: grid.prompt_tokens], grid) for grid in (first, second)]
    common = 0
    for left, right in zip(first.aligned_ends, second.aligned_ends, strict=False):
        if left != right:
            break
        common = left // BLOCK
    for block in range(min(first.aligned_blocks, second.aligned_blocks)):
        at = slice(block * 32, block * 32 + 32)
        assert (digests[0][at] == digests[1][at]) == (block < common)


@given(st.integers(0, 39), chunks)
def test_a_digest_covers_every_token_before_its_end(position: int, chunk: int) -> None:
    grid = make_grid([40], BLOCK, chunk)
    tokens = list(range(40))
    changed = [*tokens]
    changed[position] += 1
    digests = [exact_digests(each, grid) for each in (tokens, changed)]
    assert len(digests[0]) == 32 * grid.aligned_blocks == 320
    for block in range(10):
        at = slice(block * 32, block * 32 + 32)
        assert (digests[0][at] == digests[1][at]) == (block < position // BLOCK)


def test_digests_are_the_same_everywhere() -> None:
    # Stored blocks outlive the process: a change here makes them unreachable.
    digest = exact_digests(list(range(8)), make_grid([8], BLOCK, 8))
    assert digest[32:].hex() == "0912cb04ab4b40e571ac93f18437a903b0ae256aee43ada9fb6bca58d42db379"
