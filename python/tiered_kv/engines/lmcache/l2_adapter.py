"""The L2 adapter class of `lmcache server`: it sees dtypes and shapes, and reports its health.

`{"type": "plugin", "module_path": "tiered_kv.engines.lmcache", "class_name": "TieredKVL2Adapter",
"adapter_params": {...}}`
"""

from __future__ import annotations

import base64
import itertools
import logging
import os
import select
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

from tiered_kv import Hold
from tiered_kv.engines.lmcache.objects import Ended, Kind, Objects
from tiered_kv.engines.lmcache.options import Options

logger = logging.getLogger(__name__)

_HOLD_S = 60.0
_DELETE_S = 30.0
_POLL_MS = 500
_REMEMBERED = 1 << 20
"""Objects that were stored since the start, the last ones, that are listed and counted by salt."""
_LOOKED_AT = 2
"""Objects, for each one stored, of which it is seen whether they are still there."""


def key_text(key: ObjectKey) -> str:
    """The key as the native plugin sees it."""
    place = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}"
    text = f"{place}@{key.chunk_hash.hex()}"
    return f"{text}@{key.cache_salt}" if key.cache_salt else text


def kind_of(obj: Any) -> Kind:
    """What the bytes of a memory object are."""
    meta = obj.meta
    shapes = meta.shapes or [meta.shape]
    dtypes = meta.dtypes or [meta.dtype]
    return Kind(
        memoryview(obj.byte_array).nbytes,
        ",".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
        ",".join("x".join(str(n) for n in shape) for shape in shapes),
    )


