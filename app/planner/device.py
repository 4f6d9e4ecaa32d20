"""What one device reaches: the peaks of datasheets times a few efficiencies.

    a product m × n × k    2·m·n·k / (peak · matmul · k/(k + s·k_half) · t/(t + mn_half)), at least
                           the time of its bytes; t is s·m·n, and k is split into s slices.
                           Processors compute a result in tiles, and those of the last round leave
                           some processors idle: on average half of them, so `mn_half` is half of
                           what they compute at once (an A100's 108 have 3.5e6 numbers in tiles of
                           128 × 256). Small results have too few tiles, so that libraries split k
                           (split-K, stream-K: Osama et al. 2023, https://arxiv.org/abs/2301.03598):
                           into that s which is the fastest here
    attention              FLOPs / (peak · attention), longer for short sequences and narrow heads
                           (fused.py)
    anything else          bytes / (bandwidth · stream)
    each of them           `kernel` seconds to start and to end
    a collective           bytes / (link · efficiency) + hops · latency; computing beside it is
                           slower: `contention`

The efficiencies of A100 and H100 are fitted to published figures, those of other GPUs are their
family's. `trireme calibrate` measures a device and its links; a measurement overrides a fit.
part_seconds.py adds up what a part of a model takes on a device.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import yaml

from cluster.hardware import Gpu, find_gpu

CONSTANTS = Path(__file__).with_name("constants.yaml")
FITTED = Path(__file__).with_name("fitted.yaml")
Number = TypeVar("Number", float, npt.NDArray[np.float64])


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or a core of a CPU. Constants are shares, seconds or bytes.

    Args:
        gpu: The datasheet of the device (cluster/hardware.yaml).
        matmul: By precision, the share of the peak that large products reach.
        attention: Share of the peak that fused attention reaches.
        flash: Speed of that attention, relative to FlashAttention-2 on the same GPU.
        stream: Share of the memory bandwidth that element-wise operations reach.
        k_half: Inner dimension with which a product runs at half of its speed.
        mn_half: Size of a result with which it does: half of what all processors compute at once.
        operation: Seconds of the host for an operation of PyTorch, for which a device waits if its
            work is shorter.
        kernel: Seconds of a device to start and to end a kernel.
        step: Seconds of the host in an optimizer step, for each parameter of the model.
        loop: Seconds of an optimizer step that nothing hides.
        within: Share of the link inside a node that collectives reach.
        across: Share of the link between nodes that collectives reach.
        latency_within: Seconds per hop of a ring inside a node.
        latency_across: Seconds per hop between nodes.
        contention: Share lost of the time in which communication overlaps computation.
        hidden: Share of computation behind which communication can hide.
        unit_operations: Launches for a sharded unit in each pass: copies, events, hooks.
        again: Share of products that `selective` checkpointing recomputes. Trireme recomputes none,
            torchtitan every second one.
        logits: Bytes that a trainer moves for each number that the last layer gives, beside the
            loss, such as for metrics of a training batch.
        loss_memory: Bytes that a trainer's loss takes of a GPU for each logit of the whole
            vocabulary, where that is more than Trireme's: copies in float32, logits that tensor
            parallelism gathers.
        split_loss_memory: The same for each logit that a tensor-parallel worker has.
        update: Copies of the trained weights that an optimizer's step makes, such as 1 of torch's
            AdamW with `foreach`; none of Trireme's.
        shared_copies: 1 if a 16-bit copy of all weights is there for the whole step and the whole
            model computes in 16 bits, even where Trireme's autocast makes copies in forward; 0 for
            Trireme.
        whole_embedding: 1 if each tensor-parallel worker has all of the embedding, otherwise 0.
        kept_weights: 1 if gathered weights stay in memory until backward although they are gathered
            again, otherwise 0.
        weight_copies: With `train.precision=fp8`, bytes of 8-bit copies that are kept of each of
            the blocks' weights; 0 for Trireme, which casts in each product.
        gather: With `train.precision=fp8`, bytes of a number of the blocks' weights while sharded
            workers gather them; 0 for Trireme's 2.
        exchange: Share of the rows for experts that is sent to them: less than all if a token's
            row is sent once to a worker that has several of its experts.
        dispatch: 1 if a token is sent once to each worker, and between nodes once to each node,
            that has any of its experts, as DeepEP and HybridEP do; 0 if it is sent to each of its
            experts, as Trireme does.
        exchange_overlap: Share of a micro-batch's computation behind which its exchange with
            experts can hide: that of another micro-batch, in trainers that interleave two.
        async_tp: Share of tensor parallelism's communication that parallel.async_tp hides.
        scale: Share of a step lost with each doubling of GPUs: stragglers, congestion.
        stage: Share of computation that a pipeline loses beside its bubble: stops, starts, sends.
        split: Share of it that is lost by schedules that compute the gradients of weights apart.
        context: Bytes of a device that the process and the libraries take.
        of_another_trainer: Whether kernels or memory of another trainer are assumed.
        fragmentation: Share of what is allocated that cannot be used.
        ranges: The ranges of planned speeds (ranges.py).
        fitted: Whether the constants are fitted to published training, which says more than single
            operations.
        measured: Whether `trireme calibrate` has measured the device.
        corrections: What runs on this machine have measured, as corrections.py keeps it.
    """

    gpu: Gpu
    matmul: dict[str, float] = field(default_factory=dict)
    attention: float = 0.45
    flash: float = 1.0
    stream: float = 0.8
    k_half: float = 100.0
    mn_half: float = 2.0e5
    operation: float = 3.7e-5
    kernel: float = 0.0
    step: float = 2e-5
    loop: float = 0.0
    within: float = 0.75
    across: float = 0.75
    latency_within: float = 3e-6
    latency_across: float = 8e-6
    contention: float = 0.15
    hidden: float = 0.9
    unit_operations: float = 25.0
    again: float = 0.0
    logits: float = 0.0
    loss_memory: float = 0.0
    split_loss_memory: float = 0.0
    update: float = 0.0
    shared_copies: float = 0.0
    whole_embedding: float = 0.0
    kept_weights: float = 0.0
    weight_copies: float = 0.0
    gather: float = 0.0
    exchange: float = 1.0
    dispatch: float = 0.0
    exchange_overlap: float = 0.0
    of_another_trainer: bool = False
    async_tp: float = 0.0
    scale: float = 0.0
    stage: float = 0.05
    split: float = 0.03
    context: float = 1.2e9
    fragmentation: float = 0.03
    ranges: dict[str, Any] = field(default_factory=dict)
    fitted: bool = False
    measured: bool = False
    corrections: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        """Whether it is a core of a CPU."""
        return self.gpu.name == "cpu"

    @property
    def capacity(self) -> float:
        """Bytes that tensors may take."""
        return self.gpu.memory_bytes - self.context

    @property
    def bandwidth(self) -> float:
        """Bytes/s of element-wise operations."""
        return self.gpu.memory_bandwidth * self.stream

    def peak(self, precision: str) -> float:
        """FLOP/s of large products."""
        reached = self.matmul.get(precision, self.matmul.get("bf16", 0.6))
        return self.gpu.rate(precision) * self.gpu.clock * reached

    def product_share(self, m: Number, n: Number, k: Number) -> Number:
        """The share of `peak` that products reach: one m × n × k, or arrays of them."""
        # The share has its maximum where slices² = mn_half / (m·n) · k / k_half.
        fastest = np.sqrt(self.mn_half / (m * n) * k / self.k_half)
        slices = np.maximum(1.0, fastest)
        tiles = m * n * slices
        return cast(Number, k / (k + slices * self.k_half) * tiles / (tiles + self.mn_half))

    def product_seconds(
        self, products: npt.NDArray[np.float64], precision: str, itemsize: int
    ) -> float:
        """The time of products, each at least as long as its bytes take.

        Args:
            products: (P, 5): m, n, k, number in a batch, repeats.
            precision: fp32, bf16, fp16 or fp8.
            itemsize: Bytes of a number.
        """
        m, n, k, batch, repeats = products.T
        share = np.maximum(self.product_share(m, n * batch, k), 1e-3)
        computing = 2 * m * n * k * batch / (self.peak(precision) * share)
        moving = (m * k + k * n + m * n) * batch * itemsize / self.bandwidth
        return float((np.maximum(computing, moving) * repeats).sum())


