"""Failure case 6: no damage to a store's files is ever served.

Whatever a byte or a file becomes, a block is the bytes that were stored or a miss; what is bad is
quarantined and counted, and the next put heals it. Cases 9 and 33 ride along.
"""

from __future__ import annotations

import mmap
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import FormatMismatchError
from tiered_kv.blocking import BlockingStore

BLOCKS = 40
PAGE = 4096
SECTOR = 512
SLOT = 8192
"""Bytes of the slot of a block of `api.BLOCK_BYTES`."""

CONTENTS = api.blocks(BLOCKS)
Damage = Callable[[Path, random.Random], None]


def config(directory: Path, **fields: Any) -> dict[str, Any]:
    """A drive of which host memory holds a small part; 28 blocks a segment."""
    return api.config(directory, dram_capacity="128KiB", segment_bytes="256KiB") | fields


def fill(store: BlockingStore, contents: list[bytes] = CONTENTS) -> bytes:
    """Stores all blocks that are not there, and waits until they are durable."""
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(BLOCKS))
    for at in range(0, BLOCKS, 4):
        some = keys[32 * at : 32 * (at + 4)]
        report = store.put(ns, some, contents[at : at + 4], wait=30.0)
        assert report.throttled == 0
    assert store.flush().all_durable
    return keys


def served(store: BlockingStore) -> list[bool]:
    """Which blocks are there: each is asked for, and what comes is what was stored."""
    ns = store.namespace(api.spec())
    there = []
    keys = api.split(ns.keys_from_tokens(api.tokens(BLOCKS)))
    for key, content in zip(keys, CONTENTS, strict=True):
        out = bytearray(api.BLOCK_BYTES)
        hit = store.get_into(ns, key, out).items[0] is None
        if hit:
            assert bytes(out) == content, "wrong bytes were served"
        there.append(hit)
    return there


def heals(store: BlockingStore) -> None:
    """The next put makes every block whole again."""
    fill(store)
    assert all(served(store))
    assert store.scrub().corrupt == 0
    assert store.audit()["faults"] == []


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a closed store that holds all blocks."""
    directory = tmp_path_factory.mktemp("image") / "kv"
    with BlockingStore.open(**config(directory)) as store:
        fill(store)
    return directory


@pytest.fixture(params=["closed", "crashed"])
def directory(request: pytest.FixtureRequest, image: Path, tmp_path: Path) -> Path:
    """A copy of it; as a crash leaves it, without a checkpoint."""
    copy = tmp_path / "kv"
    shutil.copytree(image, copy)
    if request.param == "crashed":
        (copy / "checkpoint.tkv").unlink()
    return copy


def segments(directory: Path) -> list[Path]:
    found = sorted(directory.glob("segment-*.tkv"))
    assert len(found) >= 2, "blocks of several segments"
    return found


def change(path: Path, at: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def swap(a: tuple[Path, int], b: tuple[Path, int], length: int) -> None:
    """Exchanges two ranges of files."""
    first, second = ((path.read_bytes()[at : at + length]) for path, at in (a, b))
    assert first != second
    change(*a, second)
    change(*b, first)


def payload(path: Path, content: bytes) -> int:
    """Where a block's bytes are in a segment."""
    at = path.read_bytes().find(content[:64])
    assert at > 0
    return at


def places(directory: Path) -> dict[int, tuple[Path, int]]:
    """The file and position of each block."""
    found = {}
    for path in segments(directory):
        data = path.read_bytes()
        for number, content in enumerate(CONTENTS):
            at = data.find(content[:64])
            if at > 0:
                found[number] = (path, at)
    assert len(found) == BLOCKS
    return found


def flip_payload(directory: Path, rng: random.Random) -> None:
    path, at = places(directory)[rng.randrange(BLOCKS)]
    at += rng.randrange(api.BLOCK_BYTES)
    change(path, at, bytes([path.read_bytes()[at] ^ 1 << rng.randrange(8)]))


def zero_payload(directory: Path, rng: random.Random) -> None:
    path, at = places(directory)[rng.randrange(BLOCKS)]
    change(path, at, bytes(SECTOR))


def swap_payloads(directory: Path, rng: random.Random) -> None:
    found = places(directory)
    a, b = rng.sample(range(BLOCKS), 2)
    swap(found[a], found[b], SLOT)


def older_payload(directory: Path, rng: random.Random) -> None:
    """A write that the drive forgot: another block of the same length is still there."""
    path, at = places(directory)[rng.randrange(BLOCKS)]
    change(path, at, rng.randbytes(SLOT))


