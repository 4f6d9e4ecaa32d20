"""Workers and commands that are forks of a process which has everything imported: processes like any other."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import connect
from cluster.fast_start import client, server, warm
from tests.running import POINTS, ROOT, environment, finish, here, start, tree_without, trireme, wait_until, writes

SAYS = """
import atexit, json, os, random, ray, resource, signal, sys, time
fresh = [signal.getsignal(signal.SIGINT) is signal.default_int_handler, len(os.listdir("/proc/self/fd"))]
print(json.dumps({"core": resource.getrlimit(resource.RLIMIT_CORE), "fresh": fresh, "argv": sys.argv,
                  "pid": os.getpid(), "parent": os.getppid(), "cwd": os.getcwd(),
                  "own": os.environ.get("OWN"), "name": __name__, "group": os.getpgid(0),
                  "number": random.random(), "id": ray.ObjectID.from_random().hex()}), flush=True)
print("to stderr", file=sys.stderr)
atexit.register(lambda: (time.sleep(0.5), print("at its end")))
sys.exit(int(sys.argv[1]))
"""
SERVED = "ray.util.multiprocessing.pool"  # declares an actor, which draws from Ray's own generator, as PRELOAD does


Owner = subprocess.Popen[bytes]
Forker = tuple[str, psutil.Process]


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    """A process that servers end with."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory, owner: Owner) -> Iterator[Forker]:
    """A fork server of ours: its socket and process; it ends with its owner."""
    path = str(tmp_path_factory.mktemp("forker") / "socket")
    process = psutil.Process(client.start(path, SERVED, owner.pid, environment()))
    yield path, process
    assert process.status() != psutil.STATUS_ZOMBIE
    owner.kill()
    assert process.wait() == 0 and not Path(path).exists()


