"""What KubeRay would refuse, or do otherwise than meant, with a RayJob.

No schema says these, because each value alone is right. Every sentence begins with what would
happen.
"""

import re
from collections.abc import Mapping
from typing import Any

from cluster.command_rules import secrets_in
from cluster.document import Mistakes

LONGEST_NAME = {"RayCluster": 53, "RayJob": 47}
"""Characters that KubeRay allows, so that names of what it makes fit."""


def mistakes(data: Mapping[str, Any]) -> Mistakes:
    """Mistakes in a RayJob outside its cluster."""
    yield from _clean_up(data["spec"])
    yield from _modes(data["spec"])
    yield from _deadline(data["spec"])
    yield from _command(data["spec"])
    yield from secrets_in(("spec", "metadata"), data["spec"].get("metadata") or {})


def names(data: Mapping[str, Any]) -> Mistakes:
    """A name that KubeRay takes; secrets in the labels beside it."""
    metadata = data["metadata"]
    name = str(metadata.get("name", ""))
    longest = LONGEST_NAME[data["kind"]]
    if len(name) > longest:
        problem = f"KubeRay refuses the {data['kind']}: its name has {len(name)} characters"
        yield ("metadata", "name"), f"{problem}: write at most {longest}"
    if name and (name[0].isdigit() or "." in name):
        problem = f"KubeRay refuses the {data['kind']}: {name} cannot be a service's name"
        yield ("metadata", "name"), f"{problem}: write a letter first, and no point"
    labels = {key: metadata.get(key) for key in ("labels", "annotations")}
    yield from secrets_in(("metadata",), labels)


def _clean_up(spec: Mapping[str, Any]) -> Mistakes:
    """Clusters that go when their job has ended."""
    seconds = spec.get("ttlSecondsAfterFinished", 0)
    if seconds and not spec.get("shutdownAfterJobFinishes"):
        problem = f"KubeRay refuses the job: ttlSecondsAfterFinished is {seconds}, and"
        write = "write shutdownAfterJobFinishes: true"
        yield ("spec", "ttlSecondsAfterFinished"), f"{problem} the cluster is to stay: {write}"


def _modes(spec: Mapping[str, Any]) -> Mistakes:
    """What a way of submitting allows."""
    refuses = "KubeRay refuses the job"
    retries = spec.get("backoffLimit", 0)
    mode = spec.get("submissionMode", "K8sJobMode")
    if "clusterSelector" in spec:
        if retries:
            problem = f"{refuses}: on a cluster that exists it cannot be retried"
            yield ("spec", "backoffLimit"), f"{problem}: leave backoffLimit out"
        if spec.get("suspend"):
            problem = f"{refuses}: on a cluster that exists it cannot be suspended"
            yield ("spec", "suspend"), f"{problem}: leave it out"
        if mode == "SidecarMode":
            problem = f"{refuses}: SidecarMode needs a cluster of its own"
            yield ("spec", "submissionMode"), f"{problem}: write K8sJobMode"
        if spec.get("shutdownAfterJobFinishes"):
            problem = "the cluster stays: shutdownAfterJobFinishes is for one that the job makes"
            yield ("spec", "shutdownAfterJobFinishes"), f"{problem}: leave it out"
    if mode == "InteractiveMode" and retries:
        problem = f"{refuses}: InteractiveMode cannot be retried"
        yield ("spec", "backoffLimit"), f"{problem}: leave backoffLimit out"
    if mode == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig"):
            if key in spec:
                problem = f"{refuses}: in SidecarMode there is no pod that submits it"
                yield ("spec", key), f"{problem}: leave {key} out"
        head = (spec.get("rayClusterSpec") or {}).get("headGroupSpec") or {}
        policy = ((head.get("template") or {}).get("spec") or {}).get("restartPolicy", "Never")
        if policy != "Never":
            path = ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolicy")
            problem = f"{refuses}: in SidecarMode the head's restartPolicy is {policy}"
            yield path, f"{problem}: write Never"
    if mode == "HTTPMode" and "submitterConfig" in spec:
        problem = "submitterConfig has no effect: in HTTPMode no pod submits the job"
        yield ("spec", "submitterConfig"), f"{problem}: leave it out"


def _deadline(spec: Mapping[str, Any]) -> Mistakes:
    """A deadline behind the time that a run waits for its machines."""
    entrypoint = spec.get("entrypoint") or ""
    waiting = re.search(r"\bcluster\.wait_seconds=(\d+(?:\.\d+)?)", entrypoint)
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        seconds = spec.get(key)
        if seconds and waiting is not None and seconds <= float(waiting[1]):
            problem = f"the job is ended before its machines have come: {key} is {seconds}"
            write = "write a longer deadline"
            yield ("spec", key), f"{problem} and cluster.wait_seconds={waiting[1]}: {write}"


def _command(spec: Mapping[str, Any]) -> Mistakes:
    """A command that stays until the run has ended."""
    entrypoint = (spec.get("entrypoint") or "").strip()
    if entrypoint.endswith("&") or re.match(r"(nohup|setsid|screen|tmux)\b", entrypoint):
        problem = "the job succeeds at once and its cluster goes while the run trains: the"
        yield (
            ("spec", "entrypoint"),
            f"{problem} entrypoint ends at once: write it without & or nohup",
        )
