"""The second distribution is installed and light."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata


def test_kernels_import_without_torch() -> None:
    code = (
        "import sys, tiered_kv_kernels as k; print(k.__version__);"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == metadata.version("tiered-kv-kernels")
