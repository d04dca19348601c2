"""What a node can hold: tokens, requests and minutes of traffic in each tier, the largest batch.

```python
node = load_node("dgx-h100")
found = plan(node, read_config("llama-3-70b"), Load(context=8192), Weights(params=70e9))
assert found.batch.largest > 0
```

A node is described in TOML, where every figure has a source; what nobody has published is marked
as an assumption and printed with the result. Nothing here imports torch, numpy or matplotlib; a
plot alone loads the latter.
"""

from tiered_kv.planner.node import Figure, Gpu, Node, Tier, builtin_nodes, load_node
from tiered_kv.planner.plan import Batch, Load, Plan, TierPlan, plan
from tiered_kv.planner.weights import Weights, published

__all__ = [
    "Batch",
    "Figure",
    "Gpu",
    "Load",
    "Node",
    "Plan",
    "Tier",
    "TierPlan",
    "Weights",
    "builtin_nodes",
    "load_node",
    "plan",
    "published",
]
