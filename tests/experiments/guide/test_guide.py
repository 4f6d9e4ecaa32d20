"""The guide: every command of its pages is run or parsed, and prints what the page shows."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from app.cli import group
from app.config.io import load_config
from cluster.files import own_files
from cluster.remote import free_port
from experiments.sweep.spec import read_sweep
from tests.experiments.guide.pages import (
    FENCE,
    GUIDE,
    PAGES,
    Command,
    commands_of,
    copy_of_guide,
    home_in,
    lines_not_printed,
)
from tests.running import ROOT, Ended, environment, finish, here
from tests.test_documents import LINK, mistakes_in

COMMANDS = [command for page in PAGES for command in commands_of(page)]
TRAINS = [command for command in COMMANDS if command.shown and not command.is_quick]
"""Commands that start processes; each takes seconds on an idle machine."""
PLANS = [command for command in COMMANDS if command.words[1:2] == ["plan"]]


def kind_of(plan: Command) -> tuple[bool, bool]:
    """Whether a plan is of a cluster's file, and whether the page shows a refusal."""
    return "--cluster" in plan.words, plan.is_refused


FURTHER_PLANS = [
    command
    for command in PLANS
    if command != next(first for first in PLANS if kind_of(first) == kind_of(command))
]
"""Plans after the first one of their kind, each of which takes some seconds."""
OF_OTHERS = {"cp", "docker", "helm", "kubectl", "sbatch", "squeue"}
"""Other programs that pages name."""
READ_AS_EXPERIMENT = {"train", "plan", "config", "scale", "submit", "doctor"}
SECTIONS = ("## Type this", "## How to read it", "## Why", "## When it does not work", "## Next")
QUESTIONS = [page for page in PAGES if page.name != "README.md"]
FIVE_MINUTES = 1_000
"""The number of words read in that time, at 200 a minute."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the guide, in which the commands that copy files have been typed."""
    guide = copy_of_guide(tmp_path_factory.mktemp("guide"))
    for command in COMMANDS:
        if command.words[0] == "cp":
            shutil.copy(guide / command.words[1], guide / command.words[2])
    return guide


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home for all commands of the module, so that the planner reads each model once."""
    return home_in(tmp_path_factory.mktemp("guide-home"))


@pytest.fixture
def in_guide(
    folder: Path,
    home: dict[str, str],
    models_read_once: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The current folder is the guide's, and the home has the key that two_boxes.yaml names."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    return folder


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_a_page_answers_first_and_is_read_in_five_minutes(page: Path) -> None:
    text = page.read_text()
    title, empty, *answer = text.splitlines()[:5]
    assert title.startswith("# ")
    assert not empty
    assert all(answer), "three lines of answer follow the title"
    sections = re.findall("|".join(f"^{section}" for section in SECTIONS), text, re.MULTILINE)
    assert sections == list(SECTIONS)
    assert len(FENCE.sub("", text).split()) <= FIVE_MINUTES
    assert commands_of(page)
    assert {language for language, _ in FENCE.findall(text)} <= {"console", "bash", "python"}


@pytest.mark.parametrize(
    "document", [GUIDE / "README.md", ROOT / "README.md"], ids=["guide", "repository"]
)
def test_every_page_is_linked_by_its_question(document: Path) -> None:
    linked = {
        (document.parent / link.partition("#")[0]).resolve()
        for link in LINK.findall(document.read_text())
    }
    assert set(QUESTIONS) <= linked


# --- commands that are read -----------------------------------------------------------------------


def parse(words: list[str]) -> list[str]:
    """Parses a command line as `trireme` does, without running it.

    Returns:
        The arguments that are not options.
    """
    command: click.Command = group
    context = click.Context(group)
    name = "trireme"
    while isinstance(command, click.Group):
        default = getattr(command, "default", "")
        if default and (not words or words[0] not in command.commands):
            words = [default, *words]
        subcommand_name, subcommand, words = command.resolve_command(context, words)
        assert subcommand_name and subcommand, (name, words)
        name = subcommand_name
        command = subcommand
        context = click.Context(command, parent=context, info_name=name)
    with contextlib.suppress(click.exceptions.Exit):  # --help
        context = command.make_context(name, list(words), parent=context.parent)
    return list(context.params.get("arguments") or ())


def check_ours(words: list[str], folder: Path) -> None:
    """Checks a `trireme` command by the command line's parser and the configuration."""
    arguments = parse(list(words))
    files = [word for word in arguments if "=" not in word]
    keys = [word for word in arguments if "=" in word]
    if words[0] == "sweep":
        read_sweep(files[0], keys)
    elif words[0] in READ_AS_EXPERIMENT and (files or keys):
        # best.yaml is what the line before it writes.
        written = [file for file in files if (folder / file).exists() or file != "best.yaml"]
        load_config(written, keys)


