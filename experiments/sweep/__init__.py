"""Sweeps: one experiment over a search space, every trial a full run, with Ray Tune."""
