"""Bad input is a typed error that names the field and the remedy."""

from __future__ import annotations

import array
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import api
import tiered_kv
from tiered_kv import (
    ClosedError,
    ConfigError,
    FormatMismatchError,
    InUseError,
    InvalidArgumentError,
    KvLayout,
    Namespace,
    NotFoundError,
    StoreConfig,
    StorePermissionError,
    TieredKvError,
    errors,
)
from tiered_kv.blocking import BlockingStore


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with BlockingStore.open(**api.config()) as opened:
        yield opened


def test_each_kind_has_one_class() -> None:
    classes = [getattr(tiered_kv, name) for name in dir(tiered_kv) if name.endswith("Error")]
    kinds = [cls.kind for cls in classes if cls is not TieredKvError]
    assert len(kinds) == len(set(kinds)) == 12
    for kind in kinds:
        error = errors.from_core(kind, "text", "op", True)
        assert (error.kind, error.op, error.retry, str(error)) == (kind, "op", True, "text")
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        assert (type(copy), copy.op, copy.retry) == (type(error), "op", True)
    assert issubclass(InvalidArgumentError, ValueError)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"dram_capacity": 0}, "dram_capacity.*nvme_capacity"),
    ({"dram_capacity": 0, "nvme_capacity": 0}, "dram_capacity.*nvme_capacity"),
    ({"dram_capacity": "lots"}, "dram_capacity.*not a size"),
    ({"dram_capacity": -1}, "dram_capacity"),
    ({"dram_capacity": 1 << 70}, "dram_capacity.*out of range"),
    ({"dram_capcity": "1MiB"}, "dram_capcity"),
    ({"nvme_capacity": "1GiB"}, "nvme_paths"),
    ({"nvme_paths": ["a"]}, "nvme_capacity"),
    ({"nvme_paths": 3}, "nvme_paths"),
    ({"nvme_paths": [object()]}, "nvme_paths.*object"),
    ({"nvme_paths": ["\udcff"], "nvme_capacity": "1GiB"}, "nvme_paths.*UTF-8"),
    ({"load_threads": "two"}, "load_threads"),
    ({"load_threads": 0}, "load_threads"),
    ({"huge_pages": 1}, "huge_pages"),
    ({"load_timeout_s": float("nan")}, "load_timeout_s"),
    ({"on_format_mismatch": "ask"}, "on_format_mismatch"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_CONFIGS)
def test_a_wrong_field_is_named_at_open(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        BlockingStore.open(**fields)
    assert (caught.value.kind, caught.value.retry) == ("config", False)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=named):
        StoreConfig.from_dict(fields)


def test_configuration_and_fields_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"dram_capacity.*not both"):
        BlockingStore.open(StoreConfig(), dram_capacity="1MiB")


def test_a_missing_parent_directory(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nvme_paths.*absent"):
        BlockingStore.open(**api.config(tmp_path / "absent" / "store"))


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    directory.mkdir(mode=0o500)
    if os.geteuid() != 0:
        with pytest.raises(StorePermissionError, match="nvme_paths"):
            BlockingStore.open(**api.config(directory))
        return
    # Root may write anywhere, so the open runs as somebody else.
    code = (
        "import os, sys, api; from tiered_kv import StorePermissionError\n"
        "from tiered_kv.blocking import BlockingStore\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: BlockingStore.open(**api.config(sys.argv[1]))\n"
        "except StorePermissionError as error: print(error)"
    )
    for part in (tmp_path, *tmp_path.parents[:-1]):
        if part.stat().st_uid == os.geteuid() and part != Path("/tmp"):  # noqa: S108
            part.chmod(part.stat().st_mode | 0o011)
    directory.chmod(0o500)
    run = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "nvme_paths" in run.stdout
    assert str(directory) in run.stdout


def test_another_format_version_and_its_reset(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(1))
        store.put(ns, keys, api.blocks(1))
    path = tmp_path / "superblock.tkv"
    raw = bytearray(path.read_bytes())
    position = raw.index(tiered_kv.FORMAT_VERSION.to_bytes(4, "little"), 8)
    raw[position : position + 4] = (99).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(FormatMismatchError, match=r"on_format_mismatch = .reset.") as caught:
        BlockingStore.open(**api.config(tmp_path))
    assert str(tmp_path) in str(caught.value)
    with BlockingStore.open(**api.config(tmp_path, on_format_mismatch="reset")) as store:
        ns = store.namespace(api.spec())
        assert store.lookup(ns, keys).hits == 0
        assert store.put(ns, keys, api.blocks(1)).stored == 1


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not delete", encoding="utf-8")
    for choice in ("error", "reset"):
        with pytest.raises(FormatMismatchError, match=r"thesis\.txt"):
            BlockingStore.open(**api.config(tmp_path, on_format_mismatch=choice))
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "do not delete"


def test_a_directory_in_use_by_another_process(tmp_path: Path) -> None:
    code = (
        "import sys, api; from tiered_kv.blocking import BlockingStore\n"
        "with BlockingStore.open(**api.config(sys.argv[1])): print('open', flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(InUseError, match=f"another process .pid {owner.pid}"):
            BlockingStore.open(**api.config(tmp_path))
    finally:
        owner.communicate("\n", timeout=60)
    with BlockingStore.open(**api.config(tmp_path)):
        pass


def _setup(store: BlockingStore, n: int = 2) -> tuple[Namespace, bytes]:
    ns = store.namespace(api.spec())
    return ns, ns.keys_from_tokens(api.tokens(n))


SIZE = api.BLOCK_BYTES
BAD_BUFFERS: list[tuple[Any, str]] = [
    ([bytes(SIZE)], "`buffers` has 1 buffers for 2 keys"),
    ([bytes(SIZE)] * 3, "`buffers` has 3 buffers for 2 keys"),
    ([bytes(SIZE), bytes(SIZE - 1)], r"`buffers\[1\]` holds 4999 bytes.*5000"),
    (bytes(SIZE), "`buffers` holds 5000 bytes.*10000"),
    (bytes(2 * SIZE + 1), "`buffers` holds 10001 bytes"),
    ([bytes(SIZE), "text"], r"`buffers\[1\]`: a str"),
    ([bytes(SIZE), None], r"`buffers\[1\]`: a NoneType"),
    ("text", "`buffers` is text"),
    (7, "`buffers` is neither"),
    ([bytes(SIZE), memoryview(bytes(2 * SIZE))[::2]], r"`buffers\[1\]` is not C-contiguous"),
    (array.array("d", bytes(2 * SIZE)), "`buffers`.*format .d..*float32"),
]


@pytest.mark.parametrize(("buffers", "named"), BAD_BUFFERS)
def test_wrong_buffers_are_named(store: BlockingStore, buffers: Any, named: str) -> None:
    ns, keys = _setup(store)
    with pytest.raises(InvalidArgumentError, match=named):
        store.put(ns, keys, buffers)
    with pytest.raises(InvalidArgumentError, match="`buffers"):
        store.get_into(ns, keys, buffers)
    assert store.stats()["blocks"] == 0


def test_integers_are_a_view_of_bytes(store: BlockingStore) -> None:
    ns, keys = _setup(store)
    assert store.put(ns, keys, array.array("Q", bytes(2 * SIZE))).stored == 2
    into: list[Any] = [array.array("f", bytes(SIZE)), array.array("h", bytes(SIZE))]
    assert store.get_into(ns, keys, into).hits == 2


def test_get_into_refuses_what_it_cannot_fill(store: BlockingStore) -> None:
    ns, keys = _setup(store)
    with pytest.raises(InvalidArgumentError, match=r"`buffers\[1\]` is read-only"):
        store.get_into(ns, keys, [bytearray(SIZE), bytes(SIZE)])
    with pytest.raises(InvalidArgumentError, match="`buffers` is read-only"):
        store.get_into(ns, keys, bytes(2 * SIZE))
    same = bytearray(SIZE)
    with pytest.raises(InvalidArgumentError, match=r"`buffers\[0\]` and `buffers\[1\]` overlap"):
        store.get_into(ns, keys, [same, same])
    whole = memoryview(bytearray(2 * SIZE))
    with pytest.raises(InvalidArgumentError, match=r"`buffers\[0\]` and `buffers\[1\]` overlap"):
        store.get_into(ns, keys, [whole[100 : 100 + SIZE], whole[:SIZE]])
    assert store.get_into(ns, keys, [whole[SIZE:], whole[:SIZE]]).items == ["absent"] * 2


def test_references_to_objects_are_refused(store: BlockingStore) -> None:
    numpy = pytest.importorskip("numpy")
    ns, keys = _setup(store)
    with pytest.raises(InvalidArgumentError, match="`buffers` holds references"):
        store.put(ns, keys, numpy.zeros(2 * SIZE // 8, dtype=object))
    with pytest.raises(InvalidArgumentError, match=r"`buffers`.*format .e."):
        store.put(ns, keys, numpy.zeros(SIZE, dtype=numpy.float16))
    assert store.put(ns, keys, numpy.zeros((2, SIZE // 4), dtype=numpy.float32)).stored == 2


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"parent": bytes(31)}, "`parent` holds 31 bytes"),
    ({"tokens": [4]}, "`tokens` has 1 for 2 keys"),
    ({"tokens": [4, 5]}, "`tokens` holds 5"),
    ({"tokens": [4, -1]}, r"`tokens\[1\]` is -1"),
    ({"chunk_ends": [True]}, "`chunk_ends` has 1 for 2 keys"),
    ({"computed": "magic"}, "`computed` is .magic."),
    ({"block_type": "magic"}, "`block_type` is .magic."),
    ({"timeout": -1}, "`timeout` is -1"),
    ({"timeout": float("nan")}, "`timeout` is nan"),
]


@pytest.mark.parametrize(("options", "named"), BAD_OPTIONS)
def test_wrong_options_are_named(store: BlockingStore, options: dict[str, Any], named: str) -> None:
    ns, keys = _setup(store)
    with pytest.raises(InvalidArgumentError, match=named):
        store.put(ns, keys, api.blocks(2), **options)


def test_wrong_keys_are_named(store: BlockingStore) -> None:
    ns, keys = _setup(store)
    for call in (store.get, store.lookup, store.reserve):
        with pytest.raises(InvalidArgumentError, match="`keys` holds 63 bytes"):
            call(ns, keys[:-1])
        with pytest.raises(InvalidArgumentError, match="`keys`"):
            call(ns, [keys])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="`key` holds 64 bytes"):
        store.contains(ns, keys)
    with pytest.raises(InvalidArgumentError, match=r"`mode` is .all."):
        store.lookup(ns, keys, "all")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="`packed` holds 7 bytes"):
        ns.keys_from_opaque(bytes(7), 8)
    with pytest.raises(InvalidArgumentError, match="`width` is missing"):
        ns.keys_from_opaque(bytes(8))
    with pytest.raises(InvalidArgumentError, match=r"`packed\[1\]` holds 7 bytes"):
        ns.keys_from_opaque([bytes(8), bytes(7)], 8)
    with pytest.raises(InvalidArgumentError, match="opaque key holds 0 bytes"):
        ns.keys_from_opaque([b""])


def test_a_namespace_belongs_to_one_store(store: BlockingStore) -> None:
    ns, keys = _setup(store)
    with BlockingStore.open(**api.config()) as other:
        for call in (other.get, other.lookup, other.reserve):
            with pytest.raises(InvalidArgumentError, match="`ns` belongs to another store"):
                call(ns, keys)
        with pytest.raises(InvalidArgumentError, match="another store"):
            other.publish(store.reserve(ns, keys))
        with pytest.raises(InvalidArgumentError, match="another store"):
            other.begin_request().observe(ns, keys)
        with pytest.raises(InvalidArgumentError, match="`req` belongs to another store"):
            store.get(ns, keys, req=other.begin_request())


BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "`model` is empty"),
    ({"weights": ""}, "`weights` is empty"),
    ({"kv_dtype": ""}, "`kv_dtype` is empty"),
    ({"salt": "s" * 4097}, "`salt` is longer"),
    ({"layout": KvLayout(4, 1 << 21)}, "`layout`.*dram_capacity"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_SPECS)
def test_wrong_specifications_are_named(
    store: BlockingStore, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        store.namespace(api.spec(**fields))


BAD_LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"tokens_per_block": 0, "block_bytes": 1}, "`tokens_per_block` is 0"),
    ({"tokens_per_block": 1, "block_bytes": -1}, "`block_bytes` is -1"),
    ({"tokens_per_block": 1, "block_bytes": True}, "`block_bytes` is True"),
    ({"tokens_per_block": 1}, "`block_bytes`.*`slab_bytes`"),
    ({"tokens_per_block": 1, "block_bytes": 1, "slab_bytes": [1]}, "not both"),
    ({"tokens_per_block": 1, "layer_groups": 2, "slab_bytes": [1]}, "`layer_groups`"),
    ({"tokens_per_block": 1, "layer_groups": 1 << 17, "slab_bytes": [1]}, "`layer_groups`"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_LAYOUTS)