def check_of_others(words: list[str], folder: Path) -> None:
    """Checks that the files which another program's command names exist."""
    assert words[0] in OF_OTHERS, words
    files = [word for word in words[1:] if re.search(r"\.(py|yaml|sbatch)$", word)]
    assert not [word for word in files if not (folder / word).exists()]
    if words[0] == "sbatch":
        position = words.index("slurm.sbatch")
        check_ours(["train", *words[position + 1 :]], folder)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_read_by_the_real_parser(command: Command, in_guide: Path) -> None:
    words = command.words
    if words[0] == "trireme":
        assert not mistakes_in(command.text)
        check_ours(words[1:], in_guide)
        clusters = [
            words[position + 1] for position, word in enumerate(words) if word == "--cluster"
        ]
        for name in clusters:
            assert name in own_files() or (in_guide / name).exists(), name
    elif words[0] == "torchrun":
        options = get_args_parser().parse_args(words[1:])
        assert options.module and options.training_script == "trireme"
        check_ours(options.training_script_args, in_guide)
    elif words[0] == "python":
        assert (in_guide / words[1]).exists()
        load_config([], ["task=after:Digits", *words[2:]])
    else:
        check_of_others(words, in_guide)


def test_a_mistake_in_a_page_is_noticed(in_guide: Path) -> None:
    with pytest.raises(click.UsageError, match="No such option"):
        check_ours(["plan", "big.yaml", "--gpu-count", "8"], in_guide)
    with pytest.raises(click.UsageError, match="not a valid integer"):
        check_ours(["plan", "big.yaml", "--gpus", "eight"], in_guide)
    with pytest.raises(Exception, match="global_batch"):
        check_ours(["submit", "big.yaml", "train.global_batch=8"], in_guide)
    with pytest.raises(AssertionError):
        check_of_others(["sbatch", "slurm.sbatch", "huge.yaml"], in_guide)
    assert lines_not_printed(("a 1", "…", "b 2"), "x\na 7\ny\nb 3") == []
    assert lines_not_printed(("b 2", "a 1"), "a 7\nb 3") == ["a 1"]


# --- commands that are typed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command in FURTHER_PLANS else [])
        for command in COMMANDS
        if command.is_quick
    ],
    ids=str,
)
def test_a_plan_or_a_file_prints_what_the_page_says(
    command: Command,
    in_guide: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = here(monkeypatch, capsys, *command.words[1:])
    answer.expect(2 if command.is_refused else 0)
    assert not lines_not_printed(command.shown, answer.err + answer.out), answer.err + answer.out


def typed(words: list[str], folder: Path, **variables: str) -> Ended:
    """Runs a command as a shell would, with the programs of this environment."""
    programs = {
        "trireme": [sys.executable, "-m", "trireme"],
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}"],
    }
    return ended([*programs[words[0]], *words[1:]], folder, variables)


