"""The predictor over a cache that somebody else keeps."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tiered_kv import InvalidArgumentError
from tiered_kv._core import Evictor

MEMORY = 4 << 20
SECOND = 10**9


@dataclasses.dataclass
class Told:
    """What a request tells of itself."""

    session: str = ""
    kind: str = ""
    turn: int = 0
    prompt: int = 0
    block_tokens: int = 16


def chain(evictor: Evictor, name: str, blocks: int, *, evictable: bool = True) -> list[bytes]:
    """Blocks one behind the other."""
    keys = [f"{name:>8}{at:>24}".encode() for at in range(blocks)]
    for at, key in enumerate(keys):
        evictor.insert(key, keys[at - 1] if at else None, at, SECOND)
        evictor.set_evictable(key, evictable)
    return keys


def test_leaves_go_before_what_lies_before_them() -> None:
    evictor = Evictor(MEMORY)
    keys = chain(evictor, "a", 6)
    for wanted in reversed(keys):
        assert evictor.evict(1, [], 2 * SECOND) == [wanted]
    assert len(evictor) == 0


def test_exactly_as_many_go_as_were_asked_for_or_none() -> None:
    evictor = Evictor(MEMORY)
    first, second = chain(evictor, "a", 4), chain(evictor, "b", 4, evictable=False)
    assert evictor.evict(5, [], SECOND) is None
    assert evictor.evict(4, first[:1], SECOND) is None
    assert len(evictor) == 8
    gone = evictor.evict(3, first[:1], SECOND)
    assert gone is not None
    assert sorted(gone) == first[1:]
    assert evictor.evict(0, [], SECOND) == []
    for key in second:
        evictor.remove(key)
        evictor.remove(key)  # as often as one likes
    assert evictor.evict(1, [], SECOND) == first[:1]


def test_where_every_leaf_is_busy_what_lies_before_goes() -> None:
    evictor = Evictor(MEMORY)
    keys = chain(evictor, "a", 4)
    evictor.set_evictable(keys[3], False)
    gone = evictor.evict(3, [], SECOND)
    assert gone is not None
    assert sorted(gone) == keys[:3]
    # A child whose parent is gone, and comes back.
    evictor.insert(keys[2], None, 2, SECOND)
    evictor.set_evictable(keys[2], True)
    evictor.set_evictable(keys[3], True)
    gone = evictor.evict(1, [], SECOND)
    assert gone == [keys[3]]


def test_what_comes_again_is_worth_more_than_what_does_not() -> None:
    evictor = Evictor(MEMORY)
    now, shared = SECOND, chain(evictor, "shared", 8)
    for number in range(400):
        now += SECOND
        own = chain(evictor, f"own{number}", 8)
        keys = shared + own if number % 2 else own
        evictor.requested(keys, Told(prompt=len(keys)), now)
        over = len(evictor) - 64
        if over > 0:
            gone = evictor.evict(over, [], now)
            assert gone is not None
            assert not set(gone) & set(shared), number


def test_any_order_of_calls_leaves_counts_that_fit() -> None:
    draw, evictor = random.Random(3), Evictor(MEMORY)
    there: dict[bytes, bool] = {}
    for step in range(4000):
        key = f"{draw.randrange(40):>32}".encode()
        what = draw.randrange(5)
        if what == 0:
            parent = f"{draw.randrange(40):>32}".encode()
            evictor.insert(key, parent if parent < key else None, 3, step)
            there.setdefault(key, False)
        elif what == 1:
            evictor.remove(key)
            there.pop(key, None)
        elif what == 2:
            able = draw.random() < 0.7
            evictor.set_evictable(key, able)
            if key in there:
                there[key] = able
        elif what == 3:
            evictor.requested([key], Told(session="s", prompt=1), step)
        else:
            kept = set(draw.sample(sorted(there), len(there) // 3))
            free = {one for one, able in there.items() if able} - kept
            wanted = draw.randrange(6)
            gone = evictor.evict(wanted, kept, step)
            assert (gone is None) == (len(free) < wanted)
            for one in gone or ():
                assert one in free
                free.remove(one)
                del there[one]
        assert len(evictor) == len(there)


def test_more_of_a_prompt_than_there_is_is_refused() -> None:
    evictor = Evictor(MEMORY)
    keys = chain(evictor, "a", 2)
    for wrong in (Told(prompt=3), Told(prompt=1, block_tokens=0)):
        with pytest.raises(InvalidArgumentError, match="block_tokens"):
            evictor.requested(keys, wrong, SECOND)
