"""Conversations as ShareGPT has them: text, tokenised here, with times that are made up."""

from __future__ import annotations

import gzip
import json
import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tiered_kv._core import Trace
from tiered_kv.errors import InvalidArgumentError, UnsupportedError
from tiered_kv.sizing.checks import count, cut, shown

_MOST_BYTES = 4 << 30
_MOST_BLOCK = 65_536
_GZIP = b"\x1f\x8b"
# As the traces are made that the figures of docs/replay.md are from.
_SESSIONS_A_SECOND = 1.0
_SECONDS_A_TOKEN = 0.02
_MEAN_PAUSE_S = 60.0
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")

Encode = Callable[[str], list[int]]


def _fault(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"trace: {cut(what)}", op="trace")


def _open(path: Path) -> Any:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return gzip.open(path, "rb") if packed else path.open("rb")


def is_sharegpt(path: Path) -> bool:
    """Whether a file begins as a JSON array, which no other format does."""
    try:
        with _open(path) as file:
            return bytes(file.read(64)).lstrip()[:1] == b"["
    except (OSError, EOFError):  # what is wrong with it, the other reader says
        return False


def _encoder(tokenizer: str | None) -> Encode:
    if tokenizer is None:
        raise _fault(
            "`tokenizer` is missing: conversations are text, so give the path of a tokenizer.json "
            "or the name of a model on the hub"
        )
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UnsupportedError(
            "trace: `tokenizer` needs the package tokenizers: install it with "
            "`pip install 'tiered-kv[transformers]'`",
            op="trace",
        ) from None
    made = tokenizers.Tokenizer
    try:
        local = Path(tokenizer).is_file()
        found = made.from_file(tokenizer) if local else made.from_pretrained(tokenizer)
    except Exception as error:  # the package raises bare `Exception`s
        raise _fault(
            f"`tokenizer` is {shown(tokenizer)}: it cannot be loaded ({error}): give the path of a "
            "tokenizer.json or the name of a model on the hub"
        ) from error
    return lambda text: list(found.encode(text, add_special_tokens=False).ids)


def _conversations(path: Path) -> list[Any]:
    with _open(path) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise _fault(f"`trace` {path}: more than {_MOST_BYTES} bytes: give a part of it")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _fault(f"`trace` {path}: no JSON ({error}): give ShareGPT's array") from None
    return found if isinstance(found, list) else []


def _messages(path: Path, number: int, one: object) -> list[tuple[bool, str]]:
    """The messages of a conversation: whether the model wrote it, and the text."""
    items = one.get("conversations", one.get("messages")) if isinstance(one, dict) else None
    if not isinstance(items, list):
        raise _fault(f"`trace` {path}: entry {number} has no list of `conversations`: give one")
    found = []
    for item in items:
        who = item.get("from", item.get("role")) if isinstance(item, dict) else None
        text = item.get("value", item.get("content")) if isinstance(item, dict) else None
        if not isinstance(who, str) or not isinstance(text, str):
            raise _fault(
                f"`trace` {path}: entry {number}: a message without `from` and `value`: give both"
            )
        found.append((who.lower() in _ANSWERS, text))
    return found


class _Ids:
    """Numbers of blocks: the same number for the same tokens behind the same block."""

    def __init__(self, block_size: int) -> None:
        self._bytes = 4 * block_size
        self._numbers: dict[tuple[int, bytes], int] = {}

    def extend(self, chain: list[int], tokens: bytes) -> None:
        """Appends the numbers of the full blocks that `chain` does not have yet."""
        for at in range(len(chain) * self._bytes, len(tokens) - self._bytes + 1, self._bytes):
            key = (chain[-1] if chain else -1, tokens[at : at + self._bytes])
            chain.append(self._numbers.setdefault(key, len(self._numbers)))


def _runs(ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([one, 1])
    return runs


def _requests(
    session: int,
    messages: list[tuple[bool, str]],
    encode: Encode,
    ids: _Ids,
    start: float,
    chance: random.Random,
) -> Iterator[dict[str, Any]]:
    """A request for each answer of a conversation, with all before it as its prompt."""
    tokens, chain, now = array("I"), list[int](), start
    for answered, text in messages:
        new = encode(text)
        asked = len(tokens)
        ids.extend(chain, tokens.tobytes())
        tokens.extend(new)
        if not answered or asked == 0:
            continue
        prompt = len(chain)
        ids.extend(chain, tokens.tobytes())
        yield {
            "timestamp": now,
            "session_id": str(session),
            "type": "chat",
            "input_length": asked,
            "output_length": len(new),
            "hash_runs": _runs(chain[:prompt]),
            "out_hash_runs": _runs(chain[prompt:]),
        }
        now += len(new) * _SECONDS_A_TOKEN + chance.expovariate(1 / _MEAN_PAUSE_S)


def read(path: Path, *, tokenizer: str | None, block_size: int, seed: int) -> Trace:
    """Reads ShareGPT's array of conversations; see `tiered_kv.replay.read`.

    Sessions start as a Poisson process of one a second; a turn comes 0.02 s for each token of the
    last answer later, and a pause of 60 s in the mean.

    Raises:
        InvalidArgumentError: No tokenizer is given, or it is none; the file is not ShareGPT's.
        UnsupportedError: The package tokenizers is not installed.
    """
    count("block_size", block_size, least=1, most=_MOST_BLOCK)
    count("seed", seed)
    encode = _encoder(tokenizer)
    chance = random.Random(seed)  # noqa: S311 - of times that are made up, not of secrets
    ids, start = _Ids(block_size), 0.0
    lines: list[dict[str, Any]] = []
    for session, one in enumerate(_conversations(path)):
        start += chance.expovariate(_SESSIONS_A_SECOND)
        messages = _messages(path, session, one)
        lines.extend(_requests(session, messages, encode, ids, start, chance))
    if not lines:
        raise _fault(f"`trace` {path}: no conversation with an answer in it: give ShareGPT's array")
    lines.sort(key=lambda line: line["timestamp"])
    text = "\n".join(json.dumps({**line, "block_size": block_size}) for line in lines)
    return Trace.parse(text.encode(), path.name.partition(".")[0])
