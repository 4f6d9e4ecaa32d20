"""Watches whether this machine is about to be taken away: as its cloud announces for spot machines, and as Ray does.

AWS announces it two minutes before, Google and Azure half a minute. Ray announces that a node is drained: by an
autoscaler, by `kubectl drain` (the pod's SIGTERM), by a person.
"""

import contextlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from cluster import ray_internals
from cluster.files import read_cluster

POLL_SECONDS = 5.0
REPEAT_SECONDS = 30.0  # between notices while the machine still lives
ANSWER_SECONDS = 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # metadata is of this machine, past any proxy

Poll = Callable[[], str | None]
"""Asks once; a few words for a person if the machine is to go, None if not. OSError: no answer."""


def provider_of(file: str | None) -> str:
    """The cloud whose notices are to be polled: that of a cluster file with spot machines; "" where there is none.

    Raises:
        ClusterError: it is not a cluster file.
    """
    shape = read_cluster(file) if file else None
    return shape.provider if shape and shape.provider in CLOUDS and any(kind.spot for kind in shape.types) else ""


class PreemptionWatcher:
    """A daemon thread that calls `callback` with a few words when the machine is to go, and again every half minute.

    cloud: of `provider_of`; "" polls only Ray.
    """

    def __init__(self, cloud: str, callback: Callable[[str], None], *, every: float = POLL_SECONDS) -> None:
        self.callback, self.every = callback, every
        self.polls: list[Poll] = [draining, *([CLOUDS[cloud]()] if cloud else [])]
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="preemption").start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        pause = self.every
        while not self._closed.wait(pause):
            found = ""
            for poll in self.polls:
                with contextlib.suppress(Exception):  # no such service, or none just now: training must not suffer
                    found = found or poll() or ""
            pause = REPEAT_SECONDS if found else self.every
            if found:
                self.callback(found)


def draining() -> str | None:
    """Whether Ray drains this node, with the time that is left where it is known."""
    import ray

    deadline = ray_internals.draining_nodes().get(ray.get_runtime_context().get_node_id())
    if deadline is None:
        return None
    left = f", {max(0.0, deadline - time.time()):.0f} s left" if deadline else ""
    return f"Ray drains it{left}"


# --- clouds: each returns what polls its metadata service -------------------------------------------------------------


def aws(base: str = "") -> Poll:
    """EC2's instance metadata, version 2: a token first, then the spot interruption notice (404 until there is one).

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    base = base or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")

    def poll() -> str | None:
        token = _get(f"{base}/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        found = _get(f"{base}/latest/meta-data/spot/instance-action", **{"X-aws-ec2-metadata-token": token})
        notice = json.loads(found or "{}")
        words = f"{notice.get('action', 'terminate')} this spot machine at {notice.get('time', 'any moment')}"
        return f"AWS will {words}" if notice else None

    return poll


def gcp(base: str = "") -> Poll:
    """Compute Engine's metadata: TRUE once the machine is being preempted.

    https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_a_vm_was_preempted
    """
    base = base or f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"

    def poll() -> str | None:
        found = _get(f"{base}/computeMetadata/v1/instance/preempted", **{"Metadata-Flavor": "Google"})
        return "Google Cloud preempts this spot machine within 30 s" if found.strip() == "TRUE" else None

    return poll


def azure(base: str = "http://169.254.169.254") -> Poll:
    """Azure's scheduled events: a Preempt or Terminate that names this machine.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    def poll() -> str | None:
        name = _get(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", Metadata="true")
        found = json.loads(_get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true") or "{}")
        for event in found.get("Events", []):
            mine = not name or name in event.get("Resources", [])
            if event.get("EventType") in ("Preempt", "Terminate") and mine:
                return f"Azure takes this machine back after {event.get('NotBefore') or 'this moment'}"
        return None

    return poll


CLOUDS: dict[str, Callable[[], Poll]] = {"aws": aws, "gcp": gcp, "azure": azure}


def _get(url: str, method: str = "GET", **headers: str) -> str:
    """The answer's text; "" where there is no such thing (404)."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _DIRECT.open(request, timeout=ANSWER_SECONDS) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise
