"""Keys are the same in every process and in Rust; every field changes all of them."""

from __future__ import annotations

import array
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import InvalidArgumentError, KvLayout, Namespace, NamespaceSpec
from tiered_kv.blocking import BlockingStore
from tiered_kv.spec import rope_text

VECTORS = Path(__file__).parent / "vectors" / "keys.json"
CASES: list[dict[str, Any]] = json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def store() -> Iterator[BlockingStore]:
    with BlockingStore.open(dram_capacity="1MiB", huge_pages=False) as opened:
        yield opened


def _spec(fields: dict[str, Any]) -> NamespaceSpec:
    layout = dict(fields["layout"])
    return NamespaceSpec(**{**fields, "layout": KvLayout(layout.pop("tokens_per_block"), **layout)})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["spec"]["model"])
def test_the_vectors_hold_in_the_core(store: BlockingStore, case: dict[str, Any]) -> None:
    ns = store.namespace(_spec(case["spec"]))
    assert ns.id == case["id"]
    for sequence in case["sequences"]:
        parent = bytes.fromhex(sequence["parent"]) if sequence["parent"] else None
        for ids in (sequence["tokens"], array.array("I", sequence["tokens"])):
            keys = ns.keys_from_tokens(ids, parent, sequence["tail"])
            assert [key.hex() for key in api.split(keys)] == sequence["keys"]
    hashes = [bytes.fromhex(entry["opaque"]) for entry in case["opaque"]]
    assert [key.hex() for key in api.split(ns.keys_from_opaque(hashes))] == [
        entry["key"] for entry in case["opaque"]
    ]
    for opaque in hashes:
        assert ns.keys_from_opaque(opaque, len(opaque)) == ns.keys_from_opaque([opaque])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["spec"]["model"])
def test_the_vectors_hold_without_the_core(case: dict[str, Any]) -> None:
    ns = api.namespace_id(case["spec"])
    assert ns.hex() == case["id"]
    per_block = case["spec"]["layout"]["tokens_per_block"]
    for sequence in case["sequences"]:
        parent = bytes.fromhex(sequence["parent"]) if sequence["parent"] else None
        keys = api.token_keys(ns, sequence["tokens"], per_block, parent, sequence["tail"])
        assert [key.hex() for key in keys] == sequence["keys"]
    for entry in case["opaque"]:
        assert api.opaque_key(ns, bytes.fromhex(entry["opaque"])).hex() == entry["key"]


PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import api
from tiered_kv.blocking import BlockingStore
with BlockingStore.open(dram_capacity="1MiB", huge_pages=False) as store:
    rope = {name: 1.0 for name in {"theta", "factor", "kind", "scale"}}
    ns = store.namespace(api.spec(rope=rope))
    print(ns.id, ns.keys_from_tokens(api.tokens(3), tail=True).hex())
"""


def test_twenty_processes_agree() -> None:
    said = set()
    for seed in range(20):
        env = {**os.environ, "PYTHONHASHSEED": str(seed * 1000)}
        run = subprocess.run(
            [sys.executable, "-c", PROCESS, str(Path(__file__).parent)],
            env=env,
            check=True,
            capture_output=True,
            text=True,
        )
        said.add(run.stdout)
    assert len(said) == 1
    assert said.pop().count("\n") == 1


CHANGES: list[dict[str, Any]] = [
    {"model": "other"},
    {"weights": "other"},
    {"kv_dtype": "float16"},
    {"layout": KvLayout(api.TOKENS, api.BLOCK_BYTES + 1)},
    {"layout": KvLayout(api.TOKENS, layer_groups=2, slab_bytes=[2500, 2500])},
    {"layout": KvLayout(api.TOKENS, head_groups=2, slab_bytes=[2500, 2500])},
    {"rope": {"theta": 10000}},
    {"rope": {"theta": 10001}},
    {"rope": {"factor": 10000}},
    {"lora": "other"},
    {"salt": "other"},
    {"parallel": "tp=2/rank=0"},
    {"engine": "other"},
]


def test_every_field_changes_every_key(store: BlockingStore) -> None:
    ids = api.tokens(4)
    opaque = [bytes([n]) * 8 for n in range(4)]
    seen: set[bytes] = set()
    for change in [{}, *CHANGES]:
        ns = store.namespace(api.spec(**change))
        keys = api.split(ns.keys_from_tokens(ids)) + api.split(ns.keys_from_opaque(opaque))
        assert len(keys) == 8
        assert not seen.intersection(keys), change
        seen.update(keys)
    fields = {field.name for field in dataclasses.fields(NamespaceSpec)}
    assert fields == {name for change in CHANGES for name in change}


def test_a_changed_field_makes_everything_miss(store: BlockingStore) -> None:
    ns = store.namespace(api.spec())
    keys = ns.keys_from_tokens(api.tokens(2))
    assert store.put(ns, keys, api.blocks(2)).stored == 2
    for change in CHANGES:
        other = store.namespace(api.spec(**change))
        assert store.lookup(other, other.keys_from_tokens(api.tokens(2))).hits == 0, change
        # The old keys mean nothing in another namespace either.
        assert store.lookup(other, keys).hits == 0, change
    assert store.lookup(ns, keys).hits == 2


def test_equal_rope_numbers_are_equal_whatever_their_type() -> None:
    assert rope_text(10000) == rope_text(10000.0) == "10000"
    assert rope_text(1.5) == "1.5"
    assert rope_text(True) == "true"
    assert rope_text([1, 2.0, "a", None]) == "[1,2,a,null]"
    with pytest.raises(InvalidArgumentError, match="`rope`"):
        rope_text(object())  # type: ignore[arg-type]


def test_the_token_count_is_in_the_key(store: BlockingStore) -> None:
    ns = store.namespace(api.spec())
    full, part = ns.keys_from_tokens([1, 2, 3, 0]), ns.keys_from_tokens([1, 2, 3], tail=True)
    assert full != part
    assert ns.keys_from_tokens([1, 2, 3]) == b""
    first, second = api.split(ns.keys_from_tokens(range(8)))
    assert ns.keys_from_tokens([4, 5, 6, 7], parent=first) == second


def _keys(ns: Namespace, ids: object) -> bytes:
    return ns.keys_from_tokens(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_every_integer_buffer_reads_alike(store: BlockingStore, code: str) -> None:
    ns = store.namespace(api.spec())
    ids = [1, 2, 3, 4, 100, 101, 102, 127]
    assert _keys(ns, array.array(code, ids)) == _keys(ns, ids)
    assert _keys(ns, memoryview(array.array(code, ids))) == _keys(ns, tuple(ids))


BAD_TOKENS: list[tuple[object, str]] = [
    ([1, -1, 2, 3], r"tokens\[1\].*-1"),
    ([0, 0, 0, 1 << 32], r"tokens\[3\].*4294967296"),
    ([1.5], r"tokens\[0\]"),
    (["1"], r"tokens\[0\]"),
    ("text", "tokens"),
    (7, "tokens"),
    (array.array("q", [1, 2, -5]), r"tokens\[2\].*-5"),
    (array.array("Q", [1 << 63]), r"tokens\[0\]"),
    (array.array("d", [1.0]), "tokens"),
    (memoryview(array.array("I", range(8)))[::2], "tokens"),
]


@pytest.mark.parametrize(("ids", "named"), BAD_TOKENS)
def test_wrong_tokens_are_named(store: BlockingStore, ids: object, named: str) -> None:
    ns = store.namespace(api.spec())
    with pytest.raises(InvalidArgumentError, match=named):
        _keys(ns, ids)
