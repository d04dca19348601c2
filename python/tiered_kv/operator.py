"""What operators ask of a store: who uses what, where a key is, and why it is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiered_kv import _core

if TYPE_CHECKING:
    from typing_extensions import Buffer

Row = dict[str, Any]

MAX_ELSEWHERE = 8
"""Other namespaces that an explanation names."""

_KEY_BYTES = 32


def namespaces(core: _core.Operator) -> Iterator[Row]:
    """Every namespace that a store knows, with its fields, usage and quota.

    Args:
        core: The store.

    Yields:
        `namespace` (its digest), `fields` by name or None where they are not known, `dram_blocks`,
        `dram_bytes`, `nvme_blocks`, `nvme_bytes`, `dram_quota_bytes`, `nvme_quota_bytes`.
    """
    start: int | None = 0
    while start is not None:
        rows, start = core.namespaces(start)
        yield from rows


def blocks(
    core: _core.Operator,
    namespace: bytes | None = None,
    tenant: bytes | None = None,
    stored_before_unix_ns: int | None = None,
) -> Iterator[Row]:
    """Every block, or those that are meant. Ones that come or go meanwhile may be left out.

    Args:
        core: The store.
        namespace: Digest of a namespace.
        tenant: Digest of a tenant, zeros for blocks without one.
        stored_before_unix_ns: Only what was stored before this time.

    Yields:
        What is known of each block.
    """
    start: int | None = 0
    while start is not None:
        rows, start = core.blocks(start, namespace, tenant, stored_before_unix_ns)
        yield from rows


def survey(core: _core.Operator) -> dict[bytes, Row]:
    """What the blocks of each namespace add up to.

    Args:
        core: The store.

    Returns:
        By digest: `blocks` and `bytes` in any tier, `oldest_unix_ns`, `newest_unix_ns`, and some of
        the `tenants` (digests; None for blocks without one).
    """
    found: dict[bytes, Row] = {}
    start: int | None = 0
    while start is not None:
        rows, start = core.survey(start)
        for row in rows:
            have = found.setdefault(row["namespace"], row)
            if have is row:
                continue
            have["blocks"] += row["blocks"]
            have["bytes"] += row["bytes"]
            have["oldest_unix_ns"] = min(have["oldest_unix_ns"], row["oldest_unix_ns"])
            have["newest_unix_ns"] = max(have["newest_unix_ns"], row["newest_unix_ns"])
            more = [tenant for tenant in row["tenants"] if tenant not in have["tenants"]]
            have["tenants"].extend(more)
    return found


def when(unix_ns: int | None) -> str:
    """A time as text, in UTC."""
    if not unix_ns:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix_ns // 1_000_000_000))


def differing(asked: Mapping[str, str], there: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The fields in which two specifications differ.

    Args:
        asked: Fields by name.
        there: The other's.

    Returns:
        For each field that differs both values, empty where one has no such field.
    """
    names = sorted({*asked, *there})
    pairs = {name: (asked.get(name, ""), there.get(name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _why(found: Row, told: Row) -> str:
    """Why one key is where it is, in words."""
    events = found["events"]
    newest = {kind: event for event in reversed(events) for kind in [event["kind"]]}
    at = {kind: when(event["unix_ns"]) for kind, event in newest.items()}
    since = when(told["since_unix_ns"])
    match found["cause"]:
        case "resident":
            return f"in {found['residency']}"
        case "too_slow":
            return f"stored, but a load of it did not end by its deadline at {at['slow']}"
        case "recompute":
            at_once = f"at {at['recompute']} its caller could compute it sooner"
            return f"stored, and not loaded: {at_once} than the drive would have brought it"
        case "circuit_open":
            return "on a drive that is not asked until it answers again: see health()"
        case "writing":
            return "a put of it is under way"
        case "evicted":
            tier = newest["evicted"]["tier"]
            lost = ", and could not be made durable" if "undurable" in newest else ""
            return f"evicted from {tier} at {at['evicted']} to make room{lost}"
        case "deleted":
            return f"deleted at {at['deleted']}"
        case "fault":
            fault = newest["fault"]
            what = "corrupt" if fault["reason"] == "corrupt" else "could not be read or written"
            return f"{what} on {fault['tier']} at {at['fault']}; the next store of it heals it"
        case "throttled":
            return f"its put was throttled at {at['throttled']}: no room, or too much to be written"
        case "never_stored":
            return f"never stored since the store was opened at {since}"
    if told["closed"]:
        return "not there; a closed store has no event log"
    return f"not there, and no event since {since}, before which none is kept"


def _elsewhere(
    core: _core.Operator,
    namespace: bytes,
    fields: Mapping[str, str] | None,
    tokens: Sequence[int] | Buffer | None,
) -> list[Row]:
    """Other namespaces that have blocks, those first that hold most of the prompt."""
    others: list[Row] = []
    for row in namespaces(core):
        known = row["fields"]
        if row["namespace"] == namespace or known is None:
            continue
        if not row["dram_blocks"] + row["nvme_blocks"]:
            continue
        hits = None
        if tokens is not None:
            per_block = int(known["layout.tokens_per_block"])
            keys = _core.token_keys(row["namespace"], tokens, per_block)
            hits = _leading(core.explain(row["namespace"], keys)["keys"])
        others.append(
            {
                "namespace": row["namespace"],
                "differs": None if fields is None else differing(fields, known),
                "dram_blocks": row["dram_blocks"],
                "nvme_blocks": row["nvme_blocks"],
                "hits": hits,
            }
        )
    others.sort(key=lambda row: (-(row["hits"] or 0), len(row["differs"] or ())))
    return others[:MAX_ELSEWHERE]


def _leading(keys: Sequence[Row]) -> int:
    """How many of the first keys are there."""
    there = [key["residency"] not in ("absent", "writing") for key in keys]
    return there.index(False) if False in there else len(there)


def _verdict(found: Row) -> str:
    """The answer in one line."""
    keys, hits = found["keys"], found["hits"]
    if hits == len(keys):
        return f"all {hits} blocks are there"
    miss = keys[hits]
    text = f"block {hits} of {len(keys)} is missed: {miss['why']}"
    closest = next(iter(found["elsewhere"]), None)
    lost = miss["cause"] in ("never_stored", "unknown")
    if closest is None or not closest["differs"] or not lost:
        return text
    if closest["hits"] == 0 or (found["blocks"] and not closest["hits"]):
        return text
    named = "; ".join(
        f"`{name}` (asked for {asked!r}, stored with {there!r})"
        for name, (asked, there) in closest["differs"].items()
    )
    has = f"has {closest['hits']} of the blocks" if closest["hits"] else "has blocks"
    return f"{text}; the namespace {closest['namespace'].hex()[:16]} {has} and differs in {named}"


def explain(
    core: _core.Operator,
    namespace: bytes,
    keys: Buffer,
    *,
    fields: Mapping[str, str] | None = None,
    tokens: Sequence[int] | Buffer | None = None,
    closed: bool = False,
) -> Row:
    """Why keys of a prompt are there, or are not.

    Args:
        core: The store.
        namespace: Digest of the namespace.
        keys: Packed keys, n x 32 bytes, in their order.
        fields: The namespace's specification, where the store may not know it.
        tokens: The prompt, with which other namespaces are asked for the same blocks.
        closed: The store is closed: it has no events.

    Returns:
        As `tiered_kv.TieredStore.explain`.
    """
    told = core.explain(namespace, keys) | {"closed": closed}
    packed = bytes(keys)
    rows = []
    for index, found in enumerate(told["keys"]):
        if closed and found["cause"] == "never_stored":
            found["cause"] = "unknown"
        key = packed[index * _KEY_BYTES : (index + 1) * _KEY_BYTES]
        rows.append({"key": key, "why": _why(found, told)} | found)
    own = next((row for row in namespaces(core) if row["namespace"] == namespace), None)
    if fields is None and own is not None:
        fields = own["fields"]
    answer: Row = {
        "namespace": namespace,
        "known": own is not None,
        "blocks": 0 if own is None else max(own["dram_blocks"], own["nvme_blocks"]),
        "hits": _leading(rows),
        "keys": rows,
        "since_unix_ns": None if closed else told["since_unix_ns"],
        "complete": told["complete"] and not closed,
        "elsewhere": _elsewhere(core, namespace, fields, tokens),
    }
    return answer | {"verdict": _verdict(answer)}
