"""What a model is: fingerprints of its weights and configuration, for the namespace.

Hashing the weight files is slow for large models, so digests of files are kept in the user's cache
directory by device, inode, size and modification time. Files say nothing of what was done to the
weights after loading (a merged adapter, another dtype), so a sample of the tensors in memory always
takes part.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_kv._core import blake3, blake3_file

if TYPE_CHECKING:
    import torch

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")

_CACHE_LIMIT_BYTES = 1 << 20
_CACHE_ENTRIES = 1024
_SAMPLES = 256
_CHUNK_ELEMENTS = 1 << 24

# Fields of a config that do not change what a forward pass computes from given weights.
_NEUTRAL_FIELDS = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "label2id", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip


def cache_file() -> Path:
    """Where digests of weight files are kept: `$XDG_CACHE_HOME/tiered-kv/weights.json`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tiered-kv" / "weights.json"


def weights_fingerprint(model: Any, cache: Path | None = None) -> str:
    """The fingerprint of a model's weights.

    The weight files are hashed where the model was loaded from a local directory (or the local copy
    of a hub repository), the parameters themselves otherwise.

    Args:
        model: A `transformers` model.
        cache: File of known digests; `cache_file()` by default.

    Returns:
        64 hexadecimal digits.
    """
    directory = _source_directory(model)
    files = [] if directory is None else weight_files(directory)
    if not files:
        return blake3(_all_tensors(model).encode())
    digests = file_digests(files, cache or cache_file())
    return blake3("\n".join([*digests, _sampled_tensors(model)]).encode())


def config_fingerprint(config: Any) -> str:
    """A digest of every field of a config that changes what the model computes."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _NEUTRAL_FIELDS}
    return blake3(json.dumps(fields, sort_keys=True, default=str).encode())


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a model directory, sorted by name; of one kind only."""
    for suffix in WEIGHT_SUFFIXES:
        if files := sorted(directory.glob(f"*{suffix}")):
            return files
    return []


def file_digests(files: list[Path], cache: Path) -> list[str]:
    """The blake3 of each file, from `cache` where it has not changed since.

    Args:
        files: Existing files.
        cache: JSON file of known digests; an unreadable one counts as empty.

    Returns:
        One line for each file: its digest.
    """
    known = _read_cache(cache)
    digests = []
    changed = False
    for path in files:
        stat = path.stat()
        identity = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        digest = known.get(identity)
        if digest is None:
            digest = known[identity] = blake3_file(str(path))
            changed = True
        digests.append(digest)
    if changed:
        # A cache that cannot be written costs time at the next start, nothing else.
        with contextlib.suppress(OSError):
            _write_cache(cache, known)
    return digests


def _source_directory(model: Any) -> Path | None:
    name = getattr(model, "name_or_path", "") or ""
    return local_directory(name, getattr(model.config, "_commit_hash", None))


def local_directory(name: str, revision: str | None, file: str = "config.json") -> Path | None:
    """Where the files of a model or adapter are on this machine.

    Args:
        name: A directory, or the hub id of a repository.
        revision: Revision of the repository; None for its main branch.
        file: A file that it must have, where it is a repository.

    Returns:
        The directory, None where there is none.
    """
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except ValueError:  # a path that is no hub id and no longer a directory
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        with cache.open("rb") as file:
            text = file.read(_CACHE_LIMIT_BYTES + 1)
        entries = json.loads(text) if len(text) <= _CACHE_LIMIT_BYTES else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if _is_digest(value)}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _write_cache(cache: Path, known: Mapping[str, str]) -> None:
    cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entries = dict(list(known.items())[-_CACHE_ENTRIES:])
    # mkstemp makes the file 0600; the rename makes it whole or absent.
    descriptor, name = tempfile.mkstemp(dir=cache.parent, prefix=".weights-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(entries, file)
        Path(name).replace(cache)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _head(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # Here alone: the digests of files are for commands that need no torch, too.
    import torch

    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _all_tensors(model: Any) -> str:
    """Names, shapes and digests of all tensors, a bounded piece at a time."""
    lines = []
    for name, tensor in sorted(model.state_dict().items()):
        lines.append(_head(name, tensor))
        pieces = tensor.detach().reshape(-1).split(_CHUNK_ELEMENTS)
        lines.extend(blake3(_bytes_of(piece)) for piece in pieces)
    return "\n".join(lines)


def _sampled_tensors(model: Any) -> str:
    """Names, shapes and a few evenly spread elements of each tensor.

    A merged adapter, a step of training or another dtype changes nearly every element of the
    tensors that it touches.
    """
    lines = []
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        lines.append(_head(name, tensor))
        if flat.numel():
            step = max(1, flat.numel() // _SAMPLES)
            lines.append(blake3(_bytes_of(flat[::step][: _SAMPLES + 1])))
    return "\n".join(lines)
