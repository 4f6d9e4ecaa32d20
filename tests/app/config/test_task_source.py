"""What is wrong with a person's task is told from its source, as importing it would tell it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from app.config.task_source import refuse_wrong_task
from app.errors import MissingData, UserError
from app.tasks import check_task

pytestmark = pytest.mark.pure

FILES = {
    "first_task.py": """from trireme import Task

CLASSES = 10


def helper():
    return 1


class Forgot:
    def build_model(self):
        return 1


class Plain(Task):
    pass


class Mine(Task):
    def __init__(self, width: int = 8, *, rates: list[float] = [0.1], name: "str | None" = None,
                 classes: int = CLASSES, path=None):
        self.width = width


class Needs(Task):
    def __init__(self, data, classes):
        self.data = data


class Any_(Task):
    def __init__(self, **options):
        self.options = options


class Child(Mine):
    pass
""",
    "wrong_syntax.py": "from trireme import Task\n\nclass Mine(Task)\n    pass\n",
    "wrong_import.py": "import os\nimport not_there.at_all\nfrom trireme import Task\n",
    "optional_import.py": """try:
    import not_there
except ImportError:
    not_there = None
from trireme import Task


class Mine(Task):
    pass
""",
    "makes_names.py": """from trireme import Task

globals()["Mine"] = type("Mine", (Task,), {})


def __getattr__(name):
    if name == "Late":
        return Mine
    raise AttributeError(name)
""",
    "star.py": "from first_task import *\n",
    "changes_path.py": """import sys

sys.path.insert(0, "elsewhere")
import only_elsewhere
from trireme import Task


class Mine(Task):
    pass
""",
    "elsewhere/only_elsewhere.py": "",
    "shop/__init__.py": "",
    "shop/tasks.py": "from trireme import Task\n\n\nclass Basket(Task):\n    pass\n",
}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("first_task:Mien", {}),
    ("first_task:Unlike", {}),
    ("first_task:helper", {}),
    ("first_task:Forgot", {}),
    ("first_task:Mine", {"widht": 3}),
    ("first_task:Mine", {"width": "wide"}),
    ("first_task:Mine", {"width": 1.5}),
    ("first_task:Mine", {"rates": 0.3}),
    ("first_task:Mine", {"name": ["a"]}),
    ("first_task:Plain", {"width": 3}),
    ("first_task:Needs", {"data": "x"}),
    ("first_task:Needs", {"classes": 3}),
    ("wrong_syntax:Mine", {}),
    ("wrong_import:Mine", {}),
    ("not_a_module:Mine", {}),
    ("shop.task:Basket", {}),
    ("shop.tasks:Baskte", {}),
    ("shop.tasks.more:Basket", {}),
    ("first_task.py:Mine", {}),
    ("first_task", {}),
    ("first_task.Mine", {}),
    ("shop.tasks:", {}),
]
"""What is wrong, and is told without an import."""
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("first_task:Mine", {"width": 3, "rates": [1], "name": None, "classes": "any", "path": 1}),
    ("first_task:Any_", {"whatever": 1}),
    ("first_task:Child", {"width": 3}),
    ("optional_import:Mine", {}),
    ("makes_names:Mine", {}),
    ("makes_names:Late", {}),
    ("star:Mine", {"width": 3}),
    ("changes_path:Mine", {}),
    ("shop.tasks:Basket", {}),
]
"""What is right, or may be as far as the source shows."""


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def _sentence(error: UserError) -> str:
    """The sentence without the line of code below it, which only one of two ways may know."""
    return str(error).split("\n")[0]


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(("name", "task_args"), WRONG)
def test_the_source_says_what_the_import_would_say(name: str, task_args: dict[str, Any]) -> None:
    with pytest.raises(UserError) as from_source:
        refuse_wrong_task(name, task_args)
    assert name.partition(":")[0] not in sys.modules
    with pytest.raises(UserError) as from_import:
        check_task(name, task_args)
    assert _sentence(from_source.value) == _sentence(from_import.value)


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(("name", "task_args"), RIGHT)
def test_what_the_source_leaves_open_is_left_to_the_import(
    name: str, task_args: dict[str, Any]
) -> None:
    refuse_wrong_task(name, task_args)
    assert name.partition(":")[0] not in sys.modules
    if name != "first_task:Mine":  # `classes: int` with a default that only the import knows
        check_task(name, task_args)


@pytest.mark.usefixtures("_files")
def test_a_plan_needs_no_data() -> None:
    with pytest.raises(MissingData):
        refuse_wrong_task("first_task:Needs", {"classes": 3})
    refuse_wrong_task("first_task:Needs", {"classes": 3}, needs_data=False)
