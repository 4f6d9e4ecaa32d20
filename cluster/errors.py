"""What is wrong with a cluster, its file, or what is asked of it; always for a person to read."""

from __future__ import annotations

from dataclasses import dataclass


class ClusterError(ValueError):
    """The cluster cannot be reached, cannot ever give what is asked, or its file is wrong; one sentence."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a cluster file."""

    file: str
    line: int  # 1-based
    sentence: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.sentence}"


def refuse(faults: list[Fault]) -> None:
    """Raises ClusterError naming the first fault, and how many more there are."""
    if faults:
        more = f" (and {len(faults) - 1} more: `trireme cluster validate` lists them)" if len(faults) > 1 else ""
        raise ClusterError(f"{faults[0]}{more}")
