"""A lab: several hosts on this machine, each a network, PID, mount and host-name namespace with an SSH server.

    with Lab(4) as lab:
        lab.run(0, ["hostname"])

Hosts are 10.77.0.11, .12, … on a bridge of their own without a way out. They share this machine's files but for /tmp,
/root and /dev/shm. It needs root with CAP_SYS_ADMIN, iproute2, openssh-server and rsync: `unavailable()` says what is
missing. Ending a host's first process ends everything in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import ROOT, wait_until

NETWORK = "10.77.0"
SPACE = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]


def unavailable() -> str:
    """Why there can be no lab here; empty if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [program for program in ("ip", "sshd", "rsync", "ssh") if not shutil.which(program, path=path)]:
        return f"the lab of several hosts needs {', '.join(missing)} (iproute2, openssh-server, rsync, openssh-client)"
    name = f"trireme-{uuid.uuid4().hex[:6]}"
    try:
        _do("ip", "netns", "add", name)
        _do("ip", "netns", "exec", name, *SPACE, "true")
        return ""
    except RuntimeError as error:
        return f"the lab of several hosts needs root with CAP_SYS_ADMIN: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


INIT = """
    set -e
    home=$1 name=$2 address=$3 python=$4
    mount --make-rprivate /
    mkdir -p $home/root $home/tmp $home/run
    chmod 700 $home/root; chmod 1777 $home/tmp
    cp $home/hosts.all $home/hosts
    hostname $name
    mount --bind $home/hosts /etc/hosts
    case $python in /root/*)  # Python itself lives where the host's own /root will hide it
        mkdir -p $home$python
        mount --bind $python $home$python
        mount -o remount,bind,ro $home$python;;
    esac
    mount --rbind $home/root /root
    mkdir -p /run/sshd
    mount -t tmpfs -o mode=755 tmpfs /run/sshd
    mount -t tmpfs -o size=4g tmpfs /dev/shm
    mount --bind $home/tmp /tmp
    export HOME=/root
    /usr/sbin/sshd -o UsePAM=no -o StrictModes=no -o PidFile=none -o HostKey=/root/host_key -o ListenAddress=$address \\
        -o PermitRootLogin=yes -o PrintMotd=no
    trap 'exit 0' TERM
    touch /root/ready
    while :; do sleep 3600 & wait $! || true; done
"""


