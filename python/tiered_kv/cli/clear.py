"""`tiered-kv clear` and `tiered-kv resize`: what makes a store smaller."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.output import people, print_json
from tiered_kv.cli.stores import (
    Dirs,
    Json,
    age_seconds,
    changing,
    confirm,
    directories,
    namespace_named,
    plain,
    reading,
    require_closed,
    size,
    usage_error,
)

if TYPE_CHECKING:
    from tiered_kv import _core

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def _meant(
    core: _core.Operator, namespace: str | None, tenant: str | None, before: int | None
) -> dict[bytes, list[bytes]]:
    """The keys that are meant, by namespace, as they are now."""
    from tiered_kv import _core as compiled
    from tiered_kv.operator import blocks

    chosen = namespace_named(core, namespace) if namespace else None
    payer = None if tenant is None else compiled.tenant_digest(tenant)
    found: dict[bytes, list[bytes]] = {}
    for row in blocks(core, chosen, payer, before):
        found.setdefault(row["namespace"], []).append(row["key"])
    return found


def _delete(
    core: _core.Operator,
    meant: dict[bytes, list[bytes]],
    tenant: str | None,
    before: int | None,
    timeout: float,
) -> dict[str, Any]:
    """Deletes the keys one by one for a tenant, else with one tombstone a namespace."""
    removed, durable = 0, True
    for namespace, keys in meant.items():
        if tenant is not None:
            count, ok = core.delete_keys(namespace, b"".join(keys), timeout)
        else:
            count, ok = core.delete_before(namespace, before, timeout)
        removed += count
        durable &= ok
    return {"removed": removed, "durable": durable}


def clear(
    dirs: Dirs = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only this namespace: digits of its digest.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only what this tenant pays for.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only what was stored longer ago: 90s, 30m, 2h, 7d, 1w.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a delete may take.")] = 60.0,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete blocks durably, from a live store or a closed one. Criteria narrow each other down.

    Ends with 1 where a drive could not take the tombstones: the blocks are gone, but may be back
    after a crash.
    """
    if not (namespace or tenant is not None or older_than or everything):
        raise usage_error("nothing is meant: give --namespace, --tenant, --older-than or --all")
    if everything and (namespace or tenant is not None or older_than):
        raise usage_error("--all leaves nothing to narrow down: give it alone")
    before = None
    if older_than is not None:
        before = max(0, time.time_ns() - int(age_seconds(older_than) * 1e9))
    paths = directories(dirs)
    # A look before anything is opened for a change.
    with reading(paths) as (core, is_live):
        meant = _meant(core, namespace, tenant, before)
    count = sum(map(len, meant.values()))
    found: dict[str, Any] = {"live": is_live, "meant": count, "removed": 0, "durable": True}
    if count and not dry_run:
        question = f"{count} blocks of {len(meant)} namespaces will be deleted"
        confirm(question, yes=yes, as_json=as_json)
        with changing(paths) as core:
            found |= _delete(core, meant, tenant, before, timeout)
    found["dry_run"] = dry_run
    if as_json:
        print_json(found)
    else:
        state = "live" if is_live else "closed"
        text = f"would delete {count} blocks" if dry_run else f"deleted {found['removed']} blocks"
        lasting = "" if found["durable"] else "; NOT durable: a drive failed or was slow"
        people(as_json=False).print(f"{text} from the {state} store{lasting}")
    if not found["durable"]:
        raise typer.Exit(ExitCode.FAILED)


def _capacity(text: str) -> int:
    from tiered_kv import _core

    fields = _core.parse_config({"nvme_paths": ["."], "nvme_capacity": text})
    return int(fields["nvme_capacity"])


def resize(
    capacity: Annotated[str, typer.Argument(help="The new capacity of each drive, as in 80GiB.")],
    dirs: Dirs = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make a closed store fit another capacity, losing no more than has no place any more.

    The capacity itself is the configuration's: open the store with it afterwards. Growing needs
    nothing else. Before a store shrinks, blocks move out of the segments that go, as far as there
    are free slots; roots and what was stored last come first.
    """
    from tiered_kv import _core

    bytes_ = _capacity(capacity)
    paths = directories(dirs)
    require_closed(paths, "resize")
    rows = _core.resize(paths, bytes_, dry_run=True)
    lost = sum(row["lost_blocks"] for row in rows)
    if not dry_run:
        if lost:
            amount = size(sum(row["lost_bytes"] for row in rows))
            question = (
                f"{lost} blocks ({amount}) have no place in the new capacity and will be lost"
            )
            confirm(question, yes=yes, as_json=as_json)
        rows = _core.resize(paths, bytes_)
    if as_json:
        print_json({"capacity_bytes": bytes_, "dry_run": dry_run, "directories": plain(rows)})
        return
    console = people(as_json=False)
    for row in rows:
        goes = row["files_before"] - row["files_after"]
        console.print(
            f"{row['path']}: room for {row['segments']} segments, {row['files_after']} files "
            f"({goes} less), {row['moved_blocks']} blocks moved, {row['lost_blocks']} lost",
            markup=False,
            soft_wrap=True,
        )
    done = (
        "nothing was changed" if dry_run else f"open it with nvme_capacity = {bytes_} from now on"
    )
    console.print(done)
