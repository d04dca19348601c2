"""What runs in LMCache's environment: its own classes around our adapters.

Call: `lmcache_checks.py CHECK DIRECTORY`; prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import select
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import (
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.platform import consume_fd
from lmcache.v1.storage_backend.connector import ConnectorManager

from tiered_kv import TieredKvError
from tiered_kv.engines import flags
from tiered_kv.engines.lmcache import l2_adapter as adapter_module

N = 8
SHAPE = (2, 2, 16, 64)
LIMIT_MS = 30_000
OTHER = "other weights"


def tensor_object(data: torch.Tensor) -> TensorMemoryObj:
    """LMCache's object over a tensor."""
    raw = data.reshape(-1).view(torch.uint8)
    meta = MemoryObjMetadata(
        shape=data.shape,
        dtype=data.dtype,
        address=0,
        phy_size=raw.numel(),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
    )
    return TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None)


def objects(dtype: torch.dtype, seed: int | None) -> list[TensorMemoryObj]:
    """N objects of noise, or of zeros."""
    made = []
    for number in range(N):
        data = torch.zeros(SHAPE, dtype=torch.float16)
        if seed is not None:
            source = torch.Generator().manual_seed(seed * N + number)
            data = torch.randint(0, 1 << 15, SHAPE, generator=source, dtype=torch.int16)
        made.append(tensor_object(data.view(dtype)))
    return made


def keys(salt: str = "") -> list[ObjectKey]:
    return [ObjectKey(bytes([n] * 16), "org/model", 0x01000100, 0, salt) for n in range(N)]


def config(path: Path, **changes: Any) -> dict[str, Any]:
    """The value of the flag that the command prints, with a namespace."""
    rows = {row["engine"]: row["config"] for row in flags.engines(path, "8MiB", "64MiB")}
    found: dict[str, Any] = rows["lmcache"]
    params = {**found["adapter_params"], "namespace": "model/weights/bf16", "huge_pages": False}
    return {**found, "adapter_params": {**params, **changes}}


def opened(path: Path, **changes: Any) -> Any:
    """The adapter, made by LMCache."""
    told = SimpleNamespace(l2_adapter=[json.dumps(config(path, **changes))])
    (parsed,) = parse_args_to_l2_adapters_config(told).adapters
    return create_l2_adapter(parsed)


