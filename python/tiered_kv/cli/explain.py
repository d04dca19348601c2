"""`tiered-kv explain`: why a prompt missed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.output import people, print_json
from tiered_kv.cli.stores import (
    Dirs,
    Json,
    digits,
    directories,
    namespace_named,
    plain,
    reading,
    usage_error,
)

MAX_FILE_BYTES = 64 << 20


def _text(path: Path, what: str) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise usage_error(f"{what} {path} is over 64 MiB: give a smaller file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise usage_error(f"{what} {path} is no text: {error}") from error


def _spec(path: Path) -> tuple[bytes, dict[str, str]]:
    """Digest and fields of the specification in a JSON or TOML file."""
    from tiered_kv import KvLayout, NamespaceSpec, _core

    text = _text(path, "--spec")
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise usage_error(f"--spec {path} cannot be read: {error}") from error
    try:
        layout = found.pop("layout")
        spec = NamespaceSpec(layout=KvLayout(**layout), **found)
    except (AttributeError, KeyError, TypeError) as error:
        what = f"--spec {path} is no specification ({error})"
        raise usage_error(
            f"{what}: give the fields of NamespaceSpec, `layout` as a table"
        ) from error
    return _core.describe_spec(spec.canonical())


def _tokens(path: Path) -> list[int]:
    """Token ids: a JSON list, or numbers with white space or commas between them."""
    text = _text(path, "--tokens").strip().strip("[]")
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise usage_error(f"--tokens {path} holds no token ids: {error}") from error


def _keys(texts: list[str]) -> bytes:
    keys = b""
    for text in texts:
        if len(digits(text, "key")) != 64:
            raise usage_error(f"--keys {text!r}: give all 64 hexadecimal digits of each key")
        keys += bytes.fromhex(text)
    return keys


def explain(
    dirs: Dirs = None,
    spec: Annotated[
        Path | None,
        typer.Option(help="The namespace that was asked for: a TOML or JSON file of its fields."),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Instead: digits of its digest.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="The prompt: a file of token ids.")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--keys", help="Instead: a key in hexadecimal; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say why a prompt missed: its namespace differs in a field, a block was never stored, evicted,
    deleted, corrupt, or too slow. Ends with 1 where a block is missed."""  # noqa: D205, D209
    from tiered_kv import _core
    from tiered_kv import operator as ops

    if (spec is None) == (namespace is None):
        raise usage_error("give --spec or --namespace, which was asked for, and not both")
    if (tokens is None) == (not keys):
        raise usage_error("give --tokens or --keys, what was asked for, and not both")
    asked = None if spec is None else _spec(spec)
    ids = None if tokens is None else _tokens(tokens)
    with reading(directories(dirs)) as (core, is_live):
        if asked is not None:
            digest, fields = asked
        else:
            digest = namespace_named(core, namespace or "")
            own = (row["fields"] for row in ops.namespaces(core) if row["namespace"] == digest)
            fields = next(own) or {}
        if ids is not None:
            if "layout.tokens_per_block" not in fields:
                raise usage_error("the namespace's layout is not known: give --spec or --keys")
            packed = _core.token_keys(digest, ids, int(fields["layout.tokens_per_block"]))
        else:
            packed = _keys(keys or [])
        found = ops.explain(
            core, digest, packed, fields=fields or None, tokens=ids, closed=not is_live
        )
    if as_json:
        print_json(plain(found))
    else:
        _show(found)
    if found["hits"] < len(found["keys"]):
        raise typer.Exit(ExitCode.FAILED)


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    console = people(as_json=False)
    table = Table(box=None)
    for name in ("block", "key", "cause", "why"):
        table.add_column(name, overflow="fold")
    for index, row in enumerate(found["keys"]):
        table.add_row(str(index), row["key"].hex()[:16], row["cause"], row["why"])
    console.print(table)
    for other in found["elsewhere"]:
        differs = ", ".join(other["differs"] or {}) or "nothing that is known"
        hits = "" if other["hits"] is None else f", has {other['hits']} blocks of the prompt"
        name = other["namespace"].hex()[:16]
        console.print(f"namespace {name} differs in {differs}{hits}", markup=False, soft_wrap=True)
    console.print(found["verdict"], markup=False, soft_wrap=True)
