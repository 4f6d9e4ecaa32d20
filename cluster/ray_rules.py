"""What Ray itself says of a cluster file, with lines, and what Ray lets through although it cannot work."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError, Fault
from cluster.ray_file import FACTS, ONPREM_HEAD, ONPREM_WORKER, catalogued, instance_type, own_metadata
from cluster.shape import link
from cluster.source import Document, describe, nearest


@functools.cache
def _schema() -> dict[str, Any]:
    import ray.autoscaler

    return json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


def schema_faults(document: Document) -> list[Fault]:
    """Where the file breaks Ray's JSON schema: all of it, while Ray stops at the first."""
    import jsonschema

    # prepare_config fills `resources` of no provider, but for local ones, which have no node types at all.
    data = document.data
    provider = data.get("provider")
    if isinstance(provider, dict) and provider.get("type") == "local":
        data = {key: value for key, value in data.items() if key != "min_workers"}  # which prepare_config takes out
    errors = jsonschema.Draft7Validator(_schema()).iter_errors(data)
    return [schema_fault(document, error) for error in errors]


def schema_fault(document: Document, error: Any, base: tuple[Any, ...] = ()) -> Fault:
    """One sentence for an error of jsonschema."""
    path = (*base, *error.absolute_path)
    where = dotted(path) or "the file"
    if error.validator == "additionalProperties":
        allowed = error.schema.get("properties", {})
        unknown = next((key for key in error.instance if key not in allowed), None)
        return document.fault((*path, unknown), f"{where} has no key {unknown!r}{nearest(unknown, allowed)}")
    if error.validator == "required":
        missing = next((key for key in error.validator_value if key not in error.instance), "?")
        return document.fault(path, f"{where} lacks the key {missing!r}")
    if error.validator == "type":
        wanted = error.validator_value
        wanted = " or ".join(wanted) if isinstance(wanted, list) else wanted
        return document.fault(path, f"{where} must be of type {wanted}, not {describe(error.instance)}")
    if error.validator == "enum":
        known = [str(value) for value in error.validator_value]
        return document.fault(path, f"{where} is {error.instance!r}{nearest(error.instance, known)}")
    if error.validator == "pattern":
        form = (
            "no Kubernetes quantity, such as 8, 500m or 64Gi"
            if "KMGTPE" in error.validator_value
            else "not of its form"
        )
        return document.fault(path, f"{where} is {error.instance!r}, {form}")
    if error.validator == "minimum":
        return document.fault(path, f"{where} is {error.instance}, less than {error.validator_value}")
    return document.fault(path, f"{where}: {error.message.splitlines()[0][:200]}")


def dotted(path: tuple[Any, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def launcher_faults(document: Document) -> list[Fault]:
    """What `ray up` would say before it reaches for a cloud: prepare_config and validate_config."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _unlogged():
            validate_config(prepare_config(copy.deepcopy(document.data)))
    except Exception as error:  # ValueError, ValidationError, ClickException, KeyError, … by what is wrong
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return [document.fault(_guess(document, first), f"Ray's launcher refuses it: {first}")]
    except SystemExit:
        return [document.fault((), "Ray's launcher refuses it")]
    return []


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _guess(document: Document, message: str) -> tuple[Any, ...]:
    """The top-level key that a message of Ray's names, for its line."""
    return next(((key,) for key in document.data if f"`{key}`" in message or f"'{key}'" in message), ())


def own_faults(document: Document) -> list[Fault]:
    """What Ray does not look at: our metadata, GPUs of known machines, numbers that contradict one another."""
    return [*_metadata(document), *_node_types(document)]


def _metadata(document: Document) -> Iterator[Fault]:
    data, path = document.data, ("metadata", "trireme")
    own = own_metadata(data)
    if not own:
        return
    found = document.unknown_keys(path, ("nodes", "storage"), "metadata.trireme")
    yield from found
    if found or not isinstance(own.get("nodes", {}), dict):
        return
    onprem = data["provider"].get("type") == "local"
    types = (ONPREM_HEAD, ONPREM_WORKER) if onprem else tuple(data.get("available_node_types") or ())
    for name, facts in own.get("nodes", {}).items():
        if name not in types:
            yield document.fault((*path, "nodes", name), f"there is no node type {name!r}{nearest(name, types)}")
        else:
            yield from document.unknown_keys((*path, "nodes", name), FACTS, f"metadata.trireme.nodes.{name}")
            yield from _facts(document, (*path, "nodes", name), facts)


def _facts(document: Document, path: tuple[Any, ...], facts: Any) -> Iterator[Fault]:
    from cluster.hardware import HardwareError, gpu

    for key, value in (facts or {}).items() if isinstance(facts, dict) else ():
        try:
            if key == "gpu":
                gpu(str(value))
            elif key in ("link_within", "link_across") and isinstance(value, str):
                link(value)
            elif key in ("gpus", "cpus", "memory_gb", "price_per_hour") and not _is_amount(value):
                raise ClusterError(f"{key} must be a number of at least 0, not {describe(value)}")
        except (ClusterError, HardwareError) as error:
            yield document.fault((*path, key), str(error))


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _node_types(document: Document) -> Iterator[Fault]:
    data = document.data
    types = data.get("available_node_types") or {}
    head = data.get("head_node_type")
    if types and head not in types:
        yield document.fault(("head_node_type",), f"head_node_type is {head!r}{nearest(head, types)}")
    for name, spec in types.items():
        path = ("available_node_types", name)
        least, most = spec.get("min_workers", 0), spec.get("max_workers", data.get("max_workers", 2))
        if least > most:
            yield document.fault(
                (*path, "min_workers"), f"{name} has min_workers {least}, more than its max_workers {most}"
            )
        known, written = catalogued(instance_type(spec)), (spec.get("resources") or {}).get("GPU")
        if known and written is not None and written != known["gpus"]:
            yield document.fault(
                (*path, "resources", "GPU"),
                f"{name} says GPU: {written}, but a {instance_type(spec)} has {known['gpus']} ({known['gpu']})",
            )
