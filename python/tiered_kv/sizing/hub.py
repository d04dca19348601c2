"""Configurations of models on the hub: from its local cache, else from the hub itself."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_kv.sizing.checks import fault
from tiered_kv.sizing.documents import MOST_BYTES, load_json, parse_json

if TYPE_CHECKING:
    from http.client import HTTPResponse

SECONDS = 10.0
"""How long an answer is waited for."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_id(name: str) -> bool:
    """Whether a name can be a hub id: an owner and a name."""
    return _ID.fullmatch(name) is not None and ".." not in name


def address(model: str) -> str:
    """Where a model's configuration is."""
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return f"{base}/{model}/resolve/main/config.json"


def _cached(model: str) -> Path | None:
    """The configuration that the hub's own client has downloaded."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    try:
        found = [path for path in snapshots.glob("*/config.json") if path.is_file()]
    except OSError:
        return None
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def config_of(model: str) -> dict[str, Any]:
    """The configuration of a model on the hub.

    Args:
        model: Its id.

    Raises:
        InvalidArgumentError: It is not in the local cache, and the hub cannot be reached, does not
            have it, or refuses it.
    """
    path = _cached(model)
    if path is not None:
        return load_json(path)
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise _unreachable(model, "HF_HUB_OFFLINE is set")
    # These two take longer to load than a size takes to compute.
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    url = address(model)
    if not url.startswith(("https://", "http://")):
        raise _unreachable(model, "HF_ENDPOINT is no http address")
    request = urllib.request.Request(url, headers={"User-Agent": "tiered-kv"})  # noqa: S310
    token = os.environ.get("HF_TOKEN")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            text = _body(answer, model)
    except urllib.error.HTTPError as error:
        reasons = {401: "it is not there, or needs HF_TOKEN", 403: "it needs HF_TOKEN"}
        reason = reasons.get(error.code, f"the hub answers {error.code}")
        raise _unreachable(model, reason) from None
    except (OSError, ValueError, HTTPException) as error:
        raise _unreachable(model, str(getattr(error, "reason", error))) from None
    return parse_json(text, url)


def _body(answer: HTTPResponse, model: str) -> bytes:
    """What the hub sends; a trickle does not go on for ever."""
    text, end = b"", time.monotonic() + 3 * SECONDS
    while len(text) <= MOST_BYTES and (more := answer.read1(1 << 16)):
        text += more
        if time.monotonic() > end:
            raise _unreachable(model, f"it sends for more than {3 * SECONDS:.0f} s")
    return text


def _unreachable(model: str, reason: str) -> Exception:
    return fault(
        f"`model` {model!r} is not in the catalogue, and its configuration cannot be had from the "
        f"hub ({reason}): give the path of its config.json"
    )
