"""The compiled core. Use `tiered_kv`; what is here without a document there is its own affair.

Wherever a `Buffer` is asked for, any C-contiguous object with the buffer protocol will do.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, final, overload

from typing_extensions import Buffer

from tiered_kv.spec import NamespaceSpec, RequestContext

__all__ = [
    "FORMAT_VERSION",
    "KEY_BYTES",
    "Call",
    "Channel",
    "CloseReport",
    "CompletionQueue",
    "DeleteReport",
    "FlushReport",
    "IntoReport",
    "Lease",
    "Leases",
    "Lookup",
    "Namespace",
    "PutOptions",
    "PutReport",
    "Request",
    "Reservation",
    "Store",
    "__version__",
    "blake3",
    "blake3_file",
    "default_config",
    "parse_config",
    "probe_directory",
    "probe_io_uring",
    "probe_memory",
]

__version__: str
FORMAT_VERSION: int
KEY_BYTES: int

def blake3(buffer: Buffer) -> str:
    """The blake3 digest of a buffer's bytes, in hexadecimal; computed without the GIL."""

def blake3_file(path: object) -> str:
    """The blake3 digest of a file's contents, in hexadecimal; computed without the GIL."""

def default_config() -> dict[str, Any]:
    """Every field of the configuration with its default; None where that depends on the machine."""

def parse_config(
    fields: Mapping[str, Any] | str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Checks fields or TOML text, lets variables override them, and fills in the defaults."""

def probe_io_uring() -> tuple[bool, str]:
    """Whether this thread can have an io_uring that will do, and what it is, or why not."""

def probe_directory(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How a store would open files in a directory, which is made where it is absent.

    Returns:
        `direct`, whether files bypass the page cache, with the `reason`; `memory_alignment` and
        `offset_alignment` in bytes.

    Raises:
        TieredKvError: The directory cannot be made or written.
    """

def probe_memory() -> dict[str, Any]:
    """What memory there is: tried with a small arena that is freed again.

    Returns:
        `tried_bytes`, and of these `huge_bytes` on huge pages; `limit_bytes` of the cgroup or the
        machine and `available_bytes`, None where it cannot be told.

    Raises:
        NoSpaceError: Not even the small arena could be had.
    """

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
class Lookup:
    """What a lookup found, one entry a key."""

    @property
    def hits(self) -> int:
        """Leading keys that a `get` would find."""
    @property
    def flags(self) -> bytes:
        """Bit 0: a prefill chunk ended with the block; bit 1: computed by decode."""
    @property
    def tiers(self) -> bytes:
        """0 absent, 1 dram, 3 nvme, 254 loading, 255 being written; 0 behind a prefix."""

@final
class Leases:
    """What a `get` found: read-only views, pinned until the batch and the views are gone.

    The memory is mapped read-only. Writing to it by whatever means ends the process with SIGSEGV
    and changes nothing that is served: clone what is to be changed, or use `get_into`.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> memoryview | None:
        """A view of a block of one slab, or None for a miss."""
    @property
    def hits(self) -> int:
        """Leading blocks that were found."""
    @property
    def reasons(self) -> list[str | None]:
        """Why each block was missed, None for a hit."""
    @property
    def sources(self) -> bytes:
        """Tier that each block came from (1 dram, 3 nvme), 0 for a miss."""
    @property
    def flags(self) -> bytes:
        """Flags of each block, as in `Lookup.flags`; 0 for a miss."""
    def slab(self, index: int, slab: int) -> memoryview | None:
        """A view of one slab of a block, or None for a miss."""
    def dlpack(self, index: int, slab: int = 0) -> Lease | None:
        """One slab as an object for `numpy.from_dlpack` or `torch.from_dlpack`; None for a miss."""
    def release(self) -> None:
        """Unpins every block without a view alive; the others follow with their last view."""
    def __enter__(self) -> Leases: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Lease:
    """The lease of one slab: the buffer protocol and DLPack, read-only bytes."""

    @property
    def nbytes(self) -> int: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule: versioned and flagged read-only, or a copy.

        Raises:
            BufferError: The consumer asks for no version, which cannot say read-only, and for no
                copy; or for another device.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...

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
        timeout: float | None = None,
    ) -> PutOptions: ...

@final
class PutReport:
    """How a put ended."""

    @property
    def stored(self) -> int:
        """Blocks stored by this call."""
    @property
    def exists(self) -> int:
        """Blocks that were there already."""
    @property
    def throttled(self) -> int:
        """Blocks refused for want of room: try again later."""
    @property
    def statuses(self) -> list[Literal["stored", "exists", "throttled", "ended"]]:
        """What became of each block; "ended": the deadline passed or the call was cancelled."""

@final
class IntoReport:
    """How a `get_into` ended."""

    @property
    def hits(self) -> int:
        """Leading buffers that were filled."""
    @property
    def items(self) -> list[str | None]:
        """Why each buffer was not filled, None where it was."""
    @property
    def sources(self) -> bytes:
        """Tier that each block came from (1 dram, 3 nvme), 0 for a miss."""

@final
class FlushReport:
    """What a flush achieved."""

    @property
    def pending(self) -> int:
        """Blocks that wait still, because the deadline passed first."""
    @property
    def failed(self) -> int:
        """Blocks that could not be made durable: they are in memory only."""
    @property
    def no_durable_tier(self) -> bool: ...
    @property
    def all_durable(self) -> bool:
        """Whether everything stored before the call is durable."""

@final
class DeleteReport:
    """How a delete ended."""

    @property
    def removed(self) -> int:
        """Blocks that were there."""
    @property
    def durable(self) -> bool:
        """Whether nothing of it can come back after a crash; else a drive failed or was slow."""

@final
class CloseReport:
    """How a close ended."""

    @property
    def dropped(self) -> int:
        """Blocks dropped before they were durable, because the deadline passed."""

@final
class Reservation:
    """Memory of the store, reserved for blocks that the caller fills in place."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> memoryview | None:
        """A writable view of a block of one slab, or None where it has no memory."""
    @property
    def statuses(self) -> list[str | None]:
        """Why a block has no memory: "exists" or "throttled"; None where it has."""
    def slab(self, index: int, slab: int) -> memoryview | None:
        """A writable view of one slab of a block, or None where it has no memory."""
    def abandon(self) -> None:
        """Gives the memory back: now, or with the last writable view."""
    def __enter__(self) -> Reservation: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
        /,
    ) -> None: ...

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
            InvalidArgumentError: `keys` is no multiple of 32 bytes, or `ns` is of another store.
        """
    def finish(self, output_tokens: int = 0, engine_hit_tokens: int = 0) -> None:
        """Counts one access for each block observed; a second finish counts nothing.

        Args:
            output_tokens: Tokens that the request generated.
            engine_hit_tokens: Prompt tokens that the engine's own cache served.
        """

@final
class CompletionQueue:
    """The results of one event loop's calls."""

    def __new__(cls) -> CompletionQueue: ...
    def fileno(self) -> int:
        """The descriptor that becomes readable when there are results."""
    def drain(self) -> list[tuple[int, Any]]:
        """Takes all results, each with its call's token."""
    def close(self) -> None:
        """Drops what is there and all that is still to come."""

