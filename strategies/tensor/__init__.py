"""Tensor parallelism: the plan, putting it on a model, its collectives, its loss, its cost."""
