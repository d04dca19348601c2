"""What the commands on a store share: its directories, the way to it, digests, sizes and ages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tiered_kv import _core

TIMEOUT_S = 10.0
"""How long one question may wait for a store's owner."""

Dirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--dir",
        help="A directory of the store; name all of them. [default: as in TIERED_KV_NVME_PATHS]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]

_HEX = re.compile(r"[0-9a-f]+")
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def usage_error(message: str) -> Exception:
    """An error that ends with the status of wrong usage."""
    from tiered_kv.errors import InvalidArgumentError

    return InvalidArgumentError(message, op="command")


def directories(dirs: list[Path] | None) -> list[Path]:
    """The store's directories: those named, or else those of the environment.

    Args:
        dirs: What `--dir` named.

    Returns:
        At least one directory.

    Raises:
        InvalidArgumentError: There is none.
    """
    from tiered_kv.config import StoreConfig

    if dirs:
        return dirs
    paths = StoreConfig.from_env().nvme_paths
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    found = [Path(path) for path in several]
    if not found or found == [Path()]:
        raise usage_error("no store is named: give --dir, or set TIERED_KV_NVME_PATHS")
    return found


def live(dirs: list[Path]) -> _core.Operator | None:
    """The store that a process has open on the directories, if there is one that listens.

    Args:
        dirs: The store's directories.

    Returns:
        None where nobody listens.

    Raises:
        TieredKvError: Somebody does, and cannot be asked.
    """
    from tiered_kv import NotFoundError, _core

    for path in dirs:
        try:
            return _core.Operator.attach(path, TIMEOUT_S)
        except NotFoundError:
            continue
    return None


def require_closed(dirs: list[Path], what: str) -> None:
    """Refuses a store that is open.

    Args:
        dirs: The store's directories.
        what: What is to be done.

    Raises:
        InUseError: A process has the store open.
    """
    from tiered_kv import InUseError

    owner = live(dirs)
    if owner is not None:
        owner.close()
        message = f"{what}: {dirs[0]} is open in another process: close that store first"
        raise InUseError(message, op=what)


@contextmanager
def reading(dirs: list[Path]) -> Iterator[tuple[_core.Operator, bool]]:
    """A store to be looked at: the live one, or the closed directories, read without a change.

    Args:
        dirs: The store's directories.

    Yields:
        The store, and whether it is live.
    """
    from tiered_kv import _core

    owner = live(dirs)
    core = owner or _core.Operator.read(dirs)
    try:
        yield core, owner is not None
    finally:
        core.close()


@contextmanager
def changing(dirs: list[Path]) -> Iterator[_core.Operator]:
    """A store to delete from: the live one, or the closed one, opened meanwhile.

    Args:
        dirs: The store's directories.

    Yields:
        The store.
    """
    from tiered_kv import _core

    core = live(dirs) or _core.Operator.open(dirs)
    try:
        yield core
    finally:
        core.close()


def digits(text: str, what: str) -> str:
    """Checks hexadecimal digits of a digest, all of them or the first few.

    Args:
        text: What was given.
        what: What it is to name.

    Returns:
        4 to 64 digits, lower case.

    Raises:
        InvalidArgumentError: It is something else.
    """
    text = text.lower()
    if not _HEX.fullmatch(text) or not 4 <= len(text) <= 64:
        raise usage_error(
            f"{what} {text[:80]!r}: give 4 to 64 hexadecimal digits, as `ls` shows them"
        )
    return text


def the_one(found: list[bytes], text: str, what: str) -> bytes:
    """The digest that digits name.

    Args:
        found: The digests that begin with them.
        text: The digits.
        what: What they name.

    Returns:
        The only one.

    Raises:
        InvalidArgumentError: There is none, or several.
    """
    if not found:
        raise usage_error(f"the store has no {what} {text}: see `tiered-kv ls`")
    if len(found) > 1:
        raise usage_error(
            f"{len(found)} of the store's begin with {text}: give more digits of the {what}"
        )
    return found[0]


def namespace_named(core: _core.Operator, text: str) -> bytes:
    """The namespace of which some digits are given.

    Args:
        core: The store.
        text: Digits of its digest.

    Returns:
        The digest.

    Raises:
        InvalidArgumentError: No namespace, or several, begin so.
    """
    from tiered_kv.operator import namespaces

    text = digits(text, "namespace")
    found = [row["namespace"] for row in namespaces(core)]
    return the_one([one for one in found if one.hex().startswith(text)], text, "namespace")


def size(value: int | None, absent: str = "-") -> str:
    """Bytes in words."""
    if value is None:
        return absent
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B"


def age_seconds(text: str) -> float:
    """Seconds of an age such as `90s`, `30m`, `2h`, `7d` or `1w`.

    Args:
        text: A number and a unit; seconds without one.

    Returns:
        The seconds.

    Raises:
        InvalidArgumentError: It is no age.
    """
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise usage_error(f"`--older-than` is {text!r}: give an age such as 90s, 30m, 2h, 7d or 1w")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def plain(value: Any) -> Any:
    """A value as JSON has it: digests as hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def confirm(
    question: str, *, yes: bool, as_json: bool, ask: Callable[..., bool] = typer.confirm
) -> None:
    """Asks before something is lost.

    Args:
        question: What is about to be done.
        yes: It was confirmed on the command line.
        as_json: A program is calling, which cannot be asked.
        ask: Asks the person.

    Raises:
        InvalidArgumentError: Nobody can be asked.
        Abort: The answer is no.
    """
    import sys

    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise usage_error(
            f"{question}: give --yes to confirm, or --dry-run to see what would be done"
        )
    ask(f"{question}. Go on?", abort=True, err=True)
