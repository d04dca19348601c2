"""What of a namespace is decided while the engine runs, and what a request tells of itself."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from time import monotonic
from typing import NamedTuple

from tiered_kv import NamespaceSpec, RequestContext
from tiered_kv._core import Operator, describe_spec
from tiered_kv.operator import namespaces

EPOCH = "+reset-"
"""Between a name of weights and that of an epoch."""
RESET_S = 30.0
"""Seconds that a reset may take."""

_TENANT_FIELDS = frozenset({"lora", "salt"})
_WEIGHTS = "weights"
_LABEL_CHARACTERS = 256


class Tenancy(NamedTuple):
    """What of a namespace is decided while the engine runs: by a request, and by resets.

    Attributes:
        lora: What stands for the adapter.
        salt: What stands for the salt.
        epoch: A name of the weights since the last reset; empty for those of the files.
    """

    lora: str
    salt: str
    epoch: str = ""

    def of(self, spec: NamespaceSpec) -> NamespaceSpec:
        """A namespace for such requests."""
        weights = f"{spec.weights}{EPOCH}{self.epoch}" if self.epoch else spec.weights
        return dataclasses.replace(spec, weights=weights, lora=self.lora, salt=self.salt)


def forget_model(directory: str | os.PathLike[str], spec: NamespaceSpec, end_s: float) -> bool:
    """Deletes every namespace of an open store that differs from a model's in its tenancy only.

    Args:
        directory: The store's, whose owner may be this process or another one.
        spec: The model's namespace.
        end_s: When to give up, by the monotonic clock.

    Returns:
        Whether all of it is deleted durably.

    Raises:
        TieredKvError: The store refused a call.
    """
    _, wanted = describe_spec(spec.canonical())
    core = Operator.attach(os.fspath(directory), max(0.0, end_s - monotonic()))
    durable = True
    try:
        for row in namespaces(core):
            if row["fields"] is not None and _same_model(row["fields"], wanted):
                left_s = end_s - monotonic()
                if left_s <= 0:
                    return False
                _, done = core.delete_before(row["namespace"], None, left_s)
                durable = durable and done
    finally:
        core.close()
    return durable


def request_context(params: object, session: object = None) -> RequestContext:
    """What a request says of itself: all of it is a stranger's, so whatever is no good is left.

    Args:
        params: Its `kv_transfer_params`.
        session: The session that the engine knows it by, where `params` tell none.
    """
    told = params.get("tiered_kv") if isinstance(params, dict) else None
    told = told if isinstance(told, dict) else {}
    turn = told.get("turn")
    if type(turn) is not int or not 0 <= turn < 1 << 31:
        turn = 0
    return RequestContext(
        session=_label(told.get("session") or session),
        turn=turn,
        tenant=_label(told.get("tenant")),
        kind=_label(told.get("kind")),
    )


def _same_model(fields: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    names = {*fields, *wanted} - _TENANT_FIELDS - {_WEIGHTS}
    of_epoch = re.escape(wanted[_WEIGHTS]) + f"({re.escape(EPOCH)}[0-9a-f]{{32}})?"
    same = re.fullmatch(of_epoch, fields.get(_WEIGHTS, "")) is not None
    return same and all(fields.get(name) == wanted.get(name) for name in names)


def _label(value: object) -> str:
    fits = isinstance(value, str) and len(value) <= _LABEL_CHARACTERS and value.isprintable()
    return str(value) if fits else ""
