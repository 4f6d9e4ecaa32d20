"""What a run is configured by: every key with its documentation, how it is read, and what is checked of it."""

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
