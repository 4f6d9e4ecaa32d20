"""What one device reaches: datasheets' peaks times a few efficiencies.

    a product m × n × k    2·m·n·k / (peak · matmul · k/(k + k_half) · t/(t + mn_half)), at least its bytes' time; t is
                           m·n, times how often a long k is split. Processors compute a result in tiles, and those of
                           the last round leave some idle: on average half of them, so `mn_half` is half of what they
                           compute at once (an A100's 108 have 3.5e6 numbers in tiles of 128 × 256)
    attention              FLOPs / (peak · attention), more for short sequences and narrow heads (fused.py)
    anything else          bytes / (bandwidth · stream)
    each of them           `kernel` seconds to start and to end
    a collective           bytes / (link · efficiency) + hops · latency; overlapping slows computing: `contention`

The efficiencies of A100 and H100 are fitted on published figures, those of other GPUs are their family's. `trireme
calibrate` measures a device and its links; a measurement goes before a fit. part_costs.py adds up what a model's part
takes on a device.
"""

import functools
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from app.data.files import cache_folder
from app.errors import UserError
from cluster.hardware import Gpu, find_gpu

SLICE = 4096
"""Of the inner dimension: a longer one is split between processors that would have no tile of the result."""
CONSTANTS, FITTED = (Path(__file__).with_name(name) for name in ("constants.yaml", "fitted.yaml"))


@dataclass(frozen=True)
class Device:
    """One kind of GPU, or one core of a CPU. Seconds, bytes, FLOP/s."""

    gpu: Gpu
    matmul: dict[str, float] = field(default_factory=dict)  # by precision: share of the peak that large products reach
    attention: float = 0.45  # share of the peak that fused attention reaches
    stream: float = 0.8  # share of the memory bandwidth that element-wise operations reach
    k_half: float = 100.0  # inner dimension at which a product runs at half of its speed
    mn_half: float = 2.0e5  # size of a result at which it does: half of what all processors compute at once
    operation: float = 5e-6  # for the host to launch one operation: a device waits for it where its work is shorter
    kernel: float = 0.0  # for a device to start and to end one kernel
    step: float = 2e-5  # of an optimizer step, for each tensor of the model: what the host does for it
    loop: float = 0.0  # of an optimizer step, that nothing hides: the loop, waiting for the clipped norm
    within: float = 0.75  # share of the link inside a node that collectives reach
    across: float = 0.75  # share of the link between nodes
    latency_within: float = 3e-6  # per hop of a ring
    latency_across: float = 8e-6
    contention: float = 0.15  # of the time that communication overlaps computing, what is lost to it
    hidden: float = 0.9  # share of computing behind which communication can hide
    unit_operations: float = 40.0  # launches' worth of a sharded unit in each pass: copies, events, hooks
    again: float = 0.0  # share of products that `selective` computes again: Trireme's none, torchtitan's every second
    async_tp: float = 0.0  # share of tensor parallelism's communication that asynchronous tensor parallelism hides
    scale: float = 0.0  # share of a step lost each time that the GPUs double beyond 64: stragglers, congestion
    stage: float = 0.05  # share of computing that a pipeline loses beside its bubble: stops, starts, sends
    split: float = 0.03  # share that schedules which compute the gradients of weights apart lose
    context: float = 1.2e9  # bytes of a device that the process and the libraries take
    fragmentation: float = 0.03  # share of what is allocated that cannot be used
    ranges: dict[str, Any] = field(default_factory=dict)  # of planned speeds (ranges.py)
    fitted: bool = False  # to published trainings, which tell more than a product or an addition alone
    measured: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.gpu.name == "cpu"

    @property
    def capacity(self) -> float:
        """Bytes that tensors may take."""
        return self.gpu.memory_bytes - self.context

    @property
    def bandwidth(self) -> float:
        return self.gpu.memory_bandwidth * self.stream

    def peak(self, precision: str) -> float:
        """FLOP/s of large products."""
        reached = self.matmul.get(precision, self.matmul.get("bf16", 0.6))
        return self.gpu.rate(precision) * self.gpu.clock * reached

    def product_share(self, m: Any, n: Any, k: Any) -> Any:
        """Share of `peak` that a product of that size reaches; numbers, or arrays of them."""
        tiles = m * n * np.maximum(1.0, k / SLICE)
        return k / (k + self.k_half) * tiles / (tiles + self.mn_half)

    def product_seconds(self, products: np.ndarray, precision: str, itemsize: int) -> float:
        """Of several, (P, 5): m, n, k, number in a batch, times; at least as long as their bytes take."""
        m, n, k, batch, times = products.T
        share = np.maximum(self.product_share(m, n * batch, k), 1e-3)
        computing = 2 * m * n * k * batch / (self.peak(precision) * share)
        moving = (m * k + k * n + m * n) * batch * itemsize / self.bandwidth
        return float((np.maximum(computing, moving) * times).sum())