def ended(program: list[str], folder: Path, variables: dict[str, str]) -> Ended:
    """Runs a program in a folder to its end; after a long time it is killed with its children."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return finish(subprocess.Popen(program, cwd=folder, env=environment(**variables), **streams))


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINS, ids=str)
def test_a_training_prints_what_the_page_says(
    command: Command, folder: Path, ray_environment: dict[str, str]
) -> None:
    answer = typed(command.words, folder, **ray_environment)
    answer.expect(2 if command.is_refused else 0)
    assert not lines_not_printed(command.shown, answer.err + answer.out), answer.err + answer.out


@pytest.mark.slow
def test_the_script_after_trains(
    in_guide: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch."""
    overrides = ["launcher=local", "train.epochs=2", "run.name=quick", "tracking.enabled=false"]
    monkeypatch.setattr(sys, "argv", ["after.py", *overrides])
    runpy.run_path("after.py", run_name="__main__")
    (accuracy,) = re.findall(r"held out .* accuracy ([\d.]+)%", capfd.readouterr().out)
    assert float(accuracy) > 80


# --- Slurm ----------------------------------------------------------------------------------------

SRUN = """#!{python}
import os, subprocess, sys
words = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
if words[0] == "trireme":
    words = [{python!r}, "-m", "app", *words[1:]]
tasks = int(os.environ["SLURM_NTASKS"])
own = [{{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}} for rank in range(tasks)]
started = [subprocess.Popen(words, env=os.environ | one) for one in own]
sys.exit(max(process.wait() for process in started))
"""
NOTE = """#!{python}
import os, sys
words = [{name!r}, *sys.argv[1:], os.environ.get("MASTER_PORT", "")]
open(os.environ["NOTED"], "a").write(" ".join(words) + "\\n")
print("127.0.0.1\\nsecond-node" if "show" in sys.argv else "")
sys.exit(int(os.environ.get("ENDS_WITH", "0")) if {name!r} == "srun" else 0)
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Slurm's variables, and fakes of srun and scontrol that note how they are called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        write_program(programs / name, NOTE.format(python=sys.executable, name=name))
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    yield {**job, "PATH": f"{programs}:{os.environ['PATH']}", "NOTED": str(tmp_path / "noted")}


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def sbatch(folder: Path, variables: dict[str, str], *words: str) -> Ended:
    """Runs the file as a node does; Slurm's comments are comments of the shell too."""
    return ended(["bash", str(GUIDE / "slurm.sbatch"), *words], folder, variables)


def test_the_sbatch_file_is_a_shell_script_with_slurms_lines_first() -> None:
    file = GUIDE / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True)
    lines = file.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    # Slurm reads directives only up to the first command.
    assert directives == [line for line in lines[:first] if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in directives)
    numbers = dict(re.findall(r"--(ntasks-per-node|gpus-per-node)=(\d+)", "\n".join(directives)))
    assert numbers["ntasks-per-node"] == numbers["gpus-per-node"]


@pytest.mark.parametrize(
    ("ends_with", "requeued"), [(0, False), (1, False), (128 + signal.SIGINT, True)]
)
def test_the_sbatch_file_starts_a_process_per_gpu_and_requeues_a_stopped_run(
    ends_with: int, requeued: bool, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    variables = {**stand_ins, "ENDS_WITH": str(ends_with)}
    sbatch(tmp_path, variables, "task=after:Digits", "run.name=a b").expect(ends_with)
    listing, started, *after = Path(stand_ins["NOTED"]).read_text().splitlines()
    assert listing.strip() == "scontrol show hostnames node[1-2]"
    train = "trireme train task=after:Digits run.name=a b launcher=torchrun"
    assert started == f"srun --kill-on-bad-exit=1 {train} 24711"
    requeues = [line.rpartition(" ")[0] for line in after]
    assert requeues == (["scontrol requeue 4711"] if requeued else [])


@pytest.mark.slow
def test_two_tasks_of_slurm_train_as_one_run(
    folder: Path, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    srun = Path(stand_ins["PATH"].partition(":")[0]) / "srun"
    write_program(srun, SRUN.format(python=sys.executable))
    words = ["task=after:Digits", "train.epochs=2", f"run.storage={tmp_path}", "run.name=digits"]
    answer = sbatch(folder, stand_ins, *words).expect()
    assert "ddp (dp_replicate 2)" in answer.out and answer.out.count("trained   digits") == 1
