"""The connector of LMCache in the engine's process, a `ConnectorAdapter` for `plugin://tiered_kv`.

A fault of a plug-in is only logged by LMCache, which then serves without it. So the store is tested
when the connector is made, and what is wrong is said on stderr, too.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from tiered_kv import ConfigError, TieredKvError
from tiered_kv.engines.lmcache.objects import Ended, Kind, Objects
from tiered_kv.engines.lmcache.options import Options

logger = logging.getLogger(__name__)

_TYPE = "tiered_kv"
_URL = "plugin://"
_LMCACHES_OWN = frozenset({"module_path", "class_name"})


class TieredKVConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector of `remote_storage_plugins: ["tiered_kv"]`."""

    def __init__(self) -> None:
        super().__init__(f"{_URL}{_TYPE}")

    def can_parse(self, url: str) -> bool:
        """Whether a URL is that of this plug-in."""
        return url.startswith(_URL) and extract_plugin_type(url.removeprefix(_URL)) == _TYPE

    def create_connector(self, context: Any) -> RemoteConnector:
        """Opens the store and tests it.

        Args:
            context: What LMCache knows; the options are `remote_storage_plugin.tiered_kv.*` of its
                `extra_config`.

        Returns:
            The connector.

        Raises:
            ConfigError: An option is missing, unknown or wrong; the message names it.
            IoFaultError: What was written did not come back as it was.
            TieredKvError: The store cannot be opened.
        """
        prefix = f"remote_storage_plugin.{context.plugin_name or _TYPE}."
        extra = (context.config.extra_config if context.config else None) or {}
        named = {key.removeprefix(prefix): extra[key] for key in extra if key.startswith(prefix)}
        params = {key: named[key] for key in named if key not in _LMCACHES_OWN}
        try:
            options = Options.parse(params)
            if options.record is not None:
                text = (
                    "adapter_params: `record` is not for the connector, which is asked chunk by "
                    "chunk and not told of requests: leave it out, or take the L2 adapter"
                )
                raise ConfigError(text, op="engines")
            objects = Objects(options)
        except (TieredKvError, OSError) as error:
            print(f"tiered-kv does not serve LMCache: {error}", file=sys.stderr, flush=True)
            raise
        logger.info("tiered-kv serves LMCache from %s", params["path"])
        return TieredKVConnector(context, objects)


class TieredKVConnector(RemoteConnector):  # type: ignore[misc]
    """The store behind LMCache's interface for remote connectors.

    Args:
        context: What LMCache knows.
        objects: The objects of the store.
    """

    def __init__(self, context: Any, objects: Objects) -> None:
        super().__init__(context.local_cpu_backend.config, context.local_cpu_backend.metadata)
        self._memory = context.local_cpu_backend
        self._loop: asyncio.AbstractEventLoop = context.loop
        self._objects = objects
        self._waiting: dict[int, asyncio.Future[Ended]] = {}
        self._closed = False
        self._loop.call_soon_threadsafe(self._loop.add_reader, objects.fileno(), self._drain)

    async def exists(self, key: Any) -> bool:
        """Whether an object is there."""
        return self.exists_sync(key)

    def exists_sync(self, key: Any) -> bool:
        """Whether an object is there; a lookup in memory."""
        return self._objects.present([key.to_string()])[0]

    async def get(self, key: Any) -> Any:
        """Reads an object into memory of LMCache's; None where it is not there or not sound."""
        kind = None if self._closed else self._objects.kind_of(key.to_string())
        if kind is None or not 0 < kind.size <= self.full_chunk_size_bytes:
            return None
        obj = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if obj is None:
            return None
        read = False
        try:
            whole = self.reshape_partial_chunk(obj, kind.size)
            batch = self._objects.get([key.to_string()], [whole.byte_array], [kind])
            read = (await self._end_of(batch)).done[0]
        except ValueError as error:
            logger.warning("tiered-kv: an object of LMCache is missed: %s", error)
        finally:
            if not read:
                obj.ref_count_down()
        return obj if read else None

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Stores an object; what cannot be stored is dropped."""
        if self._closed:
            return
        buffer = memoryview(memory_obj.byte_array)
        batch = self._objects.set([key.to_string()], [buffer], [Kind(buffer.nbytes)])
        end = await self._end_of(batch)
        if not end.ok:
            logger.warning("tiered-kv: an object of LMCache is not stored: %s", end.error)

    async def list(self) -> list[str]:
        """Nothing: a store keeps digests of keys."""
        return []

    def remove_sync(self, key: Any) -> bool:
        """Deletes an object, without waiting for its end; whether it was there."""
        there = self.exists_sync(key)
        self._objects.delete([key.to_string()])
        return there

    async def close(self) -> None:
        """Ends what is under way, and returns when no memory of LMCache's is touched any more."""
        # Nobody would tell the end of what is begun from here on.
        self._closed = True
        self._loop.remove_reader(self._objects.fileno())
        await asyncio.to_thread(self._objects.close)
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    def _drain(self) -> None:
        for end in self._objects.drain():
            future = self._waiting.pop(end.number, None)
            if future is not None and not future.done():
                future.set_result(end)

    async def _end_of(self, batch: int) -> Ended:
        # The loop's own thread drains, so that no end can come before its future is there.
        future: asyncio.Future[Ended] = self._loop.create_future()
        self._waiting[batch] = future
        # A caller that is cancelled frees its memory next: the end has to come first.
        cancelled = False
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                if future.cancelled():
                    raise
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return future.result()
