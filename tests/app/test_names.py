"""A user's packages with the names of Trireme's: which one an import gets, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app import names
from tests.running import ROOT, environment

FACE = f"{ROOT}:{ROOT / 'app'}"
"""PYTHONPATH with which a checkout has `trireme`, as an installation has it."""

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

class Mine(Task):
    def build_model(self):
        hidden = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.ReLU(), hidden, nn.ReLU(), nn.Linear(WIDTH, 1)
        )

    def train_data(self):
        x = torch.rand(64, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])
"""

Files = dict[str, str]


def write(folder: Path, files: Files) -> None:
    """Writes files by their paths in a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def python(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a folder as a script of the user's there would run."""
    env = environment(**{"PYTHONPATH": FACE, **variables})
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
    )


FOUND: dict[str, tuple[Files, str, list[object]]] = {
    "a file": (
        {"app.py": "WIDTH = 3"},
        "import trireme, app, app.errors; from app import WIDTH\n"
        "print([WIDTH, app.errors.UserError.__module__])",
        [3, "app.errors"],
    ),
    "a package whose __init__ imports its own modules": (
        {
            "app/__init__.py": "from .sizes import WIDTH\nfrom app.shop import NAME",
            "app/sizes.py": "WIDTH = 3",
            "app/shop/__init__.py": "NAME = 'shop'",
            "app/shop/till.py": "from app import WIDTH as OPEN",
        },
        "import trireme; from app import WIDTH, NAME; from app.shop.till import OPEN\n"
        "print([WIDTH, NAME, OPEN])",
        [3, "shop", 3],
    ),
    "folders without __init__": (
        {
            "app/mine.py": "A = 1",
            "cluster/means.py": "B = 2",
            "strategies/buy.py": "C = 3",
            "experiments/e.py": "D = 4",
        },
        "import trireme; from app.mine import A; from cluster.means import B\n"
        "from strategies.buy import C; from experiments.e import D\n"
        "import app.names, cluster.environment; print([A, B, C, D])",
        [1, 2, 3, 4],
    ),
    "a package, and a file, where Trireme has a folder without __init__": (
        {"app/__init__.py": "", "app/tracking.py": "HIDDEN = 3", "app/run/__init__.py": "ROWS = 4"}
        | {"app/run/till.py": "from . import ROWS as MORE"},
        "import trireme; from app.tracking import HIDDEN; from app.run import ROWS\n"
        "from app.run.till import MORE; import app.tracking.spool, app.run.look\n"
        "print([HIDDEN, ROWS, MORE, app.tracking.spool.__name__])",
        [3, 4, 4, "app.tracking.spool"],
    ),
    "a package where Trireme has a file": (
        {"app/errors/__init__.py": "MINE = 5", "app/errors/web.py": "CODE = 404"},
        "import trireme; from app.errors import MINE, UserError; from app.errors.web import CODE\n"
        "print([MINE, CODE, UserError.__module__])",
        [5, 404, "app.errors"],
    ),
    "modules that cannot be imported, and are not": (
        {
            f"{name}/__init__.py": "raise RuntimeError"
            for name in ("app", "strategies", "cluster", "experiments")
        }
        | {"app/config.py": "raise RuntimeError", "cluster/connect.py": "raise RuntimeError"},
        "import trireme, app.errors, strategies, cluster.environment, experiments\n"
        "print([trireme.UserError.__module__, cluster.ClusterError.__name__])",
        ["app.errors", "ClusterError"],
    ),
    "imported before trireme": (
        {
            "app/__init__.py": "WIDTH = 3",
            "app/models.py": "HIDDEN = 4",
            "app/late.py": "from app import WIDTH as L",
        }
        | {"cluster.py": "def fit(): return 5"},
        "import app, app.models, cluster; theirs = app.models; import trireme\n"
        "from app.models import HIDDEN; import app.late\n"
        "print([app.WIDTH, HIDDEN, app.late.L, theirs.HIDDEN, cluster.fit()])",
        [3, 4, 3, 4, 5],
    ),
}


