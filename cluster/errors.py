"""What is wrong with a cluster, its file, or what is asked of it; always for a person to read."""

from __future__ import annotations

from dataclasses import dataclass


class ClusterError(ValueError):
    """The cluster cannot be reached, can never give what is asked, or its file is wrong; one sentence."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a cluster file."""

    file: str
    line: int  # 1-based
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"
