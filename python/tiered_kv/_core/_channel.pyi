"""Calls in progress, and where their results come."""

from typing import Any, final

@final
class Channel:
    """A completion queue: calls in progress and their results; see `tiered_kv.Channel`."""

    @staticmethod
    def for_loop() -> Channel:
        """The channel of an event loop: a result that is there when a call returns is returned."""
    @property
    def closed(self) -> bool: ...
    @property
    def rung_ago(self) -> float | None:
        """Seconds since the descriptor last became readable: how long a poller took to wake."""
    def fileno(self) -> int:
        """The descriptor that is readable while there are results."""
    def drain(self) -> list[tuple[int, bool, bytes, int, float]]:
        """Takes all results as summaries: number, ok, bitmap by key, bytes, seconds."""
    def results(self) -> list[tuple[int, Any]]:
        """Takes all results as they are, each with its call's number."""
    def pending(self) -> int: ...
    def cancel(self, number: int) -> None:
        """Asks the core to end a call; its result still comes, when its buffers are free."""
    def quiesce(self, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Cancels what is in progress and drops all results, those to come too; does not wait."""
