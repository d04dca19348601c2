import os
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

from typing_extensions import Buffer

from tiered_kv._core._handles import Namespace
from tiered_kv._core._results import Lookup
from tiered_kv.spec import NamespaceSpec

_Rule: TypeAlias = Literal["all", "last"] | tuple[Literal["window"], int]

@final
class Attached:
    """A store of another process; see `tiered_kv.AttachedStore`. Its calls wait without the GIL."""

    @staticmethod
    def open(path: str | os.PathLike[str], timeout: float | None = None) -> Attached: ...
    def namespace(self, spec: NamespaceSpec) -> Namespace: ...
    def lookup(self, ns: Namespace, keys: Buffer, mode: str = "prefix") -> Lookup: ...
    def contains(self, ns: Namespace, key: Buffer) -> bool: ...
    def lookup_hybrid(self, ns: Namespace, groups: Sequence[tuple[Buffer, _Rule]]) -> int: ...
    def hold(self, ns: Namespace, keys: Buffer, ttl: float) -> AttachedHold: ...
    def stats(self) -> dict[str, Any]: ...
    def health(self) -> dict[str, Any]: ...
    def counters(self) -> dict[str, int]: ...
    @property
    def alive(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def path(self) -> os.PathLike[str]: ...
    def close(self) -> None: ...

@final
class AttachedHold:
    """Keeps blocks in some tier until it ends; see `tiered_kv.AttachedStore.hold`."""

    @property
    def hits(self) -> int:
        """Leading keys that were held when it was made."""
    @property
    def held(self) -> list[bool]:
        """For each key, whether it was held when the hold was made."""
    @property
    def in_force(self) -> bool:
        """Whether its connection is still in use; it may have ended over time all the same."""
    def release(self) -> None:
        """Ends the hold; does nothing where it has ended.

        It waits for the owner, for the time-out of the attached store at most.
        """
    def __enter__(self) -> AttachedHold: ...
    def __exit__(self, _kind: object, _error: object, _trace: object, /) -> None: ...
