"""The application: configuration, tasks, the training loop, launchers, checkpoints, tracking, command line."""
