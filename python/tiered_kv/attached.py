"""Stores of other processes: lookups, holds and statistics over a Unix socket.

```python
async with TieredStore.attach("/mnt/nvme0/kv") as store:
    ns = store.namespace(NamespaceSpec("model", "weights", "float32", KvLayout(32, 4096)))
    found = await store.lookup(ns, ns.keys_from_tokens(prompt))
```
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tiered_kv import _core
from tiered_kv.spec import NamespaceSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered_kv._base import GroupRule

Path = str | os.PathLike[str]


class AttachedBase:
    """What the asyncio and the blocking face of an attached store share.

    Where the owner is gone or does not answer in time, every key is a counted miss, and a later
    call connects again. Any number of loops and threads may share one; their calls go one after the
    other. A child forked from an attached process must attach itself.
    """

    def __init__(self, core: _core.Attached) -> None:
        self._core = core

    @property
    def alive(self) -> bool:
        """Whether the owner was there a moment ago; one that is stopped is there."""
        return self._core.alive

    @property
    def closed(self) -> bool:
        """Whether this takes no more calls."""
        return self._core.closed

    @property
    def path(self) -> str:
        """The directory that was attached to."""
        return os.fspath(self._core.path)

    def namespace(self, spec: NamespaceSpec) -> _core.Namespace:
        """A namespace handle: keys, and the name of what is asked for. Asks the owner nothing.

        Args:
            spec: Everything that makes bytes incompatible.

        Returns:
            The handle, good for any attached store.

        Raises:
            InvalidArgumentError: A field is empty or too long.
            ClosedError: This is closed, or a forked child's.
        """
        return self._core.namespace(spec.canonical())

    def counters(self) -> dict[str, int]:
        """What has become of the calls.

        Returns:
            `unanswered`, calls that the owner did not answer in time, which were misses;
            `connects`, connections made, the first one included.
        """
        return self._core.counters()


class AttachedStore(AttachedBase):
    """A store of another process, for asyncio. Make one with `tiered_kv.TieredStore.attach`.

    Calls wait for the owner on a thread, at most for the time-out.
    """

    async def lookup(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        mode: Literal["prefix", "each"] = "prefix",
    ) -> _core.Lookup:
        """Says where keys are; all absent where the owner does not say.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            mode: `"prefix"` stops at the first key that is not there, `"each"` looks at all.

        Returns:
            Leading hits, and for each key its flags and its tier.

        Raises:
            InvalidArgumentError: `keys` is no multiple of 32 bytes.
            ClosedError: This is closed, or a forked child's.
        """
        return await asyncio.to_thread(self._core.lookup, ns, keys, mode)

    async def contains(self, ns: _core.Namespace, key: Buffer) -> bool:
        """Whether a `get` of one key would find it, as far as the owner says.

        Args:
            ns: The namespace.
            key: One key of 32 bytes.

        Returns:
            True for a key in any tier.

        Raises:
            InvalidArgumentError: `key` is not 32 bytes.
            ClosedError: This is closed, or a forked child's.
        """
        return await asyncio.to_thread(self._core.contains, ns, key)

    async def lookup_hybrid(
        self, ns: _core.Namespace, groups: Sequence[tuple[Buffer, GroupRule]]
    ) -> int:
        """As `tiered_kv.TieredStore.lookup_hybrid`; 0 where the owner does not say.

        Args:
            ns: The namespace.
            groups: For each group its packed keys and its rule.

        Returns:
            The largest position, in blocks, at which every group has all that it still needs.

        Raises:
            InvalidArgumentError: The groups have different numbers of keys, or a rule is unknown.
            ClosedError: This is closed, or a forked child's.
        """
        return await asyncio.to_thread(self._core.lookup_hybrid, ns, groups)

    async def hold(self, ns: _core.Namespace, keys: Buffer, ttl: float) -> _core.AttachedHold:
        """Keeps blocks on whatever tier they are; none where the owner does not say.

        It ends when it is released or dropped, after `ttl`, and with the connection: when this is
        closed, when this process ends, however it ends, and when a call is not answered in time.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            ttl: Seconds that it lasts at most; a day at most.

        Returns:
            The hold, also a context manager.

        Raises:
            InvalidArgumentError: `keys` or `ttl` is wrong.
            ClosedError: This is closed, or a forked child's.
        """
        return await asyncio.to_thread(self._core.hold, ns, keys, ttl)

    async def stats(self) -> dict[str, Any]:
        """The owner's counters and gauges, as `tiered_kv.TieredStore.stats`.

        Raises:
            TieredKvError: The owner does not say; as `tiered_kv.TieredStore.attach`.
        """
        return await asyncio.to_thread(self._core.stats)

    async def health(self) -> dict[str, Any]:
        """State of the owner's parts, as `tiered_kv.TieredStore.health`.

        Raises:
            TieredKvError: The owner does not say; as `tiered_kv.TieredStore.attach`.
        """
        return await asyncio.to_thread(self._core.health)

    async def close(self) -> None:
        """Ends the connection and every hold. A second close does nothing."""
        self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class Attaching:
    """A store being attached to: await it, or enter it with `async with`."""

    def __init__(self, path: Path, limit: float | None) -> None:
        self._path = path
        self._limit = limit
        self._attached: AttachedStore | None = None

    async def _open(self) -> AttachedStore:
        return AttachedStore(await asyncio.to_thread(_core.Attached.open, self._path, self._limit))

    def __await__(self) -> Generator[Any, None, AttachedStore]:
        return self._open().__await__()

    async def __aenter__(self) -> AttachedStore:
        self._attached = await self._open()
        return self._attached

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._attached is not None:
            await self._attached.close()


class BlockingAttachedStore(AttachedBase):
    """A store of another process, for threads. Make one with `BlockingStore.attach`.

    Calls wait for the owner without the GIL, at most for the time-out.
    """

    def lookup(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        mode: Literal["prefix", "each"] = "prefix",
    ) -> _core.Lookup:
        """Says where keys are; see `AttachedStore.lookup`."""
        return self._core.lookup(ns, keys, mode)

    def contains(self, ns: _core.Namespace, key: Buffer) -> bool:
        """Whether a `get` of one key would find it; see `AttachedStore.contains`."""
        return self._core.contains(ns, key)

    def lookup_hybrid(self, ns: _core.Namespace, groups: Sequence[tuple[Buffer, GroupRule]]) -> int:
        """Says how much of a prompt is there; see `AttachedStore.lookup_hybrid`."""
        return self._core.lookup_hybrid(ns, groups)

    def hold(self, ns: _core.Namespace, keys: Buffer, ttl: float) -> _core.AttachedHold:
        """Keeps blocks on whatever tier they are; see `AttachedStore.hold`."""
        return self._core.hold(ns, keys, ttl)

    def stats(self) -> dict[str, Any]:
        """The owner's counters and gauges; see `AttachedStore.stats`."""
        return self._core.stats()

    def health(self) -> dict[str, Any]:
        """State of the owner's parts; see `AttachedStore.health`."""
        return self._core.health()

    def close(self) -> None:
        """Ends the connection and every hold. A second close does nothing."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
