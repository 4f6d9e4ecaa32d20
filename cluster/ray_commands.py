"""The commands of a file for Ray's launcher that start Ray: their options and variables."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.document import Keys


@dataclass(frozen=True)
class RayStart:
    """A `ray start` of the file.

    Attributes:
        path: The keys and indices that lead to its command.
        options: Its options by name without dashes.
        environment: The variables that the command sets before it.
    """

    path: Keys
    options: dict[str, Any]
    environment: dict[str, str]

    @property
    def is_head(self) -> bool:
        return "head" in self.options


def ray_starts(data: Mapping[str, Any]) -> list[RayStart]:
    """Every `ray start` of the head and of the workers."""
    starts = []
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        for number, command in enumerate(data.get(key) or []):
            environment: dict[str, str] = {}
            for part in re.split(r";|&&|\|\||\n", command):
                try:
                    words = shlex.split(part)
                except ValueError:  # a quotation goes on in the next part
                    words = part.split()
                environment |= assignments(part)
                if "ray start" in " ".join(words):
                    options = command_options(words[words.index("start") :])
                    starts.append(RayStart((key, number), options, dict(environment)))
    return starts


def assignments(command: str) -> dict[str, str]:
    """The variables that a command sets."""
    return dict(re.findall(r"(?:^|[\s;])([A-Za-z_]\w*)=([^\s;]*)", command))


def command_options(words: Sequence[str]) -> dict[str, Any]:
    """The options among a command's words, by name without dashes.

    An option without a value is True.
    """
    options: dict[str, Any] = {}
    for word, next_word in zip(words, [*words[1:], "-"]):
        if not word.startswith("--"):
            continue
        name, equals, text = word[2:].partition("=")
        value: str | bool = text
        if not equals:
            value = True if next_word.startswith("-") else next_word
        options[name] = parse_scalar(value)
    return options


def parse_scalar(value: Any) -> Any:
    """The integer or truth value in a text; anything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return {"true": True, "false": False}.get(str(value).lower(), value)
