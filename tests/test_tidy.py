"""The repository keeps its size rules, and each rule can fail."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

import tidy

ROOT = Path(__file__).resolve().parents[1]
LEFT_OVER = "TO" + "DO"


def _read_all() -> list[tuple[PurePosixPath, str]]:
    texts = []
    for name in tidy.repository_files(ROOT):
        path = PurePosixPath(name.as_posix())
        if tidy.is_text(path):
            texts.append((path, (ROOT / name).read_text(encoding="utf-8")))
    return texts


def test_the_repository_is_listed() -> None:
    names = {path.as_posix() for path in tidy.repository_files(ROOT)}
    assert {"Makefile", "tests/tidy.py", "rust/types/src/lib.rs"} <= names
    assert not any(name.startswith((".venv/", "target/")) for name in names)


@pytest.mark.parametrize("rule", tidy.TEXT_RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps(rule: tidy.Rule) -> None:
    faults = [fault for path, text in _read_all() for fault in rule(path, text)]
    assert not faults, "\n" + "\n".join(faults)


def test_the_repository_has_no_large_file() -> None:
    files = tidy.repository_files(ROOT)
    sizes = [(PurePosixPath(name.as_posix()), (ROOT / name).stat().st_size) for name in files]
    faults = [fault for path, size in sizes for fault in tidy.file_size(path, size)]
    assert not faults, "\n" + "\n".join(faults)


def _rust_function(lines: int) -> str:
    """A function of `lines` lines, full of braces that are not code."""
    noise = [
        'let a = "{ \\" {"; // }}}',
        'let b = r#"}} " {{"#;',
        "let c = ['{', '\\'', '\\u{7b}'];",
        "/* { /* } */ } */",
        "fn_like::<'a>(b'{');",
    ]
    body = [noise[number % len(noise)] for number in range(lines - 2)]
    return "\n".join(["fn long<'a>(x: [u8; 4]) -> &'a str {", *body, "}", "fn next() {}", ""])


def _python_function(lines: int) -> str:
    return "@decorated\ndef long():\n" + "    x = 1\n" * (lines - 1)


# Rule, path, a text at the limit that it accepts, a text beyond it that it must refuse.
PLANTED = [
    (tidy.file_length, "a.rs", "x\n" * 500, "x\n" * 501),
    (tidy.line_length, "a.py", "x" * 100, "x" * 101),
    (tidy.line_length, "Makefile", "x" * 100, "x" * 101),
    (tidy.function_length, "a.rs", _rust_function(70), _rust_function(71)),
    (tidy.function_length, "a.py", _python_function(70), _python_function(71)),
    (tidy.marked_work, "a.md", f"{LEFT_OVER}(ann): it", f"{LEFT_OVER}: it"),
    (tidy.no_unwrap, "rust/a/src/b.rs", 'let x = y.expect("so");', "let x = y.unwrap();"),
    (tidy.no_unwrap, "a.rs", "// y.unwrap()\n", "fn f() { y\n.unwrap() }"),
    (tidy.no_unwrap, "a.rs", "#[test]\nfn f() { y.unwrap() }", "#[test]\nfn f() {}\ny.unwrap()"),
    (
        tidy.no_unwrap,
        "a.rs",
        '#[cfg(test)]\nmod t { const S: &str = "}"; fn f() { y.unwrap() } }',
        '#[cfg(test)]\nmod t { const S: &str = "{"; }\nfn f() { y.unwrap() }',
    ),
    (
        tidy.forbids_unsafe,
        "rust/store/src/lib.rs",
        "//! Doc.\n#![forbid(unsafe_code)]\n",
        "//! Doc.\n// #![forbid(unsafe_code)]\n",
    ),
    (
        tidy.unused_private,
        "a.py",
        "_LIMIT_S: float = 2\n_MOST = 3\ndef f(): wait(_LIMIT_S, _MOST)\n",
        "_LIMIT_S = 2\n_MOST = 3\ndef f(): wait(_MOST)  # _LIMIT_S\n",
    ),
]


@pytest.mark.parametrize(("rule", "path", "good", "bad"), PLANTED)
def test_a_rule_finds_what_was_planted(rule: tidy.Rule, path: str, good: str, bad: str) -> None:
    assert list(rule(PurePosixPath(path), good)) == []
    assert len(list(rule(PurePosixPath(path), bad))) == 1


def test_every_rule_was_planted() -> None:
    assert {entry[0] for entry in PLANTED} == set(tidy.TEXT_RULES)


def test_a_large_file_is_found() -> None:
    path = PurePosixPath("a.bin")
    assert list(tidy.file_size(path, tidy.MAX_FILE_BYTES - 1)) == []
    assert len(list(tidy.file_size(path, tidy.MAX_FILE_BYTES))) == 1


def test_rust_functions_are_found_with_their_lines() -> None:
    text = "trait T {\n    fn none(&self);\n    fn some(\n        &self,\n    ) {\n    }\n}\n"
    assert list(tidy.rust_functions(text)) == [("some", 3, 6)]
