"""Element types of a cache, with the scales that a quantised one stores beside its elements."""

from __future__ import annotations

import dataclasses

from tiered_kv.sizing.checks import bad


@dataclasses.dataclass(frozen=True, slots=True)
class DType:
    """How a vector of a cache is stored.

    Attributes:
        name: Its short name, such as `"bf16"`.
        bits: Bits of one element.
        scale_block: Elements that share a scale; 0 where no scale is stored a vector, -1 where the
            whole vector shares one.
        scale_bytes: Bytes of one scale.
    """

    name: str
    bits: int
    scale_block: int = 0
    scale_bytes: int = 0

    def vector_bytes(self, dim: int) -> int:
        """Bytes of a vector of `dim` elements with its scales.

        Elements are packed, and a last block that is not full has a scale of its own.
        """
        if self.scale_block == 0:
            scales = 0
        else:
            scales = 1 if self.scale_block < 0 else -(-dim // self.scale_block)
        return -(-dim * self.bits // 8) + scales * self.scale_bytes


BF16 = DType("bf16", 16)
FP16 = DType("fp16", 16)
FP32 = DType("fp32", 32)
FP64 = DType("fp64", 64)
INT64 = DType("int64", 64)
"""Positions and token ids that some models keep beside their keys."""
FP8 = DType("fp8", 8)
"""One scale a tensor, which is no part of the cache: vLLM's, SGLang's and TensorRT-LLM's fp8."""
INT8 = DType("int8", 8)
"""One scale a tensor, as TensorRT-LLM's int8 cache."""
FP8_PER_HEAD = DType("fp8_per_token_head", 8, -1, 4)
"""One fp32 scale for each vector, that is for each token and head."""
INT8_PER_HEAD = DType("int8_per_token_head", 8, -1, 4)
"""One fp32 scale for each vector, that is for each token and head."""
INT4_PER_HEAD = DType("int4_per_token_head", 4, -1, 4)
"""One fp32 scale for each vector, that is for each token and head."""
NVFP4 = DType("nvfp4", 4, 16, 1)
"""An fp8 scale for every 16 elements."""
MXFP4 = DType("mxfp4", 4, 32, 1)
"""A power of two in a byte for every 32 elements."""
MXFP8 = DType("mxfp8", 8, 32, 1)
"""A power of two in a byte for every 32 elements."""

DTYPES = {
    dtype.name: dtype
    for dtype in (
        BF16,
        FP16,
        FP32,
        FP64,
        INT64,
        FP8,
        INT8,
        FP8_PER_HEAD,
        INT8_PER_HEAD,
        INT4_PER_HEAD,
        NVFP4,
        MXFP4,
        MXFP8,
    )
}
"""Every type, by its short name."""

_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "f16": "fp16",
    "f32": "fp32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def dtype_named(name: object, field: str = "kv_dtype") -> DType:
    """The type of a name, `torch.` in front or not.

    Args:
        name: A short name, or what a configuration calls it, such as `"torch.bfloat16"`.
        field: The field that an error names.

    Raises:
        InvalidArgumentError: There is no such type.
    """
    found = _short(name)
    if found is None:
        raise bad(field, name, f"one of {', '.join(DTYPES)}")
    return DTYPES[found]


def is_dtype(name: object) -> bool:
    """Whether `dtype_named` knows a name."""
    return _short(name) is not None


def _short(name: object) -> str | None:
    if not isinstance(name, str):
        return None
    short = name.removeprefix("torch.").lower()
    short = _ALIASES.get(short, short)
    return short if short in DTYPES else None
