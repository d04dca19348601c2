"""Checks of the scheduler's side where steps wait for their loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from serving.checks import PLAIN, TOKENS, Request, output, served
from tiered_kv import ConfigError
from tiered_kv.engines.vllm.connector import TieredKVConnector
from tiered_kv.engines.vllm.groups import Group
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.within import Within, why_beside


def check_a_hit_of_a_step_is_held_until_its_output_has_come() -> None:
    with served(5, Within()) as (side, store):
        request = Request("r", 7 * TOKENS)
        assert side.matched(request, 0) == 5 * TOKENS
        side.allocated(request, (list(range(10, 17)),), 5 * TOKENS)
        (load,) = side.step(output({"r": 2 * TOKENS})).loads
        assert load.block_ids == (10, 11, 12, 13, 14)
        assert store.stats()["holds"] == 1
        assert not side.reset(), "a step loads something"
        side.loaded((), set())
        assert store.stats()["holds"] == 0


def check_what_a_step_could_not_load_is_nobodys_prefix() -> None:
    within = Within()
    evicted: list[set[int]] = []
    within.evict = evicted.append
    with served(5, within) as (side, _):
        other, request = Request("o", 2 * TOKENS), Request("r", 7 * TOKENS)
        other.all_token_ids = list(range(9000, 9000 + 2 * TOKENS))
        assert side.matched(other, 0) == 0
        assert side.matched(request, 0) == 5 * TOKENS
        side.allocated(request, (list(range(10, 17)),), 5 * TOKENS)
        request.num_computed_tokens = 5 * TOKENS
        step = side.step(output({"r": 2 * TOKENS, "o": 2 * TOKENS}))
        assert len(step.saves) == 2
        # vLLM has taken it back to the first block that is not there.
        request.num_computed_tokens = 2 * TOKENS
        other.num_computed_tokens = 2 * TOKENS
        side.loaded((), {12, 14})
        assert evicted == [{12, 13, 14, 15, 16}]
        # The workers have stored nothing of the step: all of it again.
        step = side.step(output({"r": 5 * TOKENS, "o": 1}))
        assert [(save.first, len(save.block_ids)) for save in step.saves] == [(0, 7), (0, 2)]
        # If it is preempted, it is not promised again.
        assert side.matched(request, 0) == 2 * TOKENS


def check_a_block_that_a_step_has_yet_to_load_is_no_other_requests() -> None:
    with served(5, Within()) as (side, _):
        request, other = Request("r", 7 * TOKENS), Request("o", 7 * TOKENS)
        assert side.matched(request, TOKENS) == 4 * TOKENS
        side.allocated(request, (list(range(10, 17)),), 4 * TOKENS)
        # vLLM has these in its prefix cache already. One block it had before.
        assert side.matched(other, 5 * TOKENS) is None
        assert side.matched(other, TOKENS) == 4 * TOKENS
        strange = Request("s", 7 * TOKENS, mm_features=[object()])
        assert side.matched(strange, TOKENS) is None
        assert side.matched(strange, 0) == 0
        side.step(output({"r": 2 * TOKENS}))
        side.loaded((), set())
        assert side.matched(other, 5 * TOKENS) == 0


def _config(**changes: Any) -> Any:
    told = {"pipeline_parallel_size": 1, "async_scheduling": False, "use_v2_model_runner": False}
    told |= changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=told["pipeline_parallel_size"]),
        scheduler_config=SimpleNamespace(async_scheduling=told["async_scheduling"]),
        use_v2_model_runner=told["use_v2_model_runner"],
    )


def check_steps_wait_for_loads_where_vllm_can_take_them_back() -> None:
    assert why_beside(_config(), PLAIN) == ""
    window = Group(1, "window", TOKENS, 2)
    for config, groups, word in (
        (_config(), (*PLAIN, window), "several"),
        (_config(), (window,), "several"),
        (_config(pipeline_parallel_size=2), PLAIN, "pipeline"),
        (_config(async_scheduling=True), PLAIN, "before it knows"),
        (_config(use_v2_model_runner=True), PLAIN, "V2"),
    ):
        assert word in why_beside(config, groups)


def check_layerwise_is_a_choice_that_graphs_are_told_of() -> None:
    plain = {"path": "/kv", "nvme_capacity": "8MiB"}
    assert not Options.parse(plain).layerwise
    assert Options.parse({**plain, "layerwise": True}).layerwise
    try:
        Options.parse({**plain, "layerwise": "yes"})
        why = ""
    except ConfigError as error:
        why = str(error)
    assert "give true or false" in why
    for told, wanted in (({}, False), ({"layerwise": False}, False), ({"layerwise": True}, True)):
        assert TieredKVConnector.requires_piecewise_for_cudagraph(told) is wanted
