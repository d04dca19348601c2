"""LMCache's native plugin: what LMCache does with it, without LMCache.

What a get reports as read is what was stored under the same key, namespace and length; whatever
becomes of the files, the rest is a miss.
"""

from __future__ import annotations

import gc
import json
import mmap
import random
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test_engine_options import WRONG_ANYWHERE
from tiered_kv import ConfigError, IoFaultError, TieredKvError
from tiered_kv.engines import flags
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.lmcache import TieredKVNativePlugin, objects
from tiered_kv.engines.lmcache.flags import named
from tiered_kv.engines.lmcache.options import PLACEHOLDER, Options

SIZE = 64 << 10
N = 12
LIMIT_S = 30.0

Ended = tuple[bool, str, list[bool]]


def params(path: Path, **fields: Any) -> dict[str, Any]:
    """Options of a small store."""
    small = {"nvme_capacity": "16MiB", "dram_capacity": "2MiB", "huge_pages": False}
    named = {"path": str(path / "kv"), "namespace": "model/weights-1/bfloat16"}
    return {**named, **small, **fields}


def key(number: int, salt: str = "") -> str:
    """A key as LMCache writes it: model, rank, group, hash, and a salt where there is one."""
    text = f"org/model@02000201@0@{number:032x}"
    return f"{text}@{salt}" if salt else text


KEYS = [key(number) for number in range(N)]


class Memory:
    """LMCache's own memory: buffers on page addresses, each a sequence of noise."""

    def __init__(self, count: int = N, size: int = SIZE, seed: int = 0) -> None:
        memory = memoryview(mmap.mmap(-1, count * size))
        memory[:] = random.Random(seed).randbytes(count * size)
        self.buffers = [memory[at * size : (at + 1) * size] for at in range(count)]

    def contents(self) -> list[bytes]:
        return [bytes(buffer) for buffer in self.buffers]


def ended(plugin: TieredKVNativePlugin, number: int) -> Ended:
    """Waits on the descriptor, as LMCache's thread does, until a batch has ended."""
    poller = select.poll()
    poller.register(plugin.event_fd(), select.POLLIN)
    while poller.poll(LIMIT_S * 1000):
        for found, ok, error, done in plugin.drain_completions():
            if found == number:
                assert not poller.poll(0), "what was drained does not ring again"
                return ok, error, done
    raise AssertionError("the descriptor did not become readable")


def get(plugin: TieredKVNativePlugin, keys: list[str], memory: Memory) -> list[bool]:
    ok, error, done = ended(plugin, plugin.submit_batch_get(keys, memory.buffers))
    assert (ok, error) == (True, "")
    return done


def put(plugin: TieredKVNativePlugin, keys: list[str], memory: Memory) -> None:
    done = ended(plugin, plugin.submit_batch_set(keys, memory.buffers))
    assert done == (True, "", [True] * len(keys))


def there(plugin: TieredKVNativePlugin, keys: list[str]) -> list[bool]:
    ok, _, done = ended(plugin, plugin.submit_batch_exists(keys))
    assert ok
    return done


@pytest.fixture(params=["tiered", "device", "direct"])
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    """With memory of ours, without, and with reads into LMCache's own."""
    if request.param == "tiered":
        return {}
    direct = {"direct_reads": request.param == "direct"}
    return {"dram_capacity": 0, "staging_capacity": "2MiB", **direct}


