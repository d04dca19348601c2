"""The typer application."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from tiered_kv.cli.clear import clear, resize
from tiered_kv.cli.demo import bare_json, demo
from tiered_kv.cli.doctor import doctor
from tiered_kv.cli.engines import engines
from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.explain import explain
from tiered_kv.cli.info import info
from tiered_kv.cli.ls import inspect, ls
from tiered_kv.cli.metrics import metrics
from tiered_kv.cli.output import error_line
from tiered_kv.cli.plan import run as run_plan
from tiered_kv.cli.project import run as run_project
from tiered_kv.cli.replay import run as run_replay
from tiered_kv.cli.size import run as run_size
from tiered_kv.cli.trace import run as run_trace
from tiered_kv.cli.verify import verify

_EPILOG = (
    "Exit status: 0 done; 1 what was checked does not hold; 2 wrong usage or configuration; "
    "3 something is missing here; 4 the store or the system refused; 5 a defect; 130 interrupted."
)

app = typer.Typer(
    name="tiered-kv",
    help="A tiered KV-cache store for LLM serving.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tiered-kv {metadata.version('tiered-kv')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(ExitCode.USAGE)


app.command()(info)
app.command()(demo)
app.command()(doctor)
app.command()(engines)
app.command()(ls)
app.command()(inspect)
app.command()(explain)
app.command()(verify)
app.command()(clear)
app.command()(resize)
app.command()(metrics)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def size(ctx: typer.Context) -> None:
    """Say how many bytes a model's KV cache takes, exactly, and what simpler rules would say."""
    raise typer.Exit(run_size(ctx.args))


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def plan(ctx: typer.Context) -> None:
    """Plan a node: the tokens, requests and minutes of traffic of each tier, the largest batch."""
    raise typer.Exit(run_plan(ctx.args))


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def replay(ctx: typer.Context) -> None:
    """Say what each eviction policy would have done on a trace of requests."""
    raise typer.Exit(run_replay(ctx.args))


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def project(ctx: typer.Context) -> None:
    """Project time to first token, throughput and cost of a model on a node, from a replay."""
    raise typer.Exit(run_project(ctx.args))


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def trace(ctx: typer.Context) -> None:
    """Look at traces of requests, convert them, or make them up."""
    raise typer.Exit(run_trace(ctx.args))


def _run(args: list[str]) -> int:
    try:
        code = app(args, prog_name="tiered-kv", standalone_mode=False)
    except SystemExit as stop:
        # typer answers a closed pipe with status 1, which here means a check that failed.
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    sys.stdout.flush()
    if code == ExitCode.INTERRUPTED:  # typer has swallowed the KeyboardInterrupt
        raise KeyboardInterrupt
    return code if isinstance(code, int) else ExitCode.OK


def run(args: list[str]) -> int:
    """Runs the commands that typer reads; `tiered_kv.cli.entry` ends whatever they raise.

    Args:
        args: The arguments after the program's name.

    Returns:
        The exit status, an `ExitCode`.
    """
    try:
        return _run(bare_json(args))
    except typer.TyperException as error:
        error_line(f"{error.format_message()} Try `tiered-kv --help`.")
        return error.exit_code
    except typer.Abort:
        error_line("interrupted")
        return ExitCode.INTERRUPTED
