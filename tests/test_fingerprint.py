"""Fingerprints of weights: hashed once for as long as a file stays as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from tiered_kv._core import blake3_file
from tiered_kv.engines import _fingerprint


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read to be hashed."""
    read: list[str] = []

    def counting(path: Any) -> str:
        read.append(Path(path).name)
        return blake3_file(path)

    monkeypatch.setattr(_fingerprint, "blake3_file", counting)
    return read


def test_a_file_is_hashed_again_only_when_it_has_changed(tmp_path: Path, hashed: list[str]) -> None:
    cache, weights = tmp_path / "cache" / "weights.json", tmp_path / "a.safetensors"
    weights.write_bytes(b"one")
    first = _fingerprint.file_digests([weights], cache)
    assert _fingerprint.file_digests([weights], cache) == first
    assert hashed == ["a.safetensors"]
    assert cache.stat().st_mode & 0o777 == 0o600
    # Size, time and inode, each by itself.
    weights.write_bytes(b"longer")
    os.utime(weights, ns=(1, 1))
    second = _fingerprint.file_digests([weights], cache)
    assert second != first
    os.utime(weights, ns=(1, 2))
    assert _fingerprint.file_digests([weights], cache) == second
    copy = tmp_path / "b.safetensors"
    copy.write_bytes(b"longer")
    os.utime(copy, ns=(1, 2))
    copy.rename(weights)
    assert _fingerprint.file_digests([weights], cache) == second
    assert len(hashed) == 4


def test_a_model_in_memory_is_known_by_its_parameters(tmp_path: Path, hashed: list[str]) -> None:
    cache = tmp_path / "weights.json"
    one = _fingerprint.weights_fingerprint(tiny_models.llama(), cache)
    assert one == _fingerprint.weights_fingerprint(tiny_models.llama(), cache)
    assert one != _fingerprint.weights_fingerprint(tiny_models.llama(seed=1), cache)
    assert hashed == []
    assert not cache.exists()
