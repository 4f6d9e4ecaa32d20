"""What the documents name exists.

Files, links, commands with their options and keys, benchmarks, `make` targets. Two documents may
name what is gone, since that is what they are about: experiments/LOG.md and CHANGELOG.md. Only
their links and commands are looked at.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import experiments.benchmarks.__main__ as benchmarks
from app.cli import group as command_line
from app.config import Config
from app.config.io import load_config
from app.errors import UserError
from cluster.files import own_files

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("app", "cluster", "experiments", "strategies", "tests")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(file for name in FOLDERS for file in (ROOT / name).rglob("*.md"))]
)
HISTORY = {"CHANGELOG.md", "experiments/LOG.md"}

SUFFIXES = "cpp|csv|gz|html|ipynb|json|md|pkl|png|py|svg|toml|txt|yaml|yml"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(rf"(?<![\w./…*~<$-])(?:\.\./)*[\w-][\w./-]*\.(?:{SUFFIXES})\b(?![\w/])")
FOLDER = re.compile(r"(?:\.\./)*[\w-]+(?:/[\w-]+)*/?")
KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)=")
PROGRAMS = (
    re.compile(r"(?:^|\s)trireme (?!\S*=)(?P<arguments>.+)"),
    re.compile(r"(?:^|\s)-m (?:app|trireme)\b(?P<arguments>.*)"),
)


def name_of(document: Path) -> str:
    """Its path in the repository, as pytest's name of a case too."""
    return str(document.relative_to(ROOT))


@dataclass(frozen=True)
class Parts:
    """A document, taken apart.

    Args:
        prose: the text without fenced blocks and without commands.
        commands: shell commands, each in one line, from fenced blocks and from between backticks.
        words: what else stands between backticks.
    """

    prose: str
    commands: tuple[str, ...]
    words: tuple[str, ...]


def parts_of(text: str) -> Parts:
    """Takes the text of a document apart."""
    commands: list[str] = []
    words: list[str] = []
    prose: list[str] = []
    for language, block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        commands += [line.partition(" #")[0] for line in lines if is_command(line)]
        if language != "python":
            prose += [line for line in lines if not is_command(line)]

    def sort(code: re.Match[str]) -> str:
        line = " ".join(code[1].split())
        (commands if is_command(line) else words).append(line)
        return "" if is_command(line) else code[1]

    prose += [INLINE.sub(sort, paragraph) for paragraph in FENCE.sub("", text).split("\n\n")]
    return Parts("\n\n".join(prose), tuple(commands), tuple(words))


def is_command(line: str) -> bool:
    """Whether a shell can run it: a program we name, or a variable and more."""
    line = line.strip()
    program, _, arguments = line.partition(" ")
    shell = ("trireme", "python", "torchrun", "make", "pytest", "ray", "nice", "srun", "pip")
    sets_a_variable = re.match(r"[A-Z_]+=\S* ", line) is not None
    return (program in shell or sets_a_variable) and bool(arguments)


@functools.cache
def parts(document: Path) -> Parts:
    """The parts of a document, read once."""
    return parts_of(document.read_text())


# --- files and links ------------------------------------------------------------------------------


@functools.cache
def source() -> str:
    """The text of every Python file but this one."""
    files = [file for name in FOLDERS for file in (ROOT / name).rglob("*.py")]
    return "\n".join(file.read_text() for file in files if file != Path(__file__))


def missing_files(prose: str, folder: Path) -> list[str]:
    """Files that are named and are not there.

    Neither beside the document, nor at that path of the repository, nor written by the program,
    whose code has their names. NAME stands for any name.
    """
    without_addresses = re.sub(r"\w+://\S+", "", prose)
    without_links = re.sub(r"\]\([^)]*\)", "]", without_addresses)
    names = {name for name in FILE.findall(without_links) if Path(name).stem != "NAME"}
    missing = {name for name in names if not exists(name, folder)}
    return sorted(name for name in missing if "/" in name or not is_written(name))


