"""A store's statistics for Prometheus.

```python
with tiered_kv.metrics.serve(store, "127.0.0.1:9400"):
    ...  # curl http://127.0.0.1:9400/metrics
```
`tiered-kv metrics` does the same for a store that another process has open. Needs the package
prometheus-client: `pip install 'tiered-kv[metrics]'`.
"""

from tiered_kv.metrics.render import Source, render
from tiered_kv.metrics.server import MetricsServer, serve

__all__ = ["MetricsServer", "Source", "render", "serve"]
