"""Memory of the store that callers see, and of callers that the store sees."""

import sys
from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

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
    def dlpack(self, index: int, slab: int | None = None) -> Lease | None:
        """One slab as an object for `numpy.from_dlpack` or `torch.from_dlpack`; None for a miss."""
    def release(self) -> None:
        """Unpins every block without a view alive; the others follow with their last view."""
    def __enter__(self) -> Leases: ...
    def __exit__(self, _kind: object, _error: object, _trace: object, /) -> None: ...

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
    def __exit__(self, _kind: object, _error: object, _trace: object, /) -> None: ...

@final
class Region:
    """Registered memory, cut into slots; see `tiered_kv.TieredStore.register`.

    A slot is used by one call at a time, from the call's submission to its end. The memory stays
    exported until the region and every call on it are gone.
    """

    def __len__(self) -> int:
        """Number of slots."""
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots_used(self) -> int:
        """Slots that calls use now."""
    @property
    def closed(self) -> bool: ...
    def slots(self, numbers: Sequence[int]) -> Slots:
        """Slots by number, for a call in place of its buffers: one a key.

        Nothing is claimed before the call, which is refused where another one still uses a slot.

        Raises:
            InvalidArgumentError: There is no such slot.
        """
    def read(self, slot: int) -> bytes:
        """A copy of a slot.

        Raises:
            InvalidArgumentError: There is no such slot, or a call uses it; the error names it.
            ClosedError: The region is closed.
        """
    def write(self, slot: int, data: Buffer) -> None:
        """Fills a slot with `slot_bytes` of data; raises as `read`."""
    def close(self) -> None:
        """Takes no more calls; those in progress end as they would have."""
    def __enter__(self) -> Region: ...
    def __exit__(self, _kind: object, _error: object, _trace: object, /) -> None: ...

@final
class Slots:
    """Slots of a region, in the order of a call's keys."""

    def __len__(self) -> int: ...
    @property
    def numbers(self) -> list[int]: ...
