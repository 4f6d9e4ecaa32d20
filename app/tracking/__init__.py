"""Tracking: a run appends to a spool, and one writer process delivers that to MLflow; training never waits for it."""
