"""A power cut takes what was not flushed: the disk that loses it, and a round in a guest.

Promises: nothing durable is lost (failure case 12), here with the volatile cache of a drive.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from crash import vm
from crash.disk import SECTOR_BYTES, Cut, Disk, Server
from crash.power import Run

PAGE = 4096
OLD, NEW = b"\0" * PAGE, b"\1" * PAGE


def write(disk: Disk, page: int, data: bytes = NEW, through: bool = False) -> None:
    disk.end(disk.begin(page * PAGE, data, through))


def page_of(disk: Disk, page: int) -> bytes:
    return bytes(disk.now[page * PAGE : (page + 1) * PAGE])


def test_a_cut_takes_any_part_of_what_was_not_flushed_and_nothing_else() -> None:
    whole = lost = torn = 0
    for seed in range(200):
        disk = Disk(OLD * 4)
        write(disk, 0)
        disk.flush()
        write(disk, 1)
        write(disk, 2, through=True)
        assert page_of(disk, 1) == NEW
        cut = disk.cut(random.Random(seed))
        assert page_of(disk, 0) == page_of(disk, 2) == NEW
        assert page_of(disk, 3) == OLD
        left = page_of(disk, 1)
        sectors = {left[at : at + SECTOR_BYTES] for at in range(0, PAGE, SECTOR_BYTES)}
        assert sectors <= {NEW[:SECTOR_BYTES], OLD[:SECTOR_BYTES]}
        assert cut.unflushed == 2
        whole += left == NEW
        lost += cut.lost
        torn += cut.torn and len(sectors) == 2
        assert (left == NEW) == (cut.lost + cut.torn == 0)
    assert min(whole, lost, torn) > 10


def test_a_flush_covers_no_write_that_was_not_answered_before_it() -> None:
    kept = set()
    for seed in range(50):
        disk = Disk(OLD)
        late = disk.begin(0, NEW)
        disk.flush()
        if seed % 2:
            disk.end(late)
        assert disk.cut(random.Random(seed)).unflushed == 1
        kept.add(page_of(disk, 0) == NEW)
    assert kept == {False, True}


def test_what_goes_through_the_cache_is_newer_than_what_is_in_it() -> None:
    disk = Disk(OLD)
    write(disk, 0, b"\2" * PAGE)
    write(disk, 0, through=True)
    disk.flush()
    assert disk.cut(random.Random(1)) == Cut(0, 0, 0)
    assert page_of(disk, 0) == NEW


@pytest.mark.skipif(not shutil.which("qemu-io"), reason="needs qemu-io of the package qemu-utils")
def test_an_emulator_reads_writes_and_flushes_over_the_socket(tmp_path: Path) -> None:
    disk = Disk(OLD * 16)
    server = Server(disk, tmp_path / "nbd", 1)
    asks = ["write -P 7 0 8k", "flush", "read -P 7 4k 4k", "write -P 9 16k 4k", "abort"]
    command = [text for ask in asks for text in ("-c", ask)]
    client = ["qemu-io", "-f", "raw", "-t", "writeback", *command, f"nbd:unix:{tmp_path}/nbd"]
    done = subprocess.run(client, capture_output=True, text=True, timeout=60, check=False)
    assert "Pattern verification failed" not in done.stdout, done.stdout
    server.settle()
    server.close()
    assert page_of(disk, 4) == b"\x09" * PAGE
    assert disk.cut(random.Random(1)).unflushed == 1
    assert page_of(disk, 1) == b"\x07" * PAGE


@pytest.mark.skipif(not shutil.which("qemu-io"), reason="needs qemu-io of the package qemu-utils")
def test_a_disk_dies_at_the_write_it_was_told_to(tmp_path: Path) -> None:
    disk = Disk(OLD * 16)
    server = Server(disk, tmp_path / "nbd", 1)
    assert not server.die(3, 0.0)
    asks = [text for page in range(16) for text in ("-c", f"write -P 7 {page * PAGE} 4k")]
    client = ["qemu-io", "-f", "raw", "-t", "writeback", *asks, f"nbd:unix:{tmp_path}/nbd"]
    with subprocess.Popen(client, stdout=subprocess.DEVNULL) as process:
        assert server.dead.wait(60.0)
        process.kill()
    server.settle()
    server.close()
    assert disk.cut(random.Random(1)).unflushed == 3
    assert page_of(disk, 3) == OLD


@pytest.mark.vm
@pytest.mark.slow
def test_case_12_what_was_durable_in_a_guest_outlives_a_power_cut(tmp_path: Path) -> None:
    why = vm.missing() or vm.unbuilt()
    if why:
        pytest.skip(why)
    run = Run(tmp_path, 7, "tcg")
    run.rounds(1)
    assert run.totals.good, run.report()
    assert run.report()["rounds"] == 1
