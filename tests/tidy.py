"""The size and hygiene rules of the repository, as functions from a file's text to its faults."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100
MAX_FILE_BYTES = 2 << 20

SAFE_CRATES = ("rust/types", "rust/policy", "rust/store")

_CODE = {".rs", ".py", ".pyi", ".sh"}
_NARROW = _CODE | {".toml"}
_NARROW_NAMES = {"Makefile", "run"}
_TEXT = _NARROW | {".md", ".yml", ".yaml", ".cfg"}
_UNTRACKED = {".git", ".venv", "target", "build", "dist", "__pycache__"}

Rule = Callable[[PurePosixPath, str], Iterator[str]]


def repository_files(root: Path) -> list[Path]:
    """Files that are tracked or would be, relative to `root`.

    A source archive has no `.git`; all but the usual build outputs counts there.
    """
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        names = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        every = (path.relative_to(root) for path in root.rglob("*"))
        names = [path for path in every if not _UNTRACKED.intersection(path.parts)]
    return sorted(name for name in names if (root / name).is_file())


def is_text(path: PurePosixPath) -> bool:
    """Whether the rules on text apply to `path`."""
    return path.suffix in _TEXT or path.name in _NARROW_NAMES


def file_length(path: PurePosixPath, text: str) -> Iterator[str]:
    """A source file has at most 500 lines."""
    lines = text.count("\n")
    if path.suffix in _CODE and lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines, more than {MAX_FILE_LINES}: split it"


def line_length(path: PurePosixPath, text: str) -> Iterator[str]:
    """A line of code has at most 100 columns."""
    if path.suffix not in _NARROW and path.name not in _NARROW_NAMES:
        return
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield f"{path}:{number}: {len(line)} columns, more than {MAX_COLUMNS}"


def function_length(path: PurePosixPath, text: str) -> Iterator[str]:
    """A function has at most 70 lines, from its signature to its last line."""
    spans: Iterator[tuple[str, int, int]] = iter(())
    if path.suffix == ".rs":
        spans = rust_functions(text)
    elif path.suffix == ".py":
        spans = _python_functions(text)
    for name, first, last in spans:
        lines = last - first + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{path}:{first}: {name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def marked_work(path: PurePosixPath, text: str) -> Iterator[str]:
    """Work left over carries a name or a number in parentheses."""
    if not is_text(path):
        return
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"\b(?:TO" r"DO|FIX" r"ME)\b(?!\([^)\s]+\))", line)
        if found:
            yield f"{path}:{number}: {found[0]} without an owner: do it, or name who will"


def no_unwrap(path: PurePosixPath, text: str) -> Iterator[str]:
    """Rust outside tests says why a value is there: `expect("why it holds")`."""
    in_tests = {"tests", "benches"}.intersection(path.parts) or path.stem.endswith("tests")
    if path.suffix != ".rs" or in_tests:
        return
    code = _blank_test_items(blank_rust(text))
    for found in re.finditer(r"\.\s*unwrap\s*\(\s*\)", code):
        yield f"{path}:{_line_at(code, found.start())}: unwrap() outside tests: use expect"


def forbids_unsafe(path: PurePosixPath, text: str) -> Iterator[str]:
    """The crates without I/O have no unsafe code at all."""
    roots = {PurePosixPath(crate, "src/lib.rs") for crate in SAFE_CRATES}
    if path in roots and "#![forbid(unsafe_code)]" not in blank_rust(text):
        yield f"{path}: lacks #![forbid(unsafe_code)]"


def unused_private(path: PurePosixPath, text: str) -> Iterator[str]:
    """What a Python module keeps to itself, it uses: a limit that nobody looks at is none."""
    if path.suffix != ".py":
        return
    tree = ast.parse(text)
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    for name, line in _private_constants(tree):
        if name not in used:
            yield f"{path}:{line}: {name} is not used: use it, or leave it out"


TEXT_RULES: tuple[Rule, ...] = (
    file_length,
    line_length,
    function_length,
    marked_work,
    no_unwrap,
    forbids_unsafe,
    unused_private,
)


def file_size(path: PurePosixPath, size_bytes: int) -> Iterator[str]:
    """A file in the repository is smaller than 2 MB."""
    if size_bytes >= MAX_FILE_BYTES:
        yield f"{path}: {size_bytes} bytes, {MAX_FILE_BYTES} or more: keep it elsewhere"


def _private_constants(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and re.match("_[^_]", target.id):
                yield target.id, target.lineno


def _line_at(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno or node.lineno


_RUST_TOKEN = re.compile(
    r"""
      //[^\n]*
    | (?P<block>/\*)
    | \b[bc]?r(?P<hashes>\#*)"(?s:.*?)"(?P=hashes)
    | \b[bc]?"(?:[^"\\]|\\(?s:.))*"
    | "(?:[^"\\]|\\(?s:.))*"
    | '(?:[^'\\\n]|\\(?:u\{[0-9a-fA-F_]+\}|x[0-9a-fA-F]{2}|.))'
    """,
    re.VERBOSE,
)


def blank_rust(text: str) -> str:
    """The Rust source with comments, strings and characters blanked, every offset kept.

    What is left has only braces that are code. A lifetime is not a character: it has no second
    quote after one character.
    """
    out = []
    position = 0
    while found := _RUST_TOKEN.search(text, position):
        end = _block_comment_end(text, found.start()) if found["block"] else found.end()
        out.append(text[position : found.start()])
        out.append(re.sub(r"[^\n]", " ", text[found.start() : end]))
        position = end
    out.append(text[position:])
    return "".join(out)


def _block_comment_end(text: str, start: int) -> int:
    """The end of a block comment, which nests in Rust."""
    depth = 0
    for mark in re.finditer(r"/\*|\*/", text[start:]):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return start + mark.end()
    return len(text)


def _body_span(code: str, start: int) -> tuple[int, int] | None:
    """Offsets of the braces of the item that begins at `start`; None where it has no body."""
    nesting = 0
    for offset in range(start, len(code)):
        char = code[offset]
        if char in "([":
            nesting += 1
        elif char in ")]":
            nesting -= 1
        elif nesting == 0 and char == ";":
            return None
        elif nesting == 0 and char == "{":
            return offset, _closing_brace(code, offset)
    return None


def _closing_brace(code: str, opening: int) -> int:
    depth = 0
    for offset in range(opening, len(code)):
        depth += {"{": 1, "}": -1}.get(code[offset], 0)
        if depth == 0:
            return offset
    return len(code)


def rust_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, first and last line of every function with a body, nested ones included."""
    code = blank_rust(text)
    for found in re.finditer(r"\bfn\s+(?:r#)?(\w+)", code):
        span = _body_span(code, found.end())
        if span:
            yield found[1], _line_at(code, found.start()), _line_at(code, span[1])


def _blank_test_items(code: str) -> str:
    """The blanked source without the items that exist only in tests."""
    for found in re.finditer(r"#\[\s*(?:cfg\s*\(\s*test\s*\)|test)\s*\]", code):
        span = _body_span(code, found.end())
        if span:
            inside = re.sub(r"[^\n]", " ", code[span[0] : span[1]])
            code = code[: span[0]] + inside + code[span[1] :]
    return code
