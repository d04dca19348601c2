"""`python -m tiered_kv.demo`: the same as `tiered-kv demo`."""

from __future__ import annotations

import sys

from tiered_kv.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
