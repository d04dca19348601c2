"""The test that an adapter makes before it serves: write, read, verify."""

from __future__ import annotations

import os

from tiered_kv import IoFaultError, KvLayout, NamespaceSpec
from tiered_kv.blocking import BlockingStore

_BLOCKS = 2
_LIMIT_S = 30.0


def self_test(store: BlockingStore, block_bytes: int) -> None:
    """Stores random blocks, makes them durable, reads them back, and deletes them again.

    An engine that logs a failing cache and goes on would have no hit for ever, and nobody would
    know why: better it does not start.

    Args:
        store: An open store.
        block_bytes: Bytes of a block: those of the blocks to be served, since a store that is full
            would clear a segment for blocks of another size.

    Raises:
        IoFaultError: A step of it failed; the message says which.
        TieredKvError: The store refused a call.
    """
    spec = NamespaceSpec("self-test", "none", "bytes", KvLayout(1, block_bytes))
    ns = store.namespace(spec)
    keys = ns.keys_from_opaque([os.urandom(32) for _ in range(_BLOCKS)])
    blocks = [os.urandom(block_bytes) for _ in range(_BLOCKS)]
    put = store.put(ns, keys, blocks, chain=False, wait=_LIMIT_S)
    if put.stored != _BLOCKS:
        raise _failed(f"of {_BLOCKS} blocks {put.stored} were stored: {put.statuses}")
    flush = store.flush(_LIMIT_S)
    if not flush.all_durable and not flush.no_durable_tier:
        raise _failed(f"{flush.pending} blocks were not written in time, {flush.failed} failed")
    found = [bytearray(block_bytes) for _ in blocks]
    items = store.get_into(ns, keys, found, timeout=_LIMIT_S).items
    for why, block, here in zip(items, blocks, found, strict=True):
        if why is not None:
            raise _failed(f"a block was missed: {why}")
        if here != block:
            raise _failed("a block came back with other bytes")
    if not store.delete(ns, keys, timeout=_LIMIT_S).durable:
        raise _failed("its blocks could not be deleted durably")


def _failed(text: str) -> IoFaultError:
    message = f"self-test: {text}; see `tiered-kv doctor` for the state of the drive"
    return IoFaultError(message, op="self-test")
