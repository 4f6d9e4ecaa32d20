"""Imports run one way, and the loop needs neither Ray nor MLflow.

And the image, as far as can be told without Docker.
"""

import ast
import functools
import graphlib
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import setuptools

from app.config.io import load_config, with_values
from app.run.prepare import prepare, read_task
from cluster.files import FOLDER
from experiments.benchmarks.gpu_first.table import CHECKS
from tests.experiments.benchmarks.bad_checks import NOT_THERE
from tests.running import ROOT

FORBIDDEN_IMPORTS = {
    "strategies": {"ray", "mlflow", "omegaconf", "app", "cluster", "experiments"},
    "cluster": {"app", "strategies", "experiments", "torch", "mlflow"},
    "app": {"experiments"},
    "experiments": set(),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

FILES = [
    str(file.relative_to(ROOT))
    for package in FORBIDDEN_IMPORTS
    for file in sorted((ROOT / package).rglob("*.py"))
]
FILE_BY_MODULE = {
    name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name for name in FILES
}
"""Files outside of tests/ by the names of their modules."""


@functools.cache
def trees() -> dict[str, list[Any]]:
    """Of every file, the nodes of what it is parsed to, the whole first."""
    return {name: list(ast.walk(ast.parse((ROOT / name).read_text()))) for name in FILES}


def imported_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Whole names of the modules that these nodes import, and of what they take from them.

    An import by a string counts too.
    """
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    return names


def test_imports_run_one_way() -> None:
    wrong = {}
    for name, nodes_of_file in trees().items():
        # The command line and the Python API load the verbs of experiments/ when they are called.
        loads_when_called = name.startswith(("app/cli/", "app/api.py", "app/trireme/stub.py"))
        nodes = nodes_of_file[0].body if loads_when_called else nodes_of_file
        packages = {module.split(".")[0] for module in imported_names(nodes)}
        if forbidden := packages & FORBIDDEN_IMPORTS[name.split("/")[0]]:
            wrong[name] = forbidden
    assert not wrong


def executed_nodes(tree: ast.AST, functions: bool = False) -> Iterable[ast.AST]:
    """What runs when a module is imported, or when its functions do, too.

    What is for types alone is left out.
    """
    for node in ast.iter_child_nodes(tree):
        is_typed = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not is_typed and (functions or not isinstance(node, ast.FunctionDef)):
            yield node
            yield from executed_nodes(node, functions)


def loaded_modules(*modules: str) -> set[str]:
    """All names that are imported with these modules, by them and by ours that they import."""
    loaded = set[str]()
    pending = list(modules)
    while pending:
        parts = pending.pop().split(".")
        for name in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} - loaded:
            loaded.add(name)
            if name in FILE_BY_MODULE:
                tree = trees()[FILE_BY_MODULE[name]][0]
                pending += imported_names(executed_nodes(tree))
    return loaded


RAY = {"ray", "mlflow"}
FIRST_ON_GPU = {check.function.rpartition(".")[0] for check in CHECKS}
NOT_NEEDED = [
    (("app.cli",), {*RAY, "torch", "omegaconf", "yaml"}),
    (("app.tracking.tracker", "app.tracking.settings"), {*RAY, "torch"}),
    (("strategies.parallelize", "app.training.loop"), RAY),
    (("app.launchers.train", "app.run.lifecycle"), {"app.planner", "app.doctor"}),
    (("experiments.benchmarks.gpu_first.program",), {*NOT_THERE, "torch", "numpy"}),
    ((*FIRST_ON_GPU, "strategies.parallelize"), NOT_THERE),  # where there is little but torch
]


@pytest.mark.parametrize(("modules", "names"), NOT_NEEDED)
def test_what_is_not_needed_is_not_imported(modules: tuple[str, ...], names: set[str]) -> None:
    assert not loaded_modules(*modules) & names
    assert FILE_BY_MODULE.keys() >= set(modules)


def test_a_run_that_names_its_strategy_does_without_the_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config([], ["task=tests.tasks:Points", "strategy=ddp"])
    for name in (*sys.modules, *FILE_BY_MODULE):
        if name.startswith(("app.planner", "app.doctor")):
            monkeypatch.setitem(sys.modules, name, None)
    prepare(config, read_task(config), 2, devices_per_node=None)
    automatic = with_values(config, {"strategy": "auto"})
    with pytest.raises(ImportError):
        prepare(automatic, read_task(config), 2, devices_per_node=None)


def test_every_folder_has_a_readme_and_names_in_it_files_that_exist() -> None:
    readmes = {ROOT / "README.md", *ROOT.glob("[a-z]*/**/README.md")}
    readmes |= {(ROOT / name).with_name("README.md") for name in trees()}
    broken = []
    for readme in readmes:
        links = re.findall(r"\]\(([^)#:]+)\)", readme.read_text())
        broken += [
            f"{readme.relative_to(ROOT)}: {link}"
            for link in links
            if not (readme.parent / link).exists()
        ]
    assert not broken


def assignment_targets(node: ast.AST) -> Iterable[ast.expr]:
    """What a statement assigns to, or adds to."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target


def test_nobody_writes_into_the_driver_from_outside() -> None:
    """Its attributes change by its own methods; what it needs, its constructor is given."""
    wrong = []
    for name, nodes in trees().items():
        for target in (target for node in nodes for target in assignment_targets(node)):
            owner: ast.expr = target
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
                is_driver = re.fullmatch(r"(self\.)?driver", ast.unparse(owner))
                if is_driver and ast.unparse(target) != "self.driver":
                    wrong.append(f"{name}: {ast.unparse(target)}")
    assert not wrong


ERROR_VARIABLE = r"\w*(err|exc|raised|failure)\w*"
NAME_OF_ERROR = rf"(type\({ERROR_VARIABLE}\)|{ERROR_VARIABLE}\.__class__)\.__(name|qualname)__"


def test_errors_are_recognised_by_class_and_not_by_its_name() -> None:
    """A name may be said to a person, but is compared with nothing."""
    wrong = []
    for name, nodes in trees().items():
        for node in nodes:
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            compares = isinstance(node, ast.Compare) or (
                is_method and node.func.attr in ("startswith", "endswith")
            )
            if compares and re.search(NAME_OF_ERROR, ast.unparse(node)):
                wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong


SET_CONFIGURATIONS = {
    "app/run/resolve.py",  # what is left open
    "app/run/manifest.py",  # --again, before the start
    "app/launchers/elastic.py",  # for another number of workers, before that is resolved
    "experiments/coordinate_check.py",  # the widths of a check, which resolves nothing
    "experiments/benchmarks/fork_truth.py",  # branches, whose batch was resolved for each rate
    "experiments/scale/run.py",  # a study's points, before they are resolved
    "experiments/sweep/trial.py",  # a trial, before it is resolved
    "experiments/sweep/run.py",  # the file of the next run
}
"""Files that make a configuration from another one, and for what."""


def is_replaced_config(node: ast.AST) -> bool:
    """Whether it makes another configuration: by `with_values`, or as any dataclass."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    of_config = bool(node.args) and ast.unparse(node.args[0]).rpartition(".")[2] == "config"
    return name == "with_values" or (name in ("replace", "__setattr__") and of_config)


def test_a_configuration_is_resolved_in_one_place_and_then_only_read() -> None:
    files = {name for name, nodes in trees().items() if any(map(is_replaced_config, nodes))}
    assert files == SET_CONFIGURATIONS


FORKS = {"app/tracking/writer.py", "experiments/benchmarks/gpu_first/device.py"}
"""Files where one of the two processes after a fork ends without what both would clean up."""


def test_a_process_is_ended_at_once_in_one_place() -> None:
    """Whoever finds that it cannot go on reports it to a callback."""
    files = set()
    for name, nodes in trees().items():
        if any(isinstance(node, ast.Attribute) and node.attr == "_exit" for node in nodes):
            files.add(name)
    assert files == {"app/run/abort.py", *FORKS}


STRATEGY_NAMES = {
    "ddp",
    "ddp_model_parallel",
    "deepspeed",
    "fsdp",
    "hsdp",
    "model_parallel",
    "zero1",
    "zero2",
    "zero3",
}
"""Those that are no other word as well."""
MAY_NAME_STRATEGIES = {
    f"strategies/{name}.py"
    for name in ("options", "registry", "ddp", "deepspeed", "fsdp", "one_process")
}
MAY_NAME_STRATEGIES |= {"experiments/parity/rows.py", "experiments/parity/experiment.py"}
"""A file in which a strategy's name may stand; benchmarks are rows."""


def test_a_strategys_name_stands_in_its_file_and_in_the_registry() -> None:
    files = set()
    for name, nodes in trees().items():
        words = {node.value for node in nodes if isinstance(node, ast.Constant)}
        names = {part for word in words if isinstance(word, str) for part in word.split("+")}
        if names & STRATEGY_NAMES and not name.startswith("experiments/benchmarks/"):
            files.add(name)
    assert files <= MAY_NAME_STRATEGIES


NO_NOUNS = {"found", "held", "own", "said", "told"}
"""Participles, which do not say what a value is."""


def test_no_variable_or_function_is_called_by_a_participle() -> None:
    """A noun of the domain stands there instead: `checkpoint`, not `found`."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    places = []
    for file in listed.stdout.split():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            is_assigned = isinstance(getattr(node, "ctx", None), ast.Store)
            names = [getattr(node, name, None) for name in ("id", "attr") if is_assigned]
            if isinstance(node, ast.arg):
                names.append(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            places += [f"{file}:{node.lineno}: {name}" for name in NO_NOUNS.intersection(names)]
    assert not places, "\n".join(places)


def test_the_wheel_ships_no_benchmarks() -> None:
    """And nothing at the top of site-packages.

    Another distribution may have packages of the same names there.
    """
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    shipped = setup.call_args.kwargs["packages"]
    packages = {name.removeprefix("trireme.packages.") for name in shipped}
    studies = {"experiments.sweep", "experiments.parity"}
    assert {"app", "strategies", "cluster", "trireme", *studies} <= packages
    assert not [name for name in packages if "benchmarks" in name or name.startswith("tests")]
    assert not [name for name in shipped if name.partition(".")[0] != "trireme"]


def test_reports_and_results_stay_small() -> None:
    kinds = ("*.csv", "*.html", "*.json", "*.jsonl", "*.md", "*.png", "*.svg")
    listed = subprocess.run(
        ["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.split()}
    # Apart, as the guide grows by a page a question: twelve of five minutes each, with what
    # commands print.
    guide = [sizes.pop(name) for name in list(sizes) if name.startswith("experiments/guide/")]
    assert sum(guide) <= 65_000
    # The changelog grows with every change that users notice.
    sizes.pop("CHANGELOG.md")
    assert sum(sizes.values()) <= 322_000, sorted(sizes.items(), key=lambda item: -item[1])[:9]


# --- circles --------------------------------------------------------------------------------------


def test_no_circle_of_imports() -> None:
    """Neither of files, nor of folders beside each other (a file beside a folder counts as one).

    An import counts anywhere in a file, also by a string, but not for its types alone.
    """
    others_by_module: dict[str, set[str]] = {}
    for module, file in FILE_BY_MODULE.items():
        names = imported_names(executed_nodes(trees()[file][0], functions=True))
        modules = {name if name in FILE_BY_MODULE else name.rpartition(".")[0] for name in names}
        others_by_module[module] = modules & FILE_BY_MODULE.keys() - {module}
    graphlib.TopologicalSorter(others_by_module).prepare()  # an error of its own names a circle

    def folder(module: str) -> str:
        path = Path(FILE_BY_MODULE[module])
        return module if len(path.parts) <= 2 else str(path.parent)

    others_by_folder: dict[str, set[str]] = {folder(module): set() for module in FILE_BY_MODULE}
    for module, others in others_by_module.items():
        others_by_folder[folder(module)] |= {folder(other) for other in others} - {folder(module)}
    graphlib.TopologicalSorter(others_by_folder).prepare()


# --- internals ------------------------------------------------------------------------------------

ADAPTERS = ("strategies/torch_internals.py", "cluster/ray_internals.py")
DEPENDENCIES = r"torch|dist|nn|ray|mlflow|omegaconf|fsspec|tune|train"
INTERNAL = re.compile(
    r"\b(_internal|_private|_raylet|unittest\.mock)\b"
    rf"|\b({DEPENDENCIES})(\.\w+)*\._[a-z]|from ({DEPENDENCIES})\S* import _"
)

DOCUMENTED = re.compile(
    r"torch\.cuda\.memory\.(_record_memory_history|_dump_snapshot)\b"
    r"|torch\._dynamo\.config\.optimize_ddp\b"
)
"""Documented in spite of their underscore.

At docs.pytorch.org/docs/stable: torch_cuda_memory.html and notes/ddp.html.
"""


def test_internals_of_dependencies_stand_in_two_files_of_at_most_12_entries() -> None:
    others = trees().keys() - set(ADAPTERS)
    texts = {name: DOCUMENTED.sub("", (ROOT / name).read_text()) for name in others}
    assert not [name for name, text in texts.items() if INTERNAL.search(text)]
    nodes = [node for name in ADAPTERS for node in trees()[name][0].body]
    definitions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    docstrings = {node.name: ast.get_docstring(node) or "" for node in definitions}
    entries = [
        name
        for name, docstring in docstrings.items()
        if not name.startswith("_") or "Missing:" in docstring
    ]
    assert 0 < len(entries) <= 12, entries
    assert not [name for name in entries if "Why:" not in docstrings[name]]
    assert not [name for name in entries if "Missing:" not in docstrings[name]]
    tests = "".join((ROOT / "tests" / name.replace("/", "/test_")).read_text() for name in ADAPTERS)
    assert not [name for name in entries if name.strip("_") not in tests]


# --- the image ------------------------------------------------------------------------------------

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_image_is_pinned_and_not_roots_and_has_the_packages_and_nothing_else() -> None:
    assert re.search(r"^FROM python:3\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["1000"]
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert installs and all("--constraint" in line for line in installs)
    assert not re.search(r"curl|apt-get|latest", DOCKERFILE)
    folders = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    assert folders == {"app", "strategies", "cluster", "experiments"}
    assert re.search(r"^COPY .*\bpyproject.toml setup.py\b", DOCKERFILE, re.MULTILINE)
    assert {".git", "runs", ".venv*"} <= set((ROOT / ".dockerignore").read_text().split())


def test_the_files_for_kubernetes_name_the_image_of_these_versions() -> None:
    (ray,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    tag = f"{PROJECT['project']['version']}-ray{ray}-py311-cuda"
    for name in ("kuberay-cluster", "kuberay-job"):
        text = (FOLDER / f"{name}.yaml").read_text()
        assert set(re.findall(r"image: \S+:(\S+)", text)) == {tag}
        assert f"rayVersion: {ray}" in text
    assert f"trireme:{tag} ." in DOCKERFILE
