"""What `adapter_params` of the LMCache flags may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered_kv import ConfigError, StoreConfig
from tiered_kv.engines._cpus import cpus_beside_computation

PLACEHOLDER = "MODEL/WEIGHTS/DTYPE"
"""What stands for a namespace where no model is known; no adapter opens with it."""

_OURS = frozenset({"nvme_paths", "record", "record_bytes"})
_PASSED_ON = frozenset(field.name for field in dataclasses.fields(StoreConfig)) - _OURS
_HERE = frozenset({"path", "namespace", "direct_reads", "record", "chunk_tokens"})
_MOST_NAMESPACE = 1024
_CHUNK_TOKENS = 256
"""Tokens of a chunk unless LMCache's `--chunk-size` says otherwise, which no adapter is told."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The adapter's own options, and those of its store.

    Attributes:
        path: Directory on the drive.
        namespace: What LMCache's keys do not tell: model, revision of the weights, dtype.
        direct_reads: Whether drives read into LMCache's own memory. A copy through the store's is
            quicker where that memory is of small pages, and lets a load end in time on a drive that
            stalls.
        record: A directory to which what LMCache looks up is written as a trace.
        chunk_tokens: Tokens of a chunk, LMCache's `--chunk-size`, for the trace.
        store: The configuration of the store.
    """

    path: Path
    namespace: str
    direct_reads: bool
    record: Path | None
    chunk_tokens: int
    store: StoreConfig

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Options:
        """Checks the options of the flag.

        Args:
            params: `adapter_params`.

        Returns:
            The options.

        Raises:
            ConfigError: One is missing, unknown or wrong; the message names it.
        """
        unknown = sorted(set(params) - _PASSED_ON - _HERE)
        if unknown:
            known = ", ".join(sorted(_PASSED_ON | _HERE))
            raise _wrong(f"`{unknown[0]}` is unknown: give any of {known}")
        path = params.get("path")
        if not isinstance(path, str) or not path:
            text = (
                "`path` is missing: give the directory on the drive that keeps the blocks, as in "
                '{"path": "/mnt/nvme0/kv"}'
            )
            raise _wrong(text)
        namespace = _namespace(params.get("namespace"), path)
        direct = params.get("direct_reads", False)
        if not isinstance(direct, bool):
            raise _wrong(f"`direct_reads` is {direct!r}: give true or false")
        record = params.get("record")
        if record is not None and not (isinstance(record, str) and record):
            raise _wrong(f"`record` is {record!r:.100}: give a directory for traces of requests")
        tokens = params.get("chunk_tokens", _CHUNK_TOKENS)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens < 1 << 20:
            raise _wrong(f"`chunk_tokens` is {tokens!r:.100}: give LMCache's own `--chunk-size`")
        store = {"cpus": cpus_beside_computation()}
        store |= {name: params[name] for name in params if name in _PASSED_ON}
        filled = StoreConfig.from_dict({**store, "nvme_paths": [path]})
        traces = None if record is None else Path(record)
        return cls(Path(path), namespace, direct, traces, tokens, filled)

    def make_directory(self) -> None:
        """Makes the store's directory, nobody else's to read.

        Raises:
            OSError: It cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _namespace(value: object, path: str) -> str:
    if isinstance(value, str) and 0 < len(value) <= _MOST_NAMESPACE and value != PLACEHOLDER:
        return value
    given = "is missing" if value is None else f"is {value!r:.100}"
    text = (
        f"`namespace` {given}: LMCache's keys tell neither the revision of the weights nor the "
        f"dtype of the cache, so that another model's bytes would be served. Give what `tiered-kv "
        f"engines --path {path} --model DIRECTORY` prints for the directory of the model's files, "
        f'as in {{"namespace": "{PLACEHOLDER}"}} with these three filled in'
    )
    raise _wrong(text)


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"adapter_params: {text}", op="engines")
