"""Partition of a model into pipeline stages: search, orders, predicted times."""
