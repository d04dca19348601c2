"""Whatever a caller passes, the answer is a result or one of our errors, never another's."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import api
from tiered_kv import ConfigError, InvalidArgumentError, Namespace, StoreConfig, TieredKvError, cli
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


@fast
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12), JUNK, max_size=3))
def test_a_configuration_is_taken_or_refused_by_name(fields: dict[str, Any]) -> None:
    try:
        config = StoreConfig.from_dict(fields)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert any(name in str(error) for name in [*fields, *FIELDS])
    else:
        assert StoreConfig.from_dict(config.to_dict()) == config


@fast
@given(JUNK | st.binary(max_size=100))
def test_packed_keys_are_keys_or_refused(store: BlockingStore, ns: Namespace, keys: Any) -> None:
    try:
        found = store.lookup(ns, keys)
    except TieredKvError as error:
        assert error.kind == "invalid argument"
        assert "keys" in str(error)
    else:
        assert len(keys) % 32 == 0
        assert found.hits == 0


@fast
@given(JUNK | st.lists(st.integers(-5, 1 << 33), max_size=12))
def test_tokens_are_tokens_or_refused(ns: Namespace, tokens: Any) -> None:
    try:
        keys = ns.keys_from_tokens(tokens)
    except InvalidArgumentError as error:
        assert "token" in str(error)
    else:
        assert len(keys) == len(tokens) // api.TOKENS * 32


@fast
@given(st.binary(max_size=80), JUNK | st.integers(-2, 90))
def test_an_engines_keys_are_folded_or_refused(ns: Namespace, packed: bytes, width: Any) -> None:
    try:
        keys = ns.keys_from_opaque(packed, width=width)
    except InvalidArgumentError:
        return
    assert len(keys) // 32 * width == len(packed)


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
