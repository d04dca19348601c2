"""vLLM's own tier of files, to be measured beside the store."""

from __future__ import annotations

import json
from pathlib import Path

from serving.jobs import HERE
from serving.jobs import environment as environment_of_jobs

MOST = 1.05
"""Of the time to a first token by vLLM's tier of files, what the store may take."""


def environment() -> dict[str, str]:
    """What it needs to find its files again after a restart, and the module with the copies."""
    ours = environment_of_jobs()["PYTHONPATH"]
    return {"PYTHONHASHSEED": "0", "PYTHONPATH": f"{ours}:{HERE.parent}"}


def fs_tier(root: Path) -> list[str]:
    """The flag of vLLM's tier of files, behind 1 GiB of host memory."""
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tiered_kv.engines.vllm",
        "cpu_bytes_to_use": 1 << 30,
        "offload_prompt_only": False,
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
    }
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(config)]
