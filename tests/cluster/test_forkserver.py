"""Workers and commands that are forks of a process which has everything imported: processes like any other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.fast_start import client as fork_client
from cluster.fast_start import server as fork_server
from cluster.fast_start import warm
from tests.running import POINTS, ROOT, start, trireme, wait_until

SAYS = """
import json, os, sys, threading
print(json.dumps({"argv": sys.argv, "pid": os.getpid(), "parent": os.getppid(), "cwd": os.getcwd(), "mask": os.umask(0),
                  "own": os.environ.get("OWN"), "name": __name__, "group": os.getpgid(0)}), flush=True)
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A fork server of ours that has imported next to nothing: its socket and process."""
    path = str(tmp_path / "socket")
    pid = fork_client.start(path, "json", os.getpid(), 600.0, dict(os.environ) | {"PYTHONPATH": str(ROOT)})
    try:
        yield path, pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def client(path: str, request: dict[str, object]) -> subprocess.Popen[str]:
    """A process that asks for a fork with its own streams, and waits for its end."""
    code = "import sys, json, cluster.fast_start.client as f; c = f.ask(sys.argv[1], json.loads(sys.argv[2]));"
    code += "print(f.answer(c), flush=True); print(f.answer(c))"
    words = [sys.executable, "-c", code, path, json.dumps(request)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def request(script: Path, *words: str, **more: object) -> dict[str, object]:
    env = {"PATH": os.environ["PATH"], "OWN": "yes"}
    return {"argv": [str(script), *words], "cwd": str(script.parent), "env": env, "wait": True, **more}


def test_a_fork_is_the_process_that_was_asked_for(server: tuple[str, int], tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    asked = request(script, "7", umask=0o027, limits={"RLIMIT_CORE": [0, 0]})
    out, err = client(server[0], asked).communicate(timeout=60)
    said = json.loads(next(line for line in out.splitlines() if line.startswith('{"argv"')))
    assert said["argv"] == [str(script), "7"] and said["cwd"] == str(tmp_path) and said["own"] == "yes"
    assert said["name"] == "__main__" and said["parent"] == server[1] and said["mask"] == 0o027
    assert said["group"] == said["pid"], "a raylet ends the process group of a worker: it must not be the server's"
    assert f"{{'pid': {said['pid']}}}" in out and "{'exit': 7}" in out and "to stderr" in err


def test_forks_do_not_draw_the_same_random_numbers(server: tuple[str, int], tmp_path: Path) -> None:
    script = tmp_path / "draws.py"
    script.write_text("import random; print('drawn', random.random())")
    drawn = [client(server[0], request(script)).communicate(timeout=60)[0] for _ in range(2)]
    lines = [line for out in drawn for line in out.splitlines() if line.startswith("drawn")]
    assert len(lines) == 2 and lines[0] != lines[1]


def test_forks_do_not_draw_the_same_ids_of_ray(tmp_path: Path) -> None:
    """Two workers with the same id for their first object kill one another. The real imports, since each class that is
    declared an actor's draws from Ray's own generator."""
    script = tmp_path / "draws.py"
    script.write_text("from ray._raylet import ObjectID; print('drawn', ObjectID.from_random().hex())")
    path = str(tmp_path / "socket")
    pid = fork_client.start(path, warm.PRELOAD, os.getpid(), 600.0, dict(os.environ) | {"PYTHONPATH": str(ROOT)})
    try:
        drawn = [client(path, request(script)).communicate(timeout=60)[0] for _ in range(2)]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lines = [line for out in drawn for line in out.splitlines() if line.startswith("drawn")]
    assert len(lines) == 2 and lines[0] != lines[1]


def test_when_a_command_is_killed_its_fork_is(server: tuple[str, int], tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    process = client(server[0], request(script))
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert psutil.pid_exists(pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not psutil.pid_exists(pid), 20)


def test_a_server_ends_with_its_owner_and_when_nobody_comes(tmp_path: Path) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    held = fork_client.start(str(tmp_path / "held"), "json", owner.pid, 600.0, env)
    idle = fork_client.start(str(tmp_path / "idle"), "json", os.getpid(), 0.5, env)
    assert os.waitpid(idle, 0)[0] == idle and not (tmp_path / "idle").exists()
    assert os.waitpid(held, os.WNOHANG)[0] == 0
    owner.kill()
    owner.wait()
    assert os.waitpid(held, 0)[0] == held and not (tmp_path / "held").exists()


def test_a_server_whose_code_has_changed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of this package, where a file is newer than the server: the stub has another one started."""
    for part in ("cluster", "app", "strategies"):
        (tmp_path / part).mkdir()
    (tmp_path / "cluster" / "fast_start").mkdir()
    for name in ("__init__", "fast_start/__init__", "fast_start/server", "fast_start/fork", "fast_start/client"):
        shutil.copy2(ROOT / "cluster" / f"{name}.py", tmp_path / "cluster" / f"{name}.py")
    script = tmp_path / "default_worker.py"
    script.write_text("import os\nprint('parent', os.getppid(), flush=True)")
    owner = subprocess.Popen(["sleep", "600"])
    flags = ["--preload=json", "--seconds=600"]
    words = [sys.executable, str(tmp_path / "cluster" / "fast_start" / "client.py"), *flags, str(script)]
    env = dict(os.environ) | {"RAY_RAYLET_PID": str(owner.pid)}

    def parent() -> int:
        with (tmp_path / "out").open("w") as out:
            subprocess.run(words, env=env, stdout=out, check=True, timeout=60)
        return int(wait_until(lambda: (tmp_path / "out").read_text()).split()[1])

    try:
        first = parent()
        assert parent() == first != owner.pid
        later = time.time() + 5
        os.utime(tmp_path / "cluster" / "fast_start" / "fork.py", (later, later))
        assert parent() not in (first, os.getpid())
    finally:
        owner.kill()
        owner.wait()


