"""Checkpoints: sharded, asynchronous, readable by any layout, and existing only once committed. See README.md."""

from app.checkpoint.commit import Commit, File, commits, find, latest_good, verify
from app.checkpoint.errors import CheckpointError, Unsound
from app.checkpoint.prune import best, sweep
from app.checkpoint.reader import latest_good_together, load, load_per_rank
from app.checkpoint.saver import Checkpointer

__all__ = [
    "best",
    "Checkpointer",
    "CheckpointError",
    "Commit",
    "commits",
    "File",
    "find",
    "latest_good",
    "latest_good_together",
    "load",
    "load_per_rank",
    "sweep",
    "Unsound",
    "verify",
]
