"""What calls return."""

from typing import Literal, final

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
        """Where each key is; 0 behind a prefix.

        0 absent, 1 dram, 3 nvme, 253 on a drive that is not asked at present, 254 loading, 255
        being written.
        """

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
    def statuses(self) -> list[Literal["stored", "exists", "throttled", "ended", "failed"]]:
        """What became of each block.

        "ended": the deadline passed or the call was cancelled; "failed": with `dram_capacity` 0,
        the block could not be written to a drive and is not stored.
        """

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
class ScrubReport:
    """What one pass over everything durable found."""

    @property
    def blocks(self) -> int:
        """Blocks read and found whole."""
    @property
    def bytes(self) -> int:
        """Payload bytes of these."""
    @property
    def corrupt(self) -> int:
        """Blocks that were not what had been stored."""
    @property
    def unreadable(self) -> int:
        """Blocks that the drive could not read."""
    @property
    def skipped(self) -> int:
        """Blocks that could not be looked at: their drive is not asked at present."""
    @property
    def complete(self) -> bool:
        """Everything durable when the pass began was looked at, but for the skipped."""

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
