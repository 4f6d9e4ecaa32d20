"""Watches whether this machine is about to be taken away.

Clouds announce it for spot machines: AWS two minutes before, Google and Azure half a minute. Ray
announces that a node is drained: by an autoscaler, by `kubectl drain` (the pod's SIGTERM), or by a
person.
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
REPEAT_SECONDS = 30.0
"""Between notices while the machine still runs."""
ANSWER_SECONDS = 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Past any proxy, since metadata is this machine's own."""

Poll = Callable[[], str | None]
"""Asks once whether the machine will be taken away.

Returns a few words for the user if so, None if not. Raises OSError where nothing answers.
"""


def provider_of(file: str | None) -> str:
    """The cloud whose notices are to be polled: that of a cluster file with spot machines.

    Args:
        file: A cluster file, or None.

    Returns:
        A key of `CLOUDS`, or "" where no notices are to be polled.

    Raises:
        ClusterError: The file is not a cluster file.
    """
    if not file:
        return ""
    shape = read_cluster(file)
    has_spot_machines = any(kind.spot for kind in shape.types)
    return shape.provider if shape.provider in CLOUDS and has_spot_machines else ""


class PreemptionWatcher:
    """A daemon thread that asks whether this machine will be taken away.

    Args:
        cloud: What `provider_of` returns; "" asks only Ray.
        callback: Called with a few words for the user when the machine will be taken away, and
            again every half minute.
        every: Seconds between two questions.
    """

    def __init__(
        self,
        cloud: str,
        callback: Callable[[str], None],
        *,
        every: float = POLL_SECONDS,
    ) -> None:
        self.callback = callback
        self.every = every
        self.polls: list[Poll] = [draining]
        if cloud:
            self.polls.append(CLOUDS[cloud]())
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="preemption").start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        pause = self.every
        while not self._closed.wait(pause):
            notice = ""
            for poll in self.polls:
                # A service that is missing, or silent just now, must not disturb the training.
                with contextlib.suppress(Exception):
                    notice = notice or poll() or ""
            pause = REPEAT_SECONDS if notice else self.every
            if notice:
                self.callback(notice)


def draining() -> str | None:
    """Asks Ray whether it drains this node; says how much time is left where that is known."""
    import ray

    deadline = ray_internals.draining_nodes().get(ray.get_runtime_context().get_node_id())
    if deadline is None:
        return None
    left = f", {max(0.0, deadline - time.time()):.0f} s left" if deadline else ""
    return f"Ray drains it{left}"


# --- clouds: each function returns one that polls the cloud's metadata service --------------------


def aws(base: str = "") -> Poll:
    """EC2's instance metadata, version 2.

    A token first, then the spot interruption notice (404 until there is one).

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    if not base:
        default = "http://169.254.169.254"
        base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", default).rstrip("/")

    def poll() -> str | None:
        token = _get(
            f"{base}/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
            method="PUT",
        )
        answer = _get(
            f"{base}/latest/meta-data/spot/instance-action",
            {"X-aws-ec2-metadata-token": token},
        )
        notice = json.loads(answer or "{}")
        if not notice:
            return None
        action = notice.get("action", "terminate")
        time_of_action = notice.get("time", "any moment")
        return f"AWS will {action} this spot machine at {time_of_action}"

    return poll


def gcp(base: str = "") -> Poll:
    """Compute Engine's metadata: TRUE once the machine is being preempted.

    https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_a_vm_was_preempted
    """
    if not base:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        base = f"http://{host}"

    def poll() -> str | None:
        answer = _get(
            f"{base}/computeMetadata/v1/instance/preempted",
            {"Metadata-Flavor": "Google"},
        )
        if answer.strip() != "TRUE":
            return None
        return "Google Cloud preempts this spot machine within 30 s"

    return poll


def azure(base: str = "http://169.254.169.254") -> Poll:
    """Azure's scheduled events: a Preempt or Terminate that names this machine.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    def poll() -> str | None:
        headers = {"Metadata": "true"}
        name = _get(
            f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text",
            headers,
        )
        answer = _get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
        scheduled = json.loads(answer or "{}")
        for event in scheduled.get("Events", []):
            is_of_this_machine = not name or name in event.get("Resources", [])
            if is_of_this_machine and event.get("EventType") in ("Preempt", "Terminate"):
                not_before = event.get("NotBefore") or "this moment"
                return f"Azure takes this machine back after {not_before}"
        return None

    return poll


CLOUDS: dict[str, Callable[[], Poll]] = {"aws": aws, "gcp": gcp, "azure": azure}


def _get(url: str, headers: dict[str, str], *, method: str = "GET") -> str:
    """The text of the answer; "" where there is nothing at that address (404)."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _DIRECT.open(request, timeout=ANSWER_SECONDS) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise
