"""Imports run one way, and the loop needs neither Ray nor MLflow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import setuptools

from tests.running import ROOT

MAY_NOT = {
    "strategies": ("ray", "mlflow", "omegaconf", "app", "cluster", "experiments"),
    "cluster": ("app", "strategies", "experiments", "torch", "mlflow"),
    "app": ("experiments",),
}


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Whole names of the modules that these nodes import, and of what they take from them; also by a string."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    return names


@pytest.mark.parametrize("package", MAY_NOT)
def test_imports_run_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {}
    for file in files:
        # The command line loads the verbs of experiments/ when they are called.
        tree = ast.parse(file.read_text())
        nodes = tree.body if file.is_relative_to(ROOT / "app" / "cli") else ast.walk(tree)
        if bad := {name.split(".")[0] for name in imported(nodes)} & set(MAY_NOT[package]):
            wrong[str(file.relative_to(ROOT))] = bad
    assert not wrong


def test_fast_start_is_touched_from_one_place() -> None:
    files = {file.relative_to(ROOT) for package in MAY_NOT for file in (ROOT / package).rglob("*.py")}
    outside = [file for file in files if "fast_start" not in file.parts]
    names = {str(file): imported(ast.walk(ast.parse((ROOT / file).read_text()))) for file in outside}
    found = {file for file, taken in names.items() if any("fast_start" in name for name in taken)}
    assert found == {"cluster/connect.py"}


RAY = ("ray", "mlflow")
PREPARE = """import app.train, app.run.lifecycle
from app.config_io import load_config
from app.run.prepare import prepare, read_task
config = load_config([], ["task=image_classification", "task_args={data: digits, model: mlp}", "strategy=ddp"])
prepare(config, read_task(config), 2, devices_per_node=None)"""


@pytest.mark.parametrize(
    ("code", "not_needed"),
    [
        ("import strategies.parallelize", RAY),
        ("import app.loop", RAY),
        ("import app.tracking.tracker, app.tracking.settings", (*RAY, "torch")),
        ("import app.cli", (*RAY, "torch", "omegaconf", "yaml")),
        (PREPARE, ("app.planner", "app.doctor")),  # a run that names its strategy
    ],
)
def test_what_is_not_needed_is_not_imported(code: str, not_needed: tuple[str, ...]) -> None:
    code += f"\nimport sys; print([n for n in {not_needed} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_every_folder_has_a_readme() -> None:
    folders = {str(Path(name).parent) for name in tracked("*.py")}
    assert folders
    folders = {folder for folder in folders if not folder.startswith("tests/")}
    assert not [folder for folder in sorted(folders) if not (ROOT / folder / "README.md").exists()]


def test_readmes_name_files_that_exist() -> None:
    gone = []
    for readme in [ROOT / "README.md", *ROOT.glob("[a-z]*/**/README.md")]:
        links = re.findall(r"\]\(([^)#:]+)\)", readme.read_text())
        gone += [f"{readme.relative_to(ROOT)}: {link}" for link in links if not (readme.parent / link).exists()]
    assert not gone


STRATEGY_NAMES = frozenset(
    {"ddp", "ddp_model_parallel", "deepspeed", "fsdp", "hsdp", "model_parallel", "zero1", "zero2", "zero3"}
)
"""Those that are no other word as well."""
MAY_NAME_STRATEGIES = {
    "strategies": {f"{name}.py" for name in ("registry", "ddp", "deepspeed", "fsdp", "one_process")},
    "app": set(),
    "cluster": set(),
    "experiments": {"parity/rows.py", "parity/experiment.py"},
}
"""A file in which a strategy's name may stand; benchmarks are rows. To be shrunk to strategies' and parity's rows."""


@pytest.mark.parametrize("package", MAY_NAME_STRATEGIES)
def test_a_strategys_name_stands_in_its_file_and_in_the_registry(package: str) -> None:
    found = set()
    for file in sorted((ROOT / package).rglob("*.py")):
        words = {n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)}
        names = {part for word in words if isinstance(word, str) for part in word.split("+")}
        if names & STRATEGY_NAMES and not file.is_relative_to(ROOT / "experiments" / "benchmarks"):
            found.add(str(file.relative_to(ROOT / package)))
    assert found <= MAY_NAME_STRATEGIES[package]


def test_the_wheel_ships_no_benchmarks() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = setuptools.find_namespace_packages(str(ROOT), **find)
    assert {"app", "strategies", "cluster", "experiments.sweep", "experiments.parity"} <= set(packages)
    assert not [name for name in packages if "benchmarks" in name or name.startswith("tests")]


RESULTS = ("*.csv", "*.html", "*.json", "*.jsonl", "*.md", "*.png", "*.svg")


def test_reports_and_results_stay_small() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked(*RESULTS)}
    assert sum(sizes.values()) <= 300_000, sorted(sizes.items(), key=lambda item: -item[1])[:9]


# --- circles ----------------------------------------------------------------------------------------------------------


def all_modules() -> dict[str, Path]:
    """Every module outside of tests/, by its dotted name."""
    files = [file for package in MAY_NAME_STRATEGIES for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_of(file: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports: anywhere in it, also by a string, but not for its types alone."""
    tree = ast.parse(file.read_text())
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(node) for block in typed for node in ast.walk(block)}
    names = imported(node for node in ast.walk(tree) if id(node) not in skipped)
    return {name if name in known else name.rpartition(".")[0] for name in names} & known.keys()


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Those from which a way leads back to themselves."""

    def reached(begin: str) -> set[str]:
        seen, left = set[str](), [*arrows[begin]]
        while left:
            if (here := left.pop()) not in seen:
                seen.add(here)
                left += arrows[here]
        return seen

    return [name for name in arrows if name in reached(name)]


def test_no_circle_of_imports() -> None:
    """Neither of files, nor of folders beside each other (a file beside a folder counts as one)."""
    known = all_modules()
    files = {name: imports_of(file, known) - {name} for name, file in known.items()}
    assert circles(files) == []

    def room(name: str) -> str:
        file = known[name]
        return name if len(file.relative_to(ROOT).parts) <= 2 else str(file.relative_to(ROOT).parent)

    rooms: dict[str, set[str]] = {room(name): set() for name in known}
    for name, others in files.items():
        rooms[room(name)] |= {room(other) for other in others} - {room(name)}
    assert circles(rooms) == []


# --- internals --------------------------------------------------------------------------------------------------------

ADAPTERS = ("strategies/torch_internals.py", "cluster/ray_internals.py")
DEPENDENCIES = r"torch|dist|nn|ray|mlflow|omegaconf|fsspec|tune|train"
INTERNAL = re.compile(
    r"\b(_internal|_private|_raylet|unittest\.mock)\b"
    rf"|\b({DEPENDENCIES})(\.\w+)*\._[a-z]|from ({DEPENDENCIES})\S* import _"
)


def test_internals_of_dependencies_stand_in_two_files_of_at_most_12_entries() -> None:
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in all_modules().values()}
    wrong = [name for name, text in texts.items() if name not in ADAPTERS and INTERNAL.search(text)]
    assert wrong == []
    entries = [
        node.name
        for name in ADAPTERS
        for node in ast.parse(texts[name]).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and "Missing:" in (ast.get_docstring(node) or "")
    ]
    assert 0 < len(entries) <= 12, entries
    tests = "".join((ROOT / name).read_text() for name in TESTS_OF_ADAPTERS)
    assert not [name for name in entries if name.strip("_") not in tests]


TESTS_OF_ADAPTERS = ("tests/strategies/test_torch_internals.py", "tests/cluster/test_ray_internals.py")
