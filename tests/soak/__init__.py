"""A store under load for a long time, with faults and cancellations: nothing may grow."""