@pytest.fixture
def stored(tmp_path: Path, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options of a store that is closed and has all objects on the drive."""
    with_all = params(tmp_path, **fields)
    plugin = TieredKVNativePlugin(**with_all)
    put(plugin, KEYS, Memory())
    plugin.close()
    yield with_all
    gc.collect()


def test_what_is_set_is_got_also_after_a_restart(stored: dict[str, Any]) -> None:
    plugin = TieredKVNativePlugin(**stored)
    assert there(plugin, [*KEYS, key(99)]) == [True] * N + [False]
    into = Memory(seed=1)
    assert get(plugin, KEYS, into) == [True] * N
    assert into.contents() == Memory().contents()
    ok, _, gone = ended(plugin, plugin.submit_batch_delete(KEYS[:5]))
    assert (ok, gone) == (True, [True] * 5)
    assert there(plugin, KEYS) == [False] * 5 + [True] * (N - 5)
    assert get(plugin, KEYS, into) == [False] * 5 + [True] * (N - 5)
    assert plugin.status()["is_healthy"]
    assert plugin.status()["faults"] == 0
    plugin.close()


def test_another_length_than_the_stored_one_is_a_miss(stored: dict[str, Any]) -> None:
    plugin = TieredKVNativePlugin(**stored)
    for size in (SIZE - 4096, SIZE + 4096, 512):
        into = Memory(size=size, seed=1)
        assert get(plugin, KEYS, into) == [False] * N
    mixed = Memory(N, SIZE, seed=2)
    mixed.buffers[3] = Memory(1, 4096, seed=3).buffers[0]
    assert get(plugin, KEYS, mixed) == [True] * 3 + [False] + [True] * (N - 4)
    plugin.close()


def test_objects_of_several_lengths_go_in_one_batch(tmp_path: Path) -> None:
    plugin = TieredKVNativePlugin(**params(tmp_path))
    source, into = Memory(), Memory(seed=1)
    for memory, seed in ((source, 5), (into, 6)):
        memory.buffers[::2] = Memory(N // 2, 8192, seed).buffers
    put(plugin, KEYS, source)
    assert get(plugin, KEYS, into) == [True] * N
    assert into.contents() == source.contents()
    plugin.close()


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": "model/weights-2/bfloat16"},
        {"namespace": "model/weights-1/fp8"},
    ],
    ids=["weights", "dtype"],
)
def test_a_new_revision_or_dtype_under_the_same_keys_misses(
    stored: dict[str, Any], other: dict[str, str]
) -> None:
    plugin = TieredKVNativePlugin(**{**stored, **other})
    assert there(plugin, KEYS) == [False] * N
    assert get(plugin, KEYS, Memory(seed=1)) == [False] * N
    mine = Memory(seed=4)
    put(plugin, KEYS, mine)
    plugin.close()
    plugin = TieredKVNativePlugin(**stored)
    into = Memory(seed=1)
    assert get(plugin, KEYS, into) == [True] * N
    assert into.contents() == Memory().contents(), "those of the first are as they were"
    plugin.close()


def test_two_salts_share_nothing_so_that_each_lora_adapter_needs_one(tmp_path: Path) -> None:
    plugin = TieredKVNativePlugin(**params(tmp_path))
    of = {salt: Memory(seed=seed) for seed, salt in enumerate(("", "lora-a", "lora-b"))}
    for salt in ("", "lora-a"):
        put(plugin, [key(number, salt) for number in range(N)], of[salt])
    for salt, memory in of.items():
        into = Memory(seed=9)
        done = get(plugin, [key(number, salt) for number in range(N)], into)
        assert done == [salt != "lora-b"] * N
        assert salt == "lora-b" or into.contents() == memory.contents()
    plugin.close()


@pytest.mark.parametrize("part", ["org/modem", "03000201", "1", "0" * 31 + "f"])
def test_each_part_of_a_key_counts(tmp_path: Path, part: str) -> None:
    plugin = TieredKVNativePlugin(**params(tmp_path))
    memory = Memory(1)
    put(plugin, ["org/model@02000201@0@" + "0" * 32], memory)
    parts = ["org/model", "02000201", "0", "0" * 32]
    place = {"org/modem": 0, "03000201": 1, "1": 2}.get(part, 3)
    parts[place] = part
    assert there(plugin, ["@".join(parts)]) == [False]
    assert get(plugin, ["@".join(parts)], memory) == [False]
    plugin.close()


def damaged_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))


def places(directory: Path) -> list[tuple[Path, int]]:
    """Where each object's bytes are."""
    found = []
    for content in Memory().contents():
        for path in sorted(directory.glob("segment-*.tkv")):
            at = path.read_bytes().find(content[:4096])
            if at >= 0:
                found.append((path, at))
                break
    assert len(found) == N
    return found


@pytest.mark.parametrize("damage", ["flip", "truncate", "lengthen", "delete"])
def test_damage_under_load_is_a_miss_and_heals(stored: dict[str, Any], damage: str) -> None:
    plugin = TieredKVNativePlugin(**stored)
    where = places(Path(stored["path"]))
    stop = threading.Event()
    wrong: list[int] = []
    contents = Memory().contents()

    def load() -> None:
        into = Memory(seed=1)
        while not stop.is_set():
            done = get(plugin, KEYS, into)
            wrong.extend(
                place
                for place, did in enumerate(done)
                if did and bytes(into.buffers[place]) != contents[place]
            )

    reader = threading.Thread(target=load)
    reader.start()
    for path, at in where[::2]:
        match damage:
            case "flip":
                damaged_byte(path, at + 5000)
            case "truncate":
                with path.open("r+b") as file:
                    file.truncate(at + 100)
            case "lengthen":
                with path.open("ab") as end:
                    end.write(b"x" * 4096)
            case _:
                path.unlink(missing_ok=True)
    stop.set()
    reader.join()
    assert wrong == [], "bytes that were not stored were served"
    plugin.close()
    again = TieredKVNativePlugin(**stored)
    into = Memory(seed=1)
    done = get(again, KEYS, into)
    for place, did in enumerate(done):
        assert not did or bytes(into.buffers[place]) == contents[place]
    if damage in ("truncate", "delete") and "dram_capacity" in stored:
        assert not all(done)
    put(again, KEYS, Memory())
    assert get(again, KEYS, into) == [True] * N
    assert into.contents() == contents
    again.close()


def test_a_damaged_byte_is_never_served_and_heals(stored: dict[str, Any]) -> None:
    for path, at in places(Path(stored["path"])):
        damaged_byte(path, at + 777)
    plugin = TieredKVNativePlugin(**stored)
    assert get(plugin, KEYS, Memory(seed=1)) == [False] * N
    put(plugin, KEYS, Memory())
    into = Memory(seed=2)
    assert get(plugin, KEYS, into) == [True] * N
    assert into.contents() == Memory().contents()
    plugin.close()


def test_a_store_that_fails_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    small = {"dram_capacity": 0, "staging_capacity": "2MiB"}
    plugin = TieredKVNativePlugin(**params(tmp_path, **small))
    large = Memory(1, 4 << 20)
    ok, error, done = ended(plugin, plugin.submit_batch_set([key(0)], large.buffers))
    assert (ok, done) == (False, [False])
    assert "`segment_bytes`" in error, "the error names the remedy"
    assert there(plugin, [key(0)]) == [False]
    into = Memory(1, 4 << 20)
    assert get(plugin, [key(0)], into) == [False]
    assert plugin.status()["faults"] == 1
    put(plugin, KEYS, Memory())
    plugin.close()


@pytest.mark.parametrize("wrong", [[], [b"read-only"], [None]])
def test_a_wrong_call_ends_as_failed_and_raises_nothing(tmp_path: Path, wrong: list[Any]) -> None:
    plugin = TieredKVNativePlugin(**params(tmp_path))
    assert ended(plugin, plugin.submit_batch_set([key(1)], [bytearray(b"as long!!")]))[0]
    ok, error, done = ended(plugin, plugin.submit_batch_get([key(0)], wrong))
    assert (ok, done) == (False, [False])
    assert error
    assert ended(plugin, plugin.submit_batch_exists([])) == (True, "", [])
    assert ended(plugin, plugin.submit_batch_delete([])) == (True, "", [])
    plugin.close()
    assert isinstance(plugin.submit_batch_exists(KEYS), int)
    assert plugin.drain_completions()


def test_close_with_calls_under_way_touches_no_memory_afterwards(
    stored: dict[str, Any],
) -> None:
    for _ in range(5):
        plugin = TieredKVNativePlugin(**stored)
        into = [Memory(seed=seed) for seed in range(4)]
        for memory in into:
            plugin.submit_batch_get(KEYS, memory.buffers)
            plugin.submit_batch_set([f"{name}x" for name in KEYS], memory.buffers)
        plugin.close()
        for memory in into:
            for buffer in memory.buffers:
                buffer[:] = b"\x5a" * SIZE
        # Another store takes the drive's answers of before, where any were still to come.
        other = TieredKVNativePlugin(**stored)
        get(other, KEYS, Memory(seed=1))
        other.close()
        assert all(set(content) == {0x5A} for memory in into for content in memory.contents())


def test_many_threads_submit_while_one_drains(tmp_path: Path) -> None:
    plugin = TieredKVNativePlugin(**params(tmp_path))
    put(plugin, KEYS, Memory())
    numbers: list[int] = []

    def submit() -> None:
        for _ in range(50):
            numbers.append(plugin.submit_batch_exists(KEYS))
            numbers.append(plugin.submit_batch_get(KEYS, Memory(seed=1).buffers))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    ends: list[int] = []
    poller = select.poll()
    poller.register(plugin.event_fd(), select.POLLIN)
    while len(ends) < 400 and poller.poll(LIMIT_S * 1000):
        for number, ok, _, done in plugin.drain_completions():
            assert ok
            assert done == [True] * N
            ends.append(number)
    for thread in threads:
        thread.join()
    assert sorted(ends) == sorted(numbers)
    plugin.close()


def test_without_a_namespace_it_does_not_open_and_says_where_one_is_from(tmp_path: Path) -> None:
    told = f"tiered-kv engines --path {tmp_path / 'kv'} --model"
    for namespace in (None, "", PLACEHOLDER, 7):
        with pytest.raises(ConfigError, match="`namespace`") as found:
            TieredKVNativePlugin(**params(tmp_path, namespace=namespace))
        assert told in str(found.value)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *WRONG_ANYWHERE,
        ({"direct_reads": "yes"}, "direct_reads"),
        ({"namespace": "x" * 2000}, "namespace"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": "256"}, "chunk_tokens"),
        ({"chunk_tokens": True}, "chunk_tokens"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"`{named}"):
        TieredKVNativePlugin(**{**params(tmp_path), **change})


def test_a_store_whose_test_fails_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(store: Any, size: int) -> None:
        class Lying:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def get_into(self, ns: Any, keys: bytes, *args: Any, **options: Any) -> Any:
                return store.get_into(ns, keys[32:] + keys[:32], *args, **options)

        false: Any = Lying()
        self_test(false, size)

    monkeypatch.setattr(objects, "self_test", lying)
    with pytest.raises(IoFaultError, match="other bytes"):
        TieredKVNativePlugin(**params(tmp_path))
    monkeypatch.undo()
    TieredKVNativePlugin(**params(tmp_path)).close()


def test_the_directory_is_its_owners_alone_and_one_process_has_it(tmp_path: Path) -> None:
    plugin = TieredKVNativePlugin(**params(tmp_path))
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    script = "import sys; from tiered_kv.engines.lmcache import TieredKVNativePlugin as P; "
    script += "P(path=sys.argv[1], namespace='m/w/d', nvme_capacity='16MiB')"
    command = [sys.executable, "-c", script, str(tmp_path / "kv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "InUseError" in done.stderr
    plugin.close()


def test_importing_it_imports_neither_lmcache_nor_torch() -> None:
    script = "import sys, tiered_kv.engines.lmcache; "
    script += "print([m for m in ('lmcache', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def model(directory: Path, weights: bytes = b"weights", dtype: str = "bfloat16") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
    return directory


def test_the_printed_flags_are_ones_that_the_options_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = flags.engines(tmp_path, "1GiB", "16MiB", model(tmp_path / "tiny"))
    mine = [row["config"] for row in rows if row["engine"].startswith("lmcache")]
    assert [config["type"] for config in mine] == ["plugin", "native_plugin"]
    for config in mine:
        options = Options.parse(config["adapter_params"])
        assert options.path == tmp_path
        assert options.namespace.startswith("tiny/")
        assert options.namespace.endswith("/bfloat16")
    (placed,) = {
        row["config"]["adapter_params"]["namespace"]
        for row in flags.engines(tmp_path, None, "16MiB")
        if row["engine"].startswith("lmcache")
    }
    with pytest.raises(TieredKvError, match="namespace"):
        Options.parse({"path": "x", "nvme_capacity": "16MiB", "namespace": placed})


def test_the_namespace_changes_with_weights_configuration_and_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = [
        named(model(tmp_path / "m")),
        named(model(tmp_path / "m", dtype="float32")),
        named(model(tmp_path / "m"), "fp8"),
        named(model(tmp_path / "m", weights=b"other weights")),
    ]
    assert len(set(names)) == len(names)
    assert named(model(tmp_path / "m")) == names[0]
    (tmp_path / "m/model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weight files"):
        named(tmp_path / "m")


def test_what_cannot_be_deleted_is_not_told_to_be_gone(stored: dict[str, Any]) -> None:
    plugin = TieredKVNativePlugin(**stored)
    plugin._objects._channel.close()
    plugin.submit_batch_delete(KEYS[:2])
    (end,) = plugin.drain_completions()
    assert (end[1], end[3]) == (False, [False, False])
    plugin.close()
