"""A lab of several hosts on this machine.

    with Lab(4) as lab:
        lab.run(0, ["hostname"])

Each host is a namespace of networks, processes, mounts and host names, with an SSH server. They are
10.77.0.11, .12, … on a bridge of their own, without a way out. They share this machine's files
except /tmp, /root and /dev/shm. A lab needs root with CAP_SYS_ADMIN, iproute2, openssh-server and
rsync; `unavailable()` says what is missing. Everything on a host ends with its first process.
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

import psutil
import pytest

from tests.running import ROOT, wait_until

NETWORK = "10.77.0"
NEW_HOST = [
    "unshare",
    "--pid",
    "--mount",
    "--uts",
    "--ipc",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
"""Runs a command in the namespaces of a new host, which end with it."""
PROGRAMS = ("ip", "sshd", "rsync", "ssh")


def unavailable() -> str:
    """Why there can be no lab here; "" if there can."""
    for folder in ("/tmp", "/root", "/dev/shm"):
        if ROOT.is_relative_to(folder):
            return f"the hosts of a lab have a {folder} of their own, and do not see {ROOT}"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if missing:
        packages = "iproute2, openssh-server, rsync, openssh-client"
        return f"the lab of several hosts needs {', '.join(missing)} ({packages})"
    namespace = f"trireme-{uuid.uuid4().hex[:6]}"
    try:
        _execute("ip", "netns", "add", namespace)
        _execute("ip", "netns", "exec", namespace, *NEW_HOST, "true")
        return ""
    except RuntimeError as error:
        return f"the lab of several hosts needs root with CAP_SYS_ADMIN: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


INIT = """
    set -e
    home=$1 name=$2 address=$3 python=$4
    mount --make-rprivate /
    mkdir -p $home/root $home/tmp $home/run
    chmod 700 $home/root; chmod 1777 $home/tmp
    cp $home/hosts.all $home/hosts
    hostname $name
    mount --bind $home/hosts /etc/hosts
    case $python in /root/*)  # the host's own /root would hide Python
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
    /usr/sbin/sshd -o UsePAM=no -o StrictModes=no -o PidFile=none -o HostKey=/root/host_key \\
        -o ListenAddress=$address -o PermitRootLogin=yes -o PrintMotd=no
    trap 'exit 0' TERM
    touch /root/ready
    while :; do sleep 3600 & wait $! || true; done
"""


class Lab:
    """Hosts `host0`, `host1`, …, which a `with` statement makes and ends.

    Args:
        hosts: How many.

    Attributes:
        folder: Where the lab keeps its files.
        shared: A folder that all hosts see.
        processes: What runs each host.
    """

    def __init__(self, hosts: int) -> None:
        self.count = hosts
        self.tag = uuid.uuid4().hex[:5]
        self.folder = Path(tempfile.mkdtemp(prefix="trireme-lab-", dir="/var/tmp"))
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def address(self, host: int) -> str:
        """The IP address of a host."""
        return f"{NETWORK}.{11 + host}"

    def namespace(self, host: int | str) -> str:
        """The network namespace of a host, or of the bridge ("br")."""
        return f"tl{self.tag}-{host}"

    def home(self, host: int) -> Path:
        """The folder with a host's own /root and /tmp."""
        return self.folder / f"host{host}"

    # --- making and ending hosts ---

    def __enter__(self) -> Lab:
        try:
            _execute("ip", "netns", "add", self.namespace("br"))
            self._ip("br", "link add br0 type bridge")
            self._ip("br", "link set br0 up")
            key = self.folder / "key"
            _execute("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
            for host in range(self.count):
                self._connect_to_bridge(host)
                self._write_files(host, key)
                self._boot(host)
            for host in range(self.count):
                wait_until((self.home(host) / "root" / "ready").exists)
                wait_until(lambda host=host: self._has_ssh(host))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # because of --kill-child the host's init ends too
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for host in (*range(self.count), "br"):
            command = ["ip", "netns", "del", self.namespace(host)]
            subprocess.run(command, capture_output=True)
        with contextlib.suppress(AssertionError):
            wait_until(self._remove_folder, 4)

    def _remove_folder(self) -> bool:
        shutil.rmtree(self.folder, ignore_errors=True)
        return not self.folder.exists()

    def _ip(self, host: int | str, words: str) -> None:
        """Run `ip WORDS` in the network of a host or of the bridge."""
        _execute("ip", "-n", self.namespace(host), *words.split())

    def _has_ssh(self, host: int) -> bool:
        connect = ["bash", "-c", f"</dev/tcp/{self.address(host)}/22"]
        return self.run(host, connect).returncode == 0

    def _connect_to_bridge(self, host: int) -> None:
        namespace = self.namespace(host)
        _execute("ip", "netns", "add", namespace)
        self._ip("br", f"link add v{host} type veth peer name eth0 netns {namespace}")
        self._ip("br", f"link set v{host} master br0 up")
        self._ip(host, f"address add {self.address(host)}/24 dev eth0")
        self._ip(host, "link set eth0 up")
        self._ip(host, "link set lo up")

    def _write_files(self, host: int, key: Path) -> None:
        """Write a host's keys, profile, list of hosts and init script."""
        home = self.home(host)
        root = home / "root"
        ssh = root / ".ssh"
        ssh.mkdir(parents=True)
        shutil.copy(key, ssh / "id_ed25519")
        shutil.copy(f"{key}.pub", ssh / "authorized_keys")
        (ssh / "id_ed25519").chmod(0o600)
        host_key = str(root / "host_key")
        _execute("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host_key)
        hosts = ["127.0.0.1 localhost"]
        for other in range(self.count):
            hosts.append(f"{self.address(other)} host{other}")
        (home / "hosts.all").write_text("\n".join(hosts) + "\n")
        system_path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        profile = (
            f"export PATH={Path(sys.executable).parent}:{system_path} OMP_NUM_THREADS=1 "
            f"PYTHONPATH={ROOT} GLOO_SOCKET_IFNAME=eth0\n"
        )
        (root / ".bashrc").write_text(profile)
        (root / ".bash_profile").write_text("source ~/.bashrc\n")
        (home / "init.sh").write_text(INIT)

    def _boot(self, host: int) -> None:
        """Start a host's init."""
        home = self.home(host)
        init = ["sh", str(home / "init.sh")]
        arguments = [str(home), f"host{host}", self.address(host), sys.base_prefix]
        enter = ["ip", "netns", "exec", self.namespace(host), *NEW_HOST]
        with (home / "init.log").open("ab") as log:
            process = subprocess.Popen(
                [*enter, *init, *arguments],
                preexec_fn=_die_with_parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)

    # --- commands on hosts ---

    def first_process(self, host: int) -> int:
        """The pid of a host's init on this machine."""
        return psutil.Process(self.processes[host].pid).children()[0].pid

    def command(
        self,
        host: int,
        arguments: list[str],
        env: dict[str, str] | None = None,
    ) -> list[str]:
        """What runs a command on a host, in its login environment."""
        exports = ""
        for name, value in (env or {}).items():
            exports += f"export {name}={shlex.quote(value)}; "
        enter = ["nsenter", "-t", str(self.first_process(host)), "--all"]
        clean = ["env", "-i", "HOME=/root", "TERM=dumb"]
        script = f"source /root/.bashrc; {exports}cd {ROOT}; exec {shlex.join(arguments)}"
        return [*enter, *clean, "bash", "-c", script]

    def start(
        self,
        host: int,
        arguments: list[str],
        env: dict[str, str] | None = None,
        *,
        quiet: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a command on a host.

        Args:
            host: The host.
            arguments: The command.
            env: Its environment, beside that of a login.
            quiet: Whether to drop its output.
        """
        output = subprocess.DEVNULL if quiet else subprocess.PIPE
        return subprocess.Popen(
            self.command(host, arguments, env),
            preexec_fn=_react_to_signals,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )

    def run(
        self,
        host: int,
        arguments: list[str],
        env: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        return subprocess.run(
            self.command(host, arguments, env),
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def trireme(
        self,
        host: int,
        *arguments: str,
        timeout: float = 120,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run `trireme` on a host to its end."""
        command = [sys.executable, "-m", "app", *arguments]
        return self.run(host, command, env, timeout=timeout)

    def processes_of(self, host: int) -> list[str]:
        """The command lines on a host, without those of the lab itself."""
        lines = self.run(host, ["ps", "-eo", "args="]).stdout.splitlines()
        of_lab = ("sh ", "sshd", "sleep ", "ps ", "[", "/usr/sbin/sshd", "bash -c source")
        return [line for line in lines if line.strip() and not line.strip().startswith(of_lab)]

    # --- the network ---

    def cut(self, host: int) -> None:
        """Disconnect a host from the network."""
        self._ip("br", f"link set v{host} down")

    def mend(self, host: int) -> None:
        """Connect a host to the network again."""
        self._ip("br", f"link set v{host} up")


def _react_to_signals() -> None:
    """In the new process: react to signals that nohup or a background job may ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _die_with_parent() -> None:
    """In the new process: be killed when this process ends, however it ends; the host ends too."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def onprem(lab: Lab) -> Path:
    """cluster/onprem.yaml for the lab's first three hosts: the head and two workers."""
    text = (ROOT / "cluster" / "onprem.yaml").read_text()
    for host, address in enumerate(("192.168.1.10", "192.168.1.11", "192.168.1.12")):
        text = text.replace(address, lab.address(host))
    replacements = {
        "ssh_user: ubuntu": "ssh_user: root",
        "/mnt/shared": str(lab.shared),
        "--object-store-memory=1000000000": "--object-store-memory=100000000",
    }
    for before, after in replacements.items():
        text = text.replace(before, after)
    file = lab.folder / "cluster.yaml"
    file.write_text(text)
    return file


@contextlib.contextmanager
def isolate(lab: Lab, *hosts: int) -> Iterator[None]:
    """While this lasts, some hosts do not reach one another; all others reach them."""
    bridge = ["ip", "netns", "exec", lab.namespace("br"), "bridge", "link", "set", "dev"]
    for host in hosts:
        _execute(*bridge, f"v{host}", "isolated", "on")
    try:
        yield
    finally:
        for host in hosts:
            _execute(*bridge, f"v{host}", "isolated", "off")


def _execute(*command: str) -> None:
    """Run a command on this machine; RuntimeError if it fails."""
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {process.stderr.strip()}")


WHY_UNAVAILABLE = unavailable()
NEEDS_LAB = [
    pytest.mark.skipif(bool(WHY_UNAVAILABLE), reason=WHY_UNAVAILABLE or "there is a lab"),
    pytest.mark.slow,
]
