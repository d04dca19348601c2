"""Exact bytes of a model's KV cache, for every attention architecture.

```python
spec = read_config("deepseek-v3")
assert spec.bytes_per_token == 70_272
assert spec.tokens_in(spec.bytes(1000)) == 1000
```

A `KvSpec` is made of groups of alike layers, a group of parts, and a part of entries whose number
follows the context: one a token, the last tokens of a window, one for several tokens, or a state.
All arithmetic is exact, in integers; nothing here imports torch, numpy or transformers.
"""

from tiered_kv.sizing.catalogue import Entry
from tiered_kv.sizing.catalogue import entries as catalogue_entries
from tiered_kv.sizing.dtypes import DTYPES, DType, dtype_named
from tiered_kv.sizing.parallel import Parallel, of_rank, rank_bytes, replication
from tiered_kv.sizing.parts import ENCODER, EVERY_TOKEN, STATE, Part, Span, SpanKind, last
from tiered_kv.sizing.read import read_config
from tiered_kv.sizing.spec import AsIf, Comparison, Kind, KvSpec, LayerGroup, Role

__all__ = [
    "DTYPES",
    "ENCODER",
    "EVERY_TOKEN",
    "STATE",
    "AsIf",
    "Comparison",
    "DType",
    "Entry",
    "Kind",
    "KvSpec",
    "LayerGroup",
    "Parallel",
    "Part",
    "Role",
    "Span",
    "SpanKind",
    "catalogue_entries",
    "dtype_named",
    "last",
    "of_rank",
    "rank_bytes",
    "read_config",
    "replication",
]