def exists(path: str, folder: Path) -> bool:
    """Whether it is there, seen from a document's folder or from the repository's."""
    return (folder / path).exists() or (ROOT / path).exists()


def is_written(name: str) -> bool:
    """Whether the name stands in the code after a quote or a slash."""
    return re.search(rf"[\"'/]{re.escape(name)}\b", source()) is not None


def missing_folders(words: tuple[str, ...], folder: Path) -> list[str]:
    """Paths without a suffix between backticks whose first folder is one of the repository's."""
    paths = [word for word in words if "/" in word and FOLDER.fullmatch(word)]
    paths = [path for path in paths if path.split("/")[0] in (*FOLDERS, "..")]
    return sorted(path for path in paths if not exists(path, folder))


def broken_links(text: str, folder: Path) -> list[str]:
    """Links to files that are not there, and to headings that the file does not have."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, heading = link.partition("#")
        target = folder / path if path else None
        if target is not None and not target.exists():
            broken.append(link)
            continue
        titles = headings(text if target is None else target.read_text()) if heading else set()
        if heading and heading not in titles:
            broken.append(link)
    return broken


def headings(text: str) -> set[str]:
    """As GitHub names them in an address."""
    lines = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize(
    "document", [file for file in DOCUMENTS if name_of(file) not in HISTORY], ids=name_of
)
def test_files_that_a_document_names_exist(document: Path) -> None:
    assert not missing_files(parts(document).prose, document.parent)
    assert not missing_folders(parts(document).words, document.parent)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    assert not broken_links(document.read_text(), document.parent)


# --- commands -------------------------------------------------------------------------------------


@functools.cache
def configuration_keys() -> frozenset[str]:
    """Every key, such as train.steps; of a mapping also with a point after it: `task_args.`."""

    def keys(section: Any, prefix: str) -> Iterator[str]:
        kinds = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            kind = kinds[field.name]
            if dataclasses.is_dataclass(kind):
                yield from keys(kind, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}"
                if "dict" in str(kind):
                    yield f"{prefix}{field.name}."

    return frozenset(keys(Config, ""))


@functools.cache
def sweep_keys() -> frozenset[str]:
    """The fields of a sweep file, read without importing what searches, which imports torch."""
    files = [ROOT / "experiments/sweep" / name for name in ("spec.py", "search.py")]
    trees = [ast.parse(file.read_text()) for file in files]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [
        field.target for node in classes for field in node.body if isinstance(field, ast.AnnAssign)
    ]
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


def is_key(key: str, command: str = "") -> bool:
    """Whether the configuration has it, or, of `trireme sweep`, the sweep file."""
    mapped = any(key.startswith(known) for known in configuration_keys() if known.endswith("."))
    of_sweep = command == "sweep" and key.partition(".")[0] in sweep_keys()
    return key in configuration_keys() or mapped or of_sweep


def mistakes_in(line: str) -> list[str]:
    """What is wrong in a command: one sentence each."""
    mistakes = []
    for program in PROGRAMS:
        if match := program.search(line):
            return mistakes_of_trireme(words_of(match["arguments"]))
    words = words_of(line)
    if words[:1] == ["make"]:
        names = [word for word in words[1:] if is_word(word)]
        mistakes += [f"make has no target {name}" for name in names if name not in targets()]
    if match := re.search(r"-m experiments\.benchmarks\b(.*)", line):
        return mistakes_of_benchmark(words_of(match[1]))
    if match := re.search(r"(?:^|\s)python -m ([\w.]+)", line):
        module = ROOT / match[1].replace(".", "/")
        is_installed = match[1].partition(".")[0] not in FOLDERS
        is_ours = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        if not (is_installed or is_ours):
            mistakes.append(f"there is no module {match[1]}")
    if "pytest" in words:
        paths = [word.partition("::")[0] for word in words if word.startswith("tests")]
        mistakes += [f"there is no {path}" for path in paths if not (ROOT / path).exists()]
    return mistakes


def words_of(arguments: str) -> list[str]:
    """The words of a command line as a document shows it.

    Without its comment, an ellipsis, and the bars between choices.
    """
    try:
        words = shlex.split(arguments, comments=True)
    except ValueError as error:
        raise AssertionError(f"{arguments!r} is not a command line: {error}") from error
    return [word for word in words if word not in ("…", "|")]


def is_word(word: str) -> bool:
    """Whether it may be a verb of a command or a target: no option, path or key."""
    return re.fullmatch(r"[a-z][a-z-]*", word) is not None


@functools.cache
def targets() -> frozenset[str]:
    """The targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def mistakes_of_trireme(words: list[str]) -> list[str]:
    """What is wrong in the words after `trireme`: commands, options, keys, files and values."""
    command: click.Command = command_line
    context = click.Context(command_line)
    verb = ""
    while isinstance(command, click.Group) and words and is_word(words[0]):
        subcommand = command.get_command(context, words[0])
        if subcommand is None:
            if command is command_line:
                return [f"trireme has no command {words[0]}"]
            break
        verb = verb or words[0]
        command = subcommand
        words = words[1:]
    if isinstance(command, click.Group) and (default := getattr(command, "default", "")):
        command = command.get_command(context, default) or command
    arguments = words_that_are_no_options(command, words)
    options = [word for word in arguments if word.startswith("-")]
    mistakes = [f"trireme {verb} has no option {option}" for option in options]
    overrides = {match[1]: word for word in arguments if (match := KEY.match(word))}
    unknown = [key for key in overrides if not is_key(key, verb)]
    mistakes += [f"there is no key {key}" for key in unknown]
    guide = ROOT / "experiments" / "guide"
    files = [
        str((guide / word).relative_to(ROOT)) if (guide / word).is_file() else word
        for word in arguments
        if word.endswith(".yaml") and ("/" in word or (guide / word).is_file())
    ]
    mistakes += [f"there is no {file}" for file in files if not (ROOT / file).exists()]
    if verb in ("train", "config", "plan", "parity", "scale") and not mistakes:
        mistakes += refusals([str(ROOT / file) for file in files], list(overrides.values()))
    return mistakes


