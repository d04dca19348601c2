"""The store's model: an oracle, pairs of stores driven side by side, and the rules."""