def test_without_a_server_the_worker_is_what_ray_would_have_started(tmp_path: Path) -> None:
    script = tmp_path / "default_worker.py"
    script.write_text("import os, sys\nprint('plain', os.getpid(), sys.argv[1:])")
    env = {name: value for name, value in os.environ.items() if name != "RAY_RAYLET_PID"}
    process = subprocess.Popen(
        [sys.executable, warm.STUB, "--preload=json", "--seconds=600", str(script), "--node-id=1"],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.communicate(timeout=60)[0].split() == ["plain", str(process.pid), "['--node-id=1']"]


def test_what_counts_when_a_library_is_loaded_is_in_the_key() -> None:
    base = {"PYTHONPATH": "/a", "HOME": "/b", "PYTHONBREAKPOINT": "x"}
    key = fork_client.key("app", base)
    assert key == fork_client.key("app", base | {"HOME": "/c", "PYTHONBREAKPOINT": "y", "RAY_JOB_ID": "01"})
    assert key != fork_client.key("app", base | {"PYTHONPATH": "/c"})
    assert key != fork_client.key("app", base | {"LD_LIBRARY_PATH": "/c"})
    assert key != fork_client.key("app", base | {"OMP_PROC_BIND": "true"})
    assert key == fork_client.key("app", base | {"OMP_NUM_THREADS": "3"}), "each fork sets its own"
    assert key != fork_client.key("other", base)


def test_the_raylet_of_a_cluster_is_found_by_any_name_of_this_machine() -> None:
    """`ray start --node-ip-address=127.0.0.1` gives its raylet another address of the machine than it tells users."""
    words = ["/opt/ray/raylet", "-c", "import time; time.sleep(600)", "--gcs-address=127.0.0.1:63790"]
    raylet = subprocess.Popen(words, executable=sys.executable)
    try:
        wait_until(lambda: "raylet" in Path(f"/proc/{raylet.pid}/cmdline").read_text())
        for address in ("127.0.0.1:63790", "localhost:63790", "127.0.0.2:63790"):
            assert warm._raylet_of(address) == raylet.pid, address
        for address in ("127.0.0.1:63791", "198.51.100.7:63790", "no-such-host.invalid:63790", "ray://x", ""):
            assert warm._raylet_of(address) is None, address
    finally:
        raylet.kill()
        raylet.wait()


def test_the_first_command_on_a_node_starts_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(fork_client, "ensure", lambda preload, owner, seconds, env: started.append((owner, seconds)))
    monkeypatch.setattr(warm, "_raylet_of", lambda address: os.getpid() if address == "here:1" else None)
    plain, short, off = (tmp_path / name for name in ("plain.yaml", "short.yaml", "off.yaml"))
    plain.write_text("task: app.tasks.mnist")
    short.write_text("cluster:\n  keep_warm_seconds: 7.5\n")
    off.write_text("cluster:\n  keep_warm_seconds: 0\n")
    warm._started("here:1", ["train", str(plain), "workers=2", "--json"], 600)
    warm._started("here:1", ["train", str(short)], 600)
    warm._started("here:1", ["train", str(short), "cluster.keep_warm_seconds=9"], 600)
    assert started == [(os.getpid(), 600), (os.getpid(), 7.5), (os.getpid(), 9.0)]
    warm._started("elsewhere:1", ["train", str(plain)], 600)
    warm._started("here:1", ["train", str(off)], 600)
    warm._started("here:1", ["train", str(tmp_path / "missing.yaml")], 600)
    warm._started("here:1", ["train", "--help"], 600)
    assert len(started) == 3


def test_a_job_with_a_python_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "client.py" in warm.runtime_env(600)["py_executable"]
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}}))
    assert "client.py" in warm.runtime_env(600)["py_executable"]
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"pip": ["a"]}}))
    assert warm.runtime_env(600) == {} == warm.runtime_env(0)


