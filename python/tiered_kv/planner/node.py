"""The description of a node: its GPUs and its tiers, every figure with a source."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from tiered_kv.planner import units
from tiered_kv.planner.units import bad, fault
from tiered_kv.sizing.checks import shown

TIERS = ("hbm", "dram", "cxl", "nvme", "fabric", "pfs")
"""The six tiers, fastest first. HBM is what the weights leave; the others are described."""
_MOST_BYTES = 1 << 20
_ASSUMED = "assumed"

T = TypeVar("T", int, float)


@dataclasses.dataclass(frozen=True, slots=True)
class Figure(Generic[T]):
    """A number, and where it is from.

    Attributes:
        name: Where it stands in the description, such as `"tiers.nvme.capacity"`.
        value: The number: bytes, bytes a second, seconds, a count or US dollars.
        written: The number as it was written.
        source: An address or a document; `"assumed: ..."` where it is an assumption.
    """

    name: str
    value: T
    written: str
    source: str

    @property
    def assumed(self) -> bool:
        """Whether it is an assumption, not something that somebody has published."""
        return self.source.startswith(_ASSUMED)


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """The GPUs of a node, all alike.

    Attributes:
        name: What they are.
        count: How many.
        memory: Bytes of each.
        bandwidth: Bytes a second of its memory.
        reserve: Bytes of each that hold neither weights nor KV: activations, graphs, buffers.
        flops: Dense 16-bit operations a second of each; None if not given.
        prefill_efficiency: Part of them that a prefill reaches; None if not given.
        decode_efficiency: Part of the memory's bandwidth that decoding reaches; None if not given.
        kv_cache_share: Part of the memory for KV that keeps what requests left behind; None if not
            given.
    """

    name: str
    count: Figure[int]
    memory: Figure[int]
    bandwidth: Figure[int]
    reserve: Figure[int]
    flops: Figure[int] | None = None
    prefill_efficiency: Figure[float] | None = None
    decode_efficiency: Figure[float] | None = None
    kv_cache_share: Figure[float] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """A tier below HBM.

    Attributes:
        name: One of `TIERS`.
        capacity: Bytes of the node, or its share of what nodes share.
        reserved: Bytes of them that hold no KV.
        bandwidth: Bytes a second that the node reads.
        latency: Seconds until the first byte.
        usd_per_gb: Price of a gigabyte; None if not given.
        write_bandwidth: Bytes a second that the node writes; None if not given.
        usd_per_hour: Price of an hour of its capacity; None if not given.
        usd_per_gb_month: Price of a month of a gigabyte; None if not given.
    """

    name: str
    capacity: Figure[int]
    reserved: Figure[int] | None
    bandwidth: Figure[int]
    latency: Figure[float]
    usd_per_gb: Figure[float] | None = None
    write_bandwidth: Figure[int] | None = None
    usd_per_hour: Figure[float] | None = None
    usd_per_gb_month: Figure[float] | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes for KV."""
        return self.capacity.value - (self.reserved.value if self.reserved else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node.

    Attributes:
        name: Its name.
        title: What it is, in a line.
        gpu: Its GPUs.
        tiers: Its tiers below HBM, fastest first.
        usd_per_hour: Price of an hour of it, with all tiers that have no price of their own; None
            if not given.
    """

    name: str
    title: str
    gpu: Gpu
    tiers: tuple[Tier, ...]
    usd_per_hour: Figure[float] | None = None

    def figures(self) -> list[Figure[Any]]:
        """Every figure of the description."""
        found = [getattr(self.gpu, field.name) for field in dataclasses.fields(self.gpu)]
        for tier in self.tiers:
            found += [getattr(tier, field.name) for field in dataclasses.fields(tier)]
        found.append(self.usd_per_hour)
        return [figure for figure in found if isinstance(figure, Figure)]


_SHELF = Path(__file__).with_name("nodes")


def builtin_nodes() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(path.stem for path in _SHELF.glob("*.toml"))


def load_node(source: str | Path) -> Node:
    """Reads a node's description.

    Args:
        source: A name of `builtin_nodes()`, or the path of a TOML file.

    Raises:
        InvalidArgumentError: It cannot be read, or a figure is missing, wrong or without a source.
    """
    name = str(source)
    if name in builtin_nodes():
        return parse_node((_SHELF / f"{name}.toml").read_text("utf-8"), name)
    path = Path(source)
    try:
        if not path.is_file():
            raise bad("node", name, f"a TOML file or one of {', '.join(builtin_nodes())}")
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise fault(f"`node` {name} is larger than {_MOST_BYTES} B: it is no description")
        return parse_node(text.decode("utf-8"), path.stem)
    except OSError as error:
        raise fault(f"`node` {shown(name)} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise fault(f"`node` {name} is not UTF-8") from None


def parse_node(text: str, name: str) -> Node:
    """Reads a description from its text.

    Args:
        text: TOML.
        name: What the node is called.

    Raises:
        InvalidArgumentError: It is no TOML, or a figure is missing, wrong or without a source.
    """
    try:
        loaded = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer with too many digits is the former
        raise fault(f"`node` {name} is not TOML: {error}") from None
    known = _Table("", loaded, _sources(loaded))
    known.only("title", "usd_per_hour", "sources", "gpu", "tiers")
    gpu = known.table("gpu")
    gpu.only("name", *(field.name for field in dataclasses.fields(Gpu)))
    tiers = known.table("tiers")
    tiers.only(*TIERS[1:])
    return Node(
        name=name,
        title=known.text("title"),
        gpu=_gpu(gpu),
        tiers=tuple(_tier(tier, tiers.table(tier)) for tier in TIERS[1:] if tier in tiers.values),
        usd_per_hour=known.maybe("usd_per_hour", units.price),
    )


def _sources(loaded: Mapping[str, Any]) -> dict[str, str]:
    found = loaded.get("sources", {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise bad("sources", found, "a table of texts")
    return found


def _gpu(table: _Table) -> Gpu:
    gpu = Gpu(
        name=table.text("name"),
        count=table.figure("count", units.count),
        memory=table.figure("memory", units.size),
        bandwidth=table.figure("bandwidth", units.rate),
        reserve=table.figure("reserve", units.size),
        flops=table.maybe("flops", units.flops),
        prefill_efficiency=table.maybe("prefill_efficiency", units.share),
        decode_efficiency=table.maybe("decode_efficiency", units.share),
        kv_cache_share=table.maybe("kv_cache_share", units.share),
    )
    if not 1 <= gpu.count.value <= 1 << 16:
        raise bad("gpu.count", gpu.count.value, "at least 1 GPU, at most 65,536")
    return gpu


def _tier(name: str, table: _Table) -> Tier:
    table.only(*(field.name for field in dataclasses.fields(Tier) if field.name != "name"))
    tier = Tier(
        name=name,
        capacity=table.figure("capacity", units.size),
        reserved=table.maybe("reserved", units.size),
        bandwidth=table.figure("bandwidth", units.rate),
        latency=table.figure("latency", units.seconds),
        usd_per_gb=table.maybe("usd_per_gb", units.price),
        write_bandwidth=table.maybe("write_bandwidth", units.rate),
        usd_per_hour=table.maybe("usd_per_hour", units.price),
        usd_per_gb_month=table.maybe("usd_per_gb_month", units.price),
    )
    if tier.usd_per_hour is not None and tier.usd_per_gb_month is not None:
        raise fault(f"`tiers.{name}` has `usd_per_hour` and `usd_per_gb_month`: give one")
    if tier.kv_bytes < 0:
        raise fault(f"`tiers.{name}.reserved` is more than its `capacity`: give less")
    for rate in (tier.bandwidth, tier.write_bandwidth):
        if rate is not None and rate.value == 0:
            raise bad(rate.name, 0, "more than 0")
    return tier


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A table of a description, and how an error names its fields."""

    place: str
    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def only(self, *names: str) -> None:
        for name in self.values:
            if name not in names:
                raise fault(f"`{self.place}{name}` is not known: give {', '.join(names)}")

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise fault(f"`{self.place}{name}` is missing: give it")
        return self.values[name]

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise bad(f"{self.place}{name}", value, "text")
        return value

    def table(self, name: str) -> _Table:
        value = self.get(name)
        if not isinstance(value, dict):
            raise bad(f"{self.place}{name}", value, "a table")
        return _Table(f"{self.place}{name}.", value, self.sources)

    def maybe(self, name: str, read: Callable[[str, object], T]) -> Figure[T] | None:
        return self.figure(name, read) if name in self.values else None

    def figure(self, name: str, read: Callable[[str, object], T]) -> Figure[T]:
        place = f"{self.place}{name}"
        given = self.get(name)
        if not isinstance(given, dict):
            raise bad(place, given, "a table { value, source }")
        inner = _Table(f"{place}.", given, self.sources)
        inner.only("value", "source")
        value = read(f"{place}.value", inner.get("value"))
        named = inner.text("source")
        return Figure(place, value, str(given["value"]), self.sources.get(named, named))