@pytest.mark.parametrize(
    ("damage", "bad"),
    [(flip_payload, 1), (zero_payload, 1), (swap_payloads, 2), (older_payload, 1)],
)
@pytest.mark.parametrize("seed", range(3))
def test_case_6_a_damaged_payload_costs_its_block_and_no_other(
    directory: Path, damage: Damage, bad: int, seed: int
) -> None:
    damage(directory, random.Random(seed))
    with BlockingStore.open(**config(directory)) as store:
        assert served(store).count(False) == bad
        counters = store.stats()["counters"]
        assert (counters["corrupt_nvme"], counters["quarantined"]) == (bad, bad)
        assert store.stats()["misses"]["corrupt"] == bad
        assert served(store).count(False) == bad, "case 33: missed again, not failed again"
        assert store.stats()["counters"]["corrupt_nvme"] == bad
        heals(store)
    with BlockingStore.open(**config(directory)) as store:
        assert all(served(store))


@pytest.mark.parametrize("seed", range(3))
def test_case_6_a_scrub_finds_it_first(directory: Path, seed: int) -> None:
    flip_payload(directory, random.Random(seed))
    with BlockingStore.open(**config(directory)) as store:
        found = store.scrub()
        assert (found.complete, found.blocks, found.corrupt) == (True, BLOCKS - 1, 1)
        assert store.stats()["counters"]["scrub_faults"] == 1
        assert served(store).count(False) == 1
        assert store.stats()["misses"]["corrupt"] == 0, "it was gone before it was asked for"
        heals(store)


def swap_headers(directory: Path, rng: random.Random) -> None:
    """Two sound records, each in the other's place."""
    path = rng.choice(segments(directory))
    swap((path, PAGE), (path, PAGE + SECTOR), SECTOR)


def swap_whole(directory: Path, rng: random.Random) -> None:
    """Headers and payloads, each in the other's place."""
    path = segments(directory)[0]
    swap_headers(directory, rng)
    found = sorted(at for where, at in places(directory).values() if where == path)
    swap((path, found[0]), (path, found[1]), SLOT)


def swap_segments(directory: Path, _: random.Random) -> None:
    a, b = segments(directory)[:2]
    spare = directory / "spare"
    a.rename(spare)
    b.rename(a)
    spare.rename(b)


def foreign_segment(directory: Path, rng: random.Random) -> None:
    """The segment of another store, whose keys are the same and whose bytes are not."""
    other = directory.parent / "other"
    with BlockingStore.open(**config(other)) as store:
        fill(store, api.blocks(BLOCKS, seed=rng.randrange(1, 1 << 30)))
    shutil.copyfile(segments(other)[0], segments(directory)[0])


def resize(change_length: Callable[[int], int]) -> Damage:
    def damage(directory: Path, rng: random.Random) -> None:
        path = rng.choice(segments(directory))
        length = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(change_length(length))

    return damage


def delete(pattern: str) -> Damage:
    def damage(directory: Path, rng: random.Random) -> None:
        found = sorted(directory.glob(pattern))
        if found:
            rng.choice(found).unlink()

    return damage


def blank(start: int, length: int | None, byte: bytes = b"\0") -> Damage:
    """A stretch of a segment becomes one byte, again and again."""

    def damage(directory: Path, rng: random.Random) -> None:
        path = rng.choice(segments(directory))
        change(path, start, byte * (length or path.stat().st_size - start))

    return damage


