"""What the scheduler's side and the workers tell each other."""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv import KEY_BYTES, NamespaceSpec, RequestContext
from tiered_kv.engines.vllm.tenancy import Tenancy


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of a request that lie one behind the other.

    Attributes:
        request_id: vLLM's name of the request.
        tenancy: Whose blocks these are.
        context: What is known of the request.
        first: Place of the first block in the sequence.
        keys: Packed keys for each rank.
        parents: Key of the block before the first for each rank; empty for none.
        block_ids: Where they are in the engine's cache.
        group: Which of the adapter's groups they are of.
    """

    request_id: str
    tenancy: Tenancy
    context: RequestContext
    first: int
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    group: int = 0

    def keys_of(self, rank: int) -> bytes:
        """The packed keys in the store of a rank."""
        return self.keys[rank]

    def parent_of(self, rank: int) -> bytes | None:
        """The key before the first in the store of a rank, None at the root."""
        return self.parents[rank] if self.first else None

    def behind(self, count: int) -> Blocks:
        """Those of these blocks that come behind the first ones."""
        if not count:
            return self
        return dataclasses.replace(
            self,
            first=self.first + count,
            keys=tuple(part(keys, count, len(self.block_ids)) for keys in self.keys),
            parents=tuple(part(keys, count - 1, count) for keys in self.keys),
            block_ids=self.block_ids[count:],
        )

    def is_in(self, keys: bytes) -> bool:
        """Whether the first of these blocks is in a sequence, of its keys for the first rank."""
        return part(keys, self.first, self.first + 1) == part(self.keys[0], 0, 1)


@dataclasses.dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's classes are Any here
    """What the workers do in one step of the engine."""

    loads: list[Blocks] = dataclasses.field(default_factory=list)
    saves: list[Blocks] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Saved(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's classes are Any here
    """What a worker has done since it last said so.

    Attributes:
        steps: Steps with saves.
        cuts: By request, the tokens up to which a load of several parts may be tried again.
    """

    steps: int
    cuts: dict[str, int] = dataclasses.field(default_factory=dict)

    def aggregate(self, other: Saved) -> Saved:
        """What all workers have done."""
        cuts = dict(self.cuts)
        for name, tokens in other.cuts.items():
            cuts[name] = min(tokens, cuts.get(name, tokens))
        return Saved(min(self.steps, other.steps), cuts)


@dataclasses.dataclass
class Owner(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM's classes are Any here
    """The store of a rank.

    Attributes:
        directory: Where its owner listens.
        specs: The namespaces of its blocks without tenancy, one a group.
    """

    directory: str
    specs: tuple[NamespaceSpec, ...]


def part(keys: bytes, first: int, last: int) -> bytes:
    """Keys from `first` up to `last` of packed ones."""
    return keys[first * KEY_BYTES : last * KEY_BYTES]
