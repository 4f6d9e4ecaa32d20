"""Four ways to start the same training loop: Ray Train, Ray actors, torchrun's processes, and this very process."""

PRELOAD = "app.launchers.preload"
"""The module that processes import ahead of the workers that are forked from them (cluster/connect.py)."""