@final
class Call:
    """A call in progress, whose result comes through its queue under `token`."""

    @property
    def token(self) -> int: ...
    def cancel(self) -> None:
        """Asks the core to end the call; its result still comes, when its buffers are free."""

@final
class Channel:
    """Calls without an event loop; see `tiered_kv.Channel`."""

    def __new__(cls, store: Store, capacity: int) -> Channel: ...
    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def submit_exists(self, ns: Namespace, keys: Buffer) -> int: ...
    def submit_get_into(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: Buffer | Sequence[Buffer],
        timeout: float | None = None,
        req: Request | None = None,
    ) -> int: ...
    def submit_put(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: Buffer | Sequence[Buffer],
        options: PutOptions,
    ) -> int: ...
    def submit_delete(self, ns: Namespace, keys: Buffer, timeout: float | None = None) -> int: ...
    def drain(self) -> list[tuple[int, bool, bytes, int, float]]: ...
    def pending(self) -> int: ...
    def quiesce(self, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...

@final
class Store:
    """An open store.

    Without a completion queue a call waits for its result. With one it returns the result where
    nothing has to be waited for, else a `Call`, whose result comes through the queue.
    """

    @staticmethod
    def open(fields: dict[str, Any]) -> Store: ...
    def namespace(self, spec: NamespaceSpec) -> Namespace: ...
    def lookup(self, ns: Namespace, keys: Buffer, mode: str = "prefix") -> Lookup: ...
    def contains(self, ns: Namespace, key: Buffer) -> bool: ...
    @overload
    def get(
        self,
        ns: Namespace,
        keys: Buffer,
        timeout: float | None = None,
        req: Request | None = None,
        queue: None = None,
    ) -> Leases: ...
    @overload
    def get(
        self,
        ns: Namespace,
        keys: Buffer,
        timeout: float | None,
        req: Request | None,
        queue: CompletionQueue,
    ) -> Leases | Call: ...
    @overload
    def get_into(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: Buffer | Sequence[Buffer],
        timeout: float | None = None,
        req: Request | None = None,
        queue: None = None,
    ) -> IntoReport: ...
    @overload
    def get_into(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: Buffer | Sequence[Buffer],
        timeout: float | None,
        req: Request | None,
        queue: CompletionQueue,
    ) -> IntoReport | Call: ...
    @overload
    def put(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: Buffer | Sequence[Buffer],
        options: PutOptions,
        queue: None = None,
    ) -> PutReport: ...
    @overload
    def put(
        self,
        ns: Namespace,
        keys: Buffer,
        buffers: Buffer | Sequence[Buffer],
        options: PutOptions,
        queue: CompletionQueue,
    ) -> PutReport | Call: ...
    @overload
    def flush(self, timeout: float | None = None, queue: None = None) -> FlushReport: ...
    @overload
    def flush(self, timeout: float | None, queue: CompletionQueue) -> FlushReport | Call: ...
    @overload
    def delete(
        self, ns: Namespace, keys: Buffer, timeout: float | None = None, queue: None = None
    ) -> DeleteReport: ...
    @overload
    def delete(
        self, ns: Namespace, keys: Buffer, timeout: float | None, queue: CompletionQueue
    ) -> DeleteReport | Call: ...
    @overload
    def delete_all(
        self,
        ns: Namespace,
        seconds: float | None = None,
        timeout: float | None = None,
        queue: None = None,
    ) -> DeleteReport: ...
    @overload
    def delete_all(
        self, ns: Namespace, seconds: float | None, timeout: float | None, queue: CompletionQueue
    ) -> DeleteReport | Call: ...
    def reserve(self, ns: Namespace, keys: Buffer, options: PutOptions) -> Reservation: ...
    def publish(self, reservation: Reservation) -> PutReport: ...
    def begin_request(self, context: RequestContext) -> Request: ...
    def stats(self) -> dict[str, Any]: ...
    def health(self) -> dict[str, Any]: ...
    def audit(self) -> dict[str, Any]: ...
    def events(self, since: int = 0) -> list[dict[str, Any]]: ...
    @property
    def open_times(self) -> dict[str, float]: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> CloseReport: ...
