"""A cluster's job server: reached by address or through an SSH tunnel, and reached again when the connection drops."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from app.errors import UserError

T = TypeVar("T")
DEFAULT = "http://127.0.0.1:8265"


@dataclass(frozen=True)
class Target:
    """Where jobs go: a job server's address, or a cluster file whose head is reached over SSH."""

    address: str = ""
    cluster: str = ""

    @property
    def words(self) -> str:
        return self.cluster or self.address


def target(address: str | None, cluster: str | None) -> Target:
    """What was asked for, else RAY_API_SERVER_ADDRESS or an http RAY_ADDRESS, else this machine's own job server.

    Raises:
        UserError: both an address and a cluster file are given.
    """
    allow_token()
    if address and cluster:
        raise UserError("--address and --cluster both say where to: write one of them")
    if cluster:
        return Target(cluster=cluster)
    known = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
    found = address or (known if known.startswith("http") else "") or DEFAULT
    return Target(address=found if "://" in found else f"http://{found}")


def allow_token() -> None:
    """With a token in ~/.ray/auth_token, uses it, unless RAY_AUTH_MODE says otherwise. Ray reads this when imported."""
    if os.path.exists(os.path.expanduser("~/.ray/auth_token")) or os.environ.get("RAY_AUTH_TOKEN"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class TokenRefused(UserError):
    """Trying again would not help."""


class Server:
    """The job server. `connect` opens the way to it and `close` ends it; `reconnect` does both."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._stack = contextlib.ExitStack()
        self.client: Any = None

    def __enter__(self) -> Server:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Raises UserError or ClusterError: nobody answers, or the token is refused; one sentence."""
        allow_token()
        from ray.job_submission import JobSubmissionClient

        for name in ("ray", "ray.dashboard", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.ERROR)
        address = self.target.address
        if self.target.cluster:
            from cluster.launch import load
            from cluster.ray_file import is_this_machine
            from cluster.remote import login_of, tunnel
            from cluster.status import dashboard_port, head_host

            data, file = load(self.target.cluster)
            if is_this_machine(data):
                address = f"http://127.0.0.1:{dashboard_port(data)}"
            else:
                way = tunnel(login_of(data), head_host(data, file), dashboard_port(data))
                address = f"http://127.0.0.1:{self._stack.enter_context(way)}"
        try:
            self.client = self.said(lambda: JobSubmissionClient(address))
        except (ConnectionError, RuntimeError, OSError, ValueError) as error:
            self.close()
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"no Ray job server answers at {self.target.words} ({first[:160]}): `trireme cluster up` starts a "
                "cluster, --address or --cluster says where one is"
            ) from error

    def said(self, ask: Callable[[], T]) -> T:
        """Asks the server; a refused token becomes a sentence."""
        try:
            return ask()
        except Exception as error:
            text = f"{type(error).__name__} {error}"
            if "Authentication" in text or "401" in text or "403" in text or "Unauthorized" in text:
                raise TokenRefused(
                    f"the cluster at {self.target.words} refuses the token (missing, wrong or expired): put its token "
                    "into ~/.ray/auth_token or RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token"
                ) from error
            raise

    def close(self) -> None:
        self._stack.close()
        self._stack = contextlib.ExitStack()

    def reconnect(self) -> None:
        self.close()
        self.connect()

    def versions(self) -> dict[str, str]:
        """Ray's and Python's version on the cluster; empty where the server does not say."""
        try:
            answer = self.client._do_request("GET", "/api/v0/cluster_metadata")
            data: Mapping[str, Any] = answer.json().get("data") or {}
        except Exception:  # an older server does not know the question
            return {}
        return {"ray": data.get("rayVersion", ""), "python": data.get("pythonVersion", "")}