def ask(path: str, folder: Path, script: str, *words: str, **more: object) -> subprocess.Popen[str]:
    """A process that asks for a fork with its own streams, and waits for its end."""
    (folder / "script.py").write_text(script)
    env = {"PATH": os.environ["PATH"], "OWN": "yes"}
    request = {"argv": [str(folder / "script.py"), *words], "cwd": str(folder), "env": env, "wait": True}
    code = "import sys, json, cluster.fast_start.client as f; c = f.ask(sys.argv[1], json.loads(sys.argv[2]));"
    code += "print(f.answer(c), flush=True); print(f.answer(c))"
    words = (sys.executable, "-c", code, path, json.dumps({**client.inherited(), **request, **more}))
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_forks_are_what_was_asked_for_and_draw_numbers_and_ids_of_their_own(forker: Forker, tmp_path: Path) -> None:
    """Two workers with the same id for their first object kill one another."""
    drawn = []
    for process in [ask(forker[0], tmp_path, SAYS, "7", limits={"RLIMIT_CORE": [0, 0]}) for _ in range(2)]:
        out, err = process.communicate()
        said = json.loads(next(line for line in out.splitlines() if line.startswith('{"core"')))
        assert said["argv"] == [str(tmp_path / "script.py"), "7"] and said["cwd"] == str(tmp_path)
        assert said["own"] == "yes" and said["name"] == "__main__" and said["parent"] == forker[1].pid
        # Three streams, the folder that is being listed, and the connection over which the exit code goes.
        assert said["core"] == [0, 0] and said["fresh"] == [True, 5], "limits, signals and open files of a new process"
        assert said["group"] == said["pid"], "a raylet ends the process group of a worker: it must not be the server's"
        assert f"{{'pid': {said['pid']}}}" in out and "{'exit': 7}" in out and "to stderr" in err
        assert "at its end" in out, "who waits for it has everything that it wrote once the exit code comes"
        drawn.append((said["number"], said["id"]))
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def test_a_fork_is_killed_with_its_command_and_a_server_is_listed_and_ended_unless_it_is_used(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def says(word: str) -> str:
        return here(monkeypatch, capsys, "warm", word).out

    monkeypatch.setattr(client, "folder", lambda: str(tmp_path))
    path = tmp_path / "own.socket"
    pid = client.start(str(path), "json", owner.pid, environment())
    used = ask(str(path), tmp_path, "import time; time.sleep(600)")
    wait_until(lambda: [each["processes"] for each in warm.kept()] == [1])
    (line,) = says("list").splitlines()
    assert line.startswith(f"process {pid} is kept") and " MB, serves 1 processes" in line
    assert says("stop") == "0 ended; 1 in use (--all ends those too)\n"
    (fork,) = psutil.Process(pid).children()
    used.kill()
    used.communicate()
    wait_until(lambda: not fork.is_running() and warm.kept()[0]["processes"] == 0)
    assert says("stop") == "1 ended\n" and not psutil.pid_exists(pid) and not path.exists()
    assert says("list") == "nothing is kept alive\n"


@pytest.mark.parametrize("lost", [True, False])
def test_a_server_ends_without_socket_or_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    path = tmp_path / "socket"
    with server.socket.socket(server.socket.AF_UNIX) as listener:
        listener.bind(str(path))
        served = server.Server(str(path), listener, os.getpid())
        if lost:
            path.unlink()
        monkeypatch.setattr(server, "IDLE_SECONDS", 600.0 if lost else 0.0)
        assert served.serve() is None and not path.exists()
        os.close(served.owner)


def test_a_server_whose_code_has_changed_is_replaced(tmp_path: Path, owner: Owner) -> None:
    """In a copy of this package, where a file is newer than the server: the stub runs the worker, or has it forked."""
    shutil.copytree(ROOT / "cluster", tmp_path / "cluster", ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "default_worker.py"
    script.write_text("import os\nprint('parent', os.getppid(), flush=True)")
    words = [sys.executable, str(tmp_path / "cluster" / "fast_start" / "client.py"), "json", str(script)]
    env = environment(RAY_RAYLET_PID=str(owner.pid))

    def parent() -> int:
        with (tmp_path / "out").open("w") as out:
            subprocess.run(words, env=env, stdout=out, check=True)
        return int(wait_until(lambda: (tmp_path / "out").read_text()).split()[1])

    first = parent()
    assert parent() == first != os.getpid()
    later = time.time() + 5
    os.utime(tmp_path / "cluster" / "hardware.py", (later, later))
    assert parent() == os.getpid(), "itself, as Ray would have started it"
    assert parent() not in (first, os.getpid())


def test_what_counts_when_a_library_is_loaded_is_in_the_key() -> None:
    base = {"PYTHONPATH": "/a", "HOME": "/b", "PYTHONBREAKPOINT": "x"}
    same = [{"HOME": "/c", "PYTHONBREAKPOINT": "y", "RAY_JOB_ID": "01"}, {"OMP_NUM_THREADS": "3"}]  # each fork sets it
    others = [{"PYTHONPATH": "/c"}, {"LD_LIBRARY_PATH": "/c"}, {"RAY_AUTH_MODE": "token"}]
    key = client.key("app", base)
    assert {client.key("app", base | more) for more in same} == {key}
    assert key not in [client.key("app", base | more) for more in others]
    assert key != client.key("other", base)


@pytest.mark.parametrize(("user", "mode"), [(os.getuid() + 1, 0o700), (os.getuid(), 0o750), (os.getuid(), 0o701)])
def test_a_folder_that_others_may_look_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, mode: int
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setattr(client.os, "getuid", lambda: user)
    monkeypatch.setattr(client.os, "makedirs", lambda path, **named: None)
    own = os.lstat
    monkeypatch.setattr(client.os, "lstat", lambda path: own(tmp_path))
    with pytest.raises(PermissionError, match="not this user's alone"):
        client.folder()


def test_the_node_server_has_its_raylets_authentication(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start --node-ip-address=127.0.0.1` gives its raylet another address of the machine than it tells users."""
    words = ["/opt/ray/raylet", "-c", "import time; time.sleep(600)", "--gcs-address=10.0.0.7:63790"]
    raylet = subprocess.Popen(words, executable=sys.executable, env={"RAY_AUTH_MODE": "token"})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    asked = []
    monkeypatch.setattr(client, "ensure", lambda *words: asked.append(words) or "/socket")
    try:
        wait_until(lambda: "raylet" in Path(f"/proc/{raylet.pid}/cmdline").read_text())
        assert warm.warm_up_node("localhost:63790", "json") == "/socket"
        assert warm.warm_up_node("localhost:63791", "json") == warm.warm_up_node("ray://x", "json") == ""
        ((preload, owner, env),) = asked
        assert (preload, owner, env["RAY_AUTH_MODE"], env["PATH"]) == ("json", raylet.pid, "token", os.environ["PATH"])
    finally:
        raylet.kill()
        raylet.wait()


def test_a_job_with_a_python_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, ours in [(None, True), ({"working_dir": "gcs://x.zip"}, True), ({"pip": ["a"]}, False)]:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": asked} if asked else {}))
        assert ("client.py app.x" in warm.runtime_env("app.x").get("py_executable", "")) == ours


def test_it_is_off_where_it_was_not_tested(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(warm, "TESTED", "linux, Python 3.11, Ray 1.0")
    with caplog.at_level("INFO"):
        assert connect._fast_start() is None
    assert "it was tested with linux, Python 3.11, Ray 1.0, and this is linux, Python " in caplog.text
    monkeypatch.setenv("TRIREME_FAST_START", "0")
    assert warm.why_not() == "TRIREME_FAST_START is 0"


# --- in Ray -----------------------------------------------------------------------------------------------------

SLOW = [*POINTS, "task_args.step_seconds=0.05", "train.steps=60", "workers=2"]


def workers_of(run: Path) -> list[psutil.Process]:
    """The processes of a run's two workers, once both train."""
    logs = [f"{run}/logs/rank-{rank}.log" for rank in (0, 1)]
    found = [process for process in psutil.process_iter() if any(writes(process, log) for log in logs)]
    return found if len(found) == 2 else []


def is_forked(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and "cluster.fast_start.server" in " ".join(parent.cmdline())


@pytest.mark.slow
def test_workers_and_the_second_command_are_forks(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    experiment = tmp_path / "points.yaml"
    experiment.write_text("task: tests.tasks:Points\n")
    words = ["train", str(experiment), *SLOW, "launcher=ray", f"run.storage={tmp_path}"]
    trireme(*words, "run.name=first", "train.steps=2", env=ray_environment).expect()
    process = start([*words, "run.name=second"], env=ray_environment)
    forked = [is_forked(worker) for worker in wait_until(lambda: workers_of(tmp_path / "second"))]
    lease = json.loads((tmp_path / "second" / "lease.json").read_text())
    ended = finish(process)
    assert ended.code == 0 and "60/60" in ended.out, ended.err
    assert forked == [True, True]
    assert lease["pid"] != process.pid, "the command has run in a fork"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_ray_of_its_own_is_forked_and_leaves_nothing(how: str, tmp_path: Path) -> None:
    process = start(["train", *SLOW, "launcher=actors", f"run.storage={tmp_path}", "run.name=own"])
    workers = wait_until(lambda: workers_of(tmp_path / "own"))
    forked = [is_forked(worker) for worker in workers]
    tree = [*workers, *psutil.Process(process.pid).children(recursive=True)]
    if how == "killed":
        process.kill()
    ended = finish(process)
    assert forked == [True, True] and ended.code == (0 if how == "ends" else -signal.SIGKILL), ended.err
    _, alive = psutil.wait_procs(tree, timeout=120)
    assert not alive


@pytest.mark.slow
def test_without_the_folder_everything_works(tmp_path: Path) -> None:
    words = ["-m", "app", "train", *POINTS, "train.steps=4", "workers=2", "launcher=ray", "run.name=cold"]
    words.append(f"run.storage={tmp_path}")
    with tree_without("cluster/fast_start") as tree:
        streams = {"cwd": tree, "env": environment(PYTHONPATH=tree), "capture_output": True, "text": True}
        ended = subprocess.run([sys.executable, *words], timeout=300, **streams)
        found = subprocess.run([sys.executable, "-c", "import cluster.connect, cluster.fast_start"], **streams)
    assert ended.returncode == 0 and "4/4" in ended.stdout, ended.stderr
    assert found.stderr.strip().endswith("No module named 'cluster.fast_start'")
