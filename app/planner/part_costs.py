"""What a part of a model takes on a device: seconds, added up from its kernels, and memory.

A product takes as long as its size lets it (device.py), an attention as its length and the width of its heads let it
(fused.py), any other operation as long as its bytes take; each kernel's start and end cost `kernel` seconds besides.
Where the host takes longer to launch all of them, a device waits for it. A compiled block moves and launches what
fused kernels do (fusion.py).

Products of a batch whose rows do not begin at multiples of 16 bytes (heads of width 150) have no tensor cores.
"""

from dataclasses import dataclass
from typing import NamedTuple

from app.planner.device import Device
from app.planner.model_costs import ModelCosts, PartCosts
from app.planner.read import AUTOCAST, CAST, PLAIN, WHOLE
from app.planner.trace import AFTER
from strategies.activation_checkpointing import checkpoint_every, kept_bytes, recomputed_blocks


class Work(NamedTuple):
    """What a worker does with a micro-batch, as far as a part's costs depend on it."""

    batch: float  # samples; of one that context parallelism splits, a part
    tp: int
    precision: str
    way: str  # what `way_of` says
    checkpointing: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number in matrix products."""
        return 4 if self.precision == "fp32" else 2


def way_of(is_sharded: bool, tp: int, pp: int, precision: str) -> str:
    """Sharded layouts cast everything to 16 bits; the others use autocast. WHOLE: a device has the whole model (or
    gathers it)."""
    way = PLAIN if precision == "fp32" else CAST if is_sharded else AUTOCAST
    return way + WHOLE if tp * pp == 1 else way


@dataclass(frozen=True)
class PartCost:
    """One part; seconds and bytes of one micro-batch on one tensor-parallel worker."""

    name: str
    count: int  # how many of them the model has
    forward: float  # seconds; at least what the host needs to launch the operations
    backward: float  # with what is computed again
    launch_forward: float  # seconds of the host
    launch_backward: float
    flops: float  # of forward and backward, without what is computed again
    saved: float  # bytes that stay until its backward
    each: float  # of these, what each micro-batch has of its own: without the parameters' copies in 16 bits
    rebuilt: float  # bytes that are there again once it is recomputed
    extra: float  # bytes alive at the worst moment of its forward or backward, beyond what it has saved
    crossing: float  # bytes that a pipeline sends into it
    sent: float  # bytes that tensor parallelism sends
    calls: float  # in how many collectives
    queries: float = 0.0  # numbers that attention is given, and of keys and values
    keys: float = 0.0
    exchanges: float = 1.0  # forwards of attention, with what is computed again
    attending: tuple[float, float] = (0.0, 0.0)  # seconds of attention in one forward, in backward
    multiplying: float = 0.0  # seconds of products in forward, recomputed ones too, and for gradients of inputs

    @property
    def is_block(self) -> bool:
        return self.name.startswith("block")


def part_costs(
    model: ModelCosts, work: Work, device: Device, compiled: bool, compiled_loss: bool = False
) -> list[PartCost]:
    """Every part's, in the order of forward.

    Args:
        model: What the parts cost.
        work: What a worker does with a micro-batch.
        device: Where.
        compiled: Whether blocks are compiled, by torch.compile.
        compiled_loss: Whether the loss is, on a GPU that has the whole model.
    """
    return [_part_cost(model, name, work, device, compiled, compiled_loss) for name in model.parts]


def _part_cost(
    model: ModelCosts, name: str, work: Work, device: Device, compiled: bool, compiled_loss: bool
) -> PartCost:
    is_block, blocks, mode = name.startswith("block"), len(model.order), work.checkpointing
    part = model.parts[name]
    fused = compiled and is_block and not device.is_cpu
    values = part.at(work.batch, work.tp)
    if fused or (name == AFTER and compiled_loss and work.way.endswith(WHOLE) and not device.is_cpu):
        kinds = [f"{value}_{phase}" for value in ("moved", "operations") for phase in ("forward", "backward")]
        values |= {kind: min(values[kind], values[f"fused_{kind}"]) for kind in kinds}
    if work.precision == "fp8" and not is_block:  # of a run in fp8 only the blocks' linear layers are
        work = work._replace(precision="bf16")
    forward, backward = (_phase(part, values, phase, work, device) for phase in ("forward", "backward"))
    share = recomputed_blocks(mode, blocks) / blocks if is_block else 0.0
    results = values["kept"] * (1 - device.again)
    stored = values["saved"] - values["fusible"] * fused  # the partitioner of torch.compile saves as little as it can
    kept = kept_bytes(mode, stored, results, values["boundary"]) if share else stored
    whole = share if checkpoint_every(mode) else 0.0  # `selective` keeps what products and collectives gave
    moving = values["moved_forward"] / device.bandwidth
    partly = moving + max(0.0, forward[0] - forward[3] - moving) * device.again
    again = forward[0] * whole if whole else partly * share
    # Every micro-batch of a pipeline has copies of its own where a compiled block saves them.
    copies = values["copies"] * (not fused or work.way.endswith(WHOLE))
    saved = kept * share + stored * (1 - share)
    return PartCost(
        name,
        model.counts[name],
        forward=forward[0],
        backward=backward[0] + again,
        launch_forward=forward[1],
        launch_backward=backward[1] + forward[1] * whole,
        flops=forward[2] + backward[2],
        saved=saved,
        each=saved - copies * (1 - share),
        rebuilt=max(0.0, values["saved"] + values["again"] * (share > 0) - kept),
        extra=max(values["extra"], values["forward_extra"] - values["saved"]),
        crossing=values["crossing"],
        # Backward sends what forward does, and gathers inputs again; if a block is recomputed, the recomputation does.
        sent=values["sent"] * (1 - whole) + 3 * values["sent_forward"] * whole,
        calls=values["calls"] * (1 - whole) + 3 * values["calls_forward"] * whole,
        queries=values.get("queries", 0.0),
        keys=values.get("keys", 0.0),
        exchanges=1 + share,
        attending=(forward[3], backward[3]),
        multiplying=forward[4] * (1 + whole) + backward[4] / 2,
    )


def _phase(
    part: PartCosts, values: dict[str, float], phase: str, work: Work, device: Device
) -> tuple[float, float, float, float, float]:
    """Seconds, those that launching takes, FLOPs, and the seconds of attention and of products: a roofline of products,
    attention, and bytes moved."""
    products, attended = part.products_at(phase, work.batch, work.tp), values[f"attention_{phase}"]
    launched = values[f"operations_{phase}"] * device.operation
    peak = device.gpu.rate("bf16" if work.precision == "fp8" else work.precision)
    seconds = device.product_seconds(products, work.precision, work.itemsize)
    if not device.is_cpu and work.itemsize < 4:
        seconds += values[f"misaligned_{phase}"] / device.peak("fp32")
    attending = values[f"attending_{phase}"] / (peak * device.attention)
    multiplying = seconds
    gaps = values[f"operations_{phase}"] * device.kernel
    seconds += attending + values[f"moved_{phase}"] / device.bandwidth + gaps
    flops = attended + float(2 * products.prod(axis=1).sum())
    return max(seconds, launched), launched, flops, attending, multiplying