def wait(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(LIMIT_MS), "the descriptor did not become readable"
    consume_fd(fd)


def store(adapter: Any, names: list[ObjectKey], of: list[Any]) -> bool:
    task = adapter.submit_store_task(names, of)
    wait(adapter.get_store_event_fd())
    done: dict[int, Any] = adapter.pop_completed_store_tasks()
    return bool(done[task].is_successful())


def lookup(adapter: Any, names: list[ObjectKey]) -> int:
    task = adapter.submit_lookup_and_lock_task(names, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return int(found.popcount())


def load(adapter: Any, names: list[ObjectKey], into: list[Any]) -> int:
    task = adapter.submit_load_task(names, into)
    wait(adapter.get_load_event_fd())
    found = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return int(found.popcount())


class Told:
    """What a listener was told."""

    def __init__(self) -> None:
        self.stored: list[ObjectKey] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, names: list[ObjectKey], _sizes: list[int]) -> None:
        self.stored += names

    def on_l2_keys_accessed(self, names: list[ObjectKey]) -> None:
        self.accessed += names

    def on_l2_keys_deleted(self, names: list[ObjectKey]) -> None:
        self.deleted += names


def l2_adapter(path: Path) -> dict[str, Any]:
    """The L2 adapter: dtypes, salts, weights, lists, usage, health, a restart."""
    found: dict[str, Any] = {}
    adapter, told = opened(path), Told()
    adapter.register_listener(told)
    fds = (
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    )
    found["distinct_fds"] = len(set(fds))
    found["before"] = lookup(adapter, keys())
    bf16 = objects(torch.bfloat16, 1)
    found["stored"] = store(adapter, keys(), bf16)
    found["looked_up"] = lookup(adapter, keys())
    into = objects(torch.bfloat16, None)
    found["loaded"] = load(adapter, keys(), into)
    adapter.submit_unlock(keys())
    pairs = list(zip(bf16, into, strict=True))
    found["same"] = all(torch.equal(a.raw_data, b.raw_data) for a, b in pairs)
    found["as_float16"] = load(adapter, keys(), objects(torch.float16, None))
    found["other_salt"] = lookup(adapter, keys("tenant"))
    page = adapter.list_l2_keys(model_name="org/model", page_size=5)
    rest = adapter.list_l2_keys(page_size=5, cursor=page.next_page_token)
    listed = {entry.key.chunk_hash_hex for entry in (*page.entries, *rest.entries)}
    found["listed"] = [len(page.entries), len(rest.entries), len(listed), rest.next_page_token]
    found["of_another_model"] = len(adapter.list_l2_keys(model_name="x").entries)
    found["by_salt"] = dict(adapter.get_usage().bytes_by_cache_salt)
    adapter.delete(keys()[:3])
    found["after_delete"] = lookup(adapter, keys())
    adapter.submit_unlock(keys())
    status = adapter.report_status()
    found["healthy"] = status["is_healthy"]
    found["told"] = [len(told.stored), len(told.accessed), len(told.deleted)]
    adapter.close()
    again = opened(path)
    found["after_restart"] = lookup(again, keys())
    into = objects(torch.bfloat16, None)
    found["loaded_after_restart"] = load(again, keys(), into)
    found["used_after_restart"] = again.get_usage().total_bytes_used
    again.close()
    other = opened(path, namespace=OTHER)
    found["of_other_weights"] = lookup(other, keys())
    other.close()
    return found


def evicted(path: Path) -> dict[str, Any]:
    """More than fits: the listener hears of what was evicted."""
    adapter, told = opened(path, nvme_capacity="4MiB", dram_capacity=0), Told()
    adapter.register_listener(told)
    for turn in range(160):
        names = [ObjectKey(bytes([turn, n] * 8), "m", 1) for n in range(N)]
        assert store(adapter, names, objects(torch.bfloat16, turn))
    by_salt = dict(adapter.get_usage().bytes_by_cache_salt)
    adapter.close()
    return {"stored": len(told.stored), "deleted": len(told.deleted), "by_salt": by_salt}


def forgotten(path: Path) -> dict[str, Any]:
    """More objects than are remembered: what a salt uses is that of those, whatever comes."""
    with mock.patch.object(adapter_module, "_REMEMBERED", 3 * N):
        adapter = opened(path, record=str(path / "traces"), chunk_tokens=4)
        for turn in [*range(6), *range(6)]:
            names = [ObjectKey(bytes([turn, n] * 8), "m", 1) for n in range(N)]
            assert store(adapter, names, objects(torch.bfloat16, turn))
        by_salt = dict(adapter.get_usage().bytes_by_cache_salt)
        found = lookup(adapter, [ObjectKey(bytes([0, n] * 8), "m", 1) for n in range(N)])
        recorded = adapter.report_status()["record"]["path"]
        listed = len(adapter.list_l2_keys(page_size=1000).entries)
        adapter.close()
    lines = [json.loads(line) for line in Path(recorded).read_text().splitlines()]
    return {
        "by_salt": by_salt,
        "listed": listed,
        "found": found,
        "recorded": [line["input_length"] for line in lines],
    }


class LocalMemory:
    """What LMCache gives a connector for its memory."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(extra_config={"save_chunk_meta": False}, use_layerwise=False)
        self.metadata = SimpleNamespace(
            use_mla=False,
            chunk_size=SHAPE[2],
            get_shapes=lambda: [torch.Size(SHAPE)],
            get_dtypes=lambda: [torch.bfloat16],
            get_num_groups=lambda: 1,
        )
        self.released = 0

    def allocate(self, shapes: list[torch.Size], dtypes: list[torch.dtype], _fmt: Any) -> Any:
        made = tensor_object(torch.zeros(shapes[0], dtype=dtypes[0]))
        made.ref_count_down = self._released
        return made

    def _released(self) -> None:
        self.released += 1


def extra_config(path: Path, **changes: Any) -> dict[str, Any]:
    prefix = "remote_storage_plugin.tiered_kv"
    params = {**config(path)["adapter_params"], **changes}
    return {
        f"{prefix}.module_path": "tiered_kv.engines.lmcache",
        f"{prefix}.class_name": "TieredKVConnectorAdapter",
        **{f"{prefix}.{name}": params[name] for name in params if params[name] is not None},
    }


def made(path: Path, loop: asyncio.AbstractEventLoop, memory: LocalMemory, **changes: Any) -> Any:
    """The connector, made by LMCache."""
    engine = SimpleNamespace(
        remote_storage_plugins=["tiered_kv"], extra_config=extra_config(path, **changes)
    )
    local: Any = memory
    manager = ConnectorManager(
        "plugin://tiered_kv", loop, local, engine, memory.metadata, "tiered_kv"
    )
    return manager.create_connector()


def connector(path: Path) -> dict[str, Any]:
    """The connector in the engine's process: a whole chunk, a part of one, a restart."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(30)

    found: dict[str, Any] = {}
    memory = LocalMemory()
    names = [CacheEngineKey("org/model", 1, 0, 1000 + n, torch.bfloat16) for n in range(3)]
    (whole,) = objects(torch.bfloat16, 1)[:1]
    part = tensor_object(whole.raw_data.view(torch.bfloat16).reshape(SHAPE)[:, :, :5].contiguous())
    for turn in ("first", "restarted"):
        plugin = made(path, loop, memory)
        if turn == "first":
            run(plugin.put(names[0], whole))
            run(plugin.put(names[1], part))
        found[f"exists_{turn}"] = [plugin.exists_sync(name) for name in names]
        got = [run(plugin.get(name)) for name in names]
        found[f"got_{turn}"] = [
            bytes(got[0].byte_array) == bytes(whole.byte_array),
            bytes(got[1].byte_array) == bytes(part.byte_array),
            got[2] is None,
        ]
        found[f"shape_{turn}"] = list(got[1].meta.shape)
        run(plugin.close())
    found["released"] = memory.released
    try:
        made(path, loop, memory, namespace=None)
    except TieredKvError as error:
        found["refused"] = str(error)
    try:
        made(path, loop, memory, record=str(path / "traces"))
    except TieredKvError as error:
        found["not_recorded"] = str(error)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    return found


CHECKS = {
    "l2_adapter": l2_adapter,
    "evicted": evicted,
    "forgotten": forgotten,
    "connector": connector,
}


def main() -> None:
    """Runs one check."""
    found = CHECKS[sys.argv[1]](Path(sys.argv[2]))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
