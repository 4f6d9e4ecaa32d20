"""`make test-versions`: the main tests with the oldest and newest supported releases of packages.

Both have a virtual environment under .venv-versions, which is kept. The printed table is *Works
with* of the README. Other Pythons on the PATH follow, with the versions of constraints.txt.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from app.run.versions import TESTED

ROOT = Path(__file__).parents[1]
RESUMED = "tests/app/launchers/test_resume.py::test_"
ROOMS = {
    "parity of every strategy": "tests/strategies/test_parity.py tests/strategies/test_tensor.py",
    "every schedule of the pipeline": "tests/strategies/pipeline",
    "pipeline in Ray; failures": "tests/app/launchers/test_launchers.py",
    "one process in 16 bits, Ray Train and torchrun, killed and resumed": (
        f"-m '' {RESUMED}a_killed_single_process_continues_in_the_same_mlflow_run "
        f"{RESUMED}a_worker_is_killed_then_the_command_and_run_again[train] "
        f"{RESUMED}torchrun_starts_again_by_itself[hangs] "
        f"{RESUMED}one_command_at_a_time_trains_a_run_and_a_finished_run_may_go_on"
    ),
    "checkpoints": "tests/app/checkpoint",
    "tracking in MLflow": "tests/app/tracking",
    "names that are not documented": (
        "tests/strategies/test_torch_internals.py tests/cluster/test_ray_internals.py"
    ),
}
"""Arguments of pytest by their line of the table."""


OTHER_PYTHONS = ("3.12", "3.13")


def other_pythons() -> dict[str, str]:
    """The interpreters of `OTHER_PYTHONS` that are on the PATH and run, by their versions."""
    interpreters = {}
    for release in OTHER_PYTHONS:
        program = f"python{release}"
        try:
            command = [program, "--version"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            # It is not installed, or is pyenv's stand-in for a version that is not selected.
            print(f"\nPython {release}: there is no {program} on the PATH that runs", flush=True)
            continue
        if done.stdout.startswith(f"Python {release}."):
            interpreters[release] = program
    return interpreters


def pinned_environment(release: str, interpreter: str) -> Path:
    """The Python of an environment with the tested versions.

    Args:
        release: The release of Python, such as 3.12.
        interpreter: The program that makes the environment.
    """
    folder = ROOT / ".venv-versions" / f"python{release}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    install(python, ["--constraint", str(ROOT / "constraints.txt")])
    return python


def install(python: Path, pins: list[str]) -> None:
    """Installs Trireme with these pins into the environment of a Python."""
    command = [str(python), "-m", "pip", "install", "-qq", "--no-compile"]
    command += ["--disable-pip-version-check", *pins, "--editable", f"{ROOT}[examples,dev]"]
    subprocess.run(command, check=True)


def environment(name: str, release: int) -> Path:
    """The Python of an environment with the oldest (`release` 0) or newest (1) packages."""
    folder = ROOT / ".venv-versions" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pins = [f"{package}=={ends[release]}.*" for package, ends in TESTED.items()]
    # aiobotocore takes few releases of botocore, which pip would search without end.
    constraints = (ROOT / "constraints.txt").read_text()
    pins += re.findall(r"^(?:aiobotocore|boto3|botocore)==.*$", constraints, re.M)
    install(python, pins)
    return python


def installed(python: Path) -> str:
    """The versions of the tested packages in the environment of a Python."""
    code = "from importlib.metadata import version\n"
    code += f"print(', '.join(f'{{name}} {{version(name)}}' for name in {[*TESTED]}))"
    command = [str(python), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def tested(python: Path, room: str) -> tuple[bool, str]:
    """Whether a room's tests pass there, and the counts."""
    start = time.monotonic()
    env = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    command += shlex.split(room)  # a later -m replaces this one
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    last_line = (done.stdout.splitlines() or [""])[-1]
    counts = re.findall(r"\d+ (?:passed|failed|error|skipped)\w*", last_line)
    summary = f"{', '.join(counts) or 'nothing ran'} in {time.monotonic() - start:.0f} s"
    return not done.returncode, summary


def main() -> None:
    passed = True
    for release, name in enumerate(("oldest", "newest")):
        passed = all_tested(name, environment(name, release)) and passed
    for version, interpreter in other_pythons().items():
        passed = (
            all_tested(f"Python {version}", pinned_environment(version, interpreter)) and passed
        )
    sys.exit(not passed)


def all_tested(name: str, python: Path) -> bool:
    """Prints the part of the table for one environment, and returns whether all tests pass."""
    print(f"\n{name}: {installed(python)}", flush=True)
    passed = True
    for description, room in ROOMS.items():
        passes, summary = tested(python, room)
        passed = passed and passes
        print(f"  {description:55} {summary}", flush=True)
    return passed


if __name__ == "__main__":
    main()
