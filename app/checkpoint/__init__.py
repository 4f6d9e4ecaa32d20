"""Sharded, asynchronous checkpoints that every layout can read; see README.md."""

from app.checkpoint.commit import FROZEN, Commit, commits, find, latest_good, sweep, verify
from app.checkpoint.ranks import CheckpointError, NotFinite
from app.checkpoint.reader import Weights, export, load
from app.checkpoint.saver import Checkpointer

__all__ = [
    "Checkpointer",
    "CheckpointError",
    "Commit",
    "FROZEN",
    "Weights",
    "commits",
    "export",
    "find",
    "latest_good",
    "load",
    "NotFinite",
    "sweep",
    "verify",
]