@pytest.mark.parametrize("kind", FOUND)
def test_modules_of_the_user_and_of_trireme_are_found_under_one_name(
    kind: str, tmp_path: Path
) -> None:
    files, code, expected = FOUND[kind]
    write(tmp_path, files)
    as_json = code.replace("print([", "import json; print(json.dumps([").replace("])", "]))")
    ended = python(as_json, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == expected


def test_a_users_package_may_be_installed_also_in_editable_mode(tmp_path: Path) -> None:
    write(tmp_path / "site", {"app/__init__.py": "WIDTH = 3", "app/shop.py": "NAME = 'shop'"})
    write(
        tmp_path / "source",
        {"cluster/__init__.py": "K = 2", "cluster/means.py": "from cluster import K as MEANS"},
    )
    finder = f"""
import sys, importlib.util
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "cluster":
            folder = {str(tmp_path / "source" / "cluster")!r}
            return importlib.util.spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.meta_path.append(Finder)
import trireme
from app.shop import NAME
from app import WIDTH
from cluster.means import MEANS
from cluster import ClusterError
print(NAME, WIDTH, MEANS)
"""
    ended = python(finder, tmp_path, PYTHONPATH=f"{tmp_path / 'site'}:{FACE}")
    assert ended.stdout.split() == ["shop", "3", "2"], ended.stderr


def test_every_module_of_trireme_has_a_name_that_nothing_hides(tmp_path: Path) -> None:
    errors = "class UserError(Exception): pass"
    write(tmp_path, {"app/__init__.py": "", "app/tasks.py": "", "app/errors.py": errors})
    code = """
import trireme, trireme.errors
from trireme.tracking import spool
from trireme.cluster import environment
import app.errors, app.tracking.spool, cluster.environment
assert trireme.errors is app.errors and spool is app.tracking.spool
assert environment is cluster.environment
assert app.errors.__spec__.name == "app.errors" and trireme.RunFailed is app.errors.RunFailed
try:
    import trireme.nothing
except ModuleNotFoundError as error:
    print(error)
"""
    ended = python(code, tmp_path)
    assert ended.stdout.strip() == "No module named 'trireme.nothing'", ended.stderr


def test_a_users_module_imported_too_early_is_refused_with_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, {"app/__init__.py": "", "app/errors.py": "class UserError(Exception): pass"})
    ended = python("import app.errors\nimport trireme", tmp_path)
    place = f"{tmp_path}/app/errors.py was imported as app.errors before trireme"
    assert f"{place}, which needs UserError" in ended.stderr
    assert f"({ROOT}/app/errors.py): import trireme first" in ended.stderr