def words_that_are_no_options(command: click.Command, words: list[str]) -> list[str]:
    """Without the options that the command has, and their values."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    by_name = {
        name: option for option in options for name in (*option.opts, *option.secondary_opts)
    }
    by_name |= dict.fromkeys(("--help", "-h", "--version"), click.Option(["--help"], is_flag=True))
    arguments = []
    words = list(words)
    while words:
        word = words.pop(0).rstrip(",;")
        name, equals, _ = word.partition("=")
        if word.startswith("-") and name in by_name:
            if not by_name[name].is_flag and not equals:
                words[:1] = []
        else:
            arguments.append(word)
    return arguments


def refusals(files: list[str], overrides: list[str]) -> list[str]:
    """What reading the experiment says; a line without a file shows only a part of one."""
    try:
        load_config(files, overrides if files else ["task=image_classification", *overrides])
    except UserError as error:
        return [str(error)]
    return []


def mistakes_of_benchmark(words: list[str]) -> list[str]:
    """What is wrong in the words after `python -m experiments.benchmarks`."""
    if not words:
        return []
    length = 2 if " ".join(words[:2]) in benchmarks.BENCHMARKS else 1
    name = " ".join(words[:length])
    if name not in benchmarks.BENCHMARKS:
        return [] if name.isupper() else [f"there is no benchmark {name}"]
    module = benchmarks.MODULES.get(name, name.replace("-", "_")).replace(".", "/")
    program = (ROOT / f"experiments/benchmarks/{module}.py").read_text()
    known = re.findall(r'"(--[a-z-]+)"', program)
    options = [word.partition("=")[0] for word in words[length:] if word.startswith("--")]
    unknown = [option for option in options if option not in known]
    return [f"the benchmark {name} has no option {option}" for option in unknown]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_in_a_document_are_accepted(document: Path) -> None:
    by_command = {command: mistakes_in(command) for command in parts(document).commands}
    assert not {command: mistakes for command, mistakes in by_command.items() if mistakes}


SECTIONS = sorted(field.name for field in dataclasses.fields(Config))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_keys_in_a_document_are_keys_of_the_configuration(document: Path) -> None:
    """A word between backticks such as parallel.cp or train.ema_decay=0.999."""
    pattern = re.compile(rf"((?:{'|'.join(SECTIONS)})\.[a-z_]+)(?:[=:].*)?")
    keys = [match[1] for word in parts(document).words if (match := pattern.fullmatch(word))]
    keys = [key for key in keys if not re.search(rf"\.(?:{SUFFIXES})$", key)]
    assert not [key for key in keys if not is_key(key)]


CLUSTER = r"--cluster ([a-z][\w-]*)(?=\s|$)"


def test_cluster_files_that_commands_name_exist() -> None:
    commands = [line for document in DOCUMENTS for line in parts(document).commands]
    names = {name for line in commands for name in re.findall(CLUSTER, line)}
    assert names
    assert {f"{name}.yaml" for name in names} <= own_files().keys()


# --- the test itself ------------------------------------------------------------------------------

WRONG = {
    "trireme trian experiments/gpt.yaml": "trireme has no command trian",
    "trireme train experiments/gpt.yaml --agian": "trireme train has no option --agian",
    "trireme train experiments/gtp.yaml": "there is no experiments/gtp.yaml",
    "trireme train experiments/gpt.yaml trian.steps=3 # comment": "there is no key trian.steps",
    "trireme train experiments/gpt.yaml train.precision=bf15": "bf15",
    "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m app train workers=four": "workers is 'four'",
    "trireme cluster up cluster/nowhere.yaml": "there is no cluster/nowhere.yaml",
    "trireme queue --nothing": "trireme queue has no option --nothing",
    "python -m experiments.benchmarks overhead": "there is no benchmark overhead",
    "python -m experiments.benchmarks step --modle gpt": "the benchmark step has no option --modle",
    "python -m tests.nothing --seed 1": "there is no module tests.nothing",
    "make tset": "make has no target tset",
    "SEED=1 pytest -m slow tests/falts": "there is no tests/falts",
}


@pytest.mark.parametrize(("command", "sentence"), WRONG.items(), ids=WRONG)
def test_a_wrong_command_in_a_block_or_a_sentence_is_reported(command: str, sentence: str) -> None:
    (in_block,) = parts_of(f"Text.\n\n```\n{command}\n```\n").commands
    assert sentence in " ".join(mistakes_in(in_block))
    (in_sentence,) = parts_of(f"Say `{command}`, then go on.").commands
    assert sentence in " ".join(mistakes_in(in_sentence))


def test_a_missing_file_folder_or_link_is_reported(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    (tmp_path / "folder").mkdir()
    text = (
        "`gone.py` and (lost.py: why), [a](b.py), `there.py`, `tests/conftest.py`, `run.json`, "
        "https://x.org/c.py"
    )
    assert missing_files(parts_of(text).prose, tmp_path) == ["gone.py", "lost.py"]
    words = ("app/gone", "train/loss", "tests/app", "../nowhere", "steps/s")
    assert missing_folders(words, tmp_path) == ["../nowhere", "app/gone"]
    text = (
        "[a](README.md#two-commands) [b](README.md#three) [c](none.md) [d](https://x.org) "
        "[e](#here)\n\n## Here\n"
    )
    assert broken_links(text, ROOT) == ["README.md#three", "none.md"]
