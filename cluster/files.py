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
    """The path of a cluster file: the given one, or one of Trireme's own files by its name."""
    chosen = Path(path).expanduser()
    if not chosen.exists() and chosen.parent == Path("."):
        shipped = FOLDER / f"{chosen.name.removesuffix('.yaml')}.yaml"
        if shipped.name in own_files():
            return str(shipped)
    return str(chosen)


def own_files() -> dict[str, Path]:
    """The cluster files that come with Trireme, by their names."""
    files = {path.name: path for path in sorted(FOLDER.glob("*.yaml"))}
    del files["hardware.yaml"]
    return files


def cluster_file(chosen: str | None = None) -> str | None:
    """The file of the cluster in use: the chosen one, else that of TRIREME_CLUSTER, else None."""
    return chosen or os.environ.get("TRIREME_CLUSTER") or None


def read_cluster(path: str | Path) -> ClusterShape:
    """Reads a cluster file: one for Ray's launcher, or a KubeRay manifest.

    Args:
        path: A file, or the name of one of Trireme's own (`aws`, `kuberay-job`, …).

    Raises:
        ClusterError: It is not a cluster file, or something in it is wrong; one sentence with file
            and line.
    """
    return _shape(*_valid(path))


def read_ray_file(path: str) -> tuple[dict[str, Any], str]:
    """Reads a file for Ray's launcher.

    Returns:
        The data of the file, and its path.

    Raises:
        ClusterError: It is not such a file, or something in it is wrong.
    """
    documents, file = _valid(path)
    if any(kuberay.is_kubernetes(document) for document in documents):
        commands = f"`kubectl apply -f {file}` starts it, `kubectl delete -f {file}` ends it"
        raise ClusterError(f"{file} is a Kubernetes manifest: {commands}")
    return documents[0].data, file


def _valid(path: str | Path) -> tuple[list[Document], str]:
    """The documents and the path of a cluster file in which nothing is wrong.

    Raises:
        ClusterError: Something is wrong in it.
    """
    file = find(path)
    documents = read_documents(file)
    problems = _problems(documents, file)
    if len(problems) > 1:
        more = f"and {len(problems) - 1} more: `trireme cluster validate` lists them"
        raise ClusterError(f"{problems[0]} ({more})")
    if problems:
        raise ClusterError(str(problems[0]))
    return documents, file


def bootstrap_config() -> ClusterShape | None:
    """The shape of the cluster whose head `ray up` has started on this machine.

    None where `ray up` has not left its file here.
    """
    file = Path("~/ray_bootstrap_config.yaml").expanduser()
    try:
        data = yaml.safe_load(file.read_text())
        return ray_file.shape(data, str(file))
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError):
        return None  # there is no such file, or it is not of Ray's launcher


def validate_file(path: str) -> list[Problem]:
    """Everything that is wrong in a cluster file; empty for a good one.

    Files of this machine that it names must exist, unless it is one of Trireme's own files, which
    are to be copied and edited.

    Raises:
        ClusterError: The file cannot be read, or is not YAML.
    """
    file = find(path)
    documents = read_documents(file)
    problems = _problems(documents, file)
    is_triremes = Path(file).parent.resolve() == FOLDER.resolve()
    if problems or is_triremes or kuberay.is_kubernetes(documents[0]):
        return problems
    document = documents[0]
    return [document.problem(*missing) for missing in ray_rules.missing_files(document.data)]


def _shape(documents: list[Document], file: str) -> ClusterShape:
    ray_objects = [document for document in documents if kuberay.is_ray(document)]
    if ray_objects:
        return kuberay.shape(ray_objects[0].data, file)
    return ray_file.shape(documents[0].data, file)


def _problems(documents: list[Document], file: str) -> list[Problem]:
    """Everything that is wrong in a file, in the order of its lines."""
    if not documents:
        needs = "a cluster file has a cluster_name and a provider, or a kind"
        return [Problem(file, 1, f"this file is empty: {needs}")]
    problems = [problem for document in documents for problem in document.duplicates]
    if any(kuberay.is_kubernetes(document) for document in documents):
        problems += kuberay_rules.problems(documents, file)
    else:
        problems += _ray_problems(documents)
    if not problems:
        # Some mistakes show only when everything is put together.
        try:
            _shape(documents, file)
        except ValueError as error:
            problems = [documents[0].problem((), str(error))]
    return sorted(set(problems), key=lambda problem: (problem.line, problem.message))


def _ray_problems(documents: list[Document]) -> list[Problem]:
    """Everything that is wrong in a file for Ray's launcher."""
    first = documents[0]
    if not isinstance(first.data, dict):
        kind = type(first.data).__name__
        return [first.problem((), f"not a cluster file: it is a {kind}, not a mapping")]
    if not {"cluster_name", "provider"} & set(first.data):
        known = ", ".join(map(str, list(first.data)[:3]))
        missing = "neither cluster_name and provider nor a Kubernetes kind"
        return [first.problem((), f"not a cluster file: it has {known}, but {missing}")]
    if len(documents) > 1:
        message = "a cluster file for Ray is one YAML document, and here a second one begins"
        return [documents[1].problem((), message)]
    return ray_rules.problems(first)
