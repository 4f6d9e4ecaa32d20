"""The application: configuration, tasks, the training loop, launchers, checkpoints, tracking, command line."""

from app import names as _names

_names.claim()
