"""Releases that Trireme was tested with (`make test-versions`)."""

import re
from collections.abc import Mapping
from importlib.metadata import version

TESTED = {"torch": ("2.11", "2.15"), "ray": ("2.55", "2.60"), "mlflow": ("3.11", "3.17")}
"""The oldest and the newest tested release of each package."""


def newer(versions: Mapping[str, str] | None = None) -> list[str]:
    """Sentences on packages of a newer minor release than the newest that was tested.

    Args:
        versions: Releases by package; None means those that are installed here.
    """
    releases = versions or {name: version(name) for name in TESTED}
    sentences = []
    for name, (_, newest) in TESTED.items():
        release = releases.get(name)
        if release and _minor(release) > _minor(newest):
            sentences.append(
                f"{name} {release} is newer than the newest release that Trireme was tested with, "
                f"{newest}"
            )
    return sentences


def _minor(release: str) -> tuple[int, ...]:
    """Major and minor number of a release such as 2.15.0+cu130."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])
