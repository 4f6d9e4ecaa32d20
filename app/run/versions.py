"""Releases that Trireme was tested with, the oldest and the newest of each: `make test-versions`."""

import re
from collections.abc import Mapping
from importlib.metadata import version

TESTED = {"torch": ("2.11", "2.15"), "ray": ("2.55", "2.60"), "mlflow": ("3.11", "3.17")}


def newer(versions: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each package of a newer minor release than the newest that was tested.

    versions: by package; None: those that are installed here.
    """
    here = versions or {name: version(name) for name in TESTED}
    return [
        f"{name} {here[name]} is newer than the newest release that Trireme was tested with, {newest}"
        for name, (_, newest) in TESTED.items()
        if here.get(name) and _minor(here[name]) > _minor(newest)
    ]


def _minor(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])
