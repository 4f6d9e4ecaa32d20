"""What an editor, a notebook and a type checker know of `import trireme`."""

import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jedi
import pytest
import trireme
from mypy import api as mypy

from app import api
from app.api import Run
from app.config.io import documentation
from app.trireme import stub
from tests.running import ROOT

SCRIPT = """import trireme

run = trireme.train(
    "a.yaml", "train.steps=3", workers=2, strategy="fsdp", train={"steps": 200, "clip_norm": None}
)
trireme.scale("a.yaml", workers=[1, 2], optimizer={"lr": 1e-3}, quiet=True)
trireme.sweep("a.yaml", trials=3, task_args={"width": 8})
"""
WRONG = """trireme.train("a.yaml", stratgy="fsdp")
trireme.train("a.yaml", train={"stepz": 200})
trireme.train("a.yaml", optimizer={"lr": "high"})
trireme.plan("a.yaml", gpus="four")
trireme.sweep("a.yaml", trials="many")
"""
LOOKED_AT = "[mypy]\n[mypy-app.*]\nfollow_imports = skip\n"
"""Without the types of results, for which mypy would read all of Trireme and of torch."""


def in_editor(source: str) -> jedi.Script:
    """A script that imports this checkout, as an editor sees it."""
    project = jedi.Project(ROOT, sys_path=[str(ROOT / "app"), str(ROOT), *sys.path])
    return jedi.Script(f"import trireme\n{source}", path=ROOT / "script.py", project=project)


def test_what_editors_read_is_up_to_date() -> None:
    assert stub.FILE.read_text() == stub.text(), "run python -m app.trireme.stub"


@pytest.mark.parametrize("verb", ["train", "plan", "scale", "sweep"])
def test_an_editor_and_a_notebook_complete_and_explain_keys(verb: str) -> None:
    call = f"trireme.{verb}('a.yaml', opt"
    for script in (in_editor(call), jedi.Interpreter(call, [{"trireme": trireme}])):
        assert "optimizer=" in [completion.name_with_symbols for completion in script.complete()]
    (signature,) = in_editor(f"trireme.{verb}(").get_signatures()
    docstring = " ".join(signature.docstring().split())
    # A sweep's budget is not that of a run (experiments/sweep/budget.py).
    for key in ("task_args",) if verb == "sweep" else ("budget", "task_args"):
        assert documentation()[key] in docstring


def test_an_editor_completes_the_verbs_and_what_a_run_has() -> None:
    def completed(source: str) -> set[str]:
        return {completion.name for completion in in_editor(source).complete()}

    assert set(trireme.__all__) <= completed("trireme.")
    assert {"export", "generate", "report", "metrics", "model"} <= completed(
        "trireme.train('a.yaml')."
    )
    assert {name for name in dir(Run) if not name.startswith("_")} <= completed(
        "trireme.load_run('a')."
    )


@pytest.mark.parametrize("verb", [api.train, api.fork, api.plan, api.sweep, api.scale])
def test_help_in_a_notebook_shows_and_explains_the_keys(verb: Callable[..., Any]) -> None:
    parameters = inspect.signature(verb).parameters
    assert parameters["launcher"].default == "auto"
    assert parameters["task"].annotation == "str | type[Task] | Task"
    text = inspect.getdoc(verb) or ""
    for key in parameters:
        assert f"\n    {key}: " in text, key
    assert "global_batch_size" in text and "keys: " not in text


def checked(folder: Path, script: str, *options: str) -> list[str]:
    """The errors that mypy finds in a script that imports an installed Trireme."""
    (folder / "script.py").write_text(script)
    report, problem, _ = mypy.run(
        [str(folder / "script.py"), "--cache-dir", str(folder / "cache"), *options]
    )
    assert not problem
    return [line for line in report.splitlines() if ": error: " in line]


def test_a_type_checker_finds_misspelt_keys_and_wrong_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib" / "trireme").mkdir(parents=True)
    shutil.copy(stub.FILE, tmp_path / "lib" / "trireme")
    (tmp_path / "mypy.ini").write_text(LOOKED_AT)
    monkeypatch.setenv("MYPYPATH", str(tmp_path / "lib"))
    errors = checked(
        tmp_path,
        SCRIPT + WRONG,
        "--config-file",
        str(tmp_path / "mypy.ini"),
        "--ignore-missing-imports",
    )
    lines = {int(error.partition("script.py:")[2].partition(":")[0]) for error in errors}
    first = SCRIPT.count("\n") + 1
    assert lines == set(range(first, first + WRONG.count("\n"))), errors


@pytest.mark.slow
def test_a_type_checker_knows_what_a_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the whole checkout, which takes mypy a minute."""
    monkeypatch.setenv("MYPYPATH", f"{ROOT / 'app'}:{ROOT}")
    script = f"{SCRIPT}run.export('torch')\nrun.generate('a').upper()\nrun.exprot()\n"
    options = ["--ignore-missing-imports", "--explicit-package-bases", "--follow-imports", "silent"]
    (error,) = checked(tmp_path, script, *options)
    assert 'has no attribute "exprot"' in error
