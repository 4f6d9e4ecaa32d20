"""What a worker does with a micro-batch, as far as the costs of the model's parts depend on it."""

from typing import NamedTuple

from app.planner.read import AUTOCAST, CAST, PLAIN, Variant
from strategies.options import Options


class Work(NamedTuple):
    """What a worker does with a micro-batch, as far as the costs of parts depend on it.

    Args:
        batch: Samples that the worker computes; a fraction if context parallelism splits sequences.
        samples: Samples of which the worker has all or a part.
        tp: The degree of tensor parallelism.
        precision: fp32, bf16, fp16 or fp8.
        variant: Which computation of the model a worker runs.
        checkpointing: The mode of activation checkpointing.
        moves_activations: Whether blocks keep what they save in host memory.
        ep: The number of workers over which the experts of a mixture are split.
    """

    batch: float
    samples: int
    tp: int
    precision: str
    variant: Variant
    checkpointing: str
    moves_activations: bool = False
    ep: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of a number in matrix products."""
        return 4 if self.precision == "fp32" else 2


def variant_of(
    *, is_sharded: bool, tp: int, pp: int, precision: str, weight_dtype: str = Options.weight_dtype
) -> Variant:
    """Which computation of the model a layout runs.

    Sharded layouts and weights in 16 bits cast every number to 16 bits; the others use autocast.

    Args:
        is_sharded: Whether data-parallel workers shard the parameters and gather them in the type
            of products, or another trainer keeps them in that type.
        tp: The degree of tensor parallelism.
        pp: The number of pipeline stages.
        precision: fp32, bf16, fp16 or fp8.
        weight_dtype: The type in which weights are kept, fp32 or bf16.
    """
    if precision == "fp32":
        casting = PLAIN
    elif is_sharded or weight_dtype != "fp32":
        casting = CAST
    else:
        casting = AUTOCAST
    return Variant(casting, whole_model=tp * pp == 1)
