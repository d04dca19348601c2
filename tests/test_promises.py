"""Every promise in `docs/promises.md` names tests, and the tests are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {"Request path": 60, "Invariants": 15, "T3: slots, not a log": 20, "Decisions": 25}
"""Each section with the rows that it has at least."""
NAME = re.compile(r"`([\w/]+\.(?:rs|py))::(\w+)`")


def rows(text: str) -> dict[str, list[tuple[str, str]]]:
    """The rows of each section: promise, tests."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        cells = [line.strip("|").split(" | ") for line in body.splitlines() if line[:1] == "|"]
        # The first two lines of a table are its head.
        found[title] = [(row[0].strip(), row[-1].strip()) for row in cells[2:]]
    return found


def missing(text: str) -> list[str]:
    """Rows without a test, and tests that the sources do not have."""
    faults = []
    for section in rows(text).values():
        for promise, tests in section:
            named = NAME.findall(tests)
            if not named or NAME.sub("", tests).strip():
                faults.append(f"{promise}: names no test, or something else: {tests}")
            for path, test in named:
                source = ROOT / path
                keyword = "fn" if path.endswith(".rs") else "def"
                defined = re.compile(rf"^\s*(?:async )?{keyword} {test}\(", re.MULTILINE)
                if not source.is_file() or not defined.search(source.read_text("utf-8")):
                    faults.append(f"{promise}: there is no {path}::{test}")
    return faults


def test_every_promise_names_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "promises.md").read_text("utf-8")
    assert missing(text) == []
    found = rows(text)
    assert {title: len(found[title]) for title in SECTIONS if title in found} == {
        title: max(least, len(found.get(title, []))) for title, least in SECTIONS.items()
    }


def test_every_failure_case_names_tests_that_are_there_or_is_said_to_be_open() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    covered = rows(text)["Failure cases"]
    assert missing(f"# T\n\n## A\n| case | tests |\n|---|---|\n{table(covered)}") == []
    numbers = [int(case.split(".")[0]) for case, _ in covered]
    open_cases = [int(n) for n in re.findall(r"^- (\d+)\.", text, re.MULTILINE)]
    assert sorted(numbers + open_cases) == list(range(1, 37))


def table(cells: list[tuple[str, str]]) -> str:
    return "".join(f"| {case} | {tests} |\n" for case, tests in cells)


def test_a_promise_that_rots_is_noticed() -> None:
    table = "# T\n\n## A\n| promise | tests |\n|---|---|\n| one | {} |\n"
    here = "tests/test_promises.py"
    assert missing(table.format(f"`{here}::test_a_promise_that_rots_is_noticed`")) == []
    for rotten in [f"`{here}::test_gone`", "`tests/test_gone.py::test_x`", "", "by hand"]:
        assert len(missing(table.format(rotten))) == 1


def test_one_profile_is_optimised_and_has_assertions() -> None:
    profiles = tomllib.loads((ROOT / "Cargo.toml").read_text("utf-8"))["profile"]
    assert profiles["dev"]["opt-level"] == 3
    assert profiles["dev"]["debug-assertions"] is True
    assert "test" not in profiles
