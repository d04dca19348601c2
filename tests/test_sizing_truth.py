"""What the caches of transformers hold is what the sizing says, for every architecture it has.

A tiny random model of each is run with a cache, over contexts on both sides of its window, chunk,
compression rate and block. `make sizing-truth` compares more contexts, and the whole catalogue.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers

from sizing_truth import build, listed, measure, tiny
from sizing_truth.__main__ import told
from tiered_kv.errors import InvalidArgumentError
from tiered_kv.sizing.read import read_config
from tiered_kv.sizing.spec import Kind

LEFT_OUT = listed.NOT_RUN | listed.REFUSED
NAMES = [name for name in build.model_types() if name not in LEFT_OUT]
OWN = [name for name in NAMES if name not in listed.AROUND]
LEAST = 200


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def differences(found: measure.Measured) -> str:
    """The rows that are not equal, as a failure shows them."""
    rows = [
        f"{row.context} tokens: held {row.held}, said {row.said}"
        for row in found.rows
        if row.held != row.said
    ]
    return f"{found.model_type} {found.classes}: {'; '.join(rows)}"


@pytest.mark.parametrize("model_type", OWN)
def test_a_cache_holds_what_the_sizing_says(model_type: str) -> None:
    found = measure.measure(model_type)
    assert found.equal, differences(found)


def test_an_exception_is_a_key_stored_a_second_time_as_its_value() -> None:
    types = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    more = {"layer_types": types * 2}
    runner = build.runner("deepseek_v4", more)
    spec = measure.spec_of(runner)
    windowed = [group for group in spec.groups if group.kind is Kind.SLIDING]
    found = measure.compare("deepseek_v4", runner, measure.FEW_CONTEXTS)
    for row in found.rows:
        twice = sum(group.bytes(row.context, build.BATCH) for group in windowed)
        assert row.held - row.said == twice > 0, row


@pytest.mark.parametrize("model_type", sorted(listed.AROUND))
def test_a_model_around_a_text_model_is_sized_as_its_text_model(model_type: str) -> None:
    published, part = tiny.tiny(model_type)
    assert part.model_type == listed.AROUND[model_type]
    whole, text = read_config(published), read_config(part.to_dict())
    for context in measure.CONTEXTS:
        assert whole.bytes(context) == text.bytes(context) > 0, context


def test_an_exception_is_key_value_heads_repeated_to_the_query_heads() -> None:
    heads, kv_heads = 4, 2
    more = {"new_decoder_architecture": True, "num_kv_heads": kv_heads}
    runner = build.runner("falcon", more)
    assert runner.config.num_attention_heads == heads
    found = measure.compare("falcon", runner, measure.FEW_CONTEXTS)
    for row in found.rows:
        assert row.held == row.said * heads // kv_heads > 0, row


def test_most_architectures_are_compared() -> None:
    assert len(OWN) >= LEAST
    assert len(listed.EXCEPTIONS) <= 3
    assert not set(listed.EXCEPTIONS) & set(NAMES)
    known = set(build.model_types())
    assert set(LEFT_OUT) | set(listed.AROUND) <= known, "the lists name unknown architectures"


@pytest.mark.parametrize("model_type", sorted(listed.REFUSED))
def test_what_is_refused_has_an_error_that_names_the_architecture(model_type: str) -> None:
    published, _part = tiny.tiny(model_type)
    with pytest.raises(InvalidArgumentError, match="is not known"):
        read_config(published)


@pytest.mark.parametrize("model_type", sorted(set(listed.STATIC_WITNESSES.values())))
def test_a_cache_of_a_fixed_length_holds_all_of_it(model_type: str) -> None:
    found = measure.measure_static(model_type)
    assert found.equal, differences(found)


def test_the_whole_comparison_says_how_each_went_while_it_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It takes many minutes, and said nothing until the end."""
    seen: list[str] = []

    def take(name: str) -> measure.Measured:
        seen.append(capsys.readouterr().out)
        return measure.Measured(name, (), inferred=False, rows=(measure.Row(1, 8, 8, 0, 0),))

    assert len(told("a title", ["one", "two"], take)) == 2
    assert "a title: 2 to compare" in seen[0]
    assert seen[1].startswith("one ")
    assert capsys.readouterr().out.startswith("two ")


def defined_classes() -> set[str]:
    """Classes of caches and of their layers that the installed version defines."""
    root = Path(transformers.__file__).parent
    sources = [root / "cache_utils.py", *root.glob("models/*/modeling_*.py")]
    texts = [source.read_text() for source in sources]
    known = {"Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer"}
    classes = [
        (name, {base.strip() for base in bases.split(",")})
        for text in texts
        if "cache_utils" in text or "class CacheLayerMixin" in text
        for name, bases in re.findall(r"^class (\w+)\(([\w, ]+)\):", text, re.MULTILINE)
    ]
    while more := {name for name, bases in classes if bases & known} - known:
        known |= more
    return known


def test_every_class_of_cache_is_covered() -> None:
    dynamic = {
        name: measure.measure(model_type).classes for name, model_type in listed.WITNESSES.items()
    }
    static = {
        name: measure.measure_static(model_type).classes
        for name, model_type in listed.STATIC_WITNESSES.items()
    }
    assert [name for name, seen in (dynamic | static).items() if name not in seen] == []
    covered = set(dynamic) | set(static) | set(listed.CLASSES_LEFT_OUT)
    assert covered == defined_classes(), "a class is new, or gone"
