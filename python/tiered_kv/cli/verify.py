"""`tiered-kv verify`: reads every payload of a closed store and checks it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.cli.exits import ExitCode
from tiered_kv.cli.output import people, print_json
from tiered_kv.cli.stores import Dirs, Json, directories, plain, require_closed, size

STEP_BYTES = 16 << 20
TIMEOUT_S = 60.0


def _check(dirs: list[Path]) -> dict[str, Any]:
    """Reads everything, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from tiered_kv import _core

    core = _core.Operator.read(dirs)
    try:
        drives, missing = core.drives()
        work = core.verify()
        slabs, total = work.total
        # With a checkpoint the tables are read now, without one they were already.
        damaged = sum(drive["damaged_headers"] for drive in drives)
        bad: list[dict[str, Any]] = []
        begin = time.monotonic()
        columns = (
            TextColumn("verify"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("verify", total=total)
            while (done := work.step(STEP_BYTES)) is not None:
                progress.update(task, advance=done["bytes"])
                damaged += done["damaged_headers"]
                bad.extend(done["bad"])
        seconds = time.monotonic() - begin
    finally:
        core.close()
    misfits = [name for drive in drives for name in drive["misfits"]]
    unsound = [drive["path"] for drive in drives if drive["checkpoint"] == "damaged"]
    return {
        "directories": [str(path) for path in dirs],
        "drives": drives,
        "missing_drives": missing,
        "slabs": slabs,
        "bytes": total,
        "seconds": seconds,
        "gb_s": total / max(seconds, 1e-9) / 1e9,
        "bad": bad,
        "damaged_headers": damaged,
        "damaged_checkpoints": unsound,
        "misfits": misfits,
        "quarantined": 0,
        "sound": not (bad or damaged or unsound or misfits),
    }


def _quarantine(dirs: list[Path], bad: list[dict[str, Any]]) -> int:
    """Deletes the blocks of bad slabs, so that they are misses and the next store heals them."""
    from tiered_kv import _core

    keys: dict[bytes, dict[bytes, None]] = {}
    for slab in bad:
        keys.setdefault(slab["namespace"], {})[slab["key"]] = None
    core = _core.Operator.open(dirs)
    try:
        return sum(
            core.delete_keys(namespace, b"".join(found), TIMEOUT_S)[0]
            for namespace, found in keys.items()
        )
    finally:
        core.close()


def verify(
    dirs: Dirs = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Take the blocks of bad payloads out of the store.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every payload of a closed store and check it. Ends with 1 where anything is wrong.

    Without --quarantine nothing is changed. A store that is open is refused: its loads are checked
    as they happen.
    """
    paths = directories(dirs)
    require_closed(paths, "verify")
    found = _check(paths)
    if quarantine and found["bad"]:
        found["quarantined"] = _quarantine(paths, found["bad"])
    if as_json:
        print_json(plain(found))
    else:
        _show(found)
    if not found["sound"]:
        raise typer.Exit(ExitCode.FAILED)


def _show(found: dict[str, Any]) -> None:
    console = people(as_json=False)
    rate = f"{found['seconds']:.2f} s, {found['gb_s']:.2f} GB/s"
    console.print(f"{found['slabs']} payloads, {size(found['bytes'])}, read in {rate}")
    for slab in found["bad"]:
        where = f"{slab['path']} segment {slab['segment']} slot {slab['slot']}"
        name = f"{slab['namespace'].hex()[:16]} {slab['key'].hex()}"
        console.print(f"{slab['what']}: {name} in {where}", markup=False, soft_wrap=True)
    if found["damaged_headers"]:
        console.print(
            f"{found['damaged_headers']} record headers are damaged: they are not believed"
        )
    for path in found["damaged_checkpoints"]:
        console.print(f"the checkpoint of {path} is damaged: it is not believed", markup=False)
    for name in found["misfits"]:
        console.print(f"{name} does not fit the store: the next open removes it", markup=False)
    if found["quarantined"]:
        console.print(f"{found['quarantined']} blocks were taken out; the next store heals them")
    console.print("everything is sound" if found["sound"] else "NOT everything is sound")
