"""A number out of range is our own error: it names the field, the range and the remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api
from tiered_kv import (
    ConfigError,
    InvalidArgumentError,
    KvLayout,
    Namespace,
    RequestContext,
    TieredStore,
)
from tiered_kv.blocking import BlockingStore

HUGE = 1 << 200
WHOLE: list[Any] = [-1, HUGE, 1.5, "2", None]
SECONDS: list[Any] = [-1, float("nan"), float("-inf"), 10**400, "soon"]

Call = Callable[["Setting", Any], object]


class Setting:
    """A store and what its calls are given."""

    def __init__(self, store: BlockingStore) -> None:
        self.store = store
        self.ns: Namespace = store.namespace(api.spec())
        self.keys = self.ns.keys_from_tokens(api.tokens(2))
        self.data = b"".join(api.blocks(2))
        self.out = bytearray(len(self.data))
        self.channel = store.channel()
        self.request = store.begin_request()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with BlockingStore.open(**api.config(tmp_path_factory.mktemp("store"))) as store:
        made = Setting(store)
        with made.channel:
            yield made


def in_a_loop(call: Callable[[TieredStore], Any]) -> Call:
    """A call of the asyncio store, awaited."""

    def run(s: Setting, _: Any) -> object:
        async def work() -> object:
            return await call(TieredStore(s.store._core))

        return asyncio.run(work())

    return run


TIMES: dict[str, tuple[str, Call]] = {
    "get": ("timeout", lambda s, v: s.store.get(s.ns, s.keys, v)),
    "get_into": ("timeout", lambda s, v: s.store.get_into(s.ns, s.keys, s.out, v)),
    "put": ("timeout", lambda s, v: s.store.put(s.ns, s.keys, s.data, timeout=v)),
    "put wait": ("wait", lambda s, v: s.store.put(s.ns, s.keys, s.data, wait=v)),
    "flush": ("timeout", lambda s, v: s.store.flush(v)),
    "delete": ("timeout", lambda s, v: s.store.delete(s.ns, s.keys, v)),
    "delete_namespace": ("timeout", lambda s, v: s.store.delete_namespace(s.ns, v)),
    "delete_older_than": ("seconds", lambda s, v: s.store.delete_older_than(s.ns, v)),
    "delete_older_than timeout": ("timeout", lambda s, v: s.store.delete_older_than(s.ns, 9e9, v)),
    "new_epoch": ("timeout", lambda s, v: s.store.new_epoch(s.ns, v)),
    "hold": ("ttl", lambda s, v: s.store.hold(s.ns, s.keys, v)),
    "submit_get_into": (
        "timeout",
        lambda s, v: s.channel.submit_get_into(s.ns, s.keys, s.out, timeout=v),
    ),
    "submit_put": ("timeout", lambda s, v: s.channel.submit_put(s.ns, s.keys, s.data, timeout=v)),
    "submit_put wait": ("wait", lambda s, v: s.channel.submit_put(s.ns, s.keys, s.data, wait=v)),
    "submit_delete": ("timeout", lambda s, v: s.channel.submit_delete(s.ns, s.keys, v)),
    "quiesce": ("timeout", lambda s, v: s.channel.quiesce(v)),
    "async get": (
        "timeout",
        lambda s, v: in_a_loop(lambda store: store.get(s.ns, s.keys, v))(s, v),
    ),
    "async put": (
        "wait",
        lambda s, v: in_a_loop(lambda store: store.put(s.ns, s.keys, s.data, wait=v))(s, v),
    ),
}

NUMBERS: dict[str, tuple[str, Call]] = {
    "channel": ("capacity", lambda s, v: s.store.channel(v)),
    "keys_from_opaque": ("width", lambda s, v: s.ns.keys_from_opaque(bytes(8), _given(v))),
    "tokens": (r"tokens\[1\]", lambda s, v: s.ns.keys_from_tokens([1, v])),
    "put depth": ("depth", lambda s, v: s.store.put(s.ns, s.keys, s.data, depth=v)),
    "put tokens": (r"tokens\[0\]", lambda s, v: s.store.put(s.ns, s.keys, s.data, tokens=[v, 1])),
    "reserve depth": ("depth", lambda s, v: s.store.reserve(s.ns, s.keys, depth=v)),
    "submit_put": ("depth", lambda s, v: s.channel.submit_put(s.ns, s.keys, s.data, depth=v)),
    "observe": ("position", lambda s, v: s.request.observe(s.ns, s.keys, v)),
    "finish": ("output_tokens", lambda s, v: s.request.finish(v)),
    "finish hits": ("engine_hit_tokens", lambda s, v: s.request.finish(0, v)),
    "turn": ("turn", lambda s, v: s.store.begin_request(RequestContext(turn=v))),
    "window": (
        r"groups\[0\]",
        lambda s, v: s.store.lookup_hybrid(s.ns, [(s.keys, ("window", v))]),
    ),
    "slot_bytes": ("slot_bytes", lambda s, v: s.store.register(s.out, v)),
    "stride": ("stride", lambda s, v: s.store.register(s.out, 8, _given(v))),
    "slots": ("numbers", lambda s, v: s.store.register(s.out, 8).slots([0, v])),
    "read": ("slot", lambda s, v: s.store.register(s.out, 8).read(v)),
    "events": ("since", lambda s, v: s.store.events(_given(v))),
    "layout tokens": ("tokens_per_block", lambda s, v: _layout(s, tokens_per_block=v)),
    "layout bytes": (
        "block_bytes",
        lambda s, v: _layout(s, tokens_per_block=1, block_bytes=_given(v)),
    ),
    "layout groups": ("layer_groups", lambda s, v: _layout(s, tokens_per_block=1, layer_groups=v)),
    "layout slabs": ("slab_bytes", lambda s, v: _layout(s, tokens_per_block=1, slab_bytes=[v])),
}


def _given(value: Any) -> Any:
    """None stands for a default there: something else that is no number."""
    return "no number" if value is None else value


def _layout(s: Setting, **fields: Any) -> object:
    slabs = {"slab_bytes", "block_bytes"}
    return s.store.namespace(
        api.spec(
            layout=KvLayout(**(fields if slabs & set(fields) else fields | {"block_bytes": 9}))
        )
    )


def check(s: Setting, named: str, call: Call, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"`{named}`?.*: give|`{named}`.* is ") as told:
        call(s, value)
    assert "give" in str(told.value) or "integer" in str(told.value)


@pytest.mark.parametrize("value", SECONDS, ids=repr)
@pytest.mark.parametrize(("named", "call"), TIMES.values(), ids=TIMES)
def test_seconds(setting: Setting, named: str, call: Call, value: Any) -> None:
    check(setting, named, call, value)


@pytest.mark.parametrize("value", WHOLE, ids=repr)
@pytest.mark.parametrize(("named", "call"), NUMBERS.values(), ids=NUMBERS)
def test_numbers(setting: Setting, named: str, call: Call, value: Any) -> None:
    check(setting, named, call, value)


@pytest.mark.parametrize("name", [name for name in TIMES if not name.startswith("delete")])
def test_endless_times_are_taken(setting: Setting, name: str) -> None:
    """Infinity and what no clock can hold mean: as long as it takes."""
    for value in (float("inf"), 1e300, 10**30):
        TIMES[name][1](setting, value)
    setting.channel.quiesce()
    setting.channel.drain()


@pytest.mark.parametrize("index", [2, -3, HUGE, -HUGE])
def test_places_are_index_errors(setting: Setting, index: int) -> None:
    """Sequences raise what Python's own do, whatever the integer."""
    setting.store.put(setting.ns, setting.keys, setting.data)
    leases = setting.store.get(setting.ns, setting.keys)
    fresh = setting.ns.keys_from_tokens(api.tokens(2, 5000))
    reservation = setting.store.reserve(setting.ns, fresh)
    calls: list[Callable[[], object]] = [
        lambda: leases[index],
        lambda: leases.slab(index, 0),
        lambda: leases.slab(0, index),
        lambda: leases.dlpack(index),
        lambda: leases.dlpack(0, index),
        lambda: reservation[index],
        lambda: reservation.slab(index, 0),
        lambda: reservation.slab(0, index),
    ]
    with leases, reservation:
        for call in calls:
            with pytest.raises(IndexError):
                call()


@pytest.mark.parametrize("value", [-1, HUGE, float("nan"), float("inf"), "many"], ids=repr)
@pytest.mark.parametrize(
    "field",
    [
        "dram_capacity",
        "nvme_capacity",
        "segment_bytes",
        "load_threads",
        "store_threads",
        "copy_threads",
        "max_load_bytes",
        "load_timeout_s",
        "put_timeout_s",
        "close_timeout_s",
        "dirty_high_fraction",
        "dirty_low_fraction",
        "max_leased_fraction",
        "event_log_entries",
    ],
)
def test_configuration(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        BlockingStore.open(**api.config(tmp_path) | {field: value})
