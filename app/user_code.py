"""A person's own modules: found from the current folder, also in a package that has the name of one of Trireme's."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from app.errors import UserError

OWN = ("app", "strategies", "cluster", "experiments")


def user_module(name: str) -> ModuleType:
    """The module called `name`; the current folder counts, as `python -m app` has it and a console script does not.

    Raises UserError where a module of Trireme's hides the person's; and what importing it raises.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    for own in (own for own in OWN if Path(here, own).is_dir()):
        path = importlib.import_module(own).__path__  # of several folders; Trireme's own comes first
        if f"{here}/{own}" not in path:
            path.append(f"{here}/{own}")
    module = importlib.import_module(name)
    top, *rest = name.split(".")
    if top not in OWN:
        return module
    file = Path(here, *name.split("."))
    wanted = [path for path in (file.with_suffix(".py"), file / "__init__.py") if path.is_file()]
    if rest and wanted and not any(path.samefile(module.__file__ or here) for path in wanted):
        raise UserError(f"{wanted[0]} is hidden by Trireme's own module {name}: give it another name")
    return module
