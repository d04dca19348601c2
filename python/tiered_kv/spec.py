"""What a caller tells of its blocks: namespaces, layouts, requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tiered_kv.errors import InvalidArgumentError

RopeValue = str | int | float | bool | None | Sequence["RopeValue"]


@dataclasses.dataclass(frozen=True, init=False)
class KvLayout:
    """Shape of one block: tokens, and bytes of each slab of its grid.

    In a caller's buffer the slabs of a block lie one behind the other, layer group by layer group,
    head group by head group.

    Attributes:
        tokens_per_block: Tokens in a full block.
        layer_groups: Rows of the grid.
        head_groups: Columns of the grid.
        slab_bytes: Bytes of each slab, row-major.
    """

    tokens_per_block: int
    layer_groups: int
    head_groups: int
    slab_bytes: tuple[int, ...]

    def __init__(
        self,
        tokens_per_block: int,
        block_bytes: int | None = None,
        *,
        layer_groups: int = 1,
        head_groups: int = 1,
        slab_bytes: Sequence[int] | None = None,
    ) -> None:
        if (block_bytes is None) == (slab_bytes is None):
            message = (
                "layout: give `block_bytes` (a block of one slab) or `slab_bytes` (one a slab of "
                "the grid), and not both"
            )
            raise InvalidArgumentError(message, op="layout")
        slabs = tuple(slab_bytes) if slab_bytes is not None else (block_bytes or 0,)
        for name, value in [
            ("tokens_per_block", tokens_per_block),
            ("layer_groups", layer_groups),
            ("head_groups", head_groups),
            *(("slab_bytes" if block_bytes is None else "block_bytes", size) for size in slabs),
        ]:
            limit = 1 << (16 if name.endswith("groups") else 32)
            if type(value) is not int or not 0 < value <= limit:
                message = f"layout: `{name}` is {value!r}: give an integer from 1 to {limit}"
                raise InvalidArgumentError(message, op="layout")
        if len(slabs) != layer_groups * head_groups:
            message = (
                f"layout: {len(slabs)} sizes for `layer_groups` x `head_groups` = "
                f"{layer_groups * head_groups} slabs: give `slab_bytes` one size a slab"
            )
            raise InvalidArgumentError(message, op="layout")
        object.__setattr__(self, "tokens_per_block", tokens_per_block)
        object.__setattr__(self, "layer_groups", layer_groups)
        object.__setattr__(self, "head_groups", head_groups)
        object.__setattr__(self, "slab_bytes", slabs)

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return sum(self.slab_bytes)


@dataclasses.dataclass(frozen=True)
class NamespaceSpec:
    """Everything that makes the KV bytes of two requests incompatible.

    Changing any field makes everything miss.

    Attributes:
        model: Model id.
        weights: Fingerprint of the weights, such as the hexadecimal blake3 of their files.
        kv_dtype: Type of a stored element, such as `"bfloat16"`.
        layout: Shape of a block.
        rope: Rotary position parameters as the model's configuration gives them.
        lora: Identity of the LoRA adapter, empty for none.
        salt: Tenant salt: different salts never share bytes.
        parallel: The engine's parallel layout, such as `"tp=2/rank=0"`.
        engine: The engine, its hash algorithm and its hash seed, where its keys depend on them.
    """

    model: str
    weights: str
    kv_dtype: str
    layout: KvLayout
    rope: Mapping[str, RopeValue] = dataclasses.field(default_factory=dict)
    lora: str = ""
    salt: str = ""
    parallel: str = ""
    engine: str = ""

    def canonical(self) -> NamespaceSpec:
        """The specification with each rope value as the text that is digested."""
        rope = {name: rope_text(value) for name, value in self.rope.items()}
        return dataclasses.replace(self, rope=rope)


def rope_text(value: RopeValue) -> str:
    """A rope parameter as text; equal numbers give equal text, whether int or float.

    Args:
        value: A scalar, or a sequence of them.

    Returns:
        The text that enters the namespace's digest.

    Raises:
        InvalidArgumentError: The value is of another type.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 2**53
        return str(int(value)) if whole else repr(value)
    if isinstance(value, Sequence):
        return "[" + ",".join(rope_text(item) for item in value) + "]"
    message = f"namespace: `rope` holds a {type(value).__name__}: give numbers or text"
    raise InvalidArgumentError(message, op="namespace")


@dataclasses.dataclass(frozen=True)
class RequestContext:
    """What an engine knows of a request.

    Attributes:
        session: The session that it belongs to, empty if not known.
        turn: Its turn in the session, from 1; 0 if not known.
        tenant: The tenant that pays for it, empty for none.
        kind: Kind of workload, such as `"chat"`; empty if not known.
        block_type: What its blocks hold, where they are all alike: system, tool, user, reasoning.
    """

    session: str = ""
    turn: int = 0
    tenant: str = ""
    kind: str = ""
    block_type: str | None = None
