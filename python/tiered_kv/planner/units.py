"""Numbers with units, as people write them: `"3.84 TB"`, `"26 GB/s"`, `"80 us"`, `"671B"`."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from tiered_kv.errors import InvalidArgumentError
from tiered_kv.sizing.checks import cut, shown

_BYTES = {"B": 1} | {
    f"{prefix}{binary}B": base ** (power + 1)
    for binary, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kMGTP")
}
_BYTES |= {"KB": 1000, "KiB": 1024}
_SECONDS = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
_COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_FLOPS = {"TFLOPS": 10**12, "PFLOPS": 10**15, "GFLOPS": 10**9}
_SHAPE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z/]*)\s*")
_MOST = 1 << 62
_LONGEST = 64
LEAST_SHARE = 0.001
MOST_USD = 1e9


def fault(message: str) -> InvalidArgumentError:
    """The error of this package."""
    return InvalidArgumentError(f"plan: {cut(message)}", op="plan")


def bad(field: str, value: object, want: str) -> InvalidArgumentError:
    """The error for a field whose value cannot be used."""
    return fault(f"`{field}` is {shown(value)}: give {want}")


def _number(value: float | str) -> re.Match[str] | None:
    """The number and the unit of a value; None where it has none, or so many digits."""
    if isinstance(value, int) and abs(value) > _MOST:
        return None
    text = value if isinstance(value, str) else repr(value)
    return _SHAPE.fullmatch(text) if len(text) <= _LONGEST else None


def _scaled(
    field: str, value: object, units: dict[str, int], want: str, *, whole: bool = False
) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise bad(field, value, want)
    if isinstance(value, float) and not math.isfinite(value):
        raise bad(field, value, want)
    match = _number(value)
    scale = None if match is None else units.get(match[2], 1 if match[2] == "" else None)
    if match is None or scale is None:
        raise bad(field, value, want)
    number = Fraction(match[1]) * scale
    if whole and number.denominator != 1:
        raise bad(field, value, want)
    if number > _MOST:
        raise bad(field, value, "a smaller number: this one is a mistake")
    return int(number)


def size(field: str, value: object) -> int:
    """Bytes: an integer, or text such as `"80 GB"` (decimal) or `"512 GiB"` (binary).

    Raises:
        InvalidArgumentError: It is neither, negative or absurdly large.
    """
    return _scaled(field, value, _BYTES, 'bytes, as in "80 GB" or "512 GiB"')


def rate(field: str, value: object) -> int:
    """Bytes a second, as in `"3.35 TB/s"`.

    Raises:
        InvalidArgumentError: It is no rate.
    """
    units = {f"{unit}/s": scale for unit, scale in _BYTES.items()}
    return _scaled(field, value, units, 'bytes a second, as in "26 GB/s"')


def count(field: str, value: object) -> int:
    """A number of things, as in `8`, `"671B"` or `"70.6e9"`.

    Raises:
        InvalidArgumentError: It is no number.
    """
    want = 'a whole number, as in 8, "671B" or "70.6e9"'
    return _scaled(field, value, _COUNTS, want, whole=True)


def flops(field: str, value: object) -> int:
    """Operations a second, as in `"989 TFLOPS"`.

    Raises:
        InvalidArgumentError: It is no such rate.
    """
    want = 'operations a second, as in "989 TFLOPS"'
    found = _scaled(field, value, _FLOPS, want)
    if found == 0:
        raise bad(field, value, want)
    return found


def seconds(field: str, value: object) -> float:
    """A time, as in `"80 us"`.

    Raises:
        InvalidArgumentError: It is no time.
    """
    match = _number(value) if isinstance(value, str) else None
    unit = None if match is None else _SECONDS.get(match[2])
    if match is None or unit is None:
        raise bad(field, value, 'a time, as in "80 us"')
    return float(Fraction(match[1]) * unit)


def _within(field: str, value: object, least: float, most: float, want: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise bad(field, value, want)
    return float(value)


def share(field: str, value: object) -> float:
    """A part of a whole, at least a thousandth.

    Raises:
        InvalidArgumentError: It is none.
    """
    return _within(field, value, LEAST_SHARE, 1, f"a number from {LEAST_SHARE} to 1")


def price(field: str, value: object) -> float:
    """US dollars.

    Raises:
        InvalidArgumentError: It is no amount.
    """
    return _within(field, value, 0, MOST_USD, f"US dollars from 0 to {MOST_USD:.0f}")


def large(value: float) -> str:
    """Bytes in decimal units, as capacities are sold."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,.0f} B"
