"""How large a model's weights are: parameters times their type, and where the count is from."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path

from tiered_kv.planner import units
from tiered_kv.planner.units import bad, fault

_BITS = {
    "fp32": Fraction(32),
    "bf16": Fraction(16),
    "fp16": Fraction(16),
    "fp8": Fraction(8),
    "int8": Fraction(8),
    "int4": Fraction(4),
    "nvfp4": Fraction(9, 2),
    "mxfp4": Fraction(17, 4),
}
"""Bits of a parameter. The block formats have their scales in them; others' scales are not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model.

    Attributes:
        params: Parameters of the model.
        dtype: Their type: fp32, bf16, fp16, fp8, int8, int4, nvfp4 or mxfp4.
        active: Parameters that a token passes through; 0 for all of them.
        source: Where the count is from.
    """

    params: int
    dtype: str = "bf16"
    active: int = 0
    source: str = "given"

    def __post_init__(self) -> None:
        if self.params < 1:
            raise bad("params", self.params, "at least 1 parameter")
        if self.dtype not in _BITS:
            raise bad("weight_dtype", self.dtype, f"one of {', '.join(_BITS)}")
        if not 0 <= self.active <= self.params:
            raise bad("active_params", self.active, f"at most the {self.params:,} of the model")

    @property
    def bytes(self) -> int:
        """Bytes of all parameters."""
        return -(-int(self.params * _BITS[self.dtype]) // 8)

    @property
    def flops_per_token(self) -> int:
        """Operations of a token's forward pass without its attention: two a parameter."""
        return 2 * (self.active or self.params)


def published(model: str, dtype: str = "bf16") -> Weights:
    """The weights of a model of the catalogue, with the parameters that its owner states.

    Raises:
        InvalidArgumentError: They are not known here.
    """
    text = Path(__file__).with_name("parameters.json").read_text("utf-8")
    known: dict[str, list[str]] = json.loads(text)
    if model not in known:
        raise fault(f"`params` is not known for {model}: give it, as in --params 70B")
    total, active, hub = known[model]
    return Weights(
        units.count("params", total),
        dtype,
        units.count("active_params", active),
        f"https://huggingface.co/{hub}, as its model card rounds them",
    )
