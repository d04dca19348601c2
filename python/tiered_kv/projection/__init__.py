"""Projections: time to first token, throughput and cost of a model on a node, from a replay.

Nothing here was measured on the node. Each figure follows from a replay of a trace over the node's
tiers and from inputs that are printed with their sources; what halving and doubling each of them
does is printed beside.
"""

from tiered_kv.projection.model import Factors
from tiered_kv.projection.run import CONFIGURATIONS, Facts, project

__all__ = ["CONFIGURATIONS", "Factors", "Facts", "project"]
