"""The parts that a block of tokens has in vLLM's cache, and which of them the next token needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tiered_kv import UnsupportedError
from tiered_kv._core import blake3
from tiered_kv.engines.vllm.identity import refuse_model

if TYPE_CHECKING:
    from tiered_kv._base import GroupRule

NULL_BLOCK = 0
"""Number of the engine's block that stands for one which nobody needs any more."""

# Of these types alone: their subclasses drop other blocks, or keep what is no attention's.
_WHOLE = (FullAttentionSpec, MLAAttentionSpec)
_WINDOWED = (SlidingWindowSpec, SlidingWindowMLASpec)


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose blocks vLLM gives out and takes back together.

    Attributes:
        index: Its place among vLLM's groups.
        kind: Which blocks the next token needs: "all", those of a "window", or the one "state".
        tokens: Tokens of a block.
        blocks: Of a window, the blocks that a token at the start of a block looks back on.
        name: What it is, for a namespace; empty for the only group of a model without windows.
        layers: The names of its layers.
    """

    index: int
    kind: Literal["all", "window", "state"]
    tokens: int
    blocks: int = 0
    name: str = ""
    layers: tuple[str, ...] = ()

    @property
    def rule(self) -> GroupRule:
        """As the store's lookups have it."""
        if self.kind == "window":
            return "window", self.blocks
        return "all" if self.kind == "all" else "last"

    def needed(self, tokens: int) -> int:
        """The first of its blocks that the next token needs behind so many, a multiple of all."""
        end = tokens // self.tokens
        if self.kind == "all":
            return 0
        return max(0, end - (self.blocks if self.kind == "window" else 1))


def groups_of(config: Any, cache_config: Any) -> tuple[Group, ...]:
    """The groups of a model, where this version of the adapter serves the configuration.

    Args:
        config: vLLM's configuration.
        cache_config: Its `KVCacheConfig`.

    Raises:
        UnsupportedError: It does not; the message names the option.
    """
    refuse_model(config)
    told = cache_config.kv_cache_groups
    groups = tuple(_group(at, one, config) for at, one in enumerate(told))
    if is_plain(groups):
        return groups
    return tuple(
        dataclasses.replace(one, name=_name(one, len(groups), told[one.index])) for one in groups
    )


def is_plain(groups: Sequence[Group]) -> bool:
    """Whether a model has one part only, every block of which stays until its request's end."""
    return len(groups) == 1 and groups[0].kind == "all"


def step_of(groups: Sequence[Group]) -> int:
    """Tokens after which a block of every group ends."""
    return math.lcm(*(one.tokens for one in groups))


def main_of(groups: Sequence[Group]) -> int:
    """Which of them stands for all where one must: one that keeps every block, if there is one."""
    return next((at for at, one in enumerate(groups) if one.kind == "all"), 0)


def runs(first: int, block_ids: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Blocks that lie one behind the other with nothing dropped in between, and their places."""
    begun = None
    for at, block in enumerate((*block_ids, NULL_BLOCK)):
        if block == NULL_BLOCK:
            if begun is not None:
                yield first + begun, block_ids[begun:at]
            begun = None
        elif begun is None:
            begun = at


def _group(index: int, told: Any, config: Any) -> Group:
    spec = told.kv_cache_spec
    layers = tuple(getattr(told, "layer_names", ()))
    parts = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    parts = list(parts)
    role = getattr(told, "role", KVCacheGroupRole.DEFAULT)
    apart = getattr(told, "host_resident", False) or not getattr(told, "enable_kv_transfer", True)
    if not apart and role == KVCacheGroupRole.DEFAULT:
        if all(type(one) in _WHOLE and not one.non_causal for one in parts):
            return Group(index, "all", spec.block_size, layers=layers)
        if all(type(one) in _WINDOWED and _plain_window(one) for one in parts):
            # A token sees itself and the window's others before it.
            seen = max(one.sliding_window - 1 + one.extra_retained_tokens for one in parts)
            blocks = max(1, -(-seen // spec.block_size))
            return Group(index, "window", spec.block_size, blocks, layers=layers)
        if all(type(one) is MambaSpec for one in parts):
            _refuse_states(config, parts)
            return Group(index, "state", spec.block_size, layers=layers)
    kinds = ", ".join(sorted({type(one).__name__ for one in parts}))
    raise _unsupported(
        f"the model keeps a cache of a kind that is not served yet ({kinds}): causal attention to "
        "all tokens before, windows and recurrent state are: give "
        "`--disable-hybrid-kv-cache-manager` if the model runs with it, or leave "
        "`--kv-transfer-config` out"
    )


def _plain_window(spec: Any) -> bool:
    return spec.prefix_cacheable and not spec.prefix_replay_tokens


def _refuse_states(config: Any, specs: Sequence[Any]) -> None:
    """Refuses recurrent layers of which no block has the state at its end."""
    modes = sorted({one.mamba_cache_mode for one in specs} - {"align"})
    if modes:
        raise _unsupported(
            f"the model's recurrent state is kept as `mamba_cache_mode` {modes[0]!r}, at no "
            "block's end: give `--enable-prefix-caching`"
        )
    if config.speculative_config is not None:
        raise _unsupported(
            f"`speculative_config` has the method {config.speculative_config.method}, and a state "
            "of recurrent layers may have drafts in it that are refused later: leave it out"
        )


def _name(group: Group, count: int, told: Any) -> str:
    what = f"{group.kind} {group.blocks}" if group.kind == "window" else group.kind
    layers = blake3("\n".join(told.layer_names).encode())[:16]
    return f"{group.index}/{count} {what} {layers}"


def _unsupported(text: str) -> UnsupportedError:
    return UnsupportedError(f"vllm: {text}", op="engines")
