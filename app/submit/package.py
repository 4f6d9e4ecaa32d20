"""What would be shipped to a cluster, found by Ray's own walk before anything is sent."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from app.console import size
from app.errors import UserError

# Never wanted on a cluster; what .gitignore and .rayignore name is left out too.
EXCLUDES = (
    ".git",
    ".venv",
    "venv",
    "__pycache__",
    "*.pyc",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
)
MAX_BYTES = 100_000_000
RAY_MAX_BYTES = 500 * 2**20  # Ray refuses more


@dataclass(frozen=True)
class Package:
    """The files of a working folder that go along."""

    folder: Path
    files: tuple[tuple[str, int], ...]  # relative path and bytes, the largest first
    excludes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(size_ for _, size_ in self.files)

    def sentence(self) -> str:
        return f"{len(self.files):,} files of {self.folder}, {size(self.bytes)}"


def look(folder: Path, more_excludes: tuple[str, ...] = ()) -> Package:
    """What `folder` would ship: everything but EXCLUDES, `more_excludes` and what .gitignore and .rayignore name.

    Raises:
        UserError: there is no such folder.
    """
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} to ship: write --working-dir FOLDER")
    excludes = (*EXCLUDES, *more_excludes)
    found: list[tuple[str, int]] = []

    def note(path: Path) -> None:
        if path.is_file():
            found.append((str(path.relative_to(folder)), path.stat().st_size))

    quiet = logging.getLogger("trireme.package")
    _dir_travel(folder, [_get_excludes(folder, list(excludes))], note, include_gitignore=True, logger=quiet)
    return Package(folder, tuple(sorted(found, key=lambda item: -item[1])), excludes)


def check_size(package: Package, limit: int = MAX_BYTES) -> None:
    """Raises UserError if more than `limit` bytes would go, naming what makes it large."""
    limit = min(limit, RAY_MAX_BYTES)
    if package.bytes <= limit:
        return
    largest = ", ".join(f"{name} ({size(bytes_)})" for name, bytes_ in package.files[:3])
    raise UserError(
        f"{package.sentence()}, are more than the limit of {size(limit)}, the largest {largest}: leave them out with "
        "--exclude or .gitignore, or raise --max-size (in MB, at most 524)"
    )
