"""What a secondary tier keeps of a request: its blocks one behind the other, and what it tells."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

from tiered_kv import KEY_BYTES, Namespace, Request, RequestContext
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm.tenancy import request_context

GROUP_BYTES = 4
"""Bytes at the end of a key by vLLM that name the group of layers."""

# Looking for the block before the first of a run ends after so many.
_MOST_BEFORE = 4096
# So many chunks are looked up at once.
_AHEAD = 64


class Run(NamedTuple):
    """Chunks of one group that lie one behind the other.

    Attributes:
        keys: vLLM's keys.
        slots: Where they are in the primary tier.
        end: The token at which the first one ends; 0 where that is not known.
        depth: Place of the first one in the sequence.
        chained: Whether each lies behind the one before it.
    """

    keys: list[bytes]
    slots: list[int]
    end: int
    depth: int
    chained: bool


class Tracked:
    """A request.

    Args:
        req_context: vLLM's own.
    """

    __slots__ = ("_request", "_tails", "req_context")

    def __init__(self, req_context: Any) -> None:
        self.req_context = req_context
        self._request: Request | None = None
        # By group: the token at which the last stored chunk ends, and its key in the store.
        self._tails: dict[bytes, tuple[int, bytes]] = {}

    @property
    def context(self) -> RequestContext:
        """What it tells of itself."""
        return request_context(self.req_context.kv_transfer_params)

    def used(
        self, store: BlockingStore, ns: Namespace, keys: bytes, tokens: int, first: bytes
    ) -> Request:
        """The request as the store counts it, which has now used these blocks.

        Args:
            store: The store.
            ns: The namespace.
            keys: Packed keys.
            tokens: Tokens of a chunk.
            first: vLLM's key of the first.
        """
        if self._request is None:
            self._request = store.begin_request(self.context)
        end = self.req_context.get_offload_key_position(first) or 0
        self._request.observe(ns, keys, max(0, end // tokens - 1))
        return self._request

    def parent(self, run: Run, ns: Namespace, tokens: int) -> bytes | None:
        """The key in the store of the chunk before a run, None where that is not known."""
        if not run.depth:
            return None
        first = run.keys[0]
        tail = self._tails.get(first[-GROUP_BYTES:])
        if tail is not None and tail[0] == run.end - tokens:
            return tail[1]
        before = self._before(first, run.end - tokens)
        return None if before is None else ns.keys_from_opaque(before, len(before))

    def stored(self, run: Run, keys: bytes) -> None:
        """Notes where the next run goes on."""
        if run.chained and run.end:
            end = self.req_context.get_offload_key_position(run.keys[-1])
            if end is not None:
                self._tails[run.keys[-1][-GROUP_BYTES:]] = end, keys[-KEY_BYTES:]

    def finish(self) -> None:
        """Counts its accesses."""
        if self._request is not None:
            self._request.finish()

    @staticmethod
    def sequence(req_context: Any, tokens: int, most: int | None = None) -> list[bytes]:
        """The keys by vLLM of the chunks of a request's first group, from the first one on.

        Args:
            req_context: vLLM's own.
            tokens: Tokens of a chunk.
            most: How many of the keys that vLLM knows count; None for all.
        """
        # At once: vLLM's thread may add others meanwhile.
        known = list(positions(req_context).items())[:most]
        group = known[0][0][-GROUP_BYTES:] if known else b""
        by_end = {
            end: key for key, end in known if key[-GROUP_BYTES:] == group and not end % tokens
        }
        keys: list[bytes] = []
        while (key := by_end.get((len(keys) + 1) * tokens)) is not None:
            keys.append(key)
        return keys

    def _before(self, first: bytes, end: int) -> bytes | None:
        group = first[-GROUP_BYTES:]
        # The last ones come first: what is stored is mostly what has just been computed.
        for key in islice(reversed(list(positions(self.req_context))), _MOST_BEFORE):
            if (
                key[-GROUP_BYTES:] == group
                and self.req_context.get_offload_key_position(key) == end
            ):
                return key
        return None


def runs(
    tracked: Tracked, keys: list[bytes], slots: list[int], tokens: int, groups: int
) -> list[Run]:
    """Cuts a job into runs.

    Args:
        tracked: The request.
        keys: vLLM's keys, those of a group one behind the other.
        slots: Where they are in the primary tier.
        tokens: Tokens of a chunk.
        groups: Groups of layers.
    """
    position = tracked.req_context.get_offload_key_position
    first, last = position(keys[0]), position(keys[-1])
    if first is None or last is None:
        return [Run(keys, slots, 0, 0, chained=False)]
    if groups == 1 and last - first == (len(keys) - 1) * tokens:
        return [Run(keys, slots, first, first // tokens - 1, chained=True)]
    ends = [position(key) or 0 for key in keys]
    found, begin = [], 0
    for at in range(1, len(keys) + 1):
        same = (
            at < len(keys)
            and ends[at] == ends[at - 1] + tokens
            and keys[at][-GROUP_BYTES:] == keys[begin][-GROUP_BYTES:]
        )
        if not same:
            end = ends[begin]
            depth = max(0, end // tokens - 1)
            found.append(Run(keys[begin:at], slots[begin:at], end, depth, chained=True))
            begin = at
    return found


def ahead_of(key: bytes, req_context: Any, tokens: int) -> list[bytes]:
    """A key and those that lie behind it in the request, as far as these can be told at once."""
    end = req_context.get_offload_key_position(key)
    if end is not None:
        first = end // tokens - 1
        ahead = list(islice(positions(req_context), first, first + _AHEAD))
        if ahead and ahead[0] == key:
            return ahead
    return [key]


def positions(req_context: Any) -> dict[bytes, int]:
    """The keys of a request with the tokens at which their chunks end, in their order by group."""
    # vLLM tells the end of one key only; which keys there are, it keeps to itself.
    found: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return found
