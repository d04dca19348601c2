"""Adapters for serving engines; each is imported by name and brings its own dependencies."""
