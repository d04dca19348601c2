"""What of a prompt is stored, and up to where the engine may restore it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiered_kv import KEY_BYTES, Namespace, TieredStore
from tiered_kv.engines._grid import Grid
from tiered_kv.engines._kv_layout import KvGeometry

_FLAG_CHUNK_END = 1
_FLAG_DECODE = 2
# Absent, on a drive that is not asked, being written: as in `Lookup.tiers`.
_NOT_THERE = (0, 253, 255)


@dataclass
class Plan:
    """What the store has of a prompt."""

    keys: bytes = b""
    flags: bytes = b""
    present: int = 0
    """The first block after the restored ones that is to be stored."""
    wanted: int = 0
    """The position to restore, in blocks."""

    def part(self, first: int, stop: int) -> bytes:
        """The keys of some blocks."""
        return part(self.keys, first, stop)


def part(keys: bytes, first: int, stop: int) -> bytes:
    """The keys of blocks `first` to `stop`."""
    return keys[first * KEY_BYTES : stop * KEY_BYTES]


def leading(statuses: Sequence[str], wanted: Collection[str]) -> int:
    """Number of leading statuses that are wanted ones."""
    return next((at for at, each in enumerate(statuses) if each not in wanted), len(statuses))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        shared += 1
    return shared


@dataclass(frozen=True)
class Planner:
    """Finds positions at which every layer has all that the next token attends to.

    Attributes:
        store: The store.
        geometry: The shape of the model's cache, whose groups have a rule each.
        tokens_per_block: Tokens of a block.
        exact: Only ends of whole chunks that prefill computed.
    """

    store: TieredStore
    geometry: KvGeometry
    tokens_per_block: int
    exact: bool

    def plan(self, namespace: Namespace, keys: bytes, grid: Grid) -> Plan:
        """Looks a prompt up."""
        if not keys:
            return Plan()
        found = self.store.lookup(namespace, keys, mode="each")
        plan = Plan(keys, found.flags)
        plan.wanted = self.position(namespace, plan, grid, grid.reusable_blocks)
        plan.present = plan.wanted
        # A block computed by decode is stored again once prefill has computed it, not before.
        for tier, flags in zip(found.tiers[plan.wanted :], found.flags[plan.wanted :], strict=True):
            if tier in _NOT_THERE or flags & _FLAG_DECODE:
                break
            plan.present += 1
        return plan

    def position(self, namespace: Namespace, plan: Plan, grid: Grid, limit: int) -> int:
        """The largest position of at most `limit` blocks that can be restored; 0 for none."""
        limit = min(limit, len(plan.keys) // KEY_BYTES)
        rules = self.geometry.rules(self.tokens_per_block)
        while limit:
            keys = plan.part(0, limit)
            reached = self.store.lookup_hybrid(namespace, [(keys, rule) for rule in rules])
            # Another position than the one found needs other blocks: it is looked up in turn.
            limit = self._allowed(plan.flags, grid, reached)
            if limit == reached:
                break
        return limit

    def _allowed(self, flags: Sequence[int], grid: Grid, position: int) -> int:
        """The position itself where it may be restored, else a smaller one to try."""
        if not self.exact:
            return position
        wanted = grid.last_end_within(position)
        while wanted and not flags[wanted - 1] & _FLAG_CHUNK_END:
            wanted = grid.last_end_within(wanted - 1)
        first = self.geometry.first_block(wanted, self.tokens_per_block)
        # Any position between such a block and this one needs it as well.
        decoded = (block for block in range(first, wanted) if flags[block] & _FLAG_DECODE)
        return next(decoded, wanted)

    def cut(self, grid: Grid, first: int, reached: int) -> int:
        """Where to stop after a load of blocks from `first` on that was cut short at `reached`.

        Returns:
            A position for which everything was loaded; 0 where there is none.
        """
        if first:
            return 0  # a smaller position needs blocks before `first`
        return grid.last_end_within(reached) if self.exact else reached
