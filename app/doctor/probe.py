"""What one probe finds out on its node. Standard library only, and sent by value: nodes need nothing of ours.

Everything here answers with plain values or an empty one; a machine without GPUs, without nvidia-smi or without /proc
is not an error but a fact.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
import threading
import time
from typing import Any

from app.doctor.gpu_probe import gpu_links, gpus

PACKAGES = ("ray", "torch", "numpy", "mlflow")
CHUNK = 1 << 20
LINK_BYTES = 64 << 20
LINK_SECONDS = 0.5


class Probe:
    """The actor. Its methods are called on all nodes at once."""

    def __init__(self) -> None:
        self.received = 0

    def now(self) -> float:
        return time.time()

    def facts(self, ray_gpus: float, disk: str, mlflow: str, storage: str, mark: str) -> dict[str, Any]:
        """The node's facts, by the names of `NodeFacts`; writes its mark into the storage."""
        found = {**machine(disk), **network(), "python": platform.python_version(), "packages": packages(PACKAGES)}
        found |= gpus(ray_gpus)
        found["flops"] = cpu_flops()
        found["mlflow_problem"] = reach(mlflow)
        found["storage_problem"] = write_mark(storage, mark)
        return found

    def marks(self, storage: str, prefix: str) -> list[str] | None:
        return see_marks(storage, prefix)

    def forget(self, storage: str, mark: str) -> None:
        remove_mark(storage, mark)

    def listen(self) -> int:
        """Opens a port that takes whatever comes until the probe ends."""
        server = socket.socket()
        server.bind(("0.0.0.0", 0))
        server.listen(64)
        threading.Thread(target=self._take, args=(server,), daemon=True).start()
        return server.getsockname()[1]

    def _take(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_drain, args=(connection,), daemon=True).start()

    def send(self, address: str, port: int) -> tuple[float | None, str]:
        """Bytes per second that come through to a peer's port, or None and why nothing does."""
        return send(address, port)

    def gpu_links(self) -> list[tuple[int, int, float]]:
        return gpu_links()


def machine(disk: str) -> dict[str, Any]:
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    while not os.path.isdir(disk):
        disk = os.path.dirname(disk) or "/"
    available = 10**12
    try:
        with open("/proc/meminfo") as lines:
            rows = dict(line.split(":") for line in lines)
        available = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    return {
        "host": socket.gethostname(),
        "shm_bytes": shm,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "disk_free": shutil.disk_usage(disk).free,
        "disk_path": disk,
        "memory_available": available,
    }


def packages(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those that this Python has."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def network() -> dict[str, Any]:
    """Interfaces that are up with their IPv4 addresses and speeds, and what the host's own name resolves to."""
    import fcntl
    import struct

    addresses, speeds = {}, {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                answer = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                continue
        # A virtual card's speed is made up, so only that of a card with a device behind it counts.
        if os.path.exists(f"/sys/class/net/{name}/device"):
            try:
                with open(f"/sys/class/net/{name}/speed") as file:
                    megabits = int(file.read())
                if megabits > 0:
                    speeds[name] = megabits * 1e6 / 8
            except (OSError, ValueError):
                pass
    try:
        resolved: str | None = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = None
    variables = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    asked = {name: os.environ[name] for name in variables if os.environ.get(name)}
    return {"interfaces": addresses, "speeds": speeds, "resolves_to": resolved, "asked_interfaces": asked}


def cpu_flops() -> float | None:
    """FLOP per second of CPU time of an fp32 matrix product: other work on the machine does not count against it."""
    try:
        import numpy
    except ImportError:
        return None
    a = numpy.ones((384, 384), dtype=numpy.float32)
    best = float("inf")
    for _ in range(8):
        begun = time.process_time()
        a @ a
        best = min(best, time.process_time() - begun) or best
    return 2 * 384**3 / best if best < float("inf") and best > 0 else None


def reach(uri: str) -> str:
    """Why an MLflow server does not answer; empty if it does, or is no server."""
    import urllib.error
    import urllib.request

    if not uri.startswith("http"):
        return ""
    try:
        with urllib.request.urlopen(uri.rstrip("/") + "/health", timeout=5) as answer:
            return "" if answer.status == 200 else f"it answers {answer.status}"
    except urllib.error.HTTPError as error:
        return f"it answers {error.code}" + (
            " (its --allowed-hosts does not have this name)" if error.code == 403 else ""
        )
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def write_mark(storage: str, mark: str) -> str:
    """Why nothing can be written to the storage; empty if it can."""
    if not storage:
        return ""
    try:
        if "://" in storage:
            import fsspec

            fs, path = fsspec.core.url_to_fs(storage)
            fs.pipe(f"{path}/{mark}", b"doctor")
        else:
            os.makedirs(storage, exist_ok=True)
            with open(os.path.join(storage, mark), "w") as file:
                file.write("doctor")
        return ""
    except Exception as error:  # each object store has its own
        return (str(error) or type(error).__name__).splitlines()[0][:200]


def see_marks(storage: str, prefix: str) -> list[str] | None:
    if not storage:
        return None
    try:
        if "://" in storage:
            import fsspec

            fs, path = fsspec.core.url_to_fs(storage)
            fs.invalidate_cache()
            names = [os.path.basename(name) for name in fs.ls(path, detail=False)]
        else:
            names = os.listdir(storage)
    except Exception:
        return None
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def remove_mark(storage: str, mark: str) -> None:
    try:
        if "://" in storage:
            import fsspec

            fs, path = fsspec.core.url_to_fs(storage)
            fs.rm_file(f"{path}/{mark}")
        elif storage:
            os.remove(os.path.join(storage, mark))
    except Exception:
        pass


def send(address: str, port: int) -> tuple[float | None, str]:
    try:
        with socket.create_connection((address, port), timeout=3) as peer:
            peer.settimeout(5)
            block, sent, begun = b"\0" * CHUNK, 0, time.perf_counter()
            while sent < LINK_BYTES and time.perf_counter() - begun < LINK_SECONDS:
                peer.sendall(block)
                sent += CHUNK
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)  # the peer answers when it has everything
            return sent / (time.perf_counter() - begun), ""
    except ConnectionRefusedError:
        return None, "refused"
    except TimeoutError:
        return None, "timed out"
    except OSError as error:
        return None, (error.strerror or str(error)).lower()


def _drain(connection: socket.socket) -> None:
    with connection:
        while connection.recv(CHUNK):
            pass
        connection.sendall(b"!")


def main() -> None:
    """What this machine says of itself, without Ray: `python -m app.doctor.probe [FOLDER WHOSE DISK COUNTS]`."""
    disk = sys.argv[1] if sys.argv[1:] else "/tmp"
    print(json.dumps({**machine(disk), **network(), **gpus(0), "packages": packages(PACKAGES)}, indent=1))


if __name__ == "__main__":
    main()
