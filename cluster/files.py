"""Cluster files of every kind: found, checked and read into a ClusterShape."""

import os
from pathlib import Path
from typing import Any

import yaml

from cluster import ClusterError, kuberay, kuberay_rules, ray_file, ray_rules
from cluster.document import Document, Problem, read_documents
from cluster.shape import ClusterShape

FOLDER = Path(__file__).parent


def find(path: str | Path) -> str:
    """The file itself, or the one of that name in cluster/."""
    written = Path(path).expanduser()
    if not written.exists() and written.parent == Path("."):
        own = FOLDER / f"{written.name.removesuffix('.yaml')}.yaml"
        if own.name in own_files():
            return str(own)
    return str(written)


def own_files() -> dict[str, Path]:
    """The cluster files that come with Trireme."""
    return {p.name: p for p in sorted(FOLDER.glob("*.yaml")) if p.name != "hardware.yaml"}


def cluster_file(chosen: str | None = None) -> str | None:
    """The file of the cluster in use: what was chosen, else TRIREME_CLUSTER, else none."""
    return chosen or os.environ.get("TRIREME_CLUSTER") or None


def read_cluster(path: str | Path) -> ClusterShape:
    """A cluster file: one for Ray's launcher, or a KubeRay manifest.

    path: a file, or the name of one of Trireme's own (`aws`, `kuberay-job`, …).
    Raises:
        ClusterError: it is not a cluster's, or something in it is wrong; one sentence with file and line.
    """
    return _shape(*_valid(path))


def read_ray_file(path: str) -> tuple[dict[str, Any], str]:
    """The data of a valid file for Ray's launcher, and the file's path.

    Raises:
        ClusterError: it is not one, or something in it is wrong.
    """
    documents, file = _valid(path)
    if any(kuberay.is_kubernetes(document) for document in documents):
        starts = f"`kubectl apply -f {file}` starts it, kubectl delete ends it"
        raise ClusterError(f"{file} is a Kubernetes manifest: {starts}")
    return documents[0].data, file


def _valid(path: str | Path) -> tuple[list[Document], str]:
    file = find(path)
    documents = read_documents(file)
    if found := _problems(documents, file):
        more = f" (and {len(found) - 1} more: `trireme cluster validate` lists them)" if len(found) > 1 else ""
        raise ClusterError(f"{found[0]}{more}")
    return documents, file


def bootstrap_config() -> ClusterShape | None:
    """The shape that `ray up` has given the head it started on this machine; None where there is none."""
    file = Path("~/ray_bootstrap_config.yaml").expanduser()
    try:
        return ray_file.shape(yaml.safe_load(file.read_text()), str(file))
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError):  # not there, or not of Ray's launcher
        return None


def validate_file(path: str) -> list[Problem]:
    """Everything that is wrong in a cluster file; empty for a good one. What it names of this machine must be here,
    unless it is one of Trireme's own, which are to be copied.

    Raises:
        ClusterError: the file cannot be read, or is not YAML.
    """
    file = find(path)
    documents = read_documents(file)
    found = _problems(documents, file)
    if not found and not kuberay.is_kubernetes(documents[0]) and Path(file).parent.resolve() != FOLDER.resolve():
        found = [documents[0].problem(*missing) for missing in ray_rules.missing_files(documents[0].data)]
    return found


def _shape(documents: list[Document], file: str) -> ClusterShape:
    ray_objects = [document for document in documents if kuberay.is_ray(document)]
    return kuberay.shape(ray_objects[0].data, file) if ray_objects else ray_file.shape(documents[0].data, file)


def _problems(documents: list[Document], file: str) -> list[Problem]:
    """Everything that is wrong, in the order of its lines."""
    if not documents:
        return [Problem(file, 1, "this file is empty: a cluster file has a cluster_name and a provider, or a kind")]
    found = [problem for document in documents for problem in document.duplicates]
    if any(kuberay.is_kubernetes(document) for document in documents):
        found += kuberay_rules.problems(documents, file)
    else:
        found += _ray_problems(documents)
    if not found:
        try:  # what only shows when everything is put together
            _shape(documents, file)
        except ValueError as error:
            found = [documents[0].problem((), str(error))]
    return sorted(set(found), key=lambda problem: (problem.line, problem.message))


def _ray_problems(documents: list[Document]) -> list[Problem]:
    first = documents[0]
    if not isinstance(first.data, dict):
        return [first.problem((), f"not a cluster file: it is a {type(first.data).__name__}, not a mapping")]
    if not {"cluster_name", "provider"} & set(first.data):
        known = ", ".join(map(str, list(first.data)[:3]))
        missing = "neither cluster_name and provider nor a Kubernetes kind"
        return [first.problem((), f"not a cluster file: it has {known}, but {missing}")]
    if len(documents) > 1:
        return [documents[1].problem((), "a cluster file for Ray is one YAML document, and here a second one begins")]
    return ray_rules.problems(first)