CONFIG = {"app/__init__.py": "", "app/config.py": "class Config: pass\nclass Mine: pass\nRATE = 1"}
REFUSED: dict[str, tuple[Files, str, str]] = {
    "a name": (
        {"mine.py": "x = 1\nfrom app.config import Config"},
        "mine",
        "mine.py, line 2, takes Config from app.con",
    ),
    "all names": (
        {"mine.py": "from app.config import *"},
        "mine",
        "mine.py, line 1, takes Config from app.config",
    ),
    "an attribute": (
        {"mine.py": "import app.config as c\nc.Config()"},
        "mine",
        "takes Config from app.config",
    ),
    "a module": (
        {"mine.py": "from app import config\nconfig.Config()"},
        "mine",
        "takes Config from app.config",
    ),
    "in a module that it imports": (
        {"mine.py": "def later():\n    import aid", "aid.py": "from app.config import Config"},
        "mine",
        "aid.py, line 1, takes Config",
    ),
    "relatively": (
        {"app/shop/__init__.py": "from ..config import Config"},
        "app.shop",
        "shop/__init__.py, line 1",
    ),
    "in the package that it is in": (
        {"app/shop/__init__.py": "from app.config import Config", "app/shop/mine.py": ""},
        "app.shop.mine",
        "shop/__init__.py, line 1, takes Config",
    ),
    "a task called Task": (
        {"app/tasks.py": "class Task: pass", "mine.py": "from app.tasks import Task"},
        "mine",
        "write trireme.tasks where you mean Trireme's",
    ),
    "a function that has the name of a module of Trireme's": (
        {"app/__init__.py": "def run(): pass", "mine.py": "from app import run"},
        "mine",
        "mine.py, line 1, takes run from app",
    ),
    "another package": (
        {"cluster.py": "class ClusterError: pass", "mine.py": "from cluster import ClusterError"},
        "mine",
        "write trireme.cluster where you mean Trireme's",
    ),
}
ALLOWED: dict[str, tuple[Files, str]] = {
    "what only the user has": ({"mine.py": "from app.config import RATE"}, "mine"),
    "what only Trireme has": ({"mine.py": "from app.config import TrainConfig"}, "mine"),
    "a module of which other things are used": (
        {"mine.py": "import app.config as c\nc.RATE"},
        "mine",
    ),
    "by Trireme's own name": ({"mine.py": "from trireme.config import Config"}, "mine"),
    "what does not parse": ({"mine.py": "from app.config import ("}, "mine"),
    "a name of Python's": ({"mine.py": "import json, torch"}, "mine"),
}


def ask(folder: Path, rows: dict[str, str]) -> dict[str, str]:
    """The refusals of modules by kind; row n is in the folder n."""
    code = """
import json, os, sys
from app.errors import UserError
from app.tasks.user_code import refuse_ambiguous
answers = {}
for number, (kind, name) in enumerate(json.loads(sys.argv[1]).items()):
    os.chdir(f"{number}")
    try:
        refuse_ambiguous(name)
    except UserError as error:
        answers[kind] = str(error)
    os.chdir("..")
print(json.dumps(answers))
"""
    command = [sys.executable, "-P", "-c", code, json.dumps(rows)]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_an_ambiguous_import_is_refused_before_it_runs_and_no_other(tmp_path: Path) -> None:
    rows = {kind: (files, name) for kind, (files, name, _) in REFUSED.items()} | ALLOWED
    for number, (files, _) in enumerate(rows.values()):
        write(tmp_path / str(number), CONFIG | files)
    answers = ask(tmp_path, {kind: name for kind, (_, name) in rows.items()})
    assert answers.keys() == REFUSED.keys()
    for kind, (_, _, expected) in REFUSED.items():
        assert expected in answers[kind], kind
        assert f"Trireme's ({ROOT}/" in answers[kind] and f"yours ({tmp_path}/" in answers[kind]


# --- training runs --------------------------------------------------------------------------------

SHOP = {
    "app/__init__.py": "from app.sizes import WIDTH",
    "app/sizes.py": "WIDTH = 4",
    "app/models.py": "raise RuntimeError('nobody asked for it')",
    "cluster.py": "raise RuntimeError('nobody asked for it')",
    "strategies/__init__.py": "raise RuntimeError('nobody asked for it')",
    "mine.py": f"from trireme import Task\nfrom app import WIDTH\n{TASK}",
    "app/till.py": f"from trireme import Task\nfrom .sizes import WIDTH\n{TASK}",
}
WORDS = ["train.steps=2", "train.global_batch_size=4", "tracking.enabled=false"]


