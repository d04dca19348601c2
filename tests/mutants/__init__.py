"""Mutants of the store, and whether the simulation finds them."""
