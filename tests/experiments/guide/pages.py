"""The guide's pages, taken apart: commands, and what each is said to print.

    python -m tests.experiments.guide.pages is_it_worth_sixteen.md

runs the quick commands of a page, and writes what they print now into it: as many lines before and
after `…` as were there.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.running import ROOT, environment

GUIDE = ROOT / "experiments" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "…"
READING = "reading the model"
"""What a plan says while it reads a large model."""
QUICK = {"plan", "config", "cluster"}
"""Verbs of `trireme` that start nothing and answer within seconds."""


@dataclass(frozen=True)
class Command:
    """A line that a page says to type.

    Args:
        text: the line, without its prompt and comment; lines that end in a backslash joined.
        shown: what the page says that it prints; empty where it says nothing.
    """

    page: str
    text: str
    shown: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def is_quick(self) -> bool:
        program, verb, *more = self.words
        if program != "trireme":
            return False
        if verb == "submit":  # shown and not sent, or only printed for kubectl
            return bool({"--dry-run", "--queue"} & set(more))
        return verb in QUICK and more[0] not in ("up", "down", "status")

    @property
    def is_refused(self) -> bool:
        """Whether the page shows it as a mistake, of which one sentence is said."""
        return bool(self.shown) and self.shown[-1].startswith("trireme: ")

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(page: Path) -> list[Command]:
    commands = []
    for language, block in FENCE.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "bash":
            typed = [" ".join(line.partition(" #")[0].split()) for line in lines]
            commands += [Command(page.name, line) for line in typed if line and not line.startswith("#")]
        elif language == "console":
            for line in lines:
                if line.startswith("$ "):
                    commands.append(Command(page.name, " ".join(line[2:].split())))
                else:
                    last = commands.pop()
                    commands.append(Command(page.name, last.text, (*last.shown, line)))
    return commands


def copy_of_guide(folder: Path) -> Path:
    """The guide beside the cluster files, as in a checkout, in which commands may write."""
    shutil.copytree(GUIDE, folder / "experiments" / "guide", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    shutil.copytree(ROOT / "cluster", folder / "cluster", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder / "experiments" / "guide"


def same_but_for_numbers(text: str) -> str:
    """One line without what differs from machine to machine: numbers, folders, widths of columns, units of bytes."""
    text = re.sub(r"/\S*/(?=runs\b)", "", text)
    text = re.sub(r"\d[\d.,:]*", "#", text)
    text = re.sub(r"^\S+ \(\S+\) \(head\)", "HOST (head)", text)
    return " ".join(re.sub(r"\b[KMG]i?B\b", "B", text).split())


def lines_not_printed(shown: tuple[str, ...], printed: str) -> list[str]:
    """Lines of a page that a command does not print, or not in this order; numbers may be others."""
    left = [same_but_for_numbers(line) for line in printed.splitlines()]
    missing = []
    for line in shown:
        wanted = same_but_for_numbers(line)
        if not wanted or wanted == LEFT_OUT:
            continue
        if wanted in left:
            del left[: left.index(wanted) + 1]
        else:
            missing.append(line)
    return missing


def renewed(shown: tuple[str, ...], printed: str) -> tuple[str, ...]:
    """What a page should show: as many lines of the beginning and the end as it did."""
    lines = [line.rstrip() for line in printed.strip().splitlines()]
    if LEFT_OUT not in shown:
        return tuple(lines)
    head = shown.index(LEFT_OUT)
    tail = len(shown) - head - 1
    return (*lines[:head], LEFT_OUT, *(lines[-tail:] if tail else ()))


def home_in(folder: Path) -> dict[str, str]:
    """Variables of a home with the SSH key that two_boxes.yaml names."""
    key = folder / "home" / ".ssh" / "id_ed25519"
    key.parent.mkdir(parents=True)
    key.write_text("no real key")
    return {"HOME": str(folder / "home")}


def renew(page: Path) -> None:
    """Writes what the quick commands of a page print now into it."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        at = copy_of_guide(Path(folder))
        own = environment(**home_in(Path(folder)))
        for command in commands_of(page):
            if command.words[0] == "cp":
                shutil.copy(at / command.words[1], at / command.words[2])
            elif command.is_quick and command.shown:
                program = [sys.executable, "-m", "app", *command.words[1:]]
                ended = subprocess.run(program, cwd=at, env=own, capture_output=True, text=True, check=False)
                said = [line for line in ended.stderr.splitlines() if line != READING]
                old = command.text + "\n" + "\n".join(command.shown)
                if text.count(old) != 1:
                    raise SystemExit(f"{page.name}: {old!r} is not there once")
                new = renewed(command.shown, "\n".join([*said, ended.stdout]))
                text = text.replace(old, command.text + "\n" + "\n".join(new))
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        renew(GUIDE / name)
