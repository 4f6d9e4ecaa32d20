"""`python -m experiments.benchmarks NAME [OPTION …]` runs a benchmark; without a name it lists them."""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from pathlib import Path

NAMES = ("step", "start", "pipeline", "checkpoint", "tracking", "saving", "gpu", "peers", "chaos")
MODULE: dict[str, str] = {}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="\n\n")
        for name in NAMES:
            print(f"  {name:<18}{_about(name)}")
        return
    name = sys.argv.pop(1)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        sys.exit(f"there is no benchmark {name!r}: {hint}")
    runpy.run_module(f"experiments.benchmarks.{MODULE.get(name, name)}", run_name="__main__", alter_sys=True)


def _about(name: str) -> str:
    """The first line of the module's docstring, read without importing it."""
    here = Path(__file__).parent
    file = here / name / "__main__.py" if (here / name).is_dir() else here / f"{MODULE.get(name, name)}.py"
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return text.split("\n", 1)[0].rsplit("`: ", 1)[-1]


if __name__ == "__main__":
    main()
