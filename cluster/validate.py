"""What is wrong with a cluster file: every fault as one sentence with its line, without credentials or network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cluster import kuberay
from cluster.errors import ClusterError, Fault
from cluster.source import Document, describe


def validate_file(path: str) -> list[Fault]:
    """Every fault of a cluster file; empty for a good one.

    Raises:
        ClusterError: the file cannot be read, or is no YAML.
    """
    from cluster.shape import find
    from cluster.source import read_documents

    file = find(path)
    return faults_of(read_documents(file), file)


def faults_of(documents: list[Document], file: str) -> list[Fault]:
    """Every fault of a file that was read, in the order of its lines."""
    if not documents:
        return [Fault(file, 1, "this file is empty: a cluster file has a cluster_name and a provider, or a kind")]
    found = [fault for document in documents for fault in (*document.duplicates, *_secrets(document))]
    if any(kuberay.is_kubernetes(document) for document in documents):
        from cluster.kubernetes_rules import faults

        found += faults(documents)
    else:
        found += _ray_file(documents)
    if not found:
        try:  # what only shows when everything is put together
            from cluster.shape import shape_of

            shape_of(documents, file)
        except ValueError as error:
            found = [documents[0].fault((), str(error))]
    return sorted(set(found), key=lambda fault: (fault.line, fault.sentence))


def _ray_file(documents: list[Document]) -> list[Fault]:
    first = documents[0]
    if not isinstance(first.data, dict):
        return [first.fault((), f"this is no cluster file: it holds {describe(first.data)}, not a mapping")]
    if not {"cluster_name", "provider"} & set(first.data):
        known = ", ".join(map(str, list(first.data)[:3]))
        return [
            first.fault(
                (),
                f"this is no cluster file: it has {known}, but neither cluster_name and provider nor a Kubernetes kind",
            )
        ]
    if len(documents) > 1:
        return [documents[1].fault((), "a cluster file for Ray is one YAML document, and here a second one begins")]
    from cluster import provider_rules, ray_rules

    found = ray_rules.schema_faults(first)
    if found:
        return found
    found = [*provider_rules.faults(first), *ray_rules.own_faults(first)]
    return found or ray_rules.launcher_faults(first)


_SECRET_KEY = re.compile(r"(?i)(^|[_-])(password|passwd|secret|secret_access_key|api_?key|auth_?token|token)$")
_SECRET_TEXT = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|(?i:(?:secret_access_key|password|_token|api_key))=[^\s$'\"{<][^\s'\"]{7,}"
)


def _secrets(document: Document) -> Iterator[Fault]:
    """Secrets do not belong into a file that is shown, copied and kept with the code."""
    for path, value in _texts(document.data, ()):
        key = str(path[-1]) if path else ""
        written = (
            _SECRET_KEY.search(key)
            and not value.startswith(("$", "<", "~", "/", "."))
            and document.data.get("kind") != "Secret"
        )
        if written or _SECRET_TEXT.search(value):
            yield document.fault(
                path,
                f"{'.'.join(map(str, path))} holds a secret: keep it in the environment or in the cloud's secret store",
            )


def _texts(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, (*path, number))
    elif isinstance(value, str):
        yield path, value


def check_is_for_ray_up(documents: list[Document], file: str) -> Document:
    """The document of a file that Ray's launcher starts.

    Raises:
        ClusterError: it is a Kubernetes manifest, which kubectl starts.
    """
    if any(kuberay.is_kubernetes(document) for document in documents):
        raise ClusterError(
            f"{file} is a Kubernetes manifest: `kubectl apply -f {file}` starts it, kubectl delete ends it"
        )
    return documents[0]