class TieredKVL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """The store behind LMCache's interface for L2 adapters.

    Args:
        params: `adapter_params` of the flag: `path`, `namespace`, and fields of `StoreConfig`.
        l1_memory_desc: Where LMCache's own memory is; buffers are taken as they come.

    Raises:
        ConfigError: An option is missing, unknown or wrong; the message names it.
        IoFaultError: What was written did not come back as it was.
        TieredKvError: The store cannot be opened.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        # No capacity for LMCache to keep: the store evicts by predicted reuse.
        super().__init__()
        del l1_memory_desc
        self._objects = Objects(Options.parse(params))
        self._fds = {do: os.eventfd(0, os.EFD_NONBLOCK) for do in ("set", "exists", "get")}
        # Guards what follows.
        self._lock = threading.Lock()
        self._tasks: dict[int, list[ObjectKey]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._deleted: dict[int, threading.Event] = {}
        self._holds: dict[ObjectKey, list[list[Hold]]] = {}
        self._known: OrderedDict[ObjectKey, int] = OrderedDict()
        self._lookups = itertools.count()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiered-kv-lmcache", daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        """The descriptor that is readable when a store has ended."""
        return self._fds["set"]

    def get_lookup_and_lock_event_fd(self) -> int:
        """The descriptor that is readable when a lookup has ended."""
        return self._fds["exists"]

    def get_load_event_fd(self) -> int:
        """The descriptor that is readable when a load has ended."""
        return self._fds["get"]

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begins to store objects."""
        kinds = [kind_of(obj) for obj in objects]
        with self._lock:
            task = self._objects.set(_texts(keys), [obj.byte_array for obj in objects], kinds)
            self._tasks[task] = list(keys)
            self._sizes[task] = [kind.size for kind in kinds]
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Takes the stores that have ended."""
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Looks objects up, and keeps those that are there until they are unlocked."""
        # A hint only: what an object's bytes have to be, its load says.
        del group_layout_descs
        texts = _texts(keys)
        self._objects.asked(texts)
        holds = self._objects.hold(texts, _HOLD_S)
        found = _bitmap([bool(some) for some in holds])
        with self._lock:
            for key, some in zip(keys, holds, strict=True):
                if some:
                    self._holds.setdefault(key, []).append(some)
            task = next(self._lookups)
            self._found[task] = found
        os.eventfd_write(self._fds["exists"], 1)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """What a lookup has found, once."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Lets objects go that a lookup has kept."""
        ended = []
        with self._lock:
            for key in keys:
                held = self._holds.get(key)
                if held:
                    # The one that ends first by itself.
                    ended += held.pop(0)
                    if not held:
                        del self._holds[key]
        for hold in ended:
            hold.release()

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begins to read objects into LMCache's memory."""
        kinds = [kind_of(obj) for obj in objects]
        with self._lock:
            task = self._objects.get(_texts(keys), [obj.byte_array for obj in objects], kinds)
            self._tasks[task] = list(keys)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """What a load has read, once."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Deletes objects, durably; waits for it up to 30 s."""
        if not keys:
            return
        done = threading.Event()
        with self._lock:
            task = self._objects.delete(_texts(keys))
            self._tasks[task] = list(keys)
            self._deleted[task] = done
        if not done.wait(_DELETE_S):
            logger.warning("tiered-kv: a delete of %d objects goes on", len(keys))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Lists objects that were stored since the start and are there.

        Raises:
            ValueError: `page_size` or `cursor` is wrong.
        """
        if page_size < 1:
            message = f"`page_size` is {page_size}: give 1 or more"
            raise ValueError(message)
        after = "" if cursor is None else _decoded(cursor)
        with self._lock:
            known = list(self._known.items())
        named = [(key_text(key), key, size) for key, size in known]
        rest = sorted(
            row for row in named if row[0] > after and model_name in (None, row[1].model_name)
        )
        page = rest[:page_size]
        there = self._objects.present([text for text, _, _ in page])
        entries = [
            KeyEntry(key.to_encoded_object_key(), size)
            for (_, key, size), present in zip(page, there, strict=True)
            if present
        ]
        more = len(rest) > page_size
        token = base64.urlsafe_b64encode(page[-1][0].encode()).decode() if more else None
        return KeyListPage(tuple(entries), token)

    def get_usage(self) -> AdapterUsage:
        """Bytes in use on the drives, and of each salt those of the objects that it remembers."""
        used, capacity = self._objects.used_bytes()
        return AdapterUsage(used, capacity, super().get_usage().bytes_by_cache_salt)

    def report_status(self) -> dict[str, Any]:
        """State of the store."""
        status = self._objects.status()
        alive = self._thread.is_alive()
        return {**status, "type": "tiered-kv", "is_healthy": alive and status["is_healthy"]}

    def close(self) -> None:
        """Ends what is under way, and returns when no memory of LMCache's is touched any more."""
        self._stopped.set()
        self._thread.join()
        self._objects.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _run(self) -> None:
        """Hands over what has ended."""
        poller = select.poll()
        poller.register(self._objects.fileno(), select.POLLIN)
        while not self._stopped.is_set():
            if poller.poll(_POLL_MS):
                try:
                    ends = self._objects.drain()
                except Exception:
                    logger.exception("tiered-kv: what has ended for LMCache could not be taken")
                    self._stopped.wait(_POLL_MS / 1e3)
                    continue
                for end in ends:
                    self._tell(end)

    def _tell(self, end: Ended) -> None:
        try:
            self._hand_over(end)
        except Exception:
            logger.exception("tiered-kv: an end of LMCache's was not told to all")

    def _hand_over(self, end: Ended) -> None:
        with self._lock:
            keys = self._tasks.pop(end.number)
            sizes = self._sizes.pop(end.number, [])
        done = [key for key, did in zip(keys, end.done, strict=True) if did]
        match end.do:
            case "set":
                with self._lock:
                    self._stored[end.number] = L2StoreResult(end.ok, sum(sizes) if end.ok else 0)
                os.eventfd_write(self._fds["set"], 1)
                self._keep(end, keys, sizes)
            case "get":
                with self._lock:
                    self._loaded[end.number] = _bitmap(end.done)
                os.eventfd_write(self._fds["get"], 1)
                if done:
                    self._notify_keys_accessed(done)
            case _:
                with self._lock:
                    event = self._deleted.pop(end.number)
                try:
                    self._forget(done)
                finally:
                    event.set()

    def _keep(self, end: Ended, keys: Sequence[ObjectKey], sizes: Sequence[int]) -> None:
        """Remembers what was stored, and tells it; and of older ones what is no longer there."""
        told: list[tuple[ObjectKey, int]] = []
        with self._lock:
            for key, size, did in zip(keys, sizes, end.done, strict=True):
                if did:
                    told.append((key, size - self._known.get(key, 0)))
                    self._known[key] = size
            oldest = list(itertools.islice(self._known, _LOOKED_AT * len(keys)))
        if told:
            self._notify_keys_stored([key for key, _ in told], [size for _, size in told])
        there = self._objects.look(_texts(oldest)) or [True] * len(oldest)
        self._forget([key for key, present in zip(oldest, there, strict=True) if not present])
        with self._lock:
            for key in oldest:
                if key in self._known:
                    self._known.move_to_end(key)
            surplus = list(itertools.islice(self._known, max(0, len(self._known) - _REMEMBERED)))
        # They are there, but nobody would see them go: what is told of must be what is known of.
        self._forget(surplus)

    def _forget(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            sizes = [self._known.pop(key, 0) for key in keys]
        if keys:
            self._notify_keys_deleted(list(keys), sizes)


def _texts(keys: Sequence[ObjectKey]) -> list[str]:
    return [key_text(key) for key in keys]


def _bitmap(done: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(done))
    for place, did in enumerate(done):
        if did:
            bitmap.set(place)
    return bitmap


def _decoded(cursor: str) -> str:
    try:
        return base64.urlsafe_b64decode(cursor.encode()).decode()
    except ValueError as error:
        message = f"`cursor` is {cursor!r:.100}: give the `next_page_token` of the page before"
        raise ValueError(message) from error
