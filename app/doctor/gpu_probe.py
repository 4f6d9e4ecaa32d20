"""What a probe finds out about the GPUs of its node: the bus, the driver, torch. Sent by value, as `probe` is."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import time
from typing import Any

QUERY = (
    "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,temperature.gpu,mig.mode.current,"
    "clocks_throttle_reasons.hw_thermal_slowdown,clocks_throttle_reasons.sw_thermal_slowdown,"
    "clocks_throttle_reasons.hw_power_brake_slowdown,uuid"
)


def gpus(ray_gpus: float) -> dict[str, Any]:
    pci = 0
    for path in glob.glob("/sys/bus/pci/devices/*"):
        try:
            with open(f"{path}/vendor") as vendor, open(f"{path}/class") as kind:
                pci += vendor.read().strip() == "0x10de" and kind.read().startswith("0x03")
        except OSError:
            continue
    files = len(glob.glob("/dev/nvidia[0-9]*"))
    found: dict[str, Any] = {
        "pci_gpus": pci,
        "device_files": files,
        "driver_loaded": os.path.exists("/proc/driver/nvidia/version"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": [],
    }
    found |= smi()
    if found["gpus"] or files or ray_gpus:
        found |= ask_torch(found["gpus"])
    return found


def smi() -> dict[str, Any]:
    """The driver's own view, which CUDA_VISIBLE_DEVICES does not change."""
    out, error = _nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    if out is None and "not a valid field" in error:  # newer drivers call the throttle reasons event reasons
        newer = QUERY.replace("throttle_reasons", "event_reasons")
        out, error = _nvidia_smi(f"--query-gpu={newer}", "--format=csv,noheader,nounits")
    if out is None:
        return {"smi_error": error}
    processes = _processes()
    xids = _xids()
    rows = [parse_gpu(line, processes, xids) for line in out.splitlines() if line.strip()]
    head, _ = _nvidia_smi()
    driver = re.search(r"Driver Version:\s*([\d.]+)", head or "")
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", head or "")
    return {"gpus": rows, "driver": driver[1] if driver else "", "driver_cuda": cuda[1] if cuda else ""}


def _nvidia_smi(*arguments: str) -> tuple[str | None, str]:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return None, "there is no nvidia-smi"
    except subprocess.TimeoutExpired:
        return None, "nvidia-smi hangs"
    if done.returncode:
        return None, ((done.stdout + done.stderr).strip().splitlines() or ["no reason given"])[0][:200]
    return done.stdout, ""


def parse_gpu(line: str, processes: dict[str, list[str]], xids: dict[int, list[str]]) -> dict[str, Any]:
    """One row of nvidia-smi's answer to QUERY, by the names of `GpuFacts`."""
    cells = [cell.strip() for cell in line.split(",")]
    index, name, total, used, ecc, heat, mig, hardware, software, brake, uuid = cells
    reasons = {"thermal": "Active" in (hardware, software), "power brake": brake == "Active"}
    return {
        "index": int(index),
        "name": name,
        "memory_total": int(_number(total) * 2**20),
        "memory_used": int(_number(used) * 2**20),
        "ecc_errors": int(_number(ecc)),
        "temperature": _number(heat),
        "mig": mig == "Enabled",
        "throttled": [reason for reason, active in reasons.items() if active],
        "processes": processes.get(uuid, []),
        "xids": xids.get(int(index), []),
    }


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return 0.0


def _processes() -> dict[str, list[str]]:
    out, _ = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
    found: dict[str, list[str]] = {}
    for line in (out or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1] != str(os.getpid()):
            found.setdefault(cells[0], []).append(
                f"{cells[1]} {os.path.basename(cells[2])} {_number(cells[3]):.0f} MiB"
            )
    return found


def _xids() -> dict[int, list[str]]:
    """Xid errors in the kernel's log, by the GPU's index; empty where the log may not be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    listed, _ = _nvidia_smi("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
    buses = {}
    for line in (listed or "").splitlines():
        index, _, bus = line.partition(",")
        buses[bus.strip().lower()[-10:-2]] = int(index)
    found: dict[int, list[str]] = {}
    for match in re.finditer(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", done.stdout):
        number = buses.get(match[1].lower()[-8:])
        if number is not None:
            found.setdefault(number, []).append(f"Xid {match[2]}")
    return found


def ask_torch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        return {"torch_error": f"{type(error).__name__}: {error}"[:200]}
    found: dict[str, Any] = {"torch_cuda": torch.version.cuda, "torch_gpus": torch.cuda.device_count()}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:  # then torch's order is the driver's
            for row, index in zip(rows, range(torch.cuda.device_count())):
                if not row["processes"]:
                    row["flops"] = gpu_flops(torch, index)
    else:
        try:
            torch.cuda.init()
        except Exception as error:
            found["torch_error"] = str(error).splitlines()[0][:200]
    return found


def gpu_flops(torch: Any, index: int) -> float | None:
    """FLOP/s of a bf16 matrix product, the best of five, after warming up."""
    try:
        size = 4096
        a = torch.randn(size, size, device=f"cuda:{index}", dtype=torch.bfloat16)
        best = float("inf")
        for _ in range(7):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.device(index):
                begin.record()
                for _ in range(10):
                    a @ a
                end.record()
                torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end) / 1000)
        return 10 * 2 * size**3 / best
    except Exception:
        return None
    finally:
        torch.cuda.empty_cache()


def gpu_links() -> list[tuple[int, int, float]]:
    """Bytes/s of a copy from each GPU of this node to each other, one direction."""
    try:
        import torch
    except Exception:
        return []
    found = []
    for source in range(torch.cuda.device_count()):
        for target in range(torch.cuda.device_count()):
            if source != target:
                a = torch.empty(256 << 20, dtype=torch.uint8, device=f"cuda:{source}")
                b = torch.empty_like(a, device=f"cuda:{target}")
                rates = []
                for _ in range(3):
                    torch.cuda.synchronize(source)
                    begun = time.perf_counter()
                    b.copy_(a)
                    torch.cuda.synchronize(source)
                    torch.cuda.synchronize(target)
                    rates.append(a.numel() / (time.perf_counter() - begun))
                found.append((source, target, max(rates)))
                del a, b
    return found
