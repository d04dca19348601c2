"""Whatever a caller passes, the answer is a result or one of our errors, never another's."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import api
from tiered_kv import Namespace, StoreConfig, TieredKvError, cli
from tiered_kv.blocking import BlockingStore
from tiered_kv.cli.exits import ExitCode

FIELDS = sorted(StoreConfig().to_dict())
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=8)
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
fast = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def store() -> Iterator[BlockingStore]:
    with BlockingStore.open(**api.config()) as opened:
        yield opened


@pytest.fixture(scope="module")
def ns(store: BlockingStore) -> Namespace:
    return store.namespace(api.spec())


def outcome(call: Callable[[], Any]) -> tuple[Any, TieredKvError | None]:
    """What a call has returned, or the error of ours that it has raised."""
    try:
        return call(), None
    except TieredKvError as error:
        return None, error


@fast
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12), JUNK, max_size=3))
@example({"\n": [None]})
@example({"\x1b[2J": 1})
@example({"\ud800": 1})
@example({7: 1})
def test_a_configuration_is_taken_or_refused_by_name(fields: dict[str, Any]) -> None:
    config, error = outcome(lambda: StoreConfig.from_dict(fields))
    if error is None:
        assert StoreConfig.from_dict(config.to_dict()) == config
    else:
        assert error.kind == "config"
        assert "`" in str(error), "it names a field"
        assert "\n" not in str(error)


@fast
@given(JUNK | st.binary(max_size=100))
def test_packed_keys_are_keys_or_refused(store: BlockingStore, ns: Namespace, keys: Any) -> None:
    found, error = outcome(lambda: store.lookup(ns, keys))
    if error is None:
        assert (len(keys) % 32, found.hits) == (0, 0)
    else:
        assert error.kind == "invalid argument"
        assert "keys" in str(error)


@fast
@given(JUNK | st.lists(st.integers(-5, 1 << 33), max_size=12))
def test_tokens_are_tokens_or_refused(ns: Namespace, tokens: Any) -> None:
    keys, error = outcome(lambda: ns.keys_from_tokens(tokens))
    if error is None:
        assert len(keys) == len(tokens) // api.TOKENS * 32
    else:
        assert error.kind == "invalid argument"
        assert "token" in str(error)


@fast
@given(st.binary(max_size=80), JUNK | st.integers(-2, 90))
def test_an_engines_keys_are_folded_or_refused(ns: Namespace, packed: bytes, width: Any) -> None:
    keys, error = outcome(lambda: ns.keys_from_opaque(packed, width=width))
    if error is None:
        assert len(keys) // 32 * width == len(packed)
    else:
        assert error.kind == "invalid argument"


COMMANDS = ["info", "ls", "inspect", "verify", "clear", "explain", "doctor", "resize", "--version"]
WORDS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
) | st.sampled_from(
    ["--json", "--path", "--namespace", "--older-than", "--fast", "-1", "1e9", "/nonexistent"]
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(COMMANDS) | WORDS, st.lists(WORDS, max_size=3))
def test_the_command_line_ends_with_a_status(command: str, words: list[str]) -> None:
    if command == "doctor":
        # It measures; what it does with words is the parser's work like elsewhere.
        words = ["--no-such-option", *words]
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as empty,
        contextlib.chdir(empty),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = cli.main([command, *words])
    assert status in set(ExitCode) - {ExitCode.INTERNAL}, err.getvalue()
    assert "Traceback" not in err.getvalue()
