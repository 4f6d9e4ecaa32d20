"""Ray on this machine without what only a cluster needs, so that it is there sooner and idles for less.

`ray.init` starts a head's every process: an API server (for whose address it waits before it starts anything else,
about a second and a half), an autoscaler's monitor and a monitor of log files (a third of a CPU second each, and a
little for ever). A Ray that lives as long as one command has no API, nothing to scale, and workers with log files of
their own. `python -m experiments.benchmarks start` and `idle` measure what this brings.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def bare_head(worker: str = "") -> Iterator[None]:
    """While it lasts, a head that `ray.init` starts is a GCS server and a raylet with its two agents.

    worker: the script that its raylet starts for each worker; "": Ray's own."""
    from ray._private import node

    whole = node.Node

    class Bare(whole):  # type: ignore[misc, valid-type]
        def __init__(self, ray_params: Any, *rest: Any, **named: Any) -> None:
            # Any free port: the usual one may be another Ray's, and the raylet waits while its agent tries that again.
            ray_params.dashboard_agent_listen_port = 0
            if worker:
                ray_params.setup_worker_path = worker
            self._webui_url = ""
            super().__init__(ray_params, *rest, **named)

        def start_api_server(self, **named: Any) -> None: ...

        def start_monitor(self) -> None: ...

        def start_log_monitor(self) -> None: ...

    # What its agent would look up every five seconds is for an API server.
    seldom = mock.patch.dict(os.environ, {"REPORTER_UPDATE_INTERVAL_MS": "60000"})
    with seldom, mock.patch.object(node, "Node", Bare):
        yield
