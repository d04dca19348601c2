"""Numbers with units, as people write them: `"3.84 TB"`, `"26 GB/s"`, `"80 us"`, `"671B"`."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from tiered_kv.errors import InvalidArgumentError
from tiered_kv.sizing.checks import shown

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


def fault(message: str) -> InvalidArgumentError:
    """The error of this package."""
    return InvalidArgumentError(f"plan: {message}", op="plan")


def bad(field: str, value: object, want: str) -> InvalidArgumentError:
    """The error for a field whose value cannot be used."""
    return fault(f"`{field}` is {shown(value)}: give {want}")


def _scaled(field: str, value: object, units: dict[str, int], want: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise bad(field, value, want)
    if isinstance(value, float) and not math.isfinite(value):
        raise bad(field, value, want)
    match = _SHAPE.fullmatch(value if isinstance(value, str) else repr(value))
    scale = None if match is None else units.get(match[2], 1 if match[2] == "" else None)
    if match is None or scale is None:
        raise bad(field, value, want)
    number = Fraction(match[1]) * scale
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
    return _scaled(field, value, _COUNTS, 'a number, as in 8, "671B" or "70.6e9"')


def flops(field: str, value: object) -> int:
    """Operations a second, as in `"989 TFLOPS"`.

    Raises:
        InvalidArgumentError: It is no such rate.
    """
    return _scaled(field, value, _FLOPS, 'operations a second, as in "989 TFLOPS"')


def seconds(field: str, value: object) -> float:
    """A time, as in `"80 us"`.

    Raises:
        InvalidArgumentError: It is no time.
    """
    match = _SHAPE.fullmatch(value) if isinstance(value, str) else None
    unit = None if match is None else _SECONDS.get(match[2])
    if match is None or unit is None:
        raise bad(field, value, 'a time, as in "80 us"')
    return float(Fraction(match[1]) * unit)


def share(field: str, value: object) -> float:
    """A part of a whole, above 0 and at most 1.

    Raises:
        InvalidArgumentError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise bad(field, value, "a number above 0 and at most 1")
    return float(value)


def price(field: str, value: object) -> float:
    """US dollars.

    Raises:
        InvalidArgumentError: It is no amount.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(field, value, "US dollars, at least 0")
    if not math.isfinite(value) or value < 0:
        raise bad(field, value, "US dollars, at least 0")
    return float(value)


def large(value: float) -> str:
    """Bytes in decimal units, as capacities are sold."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,.0f} B"