def test_wrong_layouts_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        KvLayout(**fields)


def test_a_closed_store_says_so() -> None:
    store = BlockingStore.open(**api.config())
    ns, keys = _setup(store)
    reservation = store.reserve(ns, keys)
    store.close()
    calls: list[Any] = [
        lambda: store.get(ns, keys),
        lambda: store.get_into(ns, keys, bytearray(2 * SIZE)),
        lambda: store.put(ns, keys, bytes(2 * SIZE)),
        lambda: store.lookup(ns, keys),
        lambda: store.contains(ns, keys[:32]),
        lambda: store.reserve(ns, keys),
        lambda: store.publish(reservation),
        lambda: store.flush(),
        lambda: store.namespace(api.spec()),
        lambda: store.begin_request(),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed") as caught:
            call()
        assert (caught.value.kind, caught.value.retry) == ("closed", False)
    assert store.close().dropped == 0


def test_an_absent_file_to_digest(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="absent"):
        tiered_kv._core.blake3_file(tmp_path / "absent")


class Boastful:
    """A sequence that claims to be far longer than it is."""

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3, 4])

    def __getitem__(self, index: int) -> int:
        return [1, 2, 3, 4][index]


def test_no_memory_is_taken_for_what_a_sequence_claims(store: BlockingStore) -> None:
    ns = store.namespace(api.spec())
    boastful: Any = Boastful()
    keys = ns.keys_from_tokens([1, 2, 3, 4])
    assert ns.keys_from_tokens(boastful) == keys
    with pytest.raises(InvalidArgumentError, match=r"`chunk_ends\[0\]`"):
        store.put(ns, keys, api.blocks(1), chunk_ends=boastful)
    with pytest.raises(InvalidArgumentError, match="`chunk_ends` is not a sequence"):
        store.put(ns, keys, api.blocks(1), chunk_ends=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [2**62, "1000000TiB", 2**63 - 1])
