"""Torch views: no copy, no conversion, no way to write through them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered_kv import InvalidArgumentError, KvLayout, NamespaceSpec, StoreConfig, TieredStore
from tiered_kv.torch import as_buffer, view

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
]


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of `dtype` with every bit pattern of 16 bits in it, NaNs and infinities included."""
    raw = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return raw.repeat(2).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_exact_and_no_copy(dtype: torch.dtype) -> None:
    original = every_pattern(dtype)
    memory = bytearray(as_buffer(original))
    tensor = view(memoryview(memory), dtype, (2, -(-original.numel() // 2)))
    assert tensor.dtype == dtype
    assert torch.equal(tensor.view(torch.uint8).view(-1), original.view(torch.uint8))
    memory[0] ^= 0xFF
    assert int(tensor.view(torch.uint8).view(-1)[0]) == memory[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_buffer_is_the_tensors_memory(dtype: torch.dtype) -> None:
    tensor = every_pattern(dtype).clone().view(4, -1)
    buffer = as_buffer(tensor)
    assert buffer.nbytes == tensor.nbytes
    tensor.view(torch.uint8)[0, 0] = 77
    assert buffer[0] == 77
    del tensor
    assert buffer[0] == 77


def test_a_read_only_block_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert view(b"\0" * 8, torch.float32, [2]).tolist() == [0.0, 0.0]


def test_a_scalar_and_an_empty_tensor_have_buffers() -> None:
    assert as_buffer(torch.tensor(1.0, dtype=torch.bfloat16)).nbytes == 2
    assert as_buffer(torch.empty(0, 3)).nbytes == 0
    assert view(b"", torch.float32, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("block", "shape", "field"),
    [
        (b"\0" * 8, (3,), r"shape: \(3,\) of torch.float32 is 12 bytes, the block has 8"),
        (b"\0" * 8, (-1, -2), "negative"),
        (memoryview(b"\0" * 16)[::2], (2,), "block: .*contiguous"),
        ([1, 2], (2,), "block: .*buffer"),
    ],
)
def test_a_wrong_view_names_its_field(block: Any, shape: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        view(block, torch.float32, shape)


@pytest.mark.parametrize(
    ("tensor", "remedy"),
    [
        (torch.zeros(4, 4).t()[1:], "contiguous"),
        (torch.zeros(2, 2, device="meta"), "cpu"),
        (torch.zeros(2, 2).to_sparse(), "to_dense"),
    ],
)
def test_a_wrong_tensor_names_the_remedy(tensor: torch.Tensor, remedy: str) -> None:
    with pytest.raises(InvalidArgumentError, match=remedy):
        as_buffer(tensor)


SPEC = NamespaceSpec(
    model="m",
    weights="00",
    kv_dtype="bfloat16",
    layout=KvLayout(tokens_per_block=16, block_bytes=1 << 16),
)


def config(directory: Path) -> StoreConfig:
    return StoreConfig(dram_capacity="16MiB", nvme_paths=[str(directory)], nvme_capacity="64MiB")


async def test_a_view_outlives_its_leases(tmp_path: Path) -> None:
    blocks = every_pattern(torch.bfloat16)[: 1 << 15].view(1, -1)
    async with TieredStore.open(config(tmp_path)) as store:
        space = store.namespace(SPEC)
        keys = space.keys_from_tokens(list(range(16)))
        await store.put(space, keys, as_buffer(blocks))
        with await store.get(space, keys) as leases:
            tensor = view(leases[0], torch.bfloat16, blocks.shape)
        # As many other blocks as the tier holds: an unpinned slot would be used again.
        for number in range(400):
            other = space.keys_from_tokens([number + 100] * 16)
            await store.put(space, other, b"\xee" * SPEC.layout.block_bytes)
        assert torch.equal(tensor.view(torch.int16), blocks.view(torch.int16))
        del tensor


TRAP = """
    import asyncio, sys
    import torch
    from tiered_kv import KvLayout, NamespaceSpec, StoreConfig, TieredStore
    from tiered_kv.torch import view

    async def main():
        config = StoreConfig(
            dram_capacity="16MiB", nvme_paths=[sys.argv[1]], nvme_capacity="64MiB"
        )
        async with TieredStore.open(config) as store:
            layout = KvLayout(tokens_per_block=16, block_bytes=1 << 16)
            space = store.namespace(
                NamespaceSpec(model="m", weights="00", kv_dtype="bfloat16", layout=layout)
            )
            keys = space.keys_from_tokens(list(range(16)))
            await store.put(space, keys, b"\\1" * layout.block_bytes)
            await store.flush()
            leases = await store.get(space, keys)
            tensor = view(leases[0], torch.bfloat16, [1 << 15])
            mine = tensor.clone()
            mine.zero_()
            print("read", int(tensor.view(torch.uint8)[0]), flush=True)
            tensor.zero_()
            print("written", flush=True)

    asyncio.run(main())
"""


def write_through_a_view(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAP), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )


async def test_writing_through_a_view_traps_and_changes_nothing(tmp_path: Path) -> None:
    ended = write_through_a_view(tmp_path)
    assert ended.stdout == "read 1\n", ended.stderr
    assert ended.returncode == -11
    async with TieredStore.open(config(tmp_path)) as store:
        space = store.namespace(SPEC)
        with await store.get(space, space.keys_from_tokens(list(range(16)))) as leases:
            block = leases[0]
            assert block is not None
            assert bytes(block) == b"\1" * SPEC.layout.block_bytes