def train(
    folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "trireme"), **variables: str
) -> str:
    """Trains in a folder, and returns the output."""
    command = [sys.executable, *program, "train", *arguments, *WORDS, f"run.name=r{len(arguments)}"]
    env = environment(**{"PYTHONPATH": FACE, **variables})
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_users_task_trains_beside_packages_with_triremes_names(tmp_path: Path) -> None:
    write(tmp_path, SHOP)
    assert "2 steps" in train(tmp_path, "task=app.till:Mine", "launcher=local")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("strategy=ddp", "workers=2"),
        ("strategy=pipeline", "workers=2", "parallel.pp=2"),
    ],
    ids=lambda row: row[0],
)
def test_a_users_task_trains_so_on_workers_in_ray(
    layout: tuple[str, ...], tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    write(tmp_path, SHOP)
    variables = {
        name: ray_environment[name] for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_TMPDIR")
    }
    assert "2 steps" in train(tmp_path, "task=mine:Mine", *layout, **variables)


@pytest.mark.slow
def test_a_users_task_trains_so_in_a_new_ray_and_under_torchrun(tmp_path: Path) -> None:
    write(tmp_path, SHOP)
    assert "2 steps" in train(tmp_path, "task=mine:Mine", "workers=2")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = (*torchrun, "-m", "trireme")
    arguments = ("task=mine:Mine", "strategy=ddp", "train.seed=1")
    assert "2 steps" in train(tmp_path, *arguments, program=program)


def test_a_users_module_with_triremes_name_is_kept_with_a_model(tmp_path: Path) -> None:
    """Whichever copy of app/names.py, of which a process may have two, has let it in."""
    write(tmp_path, SHOP)
    program = (
        "import trireme, app; from app.names import user_modules_in_use; "
        "print(app.WIDTH, *user_modules_in_use().values())"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(PYTHONPATH=FACE),
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == ["4", str(tmp_path / "app" / "__init__.py")]


SAVE = """
import json, sys, torch
from pathlib import Path
import trireme
from app.tasks import load_task
from app.tracking import model
from app.tracking.model_files import write_model_files
folder = Path(sys.argv[1])
task = load_task("mine:Mine", {})
torch.save(task.build_model().state_dict(), folder / "weights.pt")
about = {"task": "mine:Mine", "task_args": {}, "weights": str(folder / "weights.pt"), "cwd": "."}
write_model_files(task, about, folder / "files")
model._save(folder / "files", "0" * 32, folder)
"""
LOAD = """
import sys, torch
import app.models, cluster
import mlflow.pytorch
loaded = mlflow.pytorch.load_model(sys.argv[1])
assert app.models.ORDER == 7 and cluster.K == 2
print(type(loaded).__module__, sum(each.numel() for each in loaded.parameters()))
answer = mlflow.pyfunc.load_model(sys.argv[1]).predict(torch.ones(2, 8).numpy())
import app.later
print(len(answer), app.later.ORDER)
"""
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.layer(x)

class Mine(Mine):
    def build_model(self):
        return Net()
"""


@pytest.mark.slow
def test_a_trained_model_loads_in_a_program_with_another_package_app(tmp_path: Path) -> None:
    write(tmp_path / "train", SHOP | {"mine.py": SHOP["mine.py"] + NET})
    web = {
        "app/__init__.py": "",
        "app/models.py": "ORDER = 7",
        "app/later.py": "from app.models import ORDER",
    }
    write(tmp_path / "web", web | {"cluster.py": "K = 2"})
    env = environment(PYTHONPATH=FACE)
    save = [sys.executable, "-c", SAVE, str(tmp_path)]
    saved = subprocess.run(save, cwd=tmp_path / "train", env=env, capture_output=True, text=True)
    assert saved.returncode == 0, saved.stderr
    env.pop("PYTHONPATH")
    load = [sys.executable, "-c", LOAD, str(tmp_path / "model")]
    loaded = subprocess.run(load, cwd=tmp_path / "web", env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == ["mine", "36", "2", "7"]


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["python", "-m", "app", "train", "x.yaml"], "app"),
        (["python", "-u", "-m", "app", "train"], "app"),
        (["/usr/bin/trireme", "train", "app"], "trireme"),
    ],
)
def test_advice_names_the_module_that_this_program_was_started_by(
    arguments: list[str], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", arguments)
    assert names.module() == module
