"""Arguments and fields: what is wrong with one is an error of one line that names it."""

from __future__ import annotations

from tiered_kv.errors import InvalidArgumentError

MOST = 1 << 48
"""The largest number accepted for a count: beyond it a figure is a mistake."""
_SHOWN = 60
_LONGEST = 1000


def fault(message: str) -> InvalidArgumentError:
    """The error of this package."""
    return InvalidArgumentError(f"size: {cut(message)}", op="size")


def cut(message: str) -> str:
    """A message of a bounded length: what it quotes may be of any."""
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."


def shown(value: object) -> str:
    """A value as an error shows it: short, whatever it is."""
    if isinstance(value, dict | list) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer with too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def bad(field: str, value: object, want: str) -> InvalidArgumentError:
    """The error for a field whose value cannot be used."""
    return fault(f"`{field}` is {shown(value)}: give {want}")


def count(field: str, value: object, least: int = 0, most: int = MOST) -> int:
    """Checks an integer.

    Args:
        field: The field that an error names.
        value: The value.
        least: The smallest accepted.
        most: The largest accepted.

    Raises:
        InvalidArgumentError: It is no integer, or out of range.
    """
    if type(value) is not int or not least <= value <= most:
        raise bad(field, value, f"an integer from {least} to {most}")
    return value
