"""`import trireme`: from a script, a thread and a notebook, on a Ray of its own and on one that is there already."""

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
here = dict(task=Sums, task_args={"width": 8}, launcher="local", run={"name": "main"})
runs.append(trireme.train(**here, **common))
again = trireme.train(**here, **common)
found = [run.metrics()["train/loss"].dropna().to_dict() for run in runs]
outputs = [run.model()(torch.ones(1, 4)).item() for run in runs]
print(json.dumps({"curves": found, "outputs": outputs, "connected": ray.is_initialized(), "again": again.state.state}))
"""


@pytest.mark.slow
def test_a_scripts_own_task_trains_on_a_ray_that_stays(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{SCRIPT}")
    seed([f"run.storage={tmp_path}/runs"])
    ended = finish(start([], env=ray_environment, program=[sys.executable, str(script)])).expect()
    said = json.loads(ended.out.splitlines()[-1])
    object_in_thread, own_class = said["curves"]
    assert set(own_class) == {"1", "4", "8", "12"} and said["again"] == "finished"
    assert list(own_class.values()) == pytest.approx(list(object_in_thread.values()), rel=1e-5)
    assert said["outputs"][0] == pytest.approx(said["outputs"][1], rel=1e-4)
    assert said["connected"], "the script's own connection stays"
    run = load_run(tmp_path / "runs" / "main")
    assert run.config.task == "python:Sums" and run.model()[0].weight.shape == (8, 4), "in another process, too"
    logged = mlflow_run(tmp_path / "runs", "main")
    assert logged.info.run_id == run.mlflow_run_id and logged.info.status == "FINISHED"
    assert run.summary["step"] == 12 and run.checkpoint().startswith(run.folder)


def test_values_of_python_are_the_command_lines_and_wrong_input_is_one_kind_of_error(tmp_path: Path) -> None:
    keys = {"train": {"steps": 5, "clip_norm": None}, "run.name": "a b", "optimizer": {"lr": np.float32(0.5)}}
    assert _overrides(keys) == ["train.steps=5", "train.clip_norm=null", 'run.name="a b"', "optimizer.lr=0.5"]
    assert _overrides({"task_args": {"data": Path("x"), "empty": {}}}) == ['task_args.data="x"', "task_args.empty={}"]
    known: dict[str, Any] = {"task": Plain, "launcher": "local", "train.steps": 3, "run.storage": str(tmp_path)}
    for wrong, said in (
        ({"task_args": {"data": object()}}, r"task_args\.data is"),
        ({"strategy": "fdsp"}, "did you mean fsdp"),
        ({"train": {"stepz": 1}}, "train.stepz"),
        ({"parallel.dp_shard": 3}, "dp_shard"),
        ({"budget": 1.0}, "costs are not counted"),
    ):
        with pytest.raises(UserError, match=said):
            train(**known, **{"run.name": "x"}, **wrong)


@pytest.mark.slow
def test_an_installed_trireme_works_from_any_folder(tmp_path: Path) -> None:
    source, target, empty = tmp_path / "source", tmp_path / "target", tmp_path / "empty"
    folders = ("app", "strategies", "cluster", "experiments")
    for name in folders:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*install, str(target), str(source)], check=True, capture_output=True)
    assert {path.name for path in target.iterdir() if "dist-info" not in path.name} == {"bin", "trireme", "trireme.pth"}
    assert {path.name for path in (target / "trireme" / "packages").iterdir()} == {*folders}
    typed = [target / "trireme", *(target / "trireme" / "packages" / name for name in folders)]
    assert all((folder / "py.typed").exists() for folder in typed) and (typed[0] / "__init__.pyi").exists()

    def python(code: str, files: dict[str, str]) -> Any:
        for name, content in files.items():
            (empty / name).parent.mkdir(parents=True, exist_ok=True)
            (empty / name).write_text(content)
        env = environment(PYTHONPATH=str(target))
        return subprocess.run([sys.executable, "-c", code], cwd=empty, env=env, capture_output=True, text=True)

    done = python("import trireme, app; print(trireme.__file__, app.__file__, trireme.train.__module__)", {"other": ""})
    ours, theirs, module = done.stdout.split()
    assert ours == str(target / "trireme" / "__init__.py") and theirs.startswith(str(target)) and module == "app.api"
    own = {"app/__init__.py": "", "app/mine.py": "WIDTH = 3", "app/api.py": "raise ImportError"}
    said = python("import app.mine, trireme; print(app.mine.WIDTH, trireme.train.__module__)", own)
    assert said.stdout.split() == ["3", "app.api"], said.stderr
    shutil.rmtree(empty / "app")
    said = python("import trireme, app.errors; from app import serve; print(serve)", {"app.py": "serve = 7"})
    assert said.stdout.split() == ["7"], said.stderr
    (target / "app").mkdir()  # another distribution's, in the same site-packages
    (target / "app" / "__init__.py").write_text("WHOSE = 'theirs'")
    (empty / "app.py").unlink()
    said = python("import app; print(app.WHOSE); import trireme, app.errors; print(app.WHOSE)", {})
    assert said.stdout.split() == ["theirs", "theirs"], said.stderr
    listed = "import site; site.addsitedir(PATH); import app.errors; print(app.errors.__file__)"
    shutil.rmtree(target / "app")
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", listed.replace("PATH", repr(str(target)))]
    alone = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)
    assert alone.stdout.startswith(str(target / "trireme" / "packages")), alone.stderr


def test_a_runs_own_task_counts_and_not_another_of_its_name(tmp_path: Path) -> None:
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
def test_the_notebook_runs_and_shows_its_curve(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    pytest.importorskip("nbconvert", reason="of the dev extra")
    env = ray_environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'app'}", "JUPYTER_PLATFORM_DIRS": "1"}
    program = [sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", "--output", "executed.ipynb"]
    here = shutil.copy(ROOT / "experiments" / "notebook.ipynb", tmp_path)  # a notebook runs in its own folder
    done = subprocess.run([*program, str(here)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    outputs = json.dumps([cell.get("outputs") for cell in cells])
    assert "image/png" in outputs and "finished, step 60 of 60" in outputs and "of training in" in outputs
