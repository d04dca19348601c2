"""The entry point: which command runs, and how whatever happens ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tiered_kv.cli.exits import ExitCode, error_status
from tiered_kv.cli.output import error_line


def _dispatch(args: list[str]) -> int:
    # typer takes several times as long to load as these take to compute.
    if args[:1] == ["size"]:
        from tiered_kv.cli.size import run as run_size

        return run_size(args[1:])
    if args[:1] == ["plan"]:
        from tiered_kv.cli.plan import run as run_plan

        return run_plan(args[1:])
    if args[:1] == ["replay"]:
        from tiered_kv.cli.replay import run as run_replay

        return run_replay(args[1:])
    if args[:1] == ["project"]:
        from tiered_kv.cli.project import run as run_project

        return run_project(args[1:])
    if args[:1] == ["trace"]:
        from tiered_kv.cli.trace import run as run_trace

        return run_trace(args[1:])
    from tiered_kv.cli.app import run

    return run(args)


def _fail(error: Exception) -> int:
    if os.environ.get("TIERED_KV_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(error)
    code, message = error_status(error)
    if code is ExitCode.INTERNAL:
        message += " (TIERED_KV_TRACEBACK=1 shows where)"
    error_line(message)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and turns whatever happens into an exit status and one line.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit status, an `ExitCode`.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except KeyboardInterrupt:
        error_line("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer must not be written again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.PIPE_CLOSED
    except Exception as error:  # noqa: BLE001 - the last handler: it ends the process
        return _fail(error)
