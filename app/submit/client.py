"""A cluster's job server: reached by address or through an SSH tunnel, and reached again when the connection drops."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from app.errors import UserError
from cluster.addresses import bracketed

DEFAULT = "http://127.0.0.1:8265"


def allow_token() -> None:
    """With a token in ~/.ray/auth_token, uses it, unless RAY_AUTH_MODE says otherwise. Ray reads this when imported."""
    if os.path.exists(os.path.expanduser("~/.ray/auth_token")) or os.environ.get("RAY_AUTH_TOKEN"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class Server:
    """The job server, connected to inside `with`; `client` is Ray's JobSubmissionClient.

    It is at `address`, or on the head of the cluster file `cluster`, reached over SSH; by default at
    RAY_API_SERVER_ADDRESS or an http RAY_ADDRESS, else on this machine.
    """

    def __init__(self, address: str | None = None, cluster: str | None = None) -> None:
        allow_token()  # before a cluster's file is read, which imports Ray
        if address and cluster:
            raise UserError("--address and --cluster both say where to: write one of them")
        known = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
        found = address or (known if known.startswith("http") else DEFAULT)
        self.cluster = cluster or ""
        if "://" not in found:
            found = f"http://{bracketed(found)}"
        self.address = "" if cluster else found
        self.client: Any = None
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
            UserError, ClusterError: no server answers, or it refuses us, in Ray's words; one sentence.
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
            first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UserError(
                f"the Ray job server at {self} cannot be used ({first[:300]}): `trireme cluster up` starts a cluster, "
                "--address or --cluster says where one is"
            ) from error

    def _open_tunnel(self) -> str:
        """The local address that leads to the cluster's head."""
        from cluster.files import read_ray_file
        from cluster.launch import head_host
        from cluster.ray_file import dashboard_port, is_this_machine
        from cluster.remote import login_of, tunnel

        data, file = read_ray_file(self.cluster)
        port = dashboard_port(data)
        if not is_this_machine(data):
            port = self._tunnel.enter_context(tunnel(login_of(data), head_host(data, file), port))
        return f"http://127.0.0.1:{port}"
