"""What each part of a model costs a worker for a micro-batch, in seconds and bytes."""

from dataclasses import dataclass

from app.planner.device import Device
from app.planner.model_costs import ModelCosts
from app.planner.part_memory import part_memory
from app.planner.part_on_device import PartOnDevice, part_on_device
from app.planner.part_seconds import checkpointing_seconds, phase_cost
from app.planner.part_trace import AFTER, names_block
from app.planner.work import Work


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """What one part of the model costs a tensor-parallel worker for one micro-batch.

    Args:
        name: The part's name (part_trace.py).
        count: How many such parts the model has.
        forward_seconds: Seconds of forward on the device; on a CPU at least those of launching its
            operations.
        backward_seconds: The same of backward, with what is recomputed.
        launch_forward_seconds: Seconds in which the host launches the operations of forward.
        launch_backward_seconds: The same of backward, with what is recomputed.
        flops: FLOPs of forward and backward, without what is recomputed.
        saved_bytes: Bytes that each micro-batch keeps until its backward, without `copied_bytes`.
        recomputed_bytes: Bytes that are saved again while the part is recomputed.
        working_bytes: Bytes at the worst moment of forward or backward, beyond what is saved.
        stage_input_bytes: Bytes that a pipeline sends to the stage that begins with this part.
        tp_bytes: Bytes that tensor parallelism sends.
        tp_collectives: The number of collectives that send them.
        query_numel: Numbers in the queries of attention.
        key_value_numel: Numbers in its keys and values.
        attention_forwards: How often the forward of attention runs, with recomputation.
        attention_seconds: Seconds of attention, (in one forward, in backward).
        overlappable_seconds: Seconds of the products that can run beside the collectives of tensor
            parallelism: in forward, in recomputation, and for the gradients of inputs.
        tp_bytes_beside_weights: Bytes of `tp_bytes` that are sent beside the products for the
            gradients of weights.
        tp_bytes_beside_inputs: The same of inputs.
        weight_gradient_seconds: Seconds of the products for the gradients of weights; those of
            inputs take as long.
        moved_bytes: Bytes that are kept as `saved_bytes` are, but in host memory.
        copied_bytes: Bytes of 16-bit copies of parameters, which micro-batches share. They are made
            in forward and kept until the part's backward.
        output_bytes: Bytes that a block gives to the next part. A stage of a pipeline keeps its
            last block's until the micro-batch goes backward, and gets as large a gradient.
        cached_bytes: Bytes of such copies that autocast keeps until the end of forward and no
            backward reads, because the part is recomputed. `working_bytes` of what is behind the
            blocks includes them, where its worst moment is one of forward.
    """

    name: str
    count: int
    forward_seconds: float
    backward_seconds: float
    launch_forward_seconds: float
    launch_backward_seconds: float
    flops: float
    saved_bytes: float
    recomputed_bytes: float
    working_bytes: float
    stage_input_bytes: float
    tp_bytes: float
    tp_collectives: float
    query_numel: float = 0.0
    key_value_numel: float = 0.0
    attention_forwards: float = 1.0
    attention_seconds: tuple[float, float] = (0.0, 0.0)
    overlappable_seconds: float = 0.0
    tp_bytes_beside_weights: float = 0.0
    tp_bytes_beside_inputs: float = 0.0
    weight_gradient_seconds: float = 0.0
    moved_bytes: float = 0.0
    copied_bytes: float = 0.0
    output_bytes: float = 0.0
    cached_bytes: float = 0.0

    @property
    def is_block(self) -> bool:
        """Whether it is one of the repeating blocks."""
        return names_block(self.name)

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_seconds + self.backward_seconds


def part_costs(
    model: ModelCosts,
    work: Work,
    device: Device,
    *,
    compiles_blocks: bool,
    compiles_loss: bool = False,
) -> list[PartCost]:
    """The cost of every part of a model, in the order of forward.

    Args:
        model: The costs of the parts for any batch and tensor-parallel degree.
        work: What a worker does with a micro-batch.
        device: The device that does it.
        compiles_blocks: Whether torch.compile compiles the blocks.
        compiles_loss: Whether the loss is compiled on a GPU that has whole logits.
    """
    costs: list[PartCost] = []
    cached_bytes = 0.0
    for name in model.parts:
        if names_block(name):
            is_compiled = compiles_blocks
        else:
            # Logits that tensor parallelism splits have a loss of their own, which is not compiled.
            is_compiled = name == AFTER and compiles_loss and work.tp == 1
        is_fused = is_compiled and not device.is_cpu
        part = part_on_device(model, name, work, device, is_fused=is_fused)
        cost = _part_cost(part, count=model.counts[name], cached_bytes=cached_bytes)
        costs.append(cost)
        cached_bytes += cost.cached_bytes * cost.count
    return costs


def _part_cost(part: PartOnDevice, *, count: int, cached_bytes: float) -> PartCost:
    """The cost of one part.

    Args:
        part: The part.
        count: How many such parts the model has.
        cached_bytes: Bytes that autocast keeps of the parts before it until the end of forward.
    """
    values = part.values
    recomputed_share = part.recomputed_share
    fully_share = part.fully_recomputed_share
    forward = phase_cost(part, "forward")
    backward = phase_cost(part, "backward")
    checkpointing = checkpointing_seconds(part, forward)
    memory = part_memory(part, cached_bytes)
    return PartCost(
        name=part.name,
        count=count,
        forward_seconds=forward.seconds + checkpointing.forward,
        backward_seconds=backward.seconds + checkpointing.backward,
        launch_forward_seconds=forward.launch_seconds + checkpointing.launch_forward,
        launch_backward_seconds=backward.launch_seconds + checkpointing.launch_backward,
        flops=forward.flops + backward.flops,
        saved_bytes=memory.saved_bytes,
        recomputed_bytes=memory.recomputed_bytes,
        working_bytes=memory.working_bytes,
        stage_input_bytes=values["crossing"],
        tp_bytes=_with_recomputation(part, "sent"),
        tp_collectives=_with_recomputation(part, "collectives"),
        query_numel=values["queries"],
        key_value_numel=values["keys"],
        attention_forwards=1 + recomputed_share,
        attention_seconds=(forward.attention_seconds, backward.attention_seconds),
        overlappable_seconds=(
            forward.product_seconds * (1 + fully_share) + backward.product_seconds / 2
        ),
        # Compiled code gathers in one operation, and multiplies in autograd's order.
        tp_bytes_beside_weights=0.0 if part.is_fused else values["sent_beside"],
        tp_bytes_beside_inputs=(
            0.0 if part.is_fused else values["regathered"] * (1 - recomputed_share)
        ),
        weight_gradient_seconds=backward.product_seconds / 2,
        moved_bytes=memory.moved_bytes,
        copied_bytes=memory.copied_bytes,
        output_bytes=values["boundary"] if part.is_block else 0.0,
        cached_bytes=memory.cached_bytes,
    )


def _with_recomputation(part: PartOnDevice, kind: str) -> float:
    """What tensor parallelism sends for a part, on average over all such parts.

    Backward repeats the collectives of forward, and gathers inputs again. If the part is
    recomputed, its recomputation gathers them: three times those of forward in all.

    Args:
        part: The part.
        kind: "sent" for bytes, or "collectives" for their number.
    """
    share = part.fully_recomputed_share
    return part.values[kind] * (1 - share) + 3 * part.values[f"{kind}_forward"] * share
