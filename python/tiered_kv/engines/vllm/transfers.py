"""What all ways between a rank's store and the engine's cache share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

from vllm.logger import init_logger

from tiered_kv import Leases, Namespace, Request, Reservation
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm.messages import Blocks, part
from tiered_kv.engines.vllm.paged import PagedCache

_LOG = init_logger("vllm.tiered_kv")


class Load(NamedTuple):
    """Blocks to be loaded, and on whose behalf."""

    blocks: Blocks
    namespace: Namespace
    request: Request


class Reader:
    """Leases blocks in batches, and counts the loads that lack some.

    Args:
        store: The store of the rank.
        rank: The rank.
        timeout_s: Seconds after which a batch is a miss.
    """

    def __init__(self, store: BlockingStore, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self.stopped = threading.Event()
        self.cut_loads = 0

    def lease(self, load: Load, first: int, size: int, timeout_s: float | None = None) -> Leases:
        """Leases a batch; the one behind it is read from the drives meanwhile.

        Args:
            load: What is loaded.
            first: Place of the batch's first block among those of the load.
            size: Blocks of a batch; the last one has fewer.
            timeout_s: Seconds after which it is a miss, if not the usual ones.

        Returns:
            The leases of the batch.

        Raises:
            TieredKvError: The store is closed, or has failed.
        """
        keys, count = load.blocks.keys_of(self._rank), len(load.blocks.block_ids)
        last = min(first + size, count)
        self._store.prefetch(load.namespace, part(keys, last, min(last + size, count)))
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._store.get(load.namespace, part(keys, first, last), timeout_s, load.request)

    def lacks(self, load: Load, first: int, leases: Leases) -> bool:
        """Whether a batch lacks blocks, which ends its load: a block needs those before it."""
        hits = leases.hits
        if hits == len(leases):
            return False
        keys, count = load.blocks.keys_of(self._rank), len(load.blocks.block_ids)
        why = leases.reasons[hits]
        self.cut_loads += 1
        if self.cut_loads == 1:
            _LOG.warning(
                "a load was cut by %d blocks (%s), which are computed again, as with later ones",
                count - first - hits,
                why,
            )
        if why == "corrupt":
            # Others may be too, and are found so while this one is computed.
            self._store.prefetch(load.namespace, part(keys, first + len(leases), count))
        return True


class Saving:
    """Blocks on their way into memory of the store.

    Only what has every layer is published; the memory of what is not is given back.

    Args:
        store: The store of the rank.
        reservation: Memory for the blocks, where the store has room and lacks them.
        paged: The engine's cache.
        block_ids: Where the blocks are in it.
    """

    def __init__(
        self,
        store: BlockingStore,
        reservation: Reservation,
        paged: PagedCache,
        block_ids: Sequence[int],
    ) -> None:
        self._store = store
        self._reservation = reservation
        self._paged = paged
        free = [at for at, why in enumerate(reservation.statuses) if why is None]
        self._block_ids = [block_ids[at] for at in free]
        self._views = [reservation[at] for at in free]
        self._left = set(range(paged.layers))

    def copy(self, layer: int) -> int:
        """Copies one layer, by its place; returns of how many blocks."""
        self._paged.read(self._block_ids, self._views, layer)
        self._left.discard(layer)
        return len(self._block_ids)

    def fill(self) -> None:
        """Copies what has not been copied yet."""
        if len(self._left) == self._paged.layers:
            self._paged.read(self._block_ids, self._views)
            self._left.clear()
        for layer in sorted(self._left):
            self.copy(layer)

    def publish(self) -> None:
        """Makes the blocks visible, once all copies have ended.

        Raises:
            TieredKvError: The store is closed, or the reservation has expired.
        """
        try:
            # A block with a writable view alive is not published.
            for one in self._views:
                if one is not None:
                    one.release()
            if self._views and not self._left:
                self._store.publish(self._reservation)
        finally:
            self.drop()

    def drop(self) -> None:
        """Gives back the memory of what is not published, once all copies have ended."""
        views, self._views, self._block_ids = self._views, [], []
        for one in views:
            # What an error in flight still refers to is given back with it.
            with contextlib.suppress(BufferError):
                if one is not None:
                    one.release()
        self._reservation.abandon()