def test_a_folder_that_others_may_look_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client.os, "getuid", lambda: 12345)
    monkeypatch.setattr(fork_client.os, "makedirs", lambda path, **named: None)
    own = os.lstat
    monkeypatch.setattr(fork_client.os, "lstat", lambda path: own(tmp_path))
    with pytest.raises(PermissionError, match="not this user's alone"):
        fork_client.folder()


def test_code_that_is_rolled_back_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster" / "fast_start").mkdir(parents=True)
    file = tmp_path / "cluster" / "fast_start" / "server.py"
    file.write_text("a = 1")
    monkeypatch.setattr(fork_server, "__file__", str(file))
    before = fork_server.sources()
    assert before == fork_server.sources()
    os.utime(file, (1, 1))
    assert fork_server.sources() != before
    file.unlink()
    assert fork_server.sources() != before


# --- in Ray -----------------------------------------------------------------------------------------------------


def parents(run: Path) -> list[str]:
    """Command lines of the parents of a run's workers, read while they train."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            if "ray::" in " ".join(process.info["cmdline"] or []) and f"{run}/" in _open_files(process):
                parent = process.parent()
                found.append(" ".join(parent.cmdline()) if parent else "")
    return found


def both(run: Path) -> list[str]:
    """The same once both workers train."""
    found = parents(run)
    return found if len(found) == 2 else []


def _open_files(process: psutil.Process) -> str:
    return "\n".join(file.path for file in process.open_files())


@pytest.mark.alone
@pytest.mark.parametrize("launcher", ["ray", pytest.param("actors", marks=pytest.mark.slow)])
def test_workers_and_the_second_command_are_forks(
    launcher: str, tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    words = ["train", *POINTS, "task_args.step_seconds=0.05", "workers=2", f"launcher={launcher}", "train.steps=60"]
    words.append(f"run.storage={tmp_path}")
    first = trireme(*words, "run.name=first", "train.steps=2", env=ray_environment)
    assert first.code == 0, first.err
    process = start([*words, "run.name=second"], env=ray_environment)
    above = wait_until(lambda: both(tmp_path / "second"))
    lease = json.loads((tmp_path / "second" / "lease.json").read_text())
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert all("cluster.fast_start.server" in line for line in above), above
    assert lease["pid"] != process.pid, "the command has run in a fork"
    assert "60/60" in out


@pytest.mark.alone
def test_without_keeping_warm_nothing_is_forked(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    words = ["train", *POINTS, "task_args.step_seconds=0.05", "workers=2", "launcher=actors", "train.steps=60"]
    process = start(
        [*words, f"run.storage={tmp_path}", "run.name=cold", "cluster.keep_warm_seconds=0"], env=ray_environment
    )
    above = wait_until(lambda: both(tmp_path / "cold"))
    assert process.wait(timeout=120) == 0
    assert not any("cluster.fast_start.server" in line for line in above), above
