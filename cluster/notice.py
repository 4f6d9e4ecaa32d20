"""Hears that this machine is about to be taken away: from its cloud, where it is a spot machine, and from Ray.

AWS tells two minutes before, Google and Azure half a minute. Ray tells when a node is drained: by an autoscaler, by
`kubectl drain` (the pod's SIGTERM), by a person.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from cluster.shape import read_cluster

POLL_SECONDS = 5.0
AGAIN_SECONDS = 30.0  # how often it is said while the machine still lives
ANSWER_SECONDS = 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy has this machine's own answers

Ask = Callable[[], str | None]
"""Asks once; a few words for a person if the machine is to go, None if not. OSError: nobody answers."""


def provider_of(file: str | None) -> str:
    """The cloud whose warnings are to be asked for: that of a cluster file with spot machines; "" where there is none.

    Raises:
        ClusterError: it is no cluster file.
    """
    shape = read_cluster(file) if file else None
    return shape.provider if shape and shape.provider in CLOUDS and any(kind.spot for kind in shape.types) else ""


class Watch:
    """A daemon thread that calls `told` with a sentence's middle when the machine is to go, and again every half
    minute. cloud: of `provider_of`; "" asks only Ray."""

    def __init__(self, cloud: str, told: Callable[[str], None], *, every: float = POLL_SECONDS) -> None:
        self.told, self.every = told, every
        self.asks: list[Ask] = [draining, *([CLOUDS[cloud]()] if cloud else [])]
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="notice").start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        pause = self.every
        while not self._over.wait(pause):
            found = next((words for ask in self.asks if (words := _answer(ask))), None)
            pause = AGAIN_SECONDS if found else self.every
            if found:
                self.told(found)


def _answer(ask: Ask) -> str | None:
    try:
        return ask()
    except Exception:  # no such service, or none just now: training must not suffer
        return None


def draining() -> str | None:
    """Whether Ray drains this node, with the time that is left where it is known."""
    import time

    import ray

    nodes = ray._private.state.state.get_draining_nodes()
    deadline = nodes.get(ray.get_runtime_context().get_node_id())
    if deadline is None:
        return None
    left = f", {max(0.0, deadline / 1000 - time.time()):.0f} s left" if deadline else ""
    return f"Ray drains it{left}"


# --- clouds: each returns what asks its metadata service -------------------------------------------------------------


def aws(base: str = "") -> Ask:
    """EC2's instance metadata, version 2: a token first, then the spot interruption notice (404 until there is one).

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    base = base or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token: list[str] = []

    def ask() -> str | None:
        if not token:
            made = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, "PUT")
            token.append(made or "")
        try:
            found = _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token[0]})
        except urllib.error.HTTPError:  # the token has run out
            token.clear()
            return None
        if not found:
            return None
        notice = json.loads(found)
        return f"AWS will {notice.get('action', 'terminate')} this spot machine at {notice.get('time', 'any moment')}"

    return ask


def gcp(base: str = "") -> Ask:
    """Compute Engine's metadata: TRUE once the machine is being preempted.

    https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_a_vm_was_preempted
    """
    base = base or f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"

    def ask() -> str | None:
        found = _get(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return "Google Cloud preempts this spot machine within 30 s" if (found or "").strip() == "TRUE" else None

    return ask


def azure(base: str = "http://169.254.169.254") -> Ask:
    """Azure's scheduled events: a Preempt or Terminate that names this machine.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """
    name: list[str] = []

    def ask() -> str | None:
        header = {"Metadata": "true"}
        if not name:
            name.append(_get(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header) or "")
        found = json.loads(_get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", header) or "{}")
        for event in found.get("Events", []):
            mine = not name[0] or name[0] in event.get("Resources", [])
            if event.get("EventType") in ("Preempt", "Terminate") and mine:
                return f"Azure takes this machine back after {event.get('NotBefore') or 'this moment'}"
        return None

    return ask


CLOUDS: dict[str, Callable[[], Ask]] = {"aws": aws, "gcp": gcp, "azure": azure}


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The answer's text; None where there is no such thing (404)."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _DIRECT.open(request, timeout=ANSWER_SECONDS) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
