"""The command `tiered-kv`.

Conventions of every command:

- `--json` prints one JSON document on stdout; progress and text for people go to stderr then.
- An error is one line on stderr; `TIERED_KV_TRACEBACK=1` shows the traceback.
- The exit status says what happened: see `tiered_kv.cli.exits.ExitCode`.
- A command imports what it needs when it runs: `tiered-kv --help` loads no torch.
"""

from tiered_kv.cli.entry import main
from tiered_kv.cli.exits import ExitCode

__all__ = ["ExitCode", "main"]
