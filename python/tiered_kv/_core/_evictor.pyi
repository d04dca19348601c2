"""The reuse predictor over a cache that somebody else keeps."""

from collections.abc import Iterable, Sequence
from typing import Protocol, final

class _Told(Protocol):
    """What a request tells of itself."""

    @property
    def session(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def turn(self) -> int: ...
    @property
    def prompt(self) -> int:
        """How many of its blocks are the prompt's."""
    @property
    def block_tokens(self) -> int: ...

@final
class CountedRequest:
    """As what an evictor has counted a request."""

@final
class Evictor:
    """Is told what a cache has and what is used of it, and says what goes.

    Keys are of any width, and times those of one clock that never goes back.
    """

    def __new__(cls, metadata_bytes: int, seed: int = 1) -> Evictor: ...
    def __len__(self) -> int: ...
    def insert(self, key: bytes, parent: bytes | None, depth: int, now_ns: int) -> None:
        """A block is there from now on, behind its parent, and may not go yet."""
    def remove(self, key: bytes) -> None:
        """A block is gone, and not by `evict`."""
    def set_evictable(self, key: bytes, evictable: bool) -> None:
        """Whether a block may go."""
    def requested(
        self,
        keys: Sequence[bytes],
        told: _Told,
        now_ns: int,
        counted: CountedRequest | None = None,
    ) -> CountedRequest:
        """A request has used these blocks, which lie one behind the other.

        A request may be told twice: its prompt, before anything leaves for its sake, and all of it
        with its answer. With what the first call has returned, what is known of it does not count
        again. What another evictor has returned is as nothing.

        Raises:
            InvalidArgumentError: There are fewer keys than blocks of the prompt.
        """
    def evict(self, n: int, protected: Iterable[bytes], now_ns: int) -> list[bytes] | None:
        """Takes out exactly `n` blocks that may go and are not protected.

        Leaves of their chains go first, by what it is worth to keep them.

        Returns:
            Their keys; None where there are not so many, and then nothing has changed.
        """
