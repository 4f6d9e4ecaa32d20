"""What is installed where: pyproject.toml has all the rest.

Trireme's packages are called app, strategies, cluster and experiments, as other people's may be. In
site-packages they lie in a folder of their own, trireme/packages, so that no files of another
distribution come to lie among theirs. A .pth file puts that folder last on sys.path; in Trireme's
own processes it comes first (app/names.py).
"""

import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

NAMES = ("app", "strategies", "cluster", "experiments")
DATA = {
    "app": ["py.typed"],
    "strategies": ["py.typed"],
    "experiments": ["*.yaml", "report/*.html", "py.typed"],
    "cluster": ["*.yaml", "*.json", "schemas/*", "py.typed"],
    "app.planner": ["*.yaml"],
}
EDITABLE = "editable_wheel" in sys.argv
"""Whether packages stay where they are and Python only learns of them: an editable install."""
PREFIX = "" if EDITABLE else "trireme.packages."


class BuildWithPath(build_py):
    """Adds the .pth file, https://docs.python.org/3/library/site.html"""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "trireme.pth").write_text("trireme/packages\n")


def packages() -> list[str]:
    """All folders with code, but `trireme` and what only a checkout needs."""
    include = [pattern for name in NAMES for pattern in (name, f"{name}.*")]
    exclude = ["app.trireme*", "experiments.benchmarks*", "experiments.guide*", "*.pictures"]
    return find_namespace_packages(include=include, exclude=exclude)


setup(
    packages=["trireme", *(f"{PREFIX}{name}" for name in packages())],
    package_dir={"trireme": "app/trireme", **{f"{PREFIX}{name}": name for name in NAMES}},
    package_data={
        "trireme": ["py.typed", "*.pyi"],
        **{f"{PREFIX}{name}": files for name, files in DATA.items()},
    },
    include_package_data=False,
    cmdclass={"build_py": BuildWithPath},
)
