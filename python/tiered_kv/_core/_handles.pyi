"""What calls are given: namespaces, holds, requests, options."""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

@final
class Namespace:
    """A namespace opened in a store: a cheap handle that calls name."""

    @property
    def id(self) -> str:
        """Digest of everything that the namespace stands for, in hexadecimal."""
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def slab_bytes(self) -> tuple[int, ...]:
        """Bytes of each slab of a block, row-major."""
    def keys_from_tokens(
        self, tokens: Sequence[int] | Buffer, parent: Buffer | None = None, tail: bool = False
    ) -> bytes:
        """Packed keys (n x 32 bytes) of the blocks of a token sequence.

        Args:
            tokens: Token ids, 0 to 2^32 - 1: a sequence, or a buffer of integers (faster).
            parent: Key of the block before the first.
            tail: Give a last block that is not full a key as well.

        Returns:
            One key a block.

        Raises:
            InvalidArgumentError: A token is out of range, or `parent` is not 32 bytes.
        """
    def keys_from_opaque(
        self, packed: Buffer | Sequence[Buffer], width: int | None = None
    ) -> bytes:
        """Packed keys (n x 32 bytes) of an engine's own hashes.

        Args:
            packed: Packed hashes, n x `width` bytes, or a sequence of hashes of any widths.
            width: Bytes of a hash.

        Returns:
            One key a hash.

        Raises:
            InvalidArgumentError: The bytes are no multiple of the width, or a hash is empty or over
                4,096 bytes.
        """

@final
class Hold:
    """Keeps blocks in some tier until it ends; see `tiered_kv.TieredStore.hold`."""

    @property
    def hits(self) -> int:
        """Leading keys that were held when it was made."""
    @property
    def held(self) -> list[bool]:
        """For each key, whether it was held when the hold was made."""
    def release(self) -> None:
        """Ends the hold; does nothing where it has ended."""
    def __enter__(self) -> Hold: ...
    def __exit__(self, _kind: object, _error: object, _trace: object, /) -> None: ...

@final
class PutOptions:
    """What a put or a reservation tells of its blocks; see `tiered_kv.TieredStore.put`."""

    def __new__(
        cls,
        *,
        parent: Buffer | None = None,
        depth: int = 0,
        chain: bool = True,
        tokens: Sequence[int] | None = None,
        chunk_ends: Sequence[bool] | None = None,
        computed: str = "prefill",
        block_type: str | None = None,
        wait: float | None = None,
        timeout: float | None = None,
        req: Request | None = None,
    ) -> PutOptions: ...

@final
class Request:
    """A request in progress: one access a block, counted when it finishes."""

    def observe(self, ns: Namespace, keys: Buffer, position: int = 0) -> None:
        """The request uses these blocks.

        Args:
            ns: Their namespace.
            keys: Packed keys, n x 32 bytes. Observing a block again changes nothing.
            position: Place of the first in the sequence, in blocks.

        Raises:
            InvalidArgumentError: An argument is out of range, or `ns` is of another store.
        """
    def finish(self, output_tokens: int = 0, engine_hit_tokens: int = 0) -> None:
        """Counts one access for each block observed; a second finish counts nothing.

        Args:
            output_tokens: Tokens that the request generated.
            engine_hit_tokens: Prompt tokens that the engine's own cache served.

        Raises:
            InvalidArgumentError: A number is negative or 2^64 or more.
        """
