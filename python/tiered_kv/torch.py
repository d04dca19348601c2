"""Torch views of leased blocks, and buffers of torch tensors, without a copy.

Importing this module imports torch; `import tiered_kv` does not.

Memory of a lease is mapped read-only, while torch has no read-only tensors. A tensor from `view`
therefore reads as any other, but **an in-place write through it ends the process with SIGSEGV**
(that is the guard: no session can change what another is served). Use `view(...).clone()` for a
tensor of your own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from tiered_kv import InvalidArgumentError

__all__ = ["as_buffer", "view"]

# torch warns about read-only buffers once a process. The warning is this module's documentation, so
# it is used up here, on a buffer that nobody sees.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def view(block: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over the bytes of a leased block, without a copy and without conversion.

    The tensor keeps the block pinned until it, and every view of it, is gone, also where the
    `Leases` object it came from was released before. Do not write to it: see the module's
    documentation.

    Args:
        block: A lease, or any object with a C-contiguous buffer.
        dtype: The type of the elements as they were stored; bf16, fp16 and fp8 are exact.
        shape: The sizes of the dimensions, in elements; the product must fill the block.

    Returns:
        A contiguous CPU tensor.

    Raises:
        InvalidArgumentError: The block is not a contiguous buffer, or its length is not that of
            `shape` and `dtype`.
    """
    try:
        # A memoryview of our own: torch keeps a reference to the object that it was given, and this
        # one nobody else can release, so the export (and with it the pin) lives with the tensor.
        raw = memoryview(block).cast("B")
    except TypeError as error:
        message = f"block: {error}; pass a lease or a C-contiguous buffer"
        raise InvalidArgumentError(message) from None
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise InvalidArgumentError(f"shape: {sizes} has a negative size; give sizes of 0 or more")
    wanted = math.prod(sizes) * dtype.itemsize
    if wanted != raw.nbytes:
        raise InvalidArgumentError(
            f"shape: {sizes} of {dtype} is {wanted} bytes, the block has {raw.nbytes}; "
            "give the shape and dtype that the block was stored with"
        )
    if wanted == 0:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(sizes)


def as_buffer(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, for `put` or `register`, without a copy.

    Args:
        tensor: A contiguous CPU tensor of any dtype, bf16 and fp8 included.

    Returns:
        A flat memoryview of `tensor.nbytes` bytes; it keeps the tensor's memory alive.

    Raises:
        InvalidArgumentError: The tensor is on another device, not contiguous or not dense.
    """
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(f"tensor: layout {tensor.layout}; pass tensor.to_dense()")
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(f"tensor: on {tensor.device}; pass tensor.cpu()")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgumentError("tensor: lazily conjugated or negated; resolve it first")
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"tensor: strides {tuple(tensor.stride())} are not contiguous; pass tensor.contiguous()"
        )
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