def device_named(name: str, measured: dict[str, Any] | None = None) -> Device:
    """A device of the catalogue.

    Args:
        name: The name of a GPU, or cpu.
        measured: Measured constants by name; None if there are none.

    Raises:
        HardwareError: The GPU is not in the catalogue.
    """
    datasheet = find_gpu(name)
    values = _constants_of(datasheet, measured or {})
    of_datasheet = {
        key: values[key]
        for key in ("memory_bytes", "memory_bandwidth", "link_within")
        if key in values
    }
    peak = datasheet.peak | values.get("peak", {})
    device_fields = {entry.name for entry in fields(Device)} - {"gpu"}
    return Device(
        gpu=replace(datasheet, peak=peak, **of_datasheet),
        **{key: value for key, value in values.items() if key in device_fields},
    )


def _constants_of(gpu: Gpu, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults, overridden by constants of the GPU's family, its own, and measured ones."""
    known = constants()
    fitted = known["fitted"]
    family = family_of(gpu)
    values: dict[str, Any] = known["default"] | fitted["shared"]
    values["ranges"] = fitted["ranges"]
    if family:
        values = _overridden(values, known["families"][family])
        if not _has_bridge(gpu, measured):
            values |= values.get("without_bridge", {})
    family_fit = fitted["families"].get(family)
    if family_fit:
        values = _overridden(values, family_fit) | {"fitted": True}
    values = _overridden(values, known["gpus"].get(gpu.base, {})) | dict(measured)
    if gpu.name == "cpu":
        values["ranges"] = {}
    return values


def _has_bridge(gpu: Gpu, measured: Mapping[str, Any]) -> bool:
    """Whether a GPU was given a faster link than its datasheet's PCIe: an NVLink bridge."""
    link_within = measured.get("link_within", gpu.link_within)
    return bool(link_within > find_gpu(gpu.base).link_within)


def _overridden(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Constants, of which others take the place; a precision that these lack keeps its share."""
    matmul = {**values["matmul"], **others.get("matmul", {})}
    return {**values, **others, "matmul": matmul}


def family_of(gpu: Gpu) -> str:
    """The family of a GPU in constants.yaml; "" if it has none."""
    families = constants()["families"]
    return next((name for name, family in families.items() if gpu.base in family["gpus"]), "")


@functools.cache
def constants() -> dict[str, Any]:
    """constants.yaml, and as `fitted` the file that `published --fit` has written."""
    values = yaml.load(CONSTANTS.read_text(), Loader=yaml.CSafeLoader)
    fitted = yaml.load(FITTED.read_text(), Loader=yaml.CSafeLoader)
    return values | {"fitted": fitted}