WHOLE_FILES: dict[str, Damage] = {
    "headers swapped": swap_headers,
    "records swapped": swap_whole,
    "segments swapped": swap_segments,
    "segment of another store": foreign_segment,
    "truncated to half": resize(lambda length: length // 2),
    "truncated to nothing": resize(lambda _: 0),
    "truncated by a byte": resize(lambda length: length - 1),
    "lengthened by a byte": resize(lambda length: length + 1),
    "lengthened by a page": resize(lambda length: length + PAGE),
    "segment deleted": delete("segment-*.tkv"),
    "header page zeroed": blank(0, PAGE),
    "table zeroed": blank(PAGE, PAGE),
    "payloads zeroed": blank(100 * 1024, None),
    "all zeroed": blank(0, None),
    "all ones": blank(0, None, b"\xff"),
}

HEADERS = {"headers swapped", "header page zeroed", "table zeroed"}
"""What leaves every payload as it was."""


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_case_6_damage_to_a_whole_file_is_misses(directory: Path, name: str) -> None:
    closed = (directory / "checkpoint.tkv").exists()
    WHOLE_FILES[name](directory, random.Random(0))
    with BlockingStore.open(**config(directory)) as store:
        # After a clean close the checkpoint stands for the headers.
        assert not all(served(store)) or (closed and name in HEADERS), "the damage shows"
        heals(store)
    with BlockingStore.open(**config(directory)) as store:
        assert all(served(store))


@pytest.mark.parametrize("pattern", ["journal.tkv", "checkpoint.tkv", "LOCK"])
def test_what_can_be_made_anew_costs_nothing(directory: Path, pattern: str) -> None:
    delete(pattern)(directory, random.Random(0))
    with BlockingStore.open(**config(directory)) as store:
        assert all(served(store))


@pytest.mark.parametrize("seed", range(24))
def test_case_6_any_byte_of_any_file(directory: Path, seed: int) -> None:
    """A byte anywhere, flipped: it is refused at open with the remedy, or at most blocks miss."""
    rng = random.Random(seed)
    files = sorted(path for path in directory.iterdir() if path.name != "LOCK")
    path = rng.choice([*files, *segments(directory), *segments(directory)])
    # Of a segment mostly the header page and the table, which the other tests leave alone.
    end = path.stat().st_size if rng.random() < 0.3 else min(path.stat().st_size, 5 * PAGE)
    at = rng.randrange(end)
    change(path, at, bytes([path.read_bytes()[at] ^ rng.randrange(1, 256)]))
    fields = config(directory)
    try:
        store = BlockingStore.open(**fields)
    except FormatMismatchError:
        if path.name != "superblock.tkv":
            raise
        store = BlockingStore.open(**fields, on_format_mismatch="reset")
    with store:
        served(store)
        heals(store)


LIVE: dict[str, Damage] = {
    name: damage
    for name, damage in WHOLE_FILES.items()
    if "swapped" not in name and "other" not in name
} | {"payloads swapped": swap_payloads, "a payload flipped": flip_payload}


@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("backend", ["auto", "blocking"])
def test_case_6_damage_while_the_store_is_open(
    image: Path, tmp_path: Path, name: str, backend: str
) -> None:
    """Case 9 as well: a file cut short under the store is a short read, and a miss."""
    directory = tmp_path / "kv"
    shutil.copytree(image, directory)
    with BlockingStore.open(**config(directory, io_backend=backend)) as store:
        LIVE[name](directory, random.Random(1))
        there = served(store)
        # Headers are read at open, and a deleted file goes on as long as it is open.
        unseen = HEADERS | {"segment deleted", "truncated by a byte"}
        assert not all(there) or name in unseen or "lengthened" in name
        assert store.health()["drives"][0]["state"] == "working"
        heals(store)


def test_case_6_drives_exchanged(tmp_path: Path) -> None:
    """The directory of one drive in the place of another's."""
    drives = [tmp_path / "a", tmp_path / "b"]
    fields = config(tmp_path, nvme_paths=drives)
    with BlockingStore.open(**fields) as store:
        fill(store)
    drives[0].rename(tmp_path / "c")
    drives[1].rename(drives[0])
    (tmp_path / "c").rename(drives[1])
    with BlockingStore.open(**fields) as store:
        served(store)
        heals(store)
    shutil.rmtree(drives[1])
    shutil.copytree(drives[0], drives[1])
    with BlockingStore.open(**fields) as store:
        served(store)
        heals(store)


@pytest.mark.parametrize("size", [100_000, 256 << 10])
@pytest.mark.parametrize("direct", [False, True])
def test_case_6_blocks_that_pass_through_a_buffer(tmp_path: Path, size: int, direct: bool) -> None:
    """Large loads of the blocking backend, of which some are read into a buffer and copied."""
    contents = api.blocks(BLOCKS, size=size)
    large = {"dram_capacity": "32MiB", "nvme_capacity": "32MiB", "segment_bytes": "2MiB"}
    fields = api.config(tmp_path / "kv", io_backend="blocking", **large)
    with BlockingStore.open(**fields) as store:
        ns = store.namespace(api.spec(size))
        keys = ns.keys_from_tokens(api.tokens(BLOCKS))
        assert store.put(ns, keys, contents, wait=30.0).stored == BLOCKS
        assert store.flush().all_durable
    # Among them some that surely pass through a buffer, and some that surely do not.
    bad = [1, 5, 6, 9, 12, *random.Random(size).sample(range(16, BLOCKS), 5)]
    for path in segments(tmp_path / "kv"):
        data = path.read_bytes()
        for number in bad:
            at = data.find(contents[number][:64])
            if at > 0:
                change(path, at + size - 1, bytes([contents[number][-1] ^ 1]))
    with BlockingStore.open(**fields) as store:
        ns = store.namespace(api.spec(size))
        memory = mmap.mmap(-1, size)
        region = store.register(memory, size)
        for number, key in enumerate(api.split(keys)):
            if direct:
                hit = store.get_into(ns, key, region.slots([0])).hits == 1
                found = bytes(region.read(0)) if hit else None
            else:
                with store.get(ns, key) as leases:
                    found = api.contents(leases)[0]
            assert found == (None if number in bad else contents[number]), number
        assert store.audit()["faults"] == []
