"""The list of mutants that `make sim-mutants` plants keeps up with the sources."""

from __future__ import annotations

import re

import pytest

from mutants.__main__ import ROOT, Mutant, cargo_test, mutants, plant

ALL = mutants()
REQUIRED = {
    "drop-sync",
    "skip-checksum-of-loads",
    "free-slot-under-write",
    "forget-generation-at-recovery",
    "skip-tombstones",
    "forget-one-put-in-a-thousand",
    "publish-cancelled-load",
}


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_each_can_be_planted_in_exactly_one_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert plant(mutant, text) != text


def test_the_list_names_each_once_and_all_that_are_required() -> None:
    names = [mutant.name for mutant in ALL]
    assert len(names) == len(set(names))
    assert {mutant.name for mutant in ALL if mutant.required} >= REQUIRED
    assert not any(mutant.required and mutant.survives for mutant in ALL)


def test_a_text_that_is_gone_or_there_twice_is_refused() -> None:
    mutant = Mutant(name="m", breaks="b", file="f", old="x", new="y")
    assert plant(mutant, "axb") == "ayb"
    for text in ("ab", "xx"):
        with pytest.raises(ValueError, match="m: its old text occurs"):
            plant(mutant, text)


@pytest.mark.parametrize("mutant", [m for m in ALL if m.test], ids=lambda mutant: mutant.name)
def test_the_test_that_finds_one_is_there(mutant: Mutant) -> None:
    path, _, name = mutant.test.partition("::")
    assert re.search(rf"^\s*fn {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE)
    assert not mutant.survives


def test_cargo_is_told_where_a_test_is() -> None:
    cargo = ["cargo", "test", "--locked", "-p"]
    for test, command in {
        "rust/store/src/sim/by_hand.rs::a": ["tiered-kv", "--lib", "a"],
        "tests/store_load.rs::b": ["tiered-kv", "--test", "store_load", "b"],
        "rust/io/tests/uring.rs::c": ["tiered-kv-io", "--test", "uring", "c"],
    }.items():
        assert cargo_test(test) == cargo + command


def test_the_table_of_planted_faults_names_those_of_the_list() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    rows = text.split("\n## Planted faults\n")[1].split("\n## ")[0]
    named = re.findall(r"`([a-z]+(?:-[a-z]+)+)`", rows.split("|---|", 1)[1])
    assert set(named) <= {mutant.name for mutant in ALL}
    cases = [int(n) for n in re.findall(r"^\| (\d+) \|", rows, re.MULTILINE)]
    said = re.search(r"^Not tried.*: cases ([\d, ]+)\.$", rows, re.MULTILINE)
    open_cases = [int(n) for n in said[1].split(",")] if said else []
    assert {*cases, *open_cases} >= {*range(1, 21), 25, 27, 31, 33, 35, 36}
    assert not {*cases} & {*open_cases}
