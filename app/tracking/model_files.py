"""What goes into a logged model: the rebuilt module, the sources it needs, the versions of what is installed."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Rebuilt:
    """A trained module on the CPU, an example of its input, and its output on that, both as NumPy arrays."""

    module: Any
    inputs: Any
    outputs: Any


def rebuild(recipe: dict[str, Any]) -> Rebuilt:
    """Make the task's model, and put the trained weights into it. Raises whatever the task's own code raises."""
    import torch

    from app.tasks import load_task

    task = load_task(recipe["task"], dict(recipe.get("task_args") or {}))
    module = task.build_model()
    module.load_state_dict(torch.load(recipe["weights"], map_location="cpu", weights_only=True))
    module.eval()
    example = task.example_input()
    with torch.no_grad():
        outputs = module(*example)
    arrays = [_array(value) for value in example]
    inputs = arrays[0] if len(arrays) == 1 else {f"input_{index}": array for index, array in enumerate(arrays)}
    return Rebuilt(module, inputs, _output(outputs))


def _array(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    return value


def _output(value: Any) -> Any:
    """A model's output for the signature: the tensor, or the first of several."""
    if isinstance(value, dict):
        return {key: _array(item) for key, item in value.items() if hasattr(item, "detach")}
    return _array(value[0]) if isinstance(value, (tuple, list)) else _array(value)


def requirements(names: set[str]) -> list[str]:
    """Pins of the installed versions of these top-level modules' packages; without the local part of a version
    (`+cpu`), which no index has."""
    providers = packages_distributions()  # `mlflow` has two: mlflow and mlflow-tracing
    packages = {name if name in providers[name] else providers[name][0] for name in names & set(providers)}
    return [f"{package}=={version(package).split('+')[0]}" for package in sorted(packages)]


def origins(module: Any, task: str) -> tuple[set[str], set[str]]:
    """Names of the top-level modules that the model's classes and its task come from: (ours to copy, installed)."""
    names = {kind.__module__.split(".")[0] for part in module.modules() for kind in type(part).__mro__}
    if ":" in task:
        names.add(task.split(":")[0].split(".")[0])
    names -= {"__main__", "app", *sys.stdlib_module_names}
    installed = {
        name for name in names if (path := _source(name)) and {"site-packages", "dist-packages"} & set(path.parts)
    }
    return (names - installed) | {"app"}, installed | {"mlflow", "torch", "numpy"}


def sources(names: set[str], folder: Path) -> list[str]:
    """Copies of these top-level packages and modules, .py files only; returns what to give as `code_paths`.

    Of `app`, what rebuilding the model and calling it once has imported, and all models.
    """
    copies = []
    for name in sorted(names):
        path = _source(name)
        if path is None:
            continue
        target = folder / path.name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if name != "app" or _of_a_model(file, path):
                copy = target / file.relative_to(path) if path.is_dir() else target
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        copies.append(str(target))
    return copies


def _of_a_model(file: Path, app: Path) -> bool:
    inside = file.relative_to(app)
    name = ".".join(("app", *inside.with_suffix("").parts)).removesuffix(".__init__")
    return inside.parts[0] == "models" or (name in sys.modules and inside.parts[0] != "tracking")


def _source(name: str) -> Path | None:
    """The folder or file of an imported top-level module."""
    module = sys.modules.get(name)
    if file := getattr(module, "__file__", None):
        path = Path(file).resolve()
        return path.parent if path.name == "__init__.py" else path
    places = list(getattr(module, "__path__", []))  # a package without __init__.py
    return Path(places[0]).resolve() if places else None
