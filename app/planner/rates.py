"""What one device really reaches: the datasheet's peaks, times a few efficiencies that are fitted or measured.

    a product m × n × k       2·m·n·k / (peak · matmul · k/(k + k_half) · mn/(mn + mn_half)), at least its bytes' time
    attention                 FLOPs / (peak · attention)
    anything else             bytes / (bandwidth · stream)
    a collective              bytes / (link · efficiency) + hops · latency; overlapping slows computing: `contention`

The efficiencies of A100 and H100 are fitted on part of published figures (published.py says which, and how well they
predict the rest); other GPUs take their family's. `trireme calibrate` measures a device and its links; a measurement
goes before a fit (calibrate.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from cluster.hardware import Gpu, gpu

CONSTANTS = Path(__file__).with_name("constants.yaml")


@dataclass(frozen=True)
class Rates:
    """One device kind. Seconds, bytes, FLOP/s."""

    gpu: Gpu
    matmul: dict[str, float] = field(default_factory=dict)
    """By precision: the share of the peak that large products reach."""
    attention: float = 0.45
    """Share of the peak that fused attention reaches."""
    stream: float = 0.8
    """Share of the memory bandwidth that element-wise operations reach."""
    k_half: float = 100.0
    """Inner dimension at which a product runs at half of its speed."""
    mn_half: float = 2.0e5
    """Size of a product's result at which it runs at half of its speed: fewer tiles than processors."""
    packing: float = 0.0
    """How often a CPU's products read or write their weights to lay them out anew, beside using them."""
    operation: float = 5e-6
    """Seconds the host needs to launch one operation: a device waits for it where its work is shorter."""
    step: float = 2e-3
    """Seconds per optimizer step that nothing hides: data, the optimizer's launch, the loop."""
    trainer: float = 0.05
    """The same of the trainer that published runs were made with; for published.py alone."""
    within: float = 0.75
    """Share of the link inside a node that collectives reach."""
    across: float = 0.75
    """Share of the link between nodes."""
    shared: float = 0.0
    """CPUs: bytes/s that two workers average in memory they share (strategies/cpu_collectives/shared_memory.py)."""
    latency_within: float = 3e-6
    latency_across: float = 8e-6
    """Seconds per hop of a ring."""
    contention: float = 0.15
    """How much of the time that communication overlaps computing is lost to it."""
    hidden: float = 0.9
    """Share of backward's computing behind which gradients' communication can hide."""
    unit: float = 0.0
    """Seconds that gathering or scattering a unit costs beside the sending; hidden on GPUs."""
    unit_operations: float = 40.0
    """Operations' worth of the host that a sharded unit costs in forward, and in backward: copies, events, hooks."""
    compiled_bytes: float = 0.45
    """Share of a block's element-wise bytes that torch.compile's fused kernels still move."""
    compiled_operations: float = 0.3
    """Share of a block's operations that are still launched."""
    tensor_step: float = 0.0
    """Seconds the optimizer needs per sharded or split parameter beside moving it; hidden on GPUs."""
    optimizer: float = 1.0
    """Of the bandwidth that element-wise operations reach, what the optimizer does."""
    waiting: float = 0.0
    """Share of computing that is lost where workers wait for one another at collectives that nothing hides."""
    crowded_latency: float = 1.0
    """How many times longer a hop takes where workers share processors: each waits for its turn."""
    stage: float = 0.05
    """Share of computing that a pipeline loses beside its waiting: stops and starts, and sends that do not overlap."""
    split: float = 0.03
    """Share that schedules which compute the gradients of weights apart lose."""
    context: float = 1.2e9
    """Bytes of a device that the process and the libraries take."""
    fragmentation: float = 0.03
    """Share of what is allocated that cannot be used."""
    crowd: tuple[tuple[int, float], ...] = ()
    """CPUs: how much slower each of so many workers on one machine is; a GPU has its own."""
    measured: bool = False

    def peak(self, precision: str) -> float:
        """FLOP/s of large products."""
        return self.gpu.rate(precision) * self.matmul.get(precision, self.matmul.get("bf16", 0.6))

    @property
    def bandwidth(self) -> float:
        return self.gpu.memory_bandwidth * self.stream

    def slowdown(self, workers: int) -> float:
        """Of each of `workers` on one machine."""
        if not self.crowd or workers <= 1:
            return 1.0
        known = sorted(self.crowd)
        below = [pair for pair in known if pair[0] <= workers][-1:] or [(1, 1.0)]
        above = [pair for pair in known if pair[0] >= workers][:1]
        if not above:  # beyond what was measured everybody gets a smaller share of the same
            return below[0][1] * workers / below[0][0]
        (w0, s0), (w1, s1) = below[0], above[0]
        return s0 if w0 == w1 else s0 + (s1 - s0) * (workers - w0) / (w1 - w0)


def rates(name: str, measured: dict[str, Any] | None = None) -> Rates:
    """The rates of a GPU of the catalogue: defaults < its family's < its own fit < what was measured.

    Raises:
        HardwareError: the GPU is not in the catalogue.
    """
    found = gpu(name)
    tree = _constants()
    values: dict[str, Any] = dict(tree["default"])
    for members in tree["families"].values():
        if found.name in members["gpus"]:
            values |= {key: value for key, value in members.items() if key != "gpus"}
    values |= tree["gpus"].get(found.name, {})
    return apply(Rates(found), values | (measured or {}))


def apply(base: Rates, values: dict[str, Any]) -> Rates:
    """`base` with other constants; peaks (FLOP/s), bandwidths and links (bytes/s) may be among them."""
    device = base.gpu
    if "peak" in values:
        device = replace(device, peak=device.peak | {k: float(v) for k, v in values["peak"].items()})
    for key in ("memory_bytes", "memory_bandwidth", "link_within"):
        if key in values:
            device = replace(device, **{key: values[key]})
    known = {entry.name for entry in fields(Rates)}
    plain = {key: value for key, value in values.items() if key in known and key not in ("matmul", "crowd")}
    crowd = tuple((int(w), float(s)) for w, s in values["crowd"]) if "crowd" in values else base.crowd
    return replace(base, gpu=device, matmul=base.matmul | values.get("matmul", {}), crowd=crowd, **plain)


@functools.cache
def _constants() -> dict[str, Any]:
    return yaml.safe_load(CONSTANTS.read_text())
