"""A store in a program of your own: put blocks, close, open again, get them back.

Run it with `python examples/quickstart.py [DIRECTORY]`. It needs no model; `tiered-kv demo` shows
the same with one, and `tiered_kv.engines.transformers` is how that reuses its prefixes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

from tiered_kv import KvLayout, NamespaceSpec, StoreConfig, TieredStore

TOKENS = list(range(96))  # three blocks of 32 tokens
SPEC = NamespaceSpec(
    model="example",
    weights="0123abcd",  # fingerprint of the weights: other weights, other namespace
    kv_dtype="float32",
    layout=KvLayout(tokens_per_block=32, block_bytes=65_536),
)


async def main(directory: str) -> None:
    """Stores three blocks, restarts the store and reads them from the drive."""
    config = StoreConfig(dram_capacity="64MiB", nvme_paths=[directory], nvme_capacity="256MiB")
    blocks = [bytes([number]) * SPEC.layout.block_bytes for number in range(3)]

    # The five lines: open, name what the bytes depend on, key the tokens, put, get.
    async with TieredStore.open(config) as store:
        ns = store.namespace(SPEC)
        keys = ns.keys_from_tokens(TOKENS)
        await store.put(ns, keys, blocks)
        with await store.get(ns, keys) as leases:
            print(f"from memory: {leases.hits} of {len(leases)} blocks")
        await store.flush()

    async with TieredStore.open(config) as store:
        ns = store.namespace(SPEC)
        # A longer prompt with the same beginning: its first three blocks are there.
        keys = ns.keys_from_tokens([*TOKENS, *range(500, 564)])
        found = store.lookup(ns, keys, mode="prefix")
        with await store.get(ns, keys[: found.hits * 32]) as leases:
            same = [bytes(view or b"") for view in leases] == blocks
            print(f"after a restart: {leases.hits} of {len(keys) // 32} blocks, identical: {same}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as fresh:
            asyncio.run(main(fresh))
