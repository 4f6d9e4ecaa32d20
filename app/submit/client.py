"""A cluster's job server, reached by its address or through an SSH tunnel."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from app.errors import UserError
from cluster.addresses import bracketed

DEFAULT_URL = "http://127.0.0.1:8265"


def allow_token() -> None:
    """Has Ray use a token if there is one, unless RAY_AUTH_MODE is set.

    The token is in ~/.ray/auth_token or RAY_AUTH_TOKEN. Call this before Ray is imported, which
    reads the mode.
    """
    has_file = os.path.exists(os.path.expanduser("~/.ray/auth_token"))
    if has_file or os.environ.get("RAY_AUTH_TOKEN"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class Server:
    """The job server of a cluster; `with` connects to it.

    Args:
        address: Where it is; None means RAY_API_SERVER_ADDRESS or an http RAY_ADDRESS, or else
            this machine.
        cluster: A cluster's file, if it is on the head of that cluster and is to be reached over
            SSH.

    Raises:
        UserError: Both an address and a file are given.
    """

    def __init__(self, address: str | None = None, cluster: str | None = None) -> None:
        allow_token()  # before a cluster's file is read, which imports Ray
        if address and cluster:
            raise UserError("--address and --cluster both name the cluster: write only one of them")
        self.cluster = cluster or ""
        self.address = "" if cluster else _url(address)
        self.client: Any = None
        """Ray's JobSubmissionClient, while connected."""
        self._tunnel = contextlib.ExitStack()

    def __str__(self) -> str:
        return self.cluster or self.address

    def __enter__(self) -> Server:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._tunnel.close()

    def connect(self) -> None:
        """Connects, or connects again.

        Raises:
            UserError: No server answers, or it refuses this process; one sentence.
            ClusterError: The cluster's head cannot be reached.
        """
        self._tunnel.close()
        from ray.job_submission import JobSubmissionClient

        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.ERROR)
        address = self._open_tunnel() if self.cluster else self.address
        try:
            self.client = JobSubmissionClient(address)
        except Exception as error:
            self._tunnel.close()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = lines[0].rstrip(".")[:300]
            raise UserError(
                f"the Ray job server at {self} cannot be used ({reason}): `trireme cluster up` "
                "starts a cluster, --address or --cluster says where one is"
            ) from error

    def _open_tunnel(self) -> str:
        """Opens a tunnel to the cluster's head; returns the local address that leads there."""
        from cluster.files import read_ray_file
        from cluster.launch import head_host
        from cluster.ray_file import dashboard_port, is_this_machine
        from cluster.remote import login_of, tunnel

        data, file = read_ray_file(self.cluster)
        port = dashboard_port(data)
        if not is_this_machine(data):
            new_tunnel = tunnel(login_of(data), head_host(data, file), port)
            port = self._tunnel.enter_context(new_tunnel)
        return f"http://127.0.0.1:{port}"


def _url(address: str | None) -> str:
    """The URL of a job server; see `Server`."""
    if not address:
        ray_address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
        address = ray_address if ray_address.startswith("http") else DEFAULT_URL
    if "://" not in address:
        return f"http://{bracketed(address)}"
    return address
