"""What operators do with a store; see `tiered_kv.operator` and the commands."""

import os
from collections.abc import Sequence
from typing import Any, final

from typing_extensions import Buffer

from tiered_kv.spec import NamespaceSpec

@final
class Operator:
    """A store as operators see it: live, attached to, or closed."""

    @staticmethod
    def attach(path: str | os.PathLike[str], timeout: float | None = None) -> Operator:
        """Attaches to the store that a process has open on a directory.

        Raises:
            NotFoundError: Nobody listens there; the others as `tiered_kv.TieredStore.attach`.
        """
    @staticmethod
    def read(paths: Sequence[str | os.PathLike[str]]) -> Operator:
        """Reads a closed store, all of whose directories are given, and changes nothing.

        Raises:
            NotFoundError: A directory is not there.
            FormatMismatchError: One is no store of this version.
            InUseError: A process has it open.
        """
    @staticmethod
    def open(paths: Sequence[str | os.PathLike[str]]) -> Operator:
        """Opens a closed store, all of whose directories are given, to delete from it.

        Raises:
            InvalidArgumentError: A directory of it is not given; the others as `read`.
        """
    def namespaces(self, start: int) -> tuple[list[dict[str, Any]], int | None]:
        """A page of namespaces, and where the next begins."""
    def survey(self, start: int) -> tuple[list[dict[str, Any]], int | None]:
        """What a page of blocks says of their namespaces; pages add up."""
    def blocks(
        self,
        start: int,
        namespace: Buffer | None = None,
        tenant: bytes | None = None,
        stored_before_unix_ns: int | None = None,
    ) -> tuple[list[dict[str, Any]], int | None]:
        """A page of blocks, which may be empty, and where the next begins."""
    def inspect(self, key: Buffer, namespace: Buffer | None = None) -> list[dict[str, Any]]:
        """All that is known of a key, in one namespace or in all."""
    def explain(self, namespace: Buffer, keys: Buffer) -> dict[str, Any]:
        """Where keys are, why, and what happened to them last."""
    def delete_keys(self, namespace: Buffer, keys: Buffer, timeout: float) -> tuple[int, bool]:
        """Deletes keys; how many were there, and whether that is durable."""
    def delete_before(
        self, namespace: Buffer, unix_ns: int | None, timeout: float
    ) -> tuple[int, bool]:
        """Deletes what was stored before a time, everything without one."""
    def drives(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The directories of a closed store, and the identities of those that were not given."""
    def verify(self) -> Verify:
        """Begins to check every payload of a closed store.

        Raises:
            UnsupportedError: It is not one that is only read.
        """
    def close(self) -> None:
        """Ends the work: closes what was opened for it, lets go of what was locked."""

@final
class Verify:
    """A check of a closed store, in steps."""

    @property
    def total(self) -> tuple[int, int]:
        """Slabs to be checked, and their bytes."""
    def step(self, max_bytes: int) -> dict[str, Any] | None:
        """Checks about so many bytes more: `slabs`, `bytes`, `damaged_headers`, `bad`."""

def describe_spec(spec: NamespaceSpec) -> tuple[bytes, dict[str, str]]:
    """The digest of a specification, and its fields by name; the salt as a digest."""

def resize(
    paths: Sequence[str | os.PathLike[str]], capacity: int, dry_run: bool = False
) -> list[dict[str, Any]]:
    """Makes the directories of a closed store fit a capacity of so many bytes each.

    Raises:
        InvalidArgumentError: The capacity is smaller than a segment; the others as `Operator.read`.
    """

def tenant_digest(name: str) -> bytes:
    """The digest under which records name a tenant, 16 bytes; zeros for none."""

def token_keys(namespace: Buffer, tokens: Sequence[int] | Buffer, tokens_per_block: int) -> bytes:
    """Packed keys of the full blocks of a token sequence, in the namespace of a digest."""
