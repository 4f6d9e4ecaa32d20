"""`make test-versions`: what matters most, with the oldest and the newest releases that Trireme says it works with.

Each end has a virtual environment of its own under .venv-versions, kept for the next time. The table that it prints is
the README's *Works with*. Other Pythons that are on the PATH follow, each with the versions of constraints.txt.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from app.run.versions import TESTED

ROOT = Path(__file__).parents[1]
ROOMS = {
    "parity of every strategy": "tests/strategies/test_parity.py tests/strategies/test_tensor.py",
    "every schedule of the pipeline": "tests/strategies/pipeline",
    "pipeline in Ray; failures": "tests/app/launchers/test_launchers.py",
    "one process in 16 bits, Ray Train and torchrun, killed and resumed": "tests/app/launchers/test_resume.py",
    "checkpoints": "tests/app/checkpoint",
    "tracking in MLflow": "tests/app/tracking",
    "names that are not documented": "tests/strategies/test_torch_internals.py tests/cluster/test_ray_internals.py",
}


OTHER_PYTHONS = ("3.12", "3.13")


def other_pythons() -> dict[str, str]:
    """The interpreters of `OTHER_PYTHONS` that are on the PATH and run, by their versions."""
    interpreters = {}
    for release in OTHER_PYTHONS:
        program = f"python{release}"
        try:
            done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # not there, or pyenv's stand-in for one that is not chosen
            print(f"\nPython {release}: there is no {program} on the PATH that runs", flush=True)
            continue
        if done.stdout.startswith(f"Python {release}."):
            interpreters[release] = program
    return interpreters


def pinned_environment(release: str, interpreter: str) -> Path:
    """Python of an environment with the tested versions.

    Args:
        release: Of Python, such as 3.12.
        interpreter: The program to make the environment with.
    """
    folder = ROOT / ".venv-versions" / f"python{release}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*install, *pins, "--editable", f"{ROOT}[examples,dev]"], check=True)
    return python


def environment(name: str, release: int) -> Path:
    """Python of the environment. release: 0 for the oldest of each package, 1 for the newest."""
    folder = ROOT / ".venv-versions" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pins = [f"{package}=={ends[release]}.*" for package, ends in TESTED.items()]
    # aiobotocore takes few releases of botocore, and pip would look for them for ever.
    pins += re.findall(r"^(?:aiobotocore|boto3|botocore)==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    install = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*install, "--editable", f"{ROOT}[examples,dev]", *pins], check=True)
    return python


def installed(python: Path) -> str:
    code = f"from importlib.metadata import version\nprint(', '.join(f'{{n}} {{version(n)}}' for n in {[*TESTED]}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def tested(python: Path, room: str) -> tuple[bool, str]:
    """Whether a room's tests pass there, and the counts."""
    begun = time.monotonic()
    env = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *room.split()]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|error|skipped)\w*", (done.stdout.splitlines() or [""])[-1])
    return not done.returncode, f"{', '.join(counts) or 'nothing ran'} in {time.monotonic() - begun:.0f} s"


def main() -> None:
    passed = True
    for release, name in enumerate(("oldest", "newest")):
        passed = all_tested(name, environment(name, release)) and passed
    for version, interpreter in other_pythons().items():
        passed = all_tested(f"Python {version}", pinned_environment(version, interpreter)) and passed
    sys.exit(not passed)


def all_tested(name: str, python: Path) -> bool:
    """Prints the part of the table for one environment; whether everything passes there."""
    print(f"\n{name}: {installed(python)}", flush=True)
    passed = True
    for what, room in ROOMS.items():
        right, said = tested(python, room)
        passed = passed and right
        print(f"  {what:55} {said}", flush=True)
    return passed


if __name__ == "__main__":
    main()
