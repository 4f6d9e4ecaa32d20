"""One part of a model as a worker computes it on its device for a micro-batch.

A trace has the whole model with all of its experts, operation by operation. A worker may have some
of the experts only, and a compiled part moves the bytes and launches the kernels of fused
operations (fusion.py), with which it also orders the rows of several samples for the collectives of
tensor parallelism.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.planner.device import Device
from app.planner.model_costs import ModelCosts, PartCosts
from app.planner.part_trace import AFTER, names_block
from app.planner.work import Work
from strategies.activation_checkpointing import recomputed_blocks
from strategies.costs import ParameterSize
from strategies.dims import checkpoint_every

FUSED_VALUES = ("moved_forward", "moved_backward", "operations_forward", "operations_backward")
"""The values of a trace that a compiler makes smaller."""
MOVED_VALUES = ("moved_forward", "moved_backward", "fused_moved_forward", "fused_moved_backward")
"""The values of a trace that are bytes read and written."""
EXCHANGE_OPERATIONS = {"forward": 19, "backward": 6}
"""Operations with which a mixture sends tokens to other workers (strategies/expert/exchange.py).

They come beside those of a mixture that has all of its experts, which a trace counts. The host
waits for how many rows to send, so that no compiler has them.
"""


@dataclass(frozen=True, kw_only=True)
class PartOnDevice:
    """One part of a model as a worker computes it on its device for a micro-batch.

    Args:
        name: The part's name (part_trace.py).
        costs: The costs of the part for any micro-batch.
        parameters: The parameters of one such part.
        values: The values of the part's trace for this micro-batch, as this worker has them.
        work: What the worker does with the micro-batch.
        device: The device that does it.
        is_fused: Whether a GPU's kernels of the part are a compiler's.
        recomputed_share: The share of such parts of which at least something is recomputed.
        fully_recomputed_share: The share of those that are recomputed as a whole; `selective` keeps
            the results of products and collectives.
    """

    name: str
    costs: PartCosts
    parameters: tuple[ParameterSize, ...]
    values: dict[str, float]
    work: Work
    device: Device
    is_fused: bool
    recomputed_share: float
    fully_recomputed_share: float

    @property
    def is_block(self) -> bool:
        """Whether it is one of the repeating blocks."""
        return names_block(self.name)

    def products(self, phase: str) -> npt.NDArray[np.float64]:
        """(P, 5): m, n, k, batch and repeats of the products of a phase."""
        return self.costs.products_at(phase, self.work.batch, self.work.tp)


def part_on_device(
    model: ModelCosts, name: str, work: Work, device: Device, *, is_fused: bool
) -> PartOnDevice:
    """One part of a model as a worker computes it.

    Args:
        model: The costs of the model's parts for any micro-batch.
        name: The part's name.
        work: What the worker does with the micro-batch.
        device: The device that does it.
        is_fused: Whether a GPU's kernels of the part are a compiler's.
    """
    costs = model.parts[name]
    parameters = model.parameters[name]
    values = costs.at(work.batch, work.tp)
    if work.ep > 1:
        for kind in MOVED_VALUES:
            values[kind] -= _bytes_of_other_experts(costs, parameters, kind, work)
    if is_fused:
        for kind in FUSED_VALUES:
            values[kind] = min(values[kind], values[f"fused_{kind}"])
    elif work.samples > 1:
        for phase in ("forward", "backward"):
            values[f"moved_{phase}"] += values[f"rearranged_{phase}"]
    if work.ep > 1 and any(parameter.is_expert for parameter in parameters):
        for phase, operations in EXCHANGE_OPERATIONS.items():
            values[f"operations_{phase}"] += operations
    if name == AFTER and device.logits:
        logits = result_numbers_of_widest(costs.products_at("forward", work.batch, work.tp))
        values["moved_forward"] += device.logits * logits
    is_block = names_block(name)
    recomputed_share = 0.0
    if is_block:
        blocks = len(model.order)
        recomputed_share = recomputed_blocks(work.checkpointing, blocks) / blocks
    elif work.precision == "fp8":  # it is for the linear layers of blocks only
        work = work._replace(precision="bf16")
    is_fully_recomputed = bool(checkpoint_every(work.checkpointing))
    return PartOnDevice(
        name=name,
        costs=costs,
        parameters=parameters,
        values=values,
        work=work,
        device=device,
        is_fused=is_fused,
        recomputed_share=recomputed_share,
        fully_recomputed_share=recomputed_share if is_fully_recomputed else 0.0,
    )


def result_numbers_of_widest(products: npt.NDArray[np.float64]) -> float:
    """The numbers in the results of the widest products: the logits, for those behind the blocks.

    The other products give gradients that a loss in chunks computes in forward.

    Args:
        products: (P, 5), as `PartOnDevice.products` gives them.
    """
    m, n, _, batch, repeats = products.T
    is_widest = n > 0.99 * n.max(initial=0.0)
    return float((m * n * batch * repeats)[is_widest].sum())


def _bytes_of_other_experts(
    costs: PartCosts, parameters: tuple[ParameterSize, ...], kind: str, work: Work
) -> float:
    """What a trace with all experts reads and writes of those that other workers have.

    What does not grow with the batch is read and written of the parameters, such as sums of their
    gradients, and of each of them as much as it is large. A worker has one in `ep` experts.

    Args:
        costs: The costs of the part.
        parameters: Its parameters.
        kind: One of `MOVED_VALUES`.
        work: What a worker does with a micro-batch.
    """
    numbers = sum(parameter.numel for parameter in parameters)
    numbers_of_experts = sum(parameter.numel for parameter in parameters if parameter.is_expert)
    if not numbers_of_experts or kind not in costs.values:
        return 0.0
    bytes_of_parameters = costs.at(0.0, work.tp)[kind]
    return bytes_of_parameters * numbers_of_experts / numbers * (1 - 1 / work.ep)
