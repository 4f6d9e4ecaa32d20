"""What a worker of any launcher in Ray needs, imported by a fork server (cluster/forkserver.py) before anyone asks."""

import app.carry_out
import app.cli.train
import app.doctor.job
import app.driver
import app.launchers.elastic
import app.launchers.member
import app.launchers.pipeline
import app.launchers.ray_train
import app.pending
import app.prepare
import app.tracking.system
import app.train
import app.worker  # noqa: F401
