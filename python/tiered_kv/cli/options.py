"""Options of the commands that answer in less time than typer takes to load."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.output import error_line

_COLUMNS = 80


class UsageError(Exception):
    """The arguments are wrong."""


class _Formatter(argparse.HelpFormatter):
    """A formatter as wide as the terminal; argparse's own loads archives' modules to ask for it."""

    def __init__(self, prog: str) -> None:
        try:
            columns = os.get_terminal_size().columns
        except (OSError, ValueError):
            columns = _COLUMNS
        super().__init__(prog, width=columns - 2)


class Parser(argparse.ArgumentParser):
    """A parser whose faults are exceptions."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter
        )

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        raise UsageError(message)

    def read(self, args: Sequence[str]) -> argparse.Namespace | ExitCode:
        """The options, or the status with which the command ends: help or a fault was printed."""
        try:
            return self.parse_args(args)
        except UsageError as error:
            return self.refuse(error)
        except SystemExit:  # the help has been printed
            return ExitCode.OK

    def refuse(self, error: object) -> ExitCode:
        """Prints a fault of usage as one line."""
        error_line(f"{error}. Try `{self.prog} --help`.")
        return ExitCode.USAGE
