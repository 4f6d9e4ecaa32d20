"""The configuration of a run: its keys, how they are read, and how their values are checked."""

from app.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    FaultConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "FaultConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrackingConfig",
    "TrainConfig",
]
