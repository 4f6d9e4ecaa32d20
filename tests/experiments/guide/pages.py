"""The guide's pages, parsed: the commands, and the output that a page shows for each.

    python -m tests.experiments.guide.pages is_it_worth_sixteen.md

runs the quick commands of a page and writes their present output into it, with as many lines before
and after `…` as before.
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
"""The message of a plan while it reads a large model."""
QUICK = {"plan", "config", "cluster"}
"""Verbs of `trireme` that start nothing and answer within seconds."""


@dataclass(frozen=True)
class Command:
    """A line that a page says to type.

    Args:
        page: The file name of the page.
        text: The line without its prompt and comment, with continued lines joined.
        shown: The output on the page; empty where it shows none.
    """

    page: str
    text: str
    shown: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def is_quick(self) -> bool:
        program, verb, *options = self.words
        if program != "trireme":
            return False
        if verb == "submit":  # shown and not sent, or only printed for kubectl
            return bool({"--dry-run", "--queue"} & set(options))
        return verb in QUICK and options[0] not in ("up", "down", "status")

    @property
    def is_refused(self) -> bool:
        """Whether the page shows it as a mistake, with the sentence that answers it."""
        return bool(self.shown) and self.shown[-1].startswith("trireme: ")

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's code blocks, in their order."""
    commands = []
    for language, block in FENCE.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "bash":
            typed = [" ".join(line.partition(" #")[0].split()) for line in lines]
            commands += [
                Command(page.name, line) for line in typed if line and not line.startswith("#")
            ]
        elif language == "console":
            for line in lines:
                if line.startswith("$ "):
                    commands.append(Command(page.name, " ".join(line[2:].split())))
                else:
                    last = commands.pop()
                    commands.append(Command(page.name, last.text, (*last.shown, line)))
    return commands


def copy_of_guide(folder: Path) -> Path:
    """Copies the guide and the cluster files, so that commands may write; returns the guide."""
    guide = folder / "experiments" / "guide"
    shutil.copytree(GUIDE, guide, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    no_code = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(ROOT / "cluster", folder / "cluster", ignore=no_code)
    return guide


def same_but_for_numbers(text: str) -> str:
    """A line without what differs between machines: numbers, folders, column widths, byte units."""
    text = re.sub(r"/\S*/(?=runs\b)", "", text)
    text = re.sub(r"\d[\d.,:]*", "#", text)
    text = re.sub(r"^\S+ \(\S+\) \(head\)", "HOST (head)", text)
    return " ".join(re.sub(r"\b[KMG]i?B\b", "B", text).split())


def lines_not_printed(shown: tuple[str, ...], printed: str) -> list[str]:
    """Lines of a page that a command does not print in this order; numbers may differ."""
    printed_lines = [same_but_for_numbers(line) for line in printed.splitlines()]
    missing = []
    for line in shown:
        expected = same_but_for_numbers(line)
        if not expected or expected == LEFT_OUT:
            continue
        if expected in printed_lines:
            del printed_lines[: printed_lines.index(expected) + 1]
        else:
            missing.append(line)
    return missing


def renewed(shown: tuple[str, ...], printed: str) -> tuple[str, ...]:
    """The output that a page should show, with as many first and last lines as it shows now."""
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
    """Writes the present output of a page's quick commands into it."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        guide = copy_of_guide(Path(folder))
        env = environment(**home_in(Path(folder)))
        for command in commands_of(page):
            if command.words[0] == "cp":
                shutil.copy(guide / command.words[1], guide / command.words[2])
            elif command.is_quick and command.shown:
                program = [sys.executable, "-m", "app", *command.words[1:]]
                ended = subprocess.run(program, cwd=guide, env=env, capture_output=True, text=True)
                messages = [line for line in ended.stderr.splitlines() if line != READING]
                old = command.text + "\n" + "\n".join(command.shown)
                if text.count(old) != 1:
                    raise SystemExit(f"{page.name}: {old!r} is not there once")
                new = renewed(command.shown, "\n".join([*messages, ended.stdout]))
                text = text.replace(old, command.text + "\n" + "\n".join(new))
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        renew(GUIDE / name)
