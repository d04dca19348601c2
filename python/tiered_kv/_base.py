"""What the asyncio store and the blocking one share: every call that waits for nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tiered_kv import _core, operator
from tiered_kv.channel import Channel
from tiered_kv.errors import InvalidArgumentError
from tiered_kv.predictor import Predictor
from tiered_kv.spec import NamespaceSpec, RequestContext

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Buffers = Buffer | Sequence[Buffer] | _core.Slots
    OnStall = Literal["wait", "bounce"]
    GroupRule = Literal["all", "last"] | tuple[Literal["window"], int]


class StoreBase:
    """The calls of a store that wait for nothing."""

    def __init__(self, core: _core.Store) -> None:
        self._core = core

    def __del__(self, _warn: Any = warnings.warn) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.closed:
            _warn(f"unclosed store {self!r}", ResourceWarning, source=self)

    @property
    def closed(self) -> bool:
        """Whether the store takes no more calls."""
        return self._core.closed

    @property
    def open_seconds(self) -> float:
        """Seconds that opening took."""
        return self.open_times["total_s"]

    @property
    def open_times(self) -> dict[str, float]:
        """Seconds of each part of the opening: `total_s`, `populate_s`, `recover_s`."""
        return self._core.open_times

    def namespace(self, spec: NamespaceSpec) -> _core.Namespace:
        """Opens a namespace: a cheap handle that calls name.

        Args:
            spec: Everything that makes bytes incompatible.

        Returns:
            The handle, good for this store only.

        Raises:
            InvalidArgumentError: A field is empty or too long, or a block fits no slot.
            ClosedError: The store is closed.
        """
        return self._core.namespace(spec.canonical())

    def lookup(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        mode: Literal["prefix", "each"] = "prefix",
    ) -> _core.Lookup:
        """Says where keys are; waits for nothing and has no effect on what is evicted.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            mode: `"prefix"` stops at the first key that is not there, `"each"` looks at all.

        Returns:
            Leading hits, and for each key its flags and its tier.

        Raises:
            InvalidArgumentError: `keys` is no multiple of 32 bytes, or `ns` is of another store.
            ClosedError: The store is closed.
        """
        return self._core.lookup(ns, keys, mode)

    def contains(self, ns: _core.Namespace, key: Buffer) -> bool:
        """Whether a `get` of one key would find it.

        Args:
            ns: The namespace.
            key: One key of 32 bytes.

        Returns:
            True for a key in any tier.

        Raises:
            InvalidArgumentError: `key` is not 32 bytes, or `ns` is of another store.
            ClosedError: The store is closed.
        """
        return self._core.contains(ns, key)

    def lookup_hybrid(self, ns: _core.Namespace, groups: Sequence[tuple[Buffer, GroupRule]]) -> int:
        """Says how much of a prompt is there for a model whose groups of layers differ.

        Args:
            ns: The namespace.
            groups: For each group its packed keys, one a block of the prompt, and its rule: `"all"`
                needs every block before a position, `("window", n)` the last n, `"last"` the one
                that ends there, as recurrent state.

        Returns:
            The largest position, in blocks, at which every group has all that it still needs.

        Raises:
            InvalidArgumentError: The groups have different numbers of keys, or a rule is unknown.
            ClosedError: The store is closed.
        """
        return self._core.lookup_hybrid(ns, groups)

    def hold(self, ns: _core.Namespace, keys: Buffer, ttl: float) -> _core.Hold:
        """Keeps blocks on whatever tier they are, as between a lookup and its `get`.

        It ends when it is released or dropped, with the `get` or `get_into` that it is given to, or
        after `ttl`. One that has ended is no error: its blocks may be misses then.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            ttl: Seconds that it lasts at most.

        Returns:
            The hold, also a context manager. A key that is not stored is not held, nor is one
            beyond the bytes that may be held at once.

        Raises:
            InvalidArgumentError: `keys` or `ttl` is wrong, or `ns` is of another store.
            ClosedError: The store is closed.
        """
        return self._core.hold(ns, keys, ttl)

    def prefetch(self, ns: _core.Namespace, keys: Buffer) -> None:
        """Begins to load blocks from a drive into memory, in their order; waits for nothing.

        It stops where memory or the budget of loads is used up, and tells nothing of it. With
        `dram_capacity` 0 it only counts.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.

        Raises:
            InvalidArgumentError: `keys` is no multiple of 32 bytes, or `ns` is of another store.
            ClosedError: The store is closed.
        """
        self._core.prefetch(ns, keys)

    def reserve(
        self,
        ns: _core.Namespace,
        keys: Buffer,
        *,
        parent: Buffer | None = None,
        depth: int = 0,
        chain: bool = True,
        tokens: Sequence[int] | None = None,
        chunk_ends: Sequence[bool] | None = None,
        computed: Literal["prefill", "decode"] = "prefill",
        block_type: str | None = None,
        req: _core.Request | None = None,
    ) -> _core.Reservation:
        """Reserves memory of the store for blocks that the caller fills in place.

        Args:
            ns: The namespace.
            keys: Packed keys, n x 32 bytes.
            parent: As in `put`, like all the others.
            depth: Depth of the first block.
            chain: Whether each key is the parent of the next.
            tokens: Tokens in each block.
            chunk_ends: Whether a prefill chunk ended with each block.
            computed: How the blocks were computed.
            block_type: What the blocks hold.
            req: The request that the blocks belong to.

        Returns:
            `reservation[i]` is a writable view, or None where the key exists or the store is
            throttled. Publish it, or abandon it.

        Raises:
            InvalidArgumentError: An option is wrong.
            UnsupportedError: `dram_capacity` is 0.
            ClosedError: The store is closed.
        """
        options = _core.PutOptions(
            parent=parent,
            depth=depth,
            chain=chain,
            tokens=tokens,
            chunk_ends=chunk_ends,
            computed=computed,
            block_type=block_type,
            req=req,
        )
        return self._core.reserve(ns, keys, options)

    def register(self, memory: Buffer, slot_bytes: int, stride: int | None = None) -> _core.Region:
        """Registers memory of the caller's, as an engine's own pool, cut into slots.

        `region.slots([3, 5, 9])` then stands for the buffers of a `get_into` or a `put`, in any
        face of the store. A `get_into` has the drive write into the slots, without a copy: give
        slots at addresses that are multiples of 4,096. What lies elsewhere, and the end of a slab
        that fills no page, goes through a buffer. Where the kernel refuses to know the memory
        beforehand, reads are a little slower; `health()` says so.

        Args:
            memory: A writable contiguous buffer; for a torch tensor
                `tiered_kv.torch.as_buffer(tensor)`. It stays exported until the region and the
                calls on it are gone. Do not touch a slot while a call uses it.
            slot_bytes: Bytes of a slot, those of a block.
            stride: Bytes from the beginning of one slot to that of the next; `slot_bytes` by
                default. A multiple of 4,096 keeps slots of other sizes on page addresses.

        Returns:
            The region, also a context manager. A slot is used by one call at a time.

        Raises:
            InvalidArgumentError: `memory` is read-only, not contiguous or too small for a slot, or
                `stride` is smaller than `slot_bytes`.
            ClosedError: The store is closed.
        """
        return self._core.register(memory, slot_bytes, stride)

    def lend(self, buffers: Sequence[Buffer]) -> _core.Slots:
        """Lends memory anywhere to one call, which reads into it as into slots of a region.

        For an engine that hands over buffers with each call and never its whole pool. Plain buffers
        given to `get_into` are filled by a copy; these by the drive, where they are at addresses
        that are multiples of 4,096. The kernel does not know the memory beforehand, which costs
        some microseconds a block.

        Args:
            buffers: Writable contiguous buffers, one a key, each of a block's bytes. They stay
                exported until the slots and the call are gone. Nobody watches that two calls do not
                use the same memory.

        Returns:
            What to give to `get_into` or `put` in place of buffers.

        Raises:
            InvalidArgumentError: A buffer is read-only, empty or not contiguous, or two overlap.
            ClosedError: The store is closed.
        """
        return self._core.lend(buffers)

    def begin_request(self, context: RequestContext | None = None) -> _core.Request:
        """Opens a request: its accesses are counted once, when it finishes.

        Args:
            context: What is known of it.

        Returns:
            The request; pass it to the calls on its behalf, and call `observe` and `finish`.

        Raises:
            InvalidArgumentError: `block_type` is not known, or `turn` is out of range.
            ClosedError: The store is closed.
        """
        return self._core.begin_request(context or RequestContext())

    def channel(self, capacity: int = 1024) -> Channel:
        """Opens a channel: calls for engines without an event loop.

        Args:
            capacity: Calls that may be submitted and not drained, 1 to 2^20. Beyond it they end as
                failed; where as many have failed so and nobody has drained, a call raises.

        Returns:
            A channel of its own, beside any others of this store. Close it.

        Raises:
            InvalidArgumentError: `capacity` is out of its bounds.
            ClosedError: The store is closed.
        """
        return Channel(self._core, self._core.channel(capacity))

    def set_quota(
        self,
        ns: _core.Namespace,
        dram_bytes: int | None = None,
        nvme_bytes: int | None = None,
    ) -> bool:
        """Limits what a namespace may use, from now until the store is closed.

        At its quota a namespace makes room among its own blocks first; where that is not enough its
        puts are throttled, and what finds no room on the drives stays in memory only. What it uses
        beyond a lowered quota is evicted.

        Args:
            ns: The namespace.
            dram_bytes: Bytes of slots in memory, payloads rounded up to 4 KiB. None: no limit.
            nvme_bytes: The same on the drives together.

        Returns:
            Whether it is within the quota now; what is leased, held or not yet written stays till
            later puts.

        Raises:
            InvalidArgumentError: A number is out of range, `ns` is of another store, or too many
                namespaces have a quota.
            ClosedError: The store is closed.
        """
        return self._core.set_quota(ns, dram_bytes, nvme_bytes)

    def namespaces(self) -> list[dict[str, Any]]:
        """Every namespace that the store knows, also from before it was opened.

        Returns:
            For each `namespace` (its digest, 32 bytes); `fields` of its specification by name, the
            salt as a digest, or None where they are not known; `dram_blocks`, `dram_bytes`,
            `nvme_blocks`, `nvme_bytes`, bytes being those of slots; `dram_quota_bytes` and
            `nvme_quota_bytes`, None without a quota.

        Raises:
            ClosedError: The store is closed.
        """
        return list(operator.namespaces(self._core.operator()))

    def explain(
        self,
        ns: _core.Namespace,
        keys: Buffer | None = None,
        *,
        tokens: Sequence[int] | Buffer | None = None,
    ) -> dict[str, Any]:
        """Why the blocks of a prompt are there, or are not. It takes milliseconds.

        Args:
            ns: The namespace that was asked for.
            keys: Packed keys, n x 32 bytes. None: those of `tokens`.
            tokens: The prompt, with which other namespaces are asked for the same blocks as well.

        Returns:
            `verdict`, the answer in a sentence; `hits`, the leading blocks that are there; `keys`,
            for each its `key`, `residency` ("dram", "nvme", "loading", "writing", "circuit_open",
            "absent"), `cause` ("resident", "too_slow", "recompute", "circuit_open", "writing",
            "evicted", "deleted", "fault", "throttled", "never_stored", "unknown"), `why` in words,
            and its last `events`; `elsewhere`, other namespaces that have blocks, with the fields
            in which `ns` differs from them;
            `since_unix_ns`, how far back the events go, `complete` where that is the open.

        Raises:
            InvalidArgumentError: Neither `keys` nor `tokens` is given, or one is wrong.
            ClosedError: The store is closed.
        """
        if keys is None:
            if tokens is None:
                message = "explain: give `keys` or `tokens`, what was asked for"
                raise InvalidArgumentError(message, op="explain")
            keys = ns.keys_from_tokens(tokens)
        return operator.explain(self._core.operator(), bytes.fromhex(ns.id), keys, tokens=tokens)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: `dram`, `nvme`, `misses`, `counters` and totals.

        Among these are `leased_bytes`, `dirty_bytes` and `loading_bytes`; the `metadata_bytes` that
        the policy keeps of blocks; `holds` in force, and the `held_bytes` that they keep. With
        `dram_capacity` 0, `staging_bytes` through which blocks pass, and `staging_used_bytes` of
        them. `namespaces` has usage and quota of the 64 that use most, in the form of
        `namespaces()` without their fields. `latencies` has, for `load` (calls that waited for a
        drive) and `commit` (groups written behind), `counts` by bucket, where the buckets end
        (`bounds_s`, seconds) and the sum of all (`sum_s`). `reuses_by_pair` and `reuses_by_chance`
        have the reuses that the predictor expected of the blocks that it watches (`predicted`) and
        those that came (`reuses`) since the open; they are empty without a predictor.
        """
        return self._core.stats()

    def predictor(self) -> Predictor | None:
        """What the reuse predictor has learned up to this call, from earlier processes too.

        Returns:
            The posterior of each of the 16 pairs; None where `policy` is not a predictor.

        Raises:
            ClosedError: The store is closed.
        """
        found = self._core.predictor()
        return None if found is None else Predictor.of(found)

    def health(self) -> dict[str, Any]:
        """State of the store's parts.

        Returns:
            `open`; the first drive's `backend` and `backend_reason`, `direct` and `direct_reason`,
            `store_id`; `drive_paused`, whether writing to any drive is; `drives`, for each its
            `path`, `state` ("working"; "paused", no writing after faults; "circuit_open", not
            asked until it answers again; "lost"), `backend` with why it is that one, `reason` (how
            its files are opened, or why it is lost), `fault` (why it does not work, and its last
            error), `store_id` and `load_bytes_per_s` (at which it has read of late, or None);
            `warnings`, what is configured and of no effect; `huge_bytes`;
            `regions`, of these `regions_plain` that the kernel does not know beforehand, and the
            `region_reason` why; `attach`, whether other processes can: `listening`, the `reason`
            (where, or why not), `connections` now, and how many were `accepted`, `refused`, and
            `dropped` since they did not keep to the protocol.
        """
        return self._core.health()

    def audit(self) -> dict[str, Any]:
        """Recounts everything; `faults` lists what does not fit together, none when all is well.

        `drives_idle`: nothing is on its way to a drive that has room for it.
        """
        return self._core.audit()

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """Entries of the event log from number `since` on: evictions, throttles, faults by key."""
        return self._core.events(since)
