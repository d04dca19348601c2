"""What the tests of the Python API share: small stores, blocks, a second opinion on keys."""

from __future__ import annotations

import dataclasses
import random
import struct
from pathlib import Path
from typing import Any

from blake3 import blake3

from tiered_kv import KvLayout, Leases, NamespaceSpec

BLOCK_BYTES = 5000
TOKENS = 4


def spec(block_bytes: int = BLOCK_BYTES, **fields: Any) -> NamespaceSpec:
    """A specification; `fields` replace those of it."""
    base = NamespaceSpec("model", "weights", "float32", KvLayout(TOKENS, block_bytes))
    return dataclasses.replace(base, **fields)


def config(directory: Path | None = None, **fields: Any) -> dict[str, Any]:
    """Fields of a small store, with a drive where a directory is given."""
    # What is read unasked has tests of its own.
    small: dict[str, Any] = {"dram_capacity": "1MiB", "huge_pages": False, "ahead_waste": 0.0}
    if directory is not None:
        small |= {"nvme_paths": [directory], "nvme_capacity": "2MiB"}
    return small | fields


def blocks(n: int, seed: int = 0, size: int = BLOCK_BYTES) -> list[bytes]:
    """`n` blocks of reproducible noise."""
    noise = random.Random(seed)
    return [noise.randbytes(size) for _ in range(n)]


def tokens(n_blocks: int, start: int = 0) -> list[int]:
    """Token ids that fill `n_blocks` blocks."""
    return list(range(start, start + n_blocks * TOKENS))


def contents(leases: Leases) -> list[bytes | None]:
    """Copies of all blocks, None for a miss."""
    views = [leases[index] for index in range(len(leases))]
    return [None if view is None else bytes(view) for view in views]


def split(packed: bytes) -> list[bytes]:
    """Packed keys as a list."""
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]


def namespace_id(fields: dict[str, Any]) -> bytes:
    """The digest of a specification, computed without the core.

    Args:
        fields: Those of `NamespaceSpec`; the layout as a dictionary, rope values as text.
    """
    hasher = blake3(derive_key_context="tiered-kv 2026 namespace v1")

    def put(name: str, value: bytes) -> None:
        for part in (name.encode(), value):
            hasher.update(struct.pack("<Q", len(part)) + part)

    for name in ("model", "weights", "kv_dtype", "lora", "salt", "parallel", "engine"):
        put(name, fields.get(name, "").encode())
    for name, value in sorted(fields.get("rope", {}).items()):
        put(f"rope.{name}", value.encode())
    layout = fields["layout"]
    head = (layout["tokens_per_block"], layout["layer_groups"], layout["head_groups"])
    sizes = layout["slab_bytes"]
    put("layout", struct.pack("<IHH", *head) + struct.pack(f"<{len(sizes)}Q", *sizes))
    return hasher.digest()


def token_keys(
    ns: bytes, ids: list[int], per_block: int, parent: bytes | None, tail: bool
) -> list[bytes]:
    """Keys of a token sequence, computed without the core."""
    keys = []
    parent = parent or bytes(32)
    for at in range(0, len(ids), per_block):
        block = ids[at : at + per_block]
        if len(block) < per_block and not tail:
            break
        count = struct.pack("<I", len(block))
        message = b"tkv1:tok" + parent + count + struct.pack(f"<{len(block)}I", *block)
        parent = blake3(message, key=ns).digest()
        keys.append(parent)
    return keys


def opaque_key(ns: bytes, opaque: bytes) -> bytes:
    """The key of an engine's hash, computed without the core."""
    return blake3(b"tkv1:raw" + struct.pack("<I", len(opaque)) + opaque, key=ns).digest()
