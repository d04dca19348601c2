"""Runs the checks of the vLLM adapter's parts, where vLLM is: `python -m serving.parts OUT`.

Each function of the modules that begins with `check_` is run; `OUT` gets, by name, what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from serving import (
    checks,
    hybrid_checks,
    identity_checks,
    layer_checks,
    limits_checks,
    metrics_checks,
    policy_checks,
    tier_checks,
    within_checks,
)

MODULES = (
    checks,
    hybrid_checks,
    identity_checks,
    layer_checks,
    limits_checks,
    metrics_checks,
    policy_checks,
    tier_checks,
    within_checks,
)
CHECKS = {
    name: what
    for module in MODULES
    for name, what in vars(module).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    faults = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:  # noqa: BLE001 - whatever it is goes to the one who asked
            faults[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps({"ran": sorted(CHECKS), "faults": faults}))