def test_more_segments_than_can_be_kept_open_are_refused(
    tmp_path: Path, capacity: int | str
) -> None:
    with pytest.raises(ConfigError, match=r"`nvme_capacity` is cut into .* `segment_bytes`"):
        BlockingStore.open(**api.config(tmp_path, nvme_capacity=capacity))
    BlockingStore.open(**api.config(tmp_path)).close()


def test_a_limit_of_open_files_is_an_error_at_open(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; import api\n"
        "from tiered_kv.blocking import BlockingStore\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (96, hard))\n"
        "fields = {'nvme_capacity': '4MiB', 'segment_bytes': '64KiB'}\n"
        "BlockingStore.open(**api.config(Path(sys.argv[1]), **fields))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(api.__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "ConfigError" in ended.stderr
    assert "keep 32 open" in ended.stderr
    assert "ulimit -n" in ended.stderr


def test_the_limit_of_open_files_is_one_for_all_drives(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; import api\n"
        "from tiered_kv import ConfigError\n"
        "from tiered_kv.blocking import BlockingStore\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (124, hard))\n"
        "root = Path(sys.argv[1]); (root / 'm').mkdir()\n"
        "paths = [root / 'a', root / 'm' / 'b']\n"
        "fields = {'nvme_paths': paths, 'nvme_capacity': '2MiB', 'segment_bytes': '64KiB'}\n"
        "try:\n    BlockingStore.open(**api.config(**fields))\n"
        "except ConfigError as error:\n    print(error)\n"
        "assert not list(paths[0].glob('*.tkv')), 'nothing is left of what was refused'\n"
        "BlockingStore.open(**api.config(**fields | {'nvme_paths': paths[0]})).close()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(api.__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "keep 26 open beside those of the other drives" in ended.stdout


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_a_path_that_no_file_can_have_says_so(path: str) -> None:
    with pytest.raises(TieredKvError, match=r"nvme_paths: .*: correct the path"):
        BlockingStore.open(**api.config(nvme_paths=path, nvme_capacity="2MiB"))
