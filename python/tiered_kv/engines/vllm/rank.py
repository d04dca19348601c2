"""The store of a rank, seen from the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from tiered_kv import AttachedHold, IoFaultError, Namespace, NamespaceSpec
from tiered_kv.attached import BlockingAttachedStore
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines.vllm.messages import Owner
from tiered_kv.engines.vllm.tenancy import Tenancy

if TYPE_CHECKING:
    from tiered_kv._base import GroupRule

_Answer = TypeVar("_Answer")

_HOLD_S = 60.0
# How long a lookup waits for a worker, which is this very engine's: a miss would have all of a
# prompt computed again. One that has not answered is not asked for a while, since the engine waits.
_LOOKUP_S = 2.0
_SILENT_S = 10.0
_NAMESPACES_KEPT = 1024


class Rank:
    """The store of a rank, which its worker owns: attached to, and asked.

    Args:
        owner: Where it is.

    Raises:
        TieredKvError: It cannot be attached to.
    """

    def __init__(self, owner: Owner) -> None:
        self.directory = owner.directory
        self.specs: tuple[NamespaceSpec, ...] = owner.specs
        self.store: BlockingAttachedStore = BlockingStore.attach(owner.directory, _LOOKUP_S)
        self._namespaces: dict[tuple[Tenancy, int], Namespace] = {}
        self._silent_until_s = 0.0

    def hold(self, tenancy: Tenancy, group: int, keys: bytes) -> AttachedHold:
        """Holds what the store has of a group's blocks.

        Raises:
            IoFaultError: The worker has not answered, lately or now.
        """
        name = self.namespace(tenancy, group)
        return self._ask(lambda: self.store.hold(name, keys, _HOLD_S))

    def lookup(self, tenancy: Tenancy, group: int, keys: bytes, rule: GroupRule) -> int:
        """Up to which of a group's blocks all is there that its rule needs.

        Raises:
            IoFaultError: The worker has not answered, lately or now.
        """
        name = self.namespace(tenancy, group)
        return self._ask(lambda: self.store.lookup_hybrid(name, [(keys, rule)]))

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        """What comes of a call of the attached store, which answers a miss where nobody else does.

        Raises:
            IoFaultError: Nobody did.
        """
        before = self.store.counters()["unanswered"]
        if monotonic() >= self._silent_until_s:
            answer = call()
            if self.store.counters()["unanswered"] == before:
                return answer
            self._silent_until_s = monotonic() + _SILENT_S
        message = f"vllm: the worker of {self.directory} does not answer: is it stopped?"
        raise IoFaultError(message, op="lookup")

    def namespace(self, tenancy: Tenancy, group: int) -> Namespace:
        """The namespace of a group for a tenancy; handles are cheap to make again."""
        found = self._namespaces.get((tenancy, group))
        if found is None:
            if len(self._namespaces) >= _NAMESPACES_KEPT:
                self._namespaces.clear()
            found = self.store.namespace(tenancy.of(self.specs[group]))
            self._namespaces[tenancy, group] = found
        return found
