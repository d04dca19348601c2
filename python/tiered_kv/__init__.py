"""A tiered KV-cache store for LLM serving."""

from tiered_kv._core import __version__

__all__ = ["__version__"]
