"""Code of a task that changes while its run goes on: the files, definitions and step are told."""

import contextlib
import importlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import pytest

from app.tasks import load_task
from app.tasks.sources import change_note, changes, length_note, task_sources
from tests.running import invoke

TASK = """
import json
import torch
from torch import nn
from torch.utils.data import TensorDataset
from app.tasks import Task
from parts.nets import build
{extra}

class Mine(Task):
    def build_model(self):
        return build()

    def train_data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        import lazily
        return {factor} * nn.functional.mse_loss(model(batch[0]), batch[1]) * lazily.ONE
"""
NETS = """from .layers import layer
from torch import nn

build = lambda: nn.Sequential(layer())
"""
FILES = {
    "my_task.py": TASK.format(factor=1, extra=""),
    "parts/__init__.py": "",
    "parts/nets.py": NETS,
    "parts/layers.py": "from torch import nn\n\ndef layer():\n    return nn.Linear(4, 1)\n",
    "lazily.py": "ONE = 1.0\n",
    "unused.py": "TWO = 2.0\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a task in several files."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@contextlib.contextmanager
def begun_in(folder: Path) -> Iterator[None]:
    """As if this process had begun in the folder: its modules are imported anew."""
    path = [str(folder), *sys.path]
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "path", path),
        mock.patch.object(sys, "dont_write_bytecode", True),
    ):
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(f"{folder}/"):
                    del sys.modules[name]


def digests(folder: Path) -> dict[str, str]:
    """The digests of the task's sources, as a process that begins in the folder finds them."""
    with begun_in(folder):
        return task_sources(load_task("my_task:Mine", {}))


def test_a_tasks_own_files_are_digested_and_no_others(folder: Path, tmp_path: Path) -> None:
    before = digests(folder)
    assert list(before) == [
        "lazily.py",
        "my_task.py",
        "parts/__init__.py",
        "parts/layers.py",
        "parts/nets.py",
    ]
    (folder / "unused.py").write_text("TWO = 3.0\n")
    assert digests(folder) == before, "a file that the task does not import does not count"
    layers = FILES["parts/layers.py"].replace("Linear(4, 1)", "Linear(4, 1, False)")
    (folder / "parts" / "layers.py").write_text(layers)
    (folder / "my_task.py").write_text(TASK.format(factor=10, extra="import unused"))
    (folder / "lazily.py").write_text("ONE = 1.0\n".replace("\n", "\r\n"))
    after = digests(folder)
    assert changes(before, after) == ["my_task.py", "parts/layers.py", "unused.py (new)"]
    assert changes(after, before) == ["my_task.py", "parts/layers.py", "unused.py (no longer used)"]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in FILES:
        (moved / name).parent.mkdir(exist_ok=True)
        (moved / name).write_bytes((folder / name).read_bytes())
    assert digests(moved) == after, "in another folder, the files have the same names"


def test_installed_code_and_built_in_tasks_are_not_digested(folder: Path) -> None:
    assert task_sources(load_task("tabular", {"data": "diamonds", "target": "price"})) == {}
    installed = folder / "site-packages"
    installed.mkdir()
    (folder / "parts").rename(installed / "parts")
    first_line = "import sys; sys.path.append('site-packages')\n"
    (folder / "my_task.py").write_text(first_line + FILES["my_task.py"])
    assert list(digests(folder)) == ["lazily.py", "my_task.py"]


NOTEBOOK = """
import math
from torch import nn
from app.tasks import Task

FACTOR = 1.0

def helper(x):
    return FACTOR * math.exp(x)

class Net(nn.Module):
    def forward(self, x):
        return [helper(v) for v in x]

class Mine(Task):
    width = 8

    def __init__(self, depth=2):
        self.depth = depth

    def build_model(self):
        return Net()

def unused():
    return 3
"""


def in_a_notebook(text: str) -> Any:
    """The task class that cells of a notebook define in `__main__`."""
    cells: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), cells)
    return cells["Mine"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("math.exp(x)", "10 * math.exp(x)", ["__main__.helper"]),
        ("FACTOR = 1.0", "FACTOR = 10.0", ["__main__.helper"]),
        ("width = 8", "width = 9", ["__main__.Mine"]),
        ("helper(v) for", "helper(v) + 1 for", ["__main__.Net"]),
        ("depth=2", "depth=3", ["__main__.Mine", "__main__.Mine.__dict__"]),
        ("return 3", "return 4", []),
        ("import math\n", "import math\n\n\n# another line\n", []),
    ],
)
def test_definitions_of_a_notebook_are_digested_with_what_they_use(
    old: str, new: str, expected: list[str]
) -> None:
    before = task_sources(in_a_notebook(NOTEBOOK)())
    after = task_sources(in_a_notebook(NOTEBOOK.replace(old, new))())
    assert set(before) == {
        "__main__.Mine",
        "__main__.Mine.__dict__",
        "__main__.Net",
        "__main__.helper",
    }
    assert changes(before, after) == expected


def test_a_pickled_task_keeps_its_digest() -> None:
    task_class = in_a_notebook(NOTEBOOK)
    unpickled = cloudpickle.loads(cloudpickle.dumps(task_class))
    assert task_sources(unpickled()) == task_sources(task_class())


def test_the_note_names_files_and_step_and_is_silent_where_nothing_is_known() -> None:
    note = change_note({"a.py": "1", "b.py": "2"}, {"a.py": "3", "b.py": "2"}, 1200)
    assert note.startswith("the task's code has changed since step 1,200: a.py; ")
    assert "b.py" not in note
    assert change_note({"a.py": "1"}, {"a.py": "1"}, 5) == ""
    assert change_note(None, {"a.py": "1"}, 5) == ""


def test_data_of_another_length_is_noted_in_a_sentence() -> None:
    note = length_note(1200, 1300, 15)
    assert note.startswith("the training data has 1,300 samples, and had 1,200 until step 15: the")
    for before, now in ((1200, 1200), (None, 1200), (1200, None)):
        assert length_note(before, now, 15) == ""


def train(folder: Path, *overrides: str) -> str:
    """Trains the task, and returns the output."""
    arguments = [
        "task=my_task:Mine",
        "launcher=local",
        "run.name=changing",
        "train.global_batch_size=8",
        "tracking.log_model=false",
        f"run.storage={folder}/runs",
        *overrides,
    ]
    with begun_in(folder):
        return invoke("train", *arguments).output


def test_a_run_resumed_with_other_code_says_so_and_mlflow_has_both(folder: Path) -> None:
    assert "code has changed" not in train(folder, "train.steps=4")
    manifest = json.loads((folder / "runs/changing/run.json").read_text())
    old = manifest["sources"]["my_task.py"]
    (folder / "my_task.py").write_text(TASK.format(factor=10, extra=""))
    output = train(folder, "train.steps=8")
    assert "note: the task's code has changed since step 4: my_task.py; " in output
    assert "code has changed" not in train(folder, "train.steps=12"), "it is said only once"
    manifest = json.loads((folder / "runs/changing/run.json").read_text())
    new = manifest["sources"]["my_task.py"]
    from mlflow.tracking import MlflowClient

    data = (
        MlflowClient(f"sqlite:///{folder}/runs/mlflow.db").get_run(manifest["mlflow_run_id"]).data
    )
    assert new != old
    assert data.params["code.my_task.py"] == old
    assert data.tags["trireme.param.code.my_task.py"] == new
