"""Errors: one class a kind, each naming the field or file concerned and the remedy.

A miss and "throttled" are values, never errors.
"""

from __future__ import annotations

from typing import ClassVar


def one_line(text: str) -> str:
    """`text` with what is not printable escaped.

    Names and paths in it are somebody else's: they must neither break a line nor drive a terminal.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class TieredKvError(Exception):
    """The base of every error that the store raises.

    Attributes:
        kind: A stable name of what went wrong, such as `"in use"`.
        op: The operation in which it arose.
        retry: Whether the same call may succeed later as it is.
    """

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, op: str = "", retry: bool = False) -> None:
        super().__init__(one_line(message))
        self.op = op
        self.retry = retry


class ConfigError(TieredKvError):
    """A field of the configuration is missing, unknown, out of range or contradictory."""

    kind = "config"


class InvalidArgumentError(TieredKvError, ValueError):
    """An argument of a call is wrong: size, count, dtype, key width."""

    kind = "invalid argument"


class ClosedError(TieredKvError):
    """The store is closed, or closing."""

    kind = "closed"


class InUseError(TieredKvError):
    """The directory is open elsewhere; the message names the owner."""

    kind = "in use"


class FormatMismatchError(TieredKvError):
    """The directory was written by another format version, or is not a store."""

    kind = "format mismatch"


class StorePermissionError(TieredKvError):
    """The operating system refused access."""

    kind = "permission"


class NotFoundError(TieredKvError):
    """A directory or file that must exist does not."""

    kind = "not found"


class NoSpaceError(TieredKvError):
    """Memory or device space could not be had."""

    kind = "no space"


class UnsupportedError(TieredKvError):
    """Something asked for is not supported here."""

    kind = "unsupported"


class IoFaultError(TieredKvError):
    """The operating system or the device reported a fault."""

    kind = "i/o"


class CancelledCallError(TieredKvError):
    """The operation was cancelled."""

    kind = "cancelled"


class InternalError(TieredKvError):
    """A defect in tiered-kv: please report it."""

    kind = "internal"


_BY_KIND = {
    cls.kind: cls
    for cls in (
        ConfigError,
        InvalidArgumentError,
        ClosedError,
        InUseError,
        FormatMismatchError,
        StorePermissionError,
        NotFoundError,
        NoSpaceError,
        UnsupportedError,
        IoFaultError,
        CancelledCallError,
        InternalError,
    )
}


def from_core(kind: str, message: str, op: str, retry: bool) -> TieredKvError:
    """The exception for an error of the core.

    Args:
        kind: The core's name of the kind.
        message: What went wrong and the remedy.
        op: The operation in which it arose.
        retry: Whether the same call may succeed later as it is.

    Returns:
        An instance of the kind's class.
    """
    return _BY_KIND.get(kind, InternalError)(message, op=op, retry=retry)
