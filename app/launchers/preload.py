"""What workers in Ray need, imported by a fork server (cluster/fast_start) before they are asked for."""

import importlib

for _name in (
    "app.cli.train",
    "app.doctor.job",
    "app.launchers.elastic",
    "app.launchers.member",
    "app.launchers.pipeline",
    "app.launchers.ray_train",
    "app.launchers.room",
    "app.loop",
    "app.run.driver",
    "app.run.lifecycle",
    "app.run.prepare",
    "app.tracking.system",
    "app.train",
):
    importlib.import_module(_name)
