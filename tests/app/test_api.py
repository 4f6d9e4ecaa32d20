"""`import trireme`: from a script, a thread and a notebook, on a new Ray and on a running one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.api import _overrides, load_run, train
from app.errors import UserError
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.by_value import name_of, read_task_file, write_task_file
from tests.running import ROOT, environment, finish, mlflow_run, seed, start
from tests.tasks import Plain

SCRIPT = """
import json, os, sys, threading
import torch, torch.nn.functional as F, ray
from torch import nn
from torch.utils.data import TensorDataset
from app import trireme

class Sums(trireme.Task):  # of the script itself: no worker can import it
    def __init__(self, *, width: int = 8) -> None:
        self.width = width
    def build_model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.ReLU(), nn.Linear(self.width, 1))
    def train_data(self):
        x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))
    eval_data = train_data
    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

ray.init(log_to_driver=False, namespace="mine")
common = dict(train={"steps": 12, "log_every": 4}, quiet=True, tracking={"log_model": False})
in_ray = dict(workers=1, launcher="actors", run={"name": "thread"})
runs = []
def work():
    runs.append(trireme.train(task=Sums(width=8), **in_ray, **common))
thread = threading.Thread(target=work)
thread.start()
thread.join()
local = dict(task=Sums, task_args={"width": 8}, launcher="local", run={"name": "main"})
runs.append(trireme.train(**local, **common))
again = trireme.train(**local, **common)
print(json.dumps({
    "curves": [run.metrics()["train/loss"].dropna().to_dict() for run in runs],
    "outputs": [run.model()(torch.ones(1, 4)).item() for run in runs],
    "connected": ray.is_initialized(),
    "again": again.state.state,
}))
"""


@pytest.mark.slow
def test_a_task_of_a_script_trains_on_a_ray_that_stays_connected(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{SCRIPT}")
    seed([f"run.storage={tmp_path}/runs"])
    ended = finish(start([], env=ray_environment, program=[sys.executable, str(script)])).expect()
    output = json.loads(ended.out.splitlines()[-1])
    thread_curve, class_curve = output["curves"]
    assert set(class_curve) == {"1", "4", "8", "12"} and output["again"] == "finished"
    assert list(class_curve.values()) == pytest.approx(list(thread_curve.values()), rel=1e-5)
    assert output["outputs"][0] == pytest.approx(output["outputs"][1], rel=1e-4)
    assert output["connected"], "the script's own connection stays"
    run = load_run(tmp_path / "runs" / "main")
    assert run.config.task == "python:Sums"
    assert run.model()[0].weight.shape == (8, 4), "in another process, too"
    logged = mlflow_run(tmp_path / "runs", "main")
    assert logged.info.run_id == run.mlflow_run_id and logged.info.status == "FINISHED"
    assert run.summary["step"] == 12 and run.checkpoint().startswith(run.folder)


def test_values_of_python_become_those_of_the_command_line() -> None:
    keys = {
        "train": {"steps": 5, "clip_norm": None},
        "run.name": "a b",
        "optimizer": {"lr": np.float32(0.5)},
    }
    assert _overrides(keys) == [
        "train.steps=5",
        "train.clip_norm=null",
        'run.name="a b"',
        "optimizer.lr=0.5",
    ]
    assert _overrides({"task_args": {"data": Path("x"), "empty": {}}}) == [
        'task_args.data="x"',
        "task_args.empty={}",
    ]


def test_wrong_input_from_python_is_a_user_error(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "task": Plain,
        "launcher": "local",
        "train.steps": 3,
        "run.storage": str(tmp_path),
    }
    for mistake, message in (
        ({"task_args": {"data": object()}}, r"task_args\.data is"),
        ({"strategy": "fdsp"}, "did you mean fsdp"),
        ({"train": {"stepz": 1}}, "train.stepz"),
        ({"parallel.dp_shard": 3}, "dp_shard"),
        ({"budget": 1.0}, "costs are not counted"),
    ):
        with pytest.raises(UserError, match=message):
            train(**common, **{"run.name": "x"}, **mistake)


@pytest.mark.slow
def test_an_installed_trireme_works_from_any_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    empty = tmp_path / "empty"
    folders = ("app", "strategies", "cluster", "experiments")
    for name in folders:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    install += ["--target", str(target), str(source)]
    subprocess.run(install, check=True, capture_output=True)
    installed = {path.name for path in target.iterdir() if "dist-info" not in path.name}
    assert installed == {"bin", "trireme", "trireme.pth"}
    assert {path.name for path in (target / "trireme" / "packages").iterdir()} == {*folders}
    typed = [target / "trireme", *(target / "trireme" / "packages" / name for name in folders)]
    assert (
        all((folder / "py.typed").exists() for folder in typed)
        and (typed[0] / "__init__.pyi").exists()
    )

    def python(code: str, files: dict[str, str]) -> Any:
        for name, content in files.items():
            (empty / name).parent.mkdir(parents=True, exist_ok=True)
            (empty / name).write_text(content)
        env = environment(PYTHONPATH=str(target))
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)

    code = "import trireme, app; print(trireme.__file__, app.__file__, trireme.train.__module__)"
    done = python(code, {"other": ""})
    trireme_file, app_file, module = done.stdout.split()
    assert trireme_file == str(target / "trireme" / "__init__.py")
    assert app_file.startswith(str(target))
    assert module == "app.api"
    files = {"app/__init__.py": "", "app/mine.py": "WIDTH = 3", "app/api.py": "raise ImportError"}
    ended = python(
        "import app.mine, trireme; print(app.mine.WIDTH, trireme.train.__module__)", files
    )
    assert ended.stdout.split() == ["3", "app.api"], ended.stderr
    shutil.rmtree(empty / "app")
    code = "import trireme, app.errors; from app import serve; print(serve)"
    ended = python(code, {"app.py": "serve = 7"})
    assert ended.stdout.split() == ["7"], ended.stderr
    (target / "app").mkdir()  # a package of another distribution in the same site-packages
    (target / "app" / "__init__.py").write_text("WHOSE = 'theirs'")
    (empty / "app.py").unlink()
    ended = python("import app; print(app.WHOSE); import trireme, app.errors; print(app.WHOSE)", {})
    assert ended.stdout.split() == ["theirs", "theirs"], ended.stderr
    code = "import site; site.addsitedir(PATH); import app.errors; print(app.errors.__file__)"
    shutil.rmtree(target / "app")
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code.replace("PATH", repr(str(target)))]
    ended_alone = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)
    assert ended_alone.stdout.startswith(str(target / "trireme" / "packages")), ended_alone.stderr


def test_a_run_uses_its_own_task_and_not_another_of_the_same_name(tmp_path: Path) -> None:
    assert name_of("tabular") == "tabular" and name_of(Plain) == "tests.tasks:Plain"
    with pytest.raises(UserError, match="must be a subclass"):
        name_of(dict)  # type: ignore[arg-type]
    storages = [Storage(tmp_path / name) for name in ("first", "second")]
    for width, storage in zip((3, 5), storages):
        write_task_file(name_of(Plain(width=width)), storage)
    for width, storage in zip((3, 5), storages):
        read_task_file("python:Plain", storage)
        assert load_task("python:Plain", {}).width == width  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="takes no task_args"):
        load_task("python:Plain", {"width": 4})
    with pytest.raises(UserError, match="does not hold it"):
        read_task_file("python:Plain", Storage(tmp_path))


@pytest.mark.slow
def test_the_notebook_runs_and_shows_its_curve(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    pytest.importorskip("nbconvert", reason="of the dev extra")
    env = ray_environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'app'}", "JUPYTER_PLATFORM_DIRS": "1"}
    # A notebook runs in the folder that it is in.
    notebook = shutil.copy(ROOT / "experiments" / "notebook.ipynb", tmp_path)
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to=notebook"]
    command += ["--output=executed.ipynb", str(notebook)]
    captured: Any = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=300, **captured)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    outputs = json.dumps([cell.get("outputs") for cell in cells])
    assert "image/png" in outputs
    assert "finished, step 60 of 60" in outputs
    assert "of training in" in outputs