class Lab:
    """Hosts `host0`, `host1`, …; `with` makes and ends them."""

    def __init__(self, hosts: int) -> None:
        self.count = hosts
        self.tag = uuid.uuid4().hex[:5]
        self.folder = Path(tempfile.mkdtemp(prefix="trireme-lab-", dir="/var/tmp"))
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def address(self, host: int) -> str:
        return f"{NETWORK}.{11 + host}"

    def namespace(self, host: int | str) -> str:
        return f"tl{self.tag}-{host}"

    def __enter__(self) -> Lab:
        try:
            _do("ip", "netns", "add", self.namespace("br"))
            self._ip("br", "link add br0 type bridge")
            self._ip("br", "link set br0 up")
            key = self.folder / "key"
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
            for host in range(self.count):
                self._host(host, key)
            for host in range(self.count):
                listens = ["bash", "-c", f"</dev/tcp/{self.address(host)}/22"]
                wait_until((self.home(host) / "root" / "ready").exists)
                wait_until(lambda at=host, what=listens: self.run(at, what).returncode == 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def home(self, host: int) -> Path:
        return self.folder / f"host{host}"

    def _ip(self, host: int | str, words: str) -> None:
        _do("ip", "-n", self.namespace(host), *words.split())

    def _host(self, host: int, key: Path) -> None:
        name, home = self.namespace(host), self.home(host)
        (home / "root" / ".ssh").mkdir(parents=True)
        _do("ip", "netns", "add", name)
        self._ip("br", f"link add v{host} type veth peer name eth0 netns {name}")
        self._ip("br", f"link set v{host} master br0 up")
        self._ip(host, f"address add {self.address(host)}/24 dev eth0")
        self._ip(host, "link set eth0 up")
        self._ip(host, "link set lo up")
        ssh = home / "root" / ".ssh"
        shutil.copy(key, ssh / "id_ed25519")
        shutil.copy(f"{key}.pub", ssh / "authorized_keys")
        (ssh / "id_ed25519").chmod(0o600)
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "root" / "host_key"))
        everyone = [f"{self.address(other)} host{other}" for other in range(self.count)]
        (home / "hosts.all").write_text("\n".join(["127.0.0.1 localhost", *everyone]) + "\n")
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        profile = f"export PATH={path} OMP_NUM_THREADS=1 PYTHONPATH={ROOT} GLOO_SOCKET_IFNAME=eth0\n"
        (home / "root" / ".bashrc").write_text(profile)
        (home / "root" / ".bash_profile").write_text("source ~/.bashrc\n")
        (home / "init.sh").write_text(INIT)
        init = ["sh", str(home / "init.sh"), str(home), f"host{host}", self.address(host), sys.base_prefix]
        with (home / "init.log").open("ab") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            command = ["ip", "netns", "exec", name, *SPACE, *init]
            self.processes.append(subprocess.Popen(command, preexec_fn=_die_with_parent, **streams))

    def first_process(self, host: int) -> int:
        """The host's init, as this machine numbers it."""
        return psutil.Process(self.processes[host].pid).children()[0].pid

    def command(self, host: int, arguments: list[str], env: dict[str, str] | None = None) -> list[str]:
        """A command that runs on a host, in its login environment."""
        exports = "".join(f"export {k}={shlex.quote(v)}; " for k, v in (env or {}).items())
        enter = ["nsenter", "-t", str(self.first_process(host)), "--all", "env", "-i", "HOME=/root", "TERM=dumb"]
        return [*enter, "bash", "-c", f"source /root/.bashrc; {exports}cd {ROOT}; exec {shlex.join(arguments)}"]

    def start(
        self, host: int, arguments: list[str], env: dict[str, str] | None = None, *, quiet: bool = False
    ) -> subprocess.Popen[str]:
        kept = subprocess.DEVNULL if quiet else subprocess.PIPE
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": kept, "stderr": kept, "text": True}
        return subprocess.Popen(self.command(host, arguments, env), preexec_fn=_heed, **streams)

    def run(self, host: int, arguments: list[str], env: dict[str, str] | None = None, timeout: float = 120) -> Any:
        streams: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        return subprocess.run(self.command(host, arguments, env), timeout=timeout, **streams)

    def trireme(self, host: int, *arguments: str, timeout: float = 120, **env: str) -> Any:
        return self.run(host, [sys.executable, "-m", "app", *arguments], env, timeout)

    def cut(self, host: int) -> None:
        """Takes the host's network cable out."""
        self._ip("br", f"link set v{host} down")

    def mend(self, host: int) -> None:
        self._ip("br", f"link set v{host} up")

    def processes_of(self, host: int) -> list[str]:
        """Command lines on a host, but for init, sshd and what is used to look."""
        listed = self.run(host, ["ps", "-eo", "args="]).stdout.splitlines()
        own = ("sh ", "sshd", "sleep ", "ps ", "[", "/usr/sbin/sshd", "bash -c source")
        return [line for line in listed if line.strip() and not line.strip().startswith(own)]

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # unshare --kill-child: the host's init goes with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for name in [self.namespace(host) for host in (*range(self.count), "br")]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: shutil.rmtree(self.folder, ignore_errors=True) or not self.folder.exists(), 4)


def _heed() -> None:
    """In the new process: what ends a command does, also where the tests were started by nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _die_with_parent() -> None:
    """In the new process: it is killed when this one ends, however it ends, and the host with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def onprem(lab: Lab) -> Path:
    """cluster/onprem.yaml with the addresses of the lab's first three hosts in it: the head, then two workers."""
    text = (ROOT / "cluster" / "onprem.yaml").read_text()
    for host, written in enumerate(("192.168.1.10", "192.168.1.11", "192.168.1.12")):
        text = text.replace(written, lab.address(host))
    text = text.replace("ssh_user: ubuntu", "ssh_user: root").replace("/mnt/shared", str(lab.shared))
    text = text.replace("--object-store-memory=1000000000", "--object-store-memory=100000000")
    file = lab.folder / "cluster.yaml"
    file.write_text(text)
    return file


@contextlib.contextmanager
def isolate(lab: Lab, *hosts: int) -> Iterator[None]:
    """These hosts do not reach one another; all others reach them."""
    enter = ["ip", "netns", "exec", lab.namespace("br"), "bridge", "link", "set", "dev"]
    for host in hosts:
        _do(*enter, f"v{host}", "isolated", "on")
    try:
        yield
    finally:
        for host in hosts:
            _do(*enter, f"v{host}", "isolated", "off")


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


WHY_NOT = unavailable()
NEEDS_LAB = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a lab"), pytest.mark.slow]
