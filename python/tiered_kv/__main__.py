"""`python -m tiered_kv` is the command `tiered-kv`."""

import sys

from tiered_kv.cli import main

if __name__ == "__main__":
    sys.exit(main())
