"""GPU kernels of tiered-kv.

There is no kernel here yet: the package fixes the name and the version under which they will be
installed. Importing it loads neither torch nor triton.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