def device(name: str, measured: dict[str, Any] | None = None) -> Device:
    """The device of the catalogue: defaults < its family's constants < its own < what was measured.

    Raises:
        HardwareError: the GPU is not in the catalogue.
    """
    found, known = find_gpu(name), constants()
    fit, family = known["fitted"], family_of(found)
    values: dict[str, Any] = known["default"] | fit["shared"]
    values["ranges"] = fit["ranges"]
    if family:
        values |= known["families"][family]
    if own := fit["families"].get(family):
        values |= {key: value for key, value in own.items() if key != "matmul"} | {"fitted": True}
        values["matmul"] = values["matmul"] | own["matmul"]
    values |= known["gpus"].get(found.base, {}) | (measured or {})
    if found.name == "cpu":
        values["ranges"] = {}
    about_gpu = {key: values[key] for key in ("memory_bytes", "memory_bandwidth", "link_within") if key in values}
    base = Device(replace(found, peak=found.peak | values.get("peak", {}), **about_gpu))
    own = {entry.name for entry in fields(Device)} - {"gpu"}
    return replace(base, **{key: value for key, value in values.items() if key in own})


def family_of(gpu: Gpu) -> str:
    """The family of constants.yaml that it belongs to; "" for none."""
    return next((name for name, known in constants()["families"].items() if gpu.base in known["gpus"]), "")


ASSUMED = {
    "products": "of the peak that large products reach",
    "attention": "of the peak that attention reaches",
    "stream": "of the memory's bandwidth that other operations reach",
    "within": "of the links inside a node",
    "across": "of those between nodes",
    "async_tp": "of tensor parallelism's communication that parallel.async_tp hides",
    "scale": "of a step lost each time that the GPUs double beyond 64",
    "step": "seconds of a step that nothing hides",
}
"""What --assume changes, and what it is: a share, but for the last."""


def assumed(device: Device, written: tuple[str, ...]) -> Device:
    """The device with what a person assumes instead: `name=value` each.

    Raises:
        UserError: not a name of ASSUMED, or no number.
    """
    for one in written:
        name, _, value = one.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in ASSUMED or number < 0:
            raise UserError(f"--assume {one}: write one of {', '.join(ASSUMED)}, then = and a number, as in across=0.5")
        if name == "products":
            device = replace(device, matmul=dict.fromkeys([*device.matmul, *device.gpu.peak], number))
        else:
            device = replace(device, **{name: number})  # type: ignore[arg-type]
    return device


def assumptions(device: Device, precision: str) -> str:
    """Two lines: what a plan takes the device to reach."""
    values = {name: getattr(device, name, 0.0) for name in ASSUMED} | {"products": device.matmul.get(precision, 0.6)}
    parts = [f"{name} {values[name]:.3g}" for name in ASSUMED]
    how = "measured here" if device.measured else "fitted to published runs" if device.fitted else "not measured"
    clock = device.gpu.clock
    limit = "" if clock == 1 else f"; {device.gpu.watts:.0f} W leave {100 * clock:.0f} % of the clock"
    lines = [f"Assumed ({how}{limit}; change one with --assume NAME=VALUE):", f"  {', '.join(parts)}"]
    return "\n".join(lines)


def remembered(gpu: str) -> dict[str, Any]:
    """What `trireme calibrate` measured of a GPU of the catalogue; empty before that."""
    try:
        return dict(json.loads(_remembered_in(gpu).read_text()))
    except (OSError, ValueError):
        return {}


def remember(gpu: str, values: dict[str, Any]) -> Path:
    """Keeps values, over what was known; the file."""
    path = _remembered_in(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(remembered(gpu) | values, indent=1))
    written.replace(path)
    return path


def _remembered_in(gpu: str) -> Path:
    return cache_folder() / "planner" / f"rates-{gpu}.json"


@functools.cache
def constants() -> dict[str, Any]:
    """Both files; `fitted` is what `published --fit` has written."""
    return yaml.safe_load(CONSTANTS.read_text()) | {"fitted": yaml.safe_load(FITTED.read_text())}
