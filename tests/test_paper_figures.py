"""docs/paper-figures.md: every command prints what the page says, and the page has every figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paper_figures import commands, renewed
from tiered_kv.planner import Load, load_node, plan, published
from tiered_kv.sizing.read import read_config

_PAGE = Path(__file__).parent.parent / "docs" / "paper-figures.md"
_TEXT = _PAGE.read_text("utf-8")


def test_every_command_prints_what_the_page_says() -> None:
    """`make paper-figures` writes the page again."""
    assert len(commands(_TEXT)) >= 8
    assert renewed(_TEXT) == _TEXT


@pytest.mark.parametrize(
    "figure",
    [
        "1152 65536 56.9",
        "a token: 70,272 B",
        "as MHA: 3,997,696 B a token",
        "a token: 327,680 B",
        "42,949,672,960 B (40.00 GiB)",
        "as MHA: 2,621,440 B a token, 320.00 GiB",
        "largest batch: 104\n  sized as MHA it would be 14\n",
        "largest batch: 104\n  sized as MHA it would be 15\n",
        "hbm     40.00 GB",
        "all tiers: 38.61 TB for KV",
    ],
)
def test_the_page_has_the_figures_of_the_paper(figure: str) -> None:
    assert figure in _TEXT


def test_memory_alone_never_gives_15_and_104() -> None:
    spec = read_config("deepseek-v3")
    mha = spec.as_mha(4096)
    assert mha is not None
    exact = spec.bytes(4096)
    # On one of 8 ranks the heads of MHA are split and the latent is whole.
    assert 15 * (mha.bytes_total // 8) // exact == 106
    assert (16 * (mha.bytes_total // 8) - 1) // exact > 104


def test_the_range_of_bytes_a_request_is_as_the_page_says() -> None:
    node, spec = load_node("dgx-h100"), read_config("deepseek-v3")
    weights = published("deepseek-v3", "int4")

    def pairs(request: int) -> bool:
        found = set()
        for reserve in range(0, 12 * 10**9, 10**8):
            load = Load(context=4096, request_bytes=request)
            batch = plan(node, spec, load, weights, reserve=reserve).batch
            found.add((batch.as_mha, batch.largest))
        return (15, 104) in found

    assert not pairs(5_000_000)
    assert pairs(8 << 20)
    assert pairs(16 << 20)
    assert not pairs(33_000_000)
