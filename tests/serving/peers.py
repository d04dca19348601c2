"""vLLM's own tier of files, to be measured beside the store."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

MOST = 1.05
"""Of the time to a first token by vLLM's tier of files, what the store may take."""

_SPIN_S = 1.2


def let_rest() -> None:
    """Waits until no engine spins.

    For a second after a step a worker of vLLM looks for the next one without sleeping, on the
    processor that it is bound to. Where several engines have the same one, the next would be
    measured beside that.
    """
    time.sleep(_SPIN_S)


def environment() -> dict[str, str]:
    """What it needs to find its files again after a restart."""
    return {"PYTHONHASHSEED": "0"}


def fs_tier(root: Path) -> list[str]:
    """The flag of vLLM's tier of files, behind 1 GiB of host memory."""
    return tiering({"type": "fs", "root_dir": str(root)})


def tiering(entry: dict[str, Any]) -> list[str]:
    """The flag of a secondary tier, behind 1 GiB of host memory, on CPUs."""
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tiered_kv.engines.vllm",
        "cpu_bytes_to_use": 1 << 30,
        "offload_prompt_only": False,
        "secondary_tiers": [entry],
    }
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(config)]
